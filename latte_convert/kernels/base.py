"""What every attention kernel is: an operator on one call, what it can be given on top, how it is fitted, its cost."""

from __future__ import annotations

import hashlib
import inspect
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from latte_convert.attention import AttentionCall, CallShape
from latte_convert.errors import UsageError
from latte_convert.graphs import in_one_graph, recorded
from latte_convert.kernels.fitting import DescentStage, MapStage, OutputStage, ShiftStage, Stage
from latte_convert.kernels.softmax import softmax_attention, softmax_flops


class Extras(TypedDict, total=False):
    """Options that every kernel takes; all off by default, none of them changes the order of the cost in N.

    Attributes:
        exact_prefix: Queries of prefix tokens (CLS, registers) attend by softmax: O(N) for each of them.
        key_shift: Subtract a constant vector per head from the keys. Softmax does not notice; a feature map does.
        input_map: Multiply queries and keys by fitted matrices, one of each per head.
        sigma: Scale each output channel.
        bias: Add a constant to each output channel.
        output_map: Multiply each head's output by a matrix; takes the place of sigma.
    """

    exact_prefix: bool
    key_shift: bool
    input_map: bool
    sigma: bool
    bias: bool
    output_map: bool


class Kernel(nn.Module, ABC):
    """An attention operator on the heads of one site, after projection, QK-norm and rotary embedding.

    A subclass computes ``attend`` and counts ``attend_flops``; its options are the keyword arguments of its
    constructor, with types. ``docs/your_own_kernel.md`` is a complete example.

    Attributes:
        name: What recipes and manifests call it.
        causal_form: Whether ``causal=True`` is supported.
        cross_form: Whether queries and keys may be different tokens.
        takes_merged: Whether it counts a merged token as often as its size says, and finds it by its place.
        takes_bias: Whether it honours what is added to the logits, such as a bias of relative positions.
        mixes_queries: Whether the output of one query depends on other queries.
        folds_sigma: Whether ``attend`` scales its output by ``sigma`` itself.
        legend: What its ``scalars`` are, for a report: a clause.
        recommended: The extras that help this kernel on held-out samples of real models.
        heads: Number of heads.
        head_dim: Channels per head of query and key, d.
        value_dim: Channels per head of value, dv.
        options: Keyword arguments that build an equal kernel, as manifests record them (JSON values).
        shift: ``(H, d)`` or None. With ``query_map`` and ``key_map``, ``(H, d, d)``, ``sigma`` and ``bias``,
            ``(H·dv,)``, and ``output_map``, ``(H, dv, dv)``, the parameters of the extras; float32.

    Args:
        heads: Number of heads.
        head_dim: Channels per head of query and key.
        value_dim: Channels per head of value, where they are not as many.
        **extras: See ``Extras``.
    """

    name: ClassVar[str]
    causal_form: ClassVar[bool]
    cross_form: ClassVar[bool] = True
    takes_merged: ClassVar[bool] = False
    takes_bias: ClassVar[bool] = False
    mixes_queries: ClassVar[bool] = False
    folds_sigma: ClassVar[bool] = False
    legend: ClassVar[str] = ""
    recommended: ClassVar[Extras] = {}

    def __init__(self, heads: int, head_dim: int, *, value_dim: int | None = None, **extras: Unpack[Extras]) -> None:
        super().__init__()
        unknown = sorted(set(extras) - set(Extras.__annotations__))
        if unknown:
            raise TypeError(f"{self.name} has no option '{unknown[0]}'")
        self.heads = heads
        self.head_dim = head_dim
        self.value_dim = value_dim or head_dim
        self.options: dict[str, Any] = {key: value for key, value in sorted(extras.items()) if value}
        if self.value_dim != head_dim:
            self.options["value_dim"] = self.value_dim
        self.exact_prefix = extras.get("exact_prefix", False)
        channels = heads * self.value_dim

        def parameter(option: str, initial: Tensor) -> nn.Parameter | None:
            return nn.Parameter(initial) if extras.get(option) else None

        self.shift = parameter("key_shift", torch.zeros(heads, head_dim))
        self.query_map = parameter("input_map", torch.eye(head_dim).repeat(heads, 1, 1))
        self.key_map = parameter("input_map", torch.eye(head_dim).repeat(heads, 1, 1))
        self.sigma = parameter("sigma", torch.ones(channels))
        self.bias = parameter("bias", torch.zeros(channels))
        self.output_map = parameter("output_map", torch.eye(self.value_dim).repeat(heads, 1, 1))

    def extra_repr(self) -> str:
        """Settings shown by ``print(model)``."""
        settings = {"heads": self.heads, "head_dim": self.head_dim, **self.options}
        return ", ".join(f"{name}={value}" for name, value in settings.items())

    @classmethod
    def obstacle(cls, *, causal: bool, cross: bool, merged: bool = False, biased: bool = False) -> str | None:
        """Why the kernel cannot serve causal or cross-attention, merged tokens or a bias; or None."""
        if causal and not cls.causal_form:
            return f"kernel '{cls.name}' has no causal form"
        if cross and not cls.cross_form:
            return f"kernel '{cls.name}' has no form for cross-attention"
        if merged and not cls.takes_merged:
            return f"kernel '{cls.name}' has no form for merged tokens"
        if biased and not cls.takes_bias:
            return f"kernel '{cls.name}' has no form for a bias on the logits"
        return None

    # --- the operator ---

    @abstractmethod
    def attend(self, call: AttentionCall) -> Tensor:
        """The kernel proper, ``(B, H, Nq, dv)``; masked keys and values are zero.

        With ``exact_prefix`` the queries begin behind the prefix: there are ``layout.prefix`` fewer than keys.
        """

    if TYPE_CHECKING:  # nn.Module's says Any

        def __call__(self, call: AttentionCall) -> Tensor:
            """Attend; see ``forward``."""

    def forward(self, call: AttentionCall) -> Tensor:
        """Attend: what surrounds ``attend`` in every kernel.

        Returns:
            ``(B, H, Nq, dv)`` in the dtype of the query; zeros where a query sees no key, NaN where a query is not
            finite. What the mask hides and what is wrong with one query stays without effect on the others.

        Raises:
            UsageError: The call is causal, cross-attention, on merged tokens or with a bias and the kernel has no form
                of it; or its tokens are merged and it has a mask or a bias as well, or is causal.
        """
        merged, biased = call.merged is not None, call.bias is not None
        if merged and (call.mask is not None or call.causal or biased):
            raise UsageError("merged tokens have no form for masks, biases and causal attention: merge nothing here")
        asked = {"causal": call.causal, "cross": not call.layout.aligned, "merged": merged, "biased": biased}
        if reason := self.obstacle(**asked):
            raise UsageError(f"{reason}: set another `kernel` for this site, such as latte")
        if not (call.query.shape[0] and call.query.shape[2] and call.key.shape[2]):
            return call.query.new_zeros(*call.query.shape[:3], call.value.shape[3])
        if self.mixes_queries and call.mask is not None and not in_one_graph():
            from latte_convert.kernels.alone import each_alone  # it imports PyTorch's compiler

            return each_alone(self._attend, call)
        return self._attend(call)

    def _attend(self, call: AttentionCall) -> Tensor:
        """``attend`` with the extras around it, and what is not finite kept where it is."""
        call = call.masked()
        prefix = self.exact_rows(call.shape)
        rest = call.asked(slice(prefix, None))
        query, key = self.reframe(rest.query, call.key)
        lost = None
        if self.mixes_queries and not _surely_finite(query):
            lost = ~query.isfinite().all(-1, keepdim=True)
            query = query.masked_fill(lost, 0)
        out = self.adjust(self.attend(replace(rest, query=query, key=key)), call)
        if lost is not None:
            out = out.masked_fill(lost, float("nan"))
        if not prefix:
            return out
        exact = softmax_attention(call.asked(slice(prefix)))
        return torch.cat([exact.to(out.dtype), out], dim=2)

    def exact_rows(self, shape: CallShape) -> int:
        """How many of the first queries attend by softmax."""
        if not self.exact_prefix or shape.causal or not shape.layout.aligned:
            return 0
        return min(shape.layout.prefix, shape.queries)

    def reframe(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as ``attend`` gets them: ``key_shift``, then ``input_map``."""
        if self.shift is not None:
            key = key - self.shift[:, None].to(key.dtype)
        if self.query_map is not None and self.key_map is not None:
            query, key = query @ self.query_map.to(query.dtype), key @ self.key_map.to(key.dtype)
        return query, key

    def adjust(self, out: Tensor, call: AttentionCall) -> Tensor:
        """``sigma``, then ``output_map``, then ``bias`` on the attention output ``(B, H, Nq, dv)``, in float32."""
        sigma = None if self.folds_sigma else self.sigma
        if sigma is None and self.output_map is None and self.bias is None:
            return out
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        if sigma is not None:
            wide = wide * sigma.to(wide.dtype).reshape(self.heads, 1, -1)
        if self.output_map is not None:
            wide = wide @ self.output_map.to(wide.dtype)
        if self.bias is not None:
            bias = self.bias.to(wide.dtype).reshape(self.heads, 1, -1)
            if call.mask is not None:  # a row that sees no key stays zero
                bias = bias * call.mask.any(-1)[:, None, None, None]
            blind = max(wide.shape[2] - call.key.shape[2], 0) if call.causal else 0
            wide = torch.cat([wide[:, :, :blind], wide[:, :, blind:] + bias], dim=2) if blind else wide + bias
        return wide.to(out.dtype)

    # --- the fit ---

    def fit_stages(self, weight: Tensor | None, seed: int) -> list[Stage]:
        """What there is to fit, in the order in which one depends on the other; arguments as in ``Stage``."""
        stages: list[Stage] = []
        if self.shift is not None:
            stages.append(ShiftStage(self, weight, seed))
        stages += self.own_stages(weight, seed)
        if descended := self.descended():
            stages.append(DescentStage(self, weight, seed, descended))
        if self.output_map is not None:
            stages.append(MapStage(self, weight, seed))
        return [*stages, OutputStage(self, weight, seed)]

    def own_stages(self, weight: Tensor | None, seed: int) -> list[Stage]:
        """The stages that fit a kernel's own parameters."""
        return []

    def descended(self) -> list[nn.Parameter]:
        """The parameters that gradient descent fits, all in one stage."""
        return [parameter for parameter in (self.query_map, self.key_map) if parameter is not None]

    # --- in a state dict ---

    def get_extra_state(self) -> Tensor:
        """What the kernel is, as bytes: so that a state dict of a hybrid fits neither its original nor another hybrid.

        A kernel without parameters would leave no trace in one.
        """
        return torch.frombuffer(bytearray(self._signature().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Check that the tensors in a state dict are this kernel's.

        Raises:
            UsageError: They are those of another kernel, or of other options.
        """
        theirs = bytes(state.tolist()).decode(errors="replace")
        if theirs != self._signature():
            raise UsageError(f"this state dict is of a site with the kernel {theirs}, the site has {self._signature()}")

    def identity(self) -> list[Any]:
        """All that an output depends on besides the call: name, options, code, tensors. What is kept goes by it."""
        return [self.name, self.options, self.code(), dict(self.state_dict())]

    @classmethod
    def code(cls) -> str:
        """Digest of the module that a kernel from outside this package comes from; the package goes by its version."""
        if cls.__module__.startswith(f"{__name__.partition('.')[0]}."):
            return ""
        try:
            source = inspect.getsource(inspect.getmodule(cls) or cls)
        except (OSError, TypeError):  # typed at a prompt: nobody can say that it is the same one again
            source = secrets.token_hex()
        return hashlib.sha256(source.encode()).hexdigest()

    def _signature(self) -> str:
        own = {key: value for key, value in self.options.items() if key not in Extras.__annotations__}
        return json.dumps([self.name, own], sort_keys=True)

    def scalars(self) -> dict[str, Tensor]:
        """Fitted scalars that a report shows, by name: few, each of shape ``(1,)`` or ``(H,)``."""
        return {}

    # --- the cost ---

    @abstractmethod
    def attend_flops(self, shape: CallShape) -> int:
        """Matmuls of ``attend``; ``shape.queries`` is without prefix rows that are exact."""

    def is_softmax(self, shape: CallShape) -> bool:
        """Whether ``attend`` runs softmax itself on a call of this shape, since it would need no fewer FLOPs."""
        return False

    def inner(self, shape: CallShape) -> CallShape:
        """What ``attend`` sees of a call of this shape: without the queries that attend exactly."""
        return replace(shape, queries=shape.queries - self.exact_rows(shape))

    def flops(self, shape: CallShape) -> int:
        """All matmuls of one call on one sample, extras included, 2 FLOPs per multiply-add.

        Elementwise work is left out, as ``torch.utils.flop_counter`` does.
        """
        rows = self.inner(shape)
        total = softmax_flops(replace(shape, queries=shape.queries - rows.queries)) + self.attend_flops(rows)
        if self.query_map is not None:
            total += 2 * (rows.queries + rows.keys) * rows.heads * rows.head_dim**2
        if self.output_map is not None:
            total += 2 * rows.queries * rows.heads * rows.value_dim**2
        return total

    def paper_flops(self, shape: CallShape) -> int:
        """Operations of one call by LATTE's paper's counting, comparable with each other only.

        A quarter of the FLOPs is what its figures amount to for kernels that it has no formula for.
        """
        return self.flops(shape) // 4


def _surely_finite(tokens: Tensor) -> bool:
    """Whether all numbers are known to be finite, in one pass; not known to a graph that is made, nor to a device."""
    if tokens.device.type != "cpu" or torch.compiler.is_compiling() or recorded():
        return False
    return bool(tokens.sum(dtype=torch.promote_types(tokens.dtype, torch.float32)).isfinite())


def check_whole(kernel: str, bounds: Mapping[str, tuple[object, int, int]]) -> None:
    """Refuse options that are no whole numbers, or so large that a call would not end or not fit.

    Args:
        kernel: Its name.
        bounds: By option: its value, the least and the largest that make sense.

    Raises:
        UsageError: An option is outside its bounds.
    """
    for option, (value, least, most) in bounds.items():
        if type(value) is not int or not least <= value <= most:
            raise UsageError(f"{kernel}'s option `{option}` is {value!r}: set it to a whole number, {least} to {most}")
