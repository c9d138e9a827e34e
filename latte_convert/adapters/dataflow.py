"""Attention as it is seen in the calls that a module makes to PyTorch, whatever its code looks like.

Attention is one call of ``scaled_dot_product_attention``, or ``softmax(q kᵀ) v`` written out: two products and a
softmax between them. The second is told by data flow. While a module is watched, a product of two activations is not
computed but becomes ``Logits``: a tensor of the right shape that remembers what it is made of. What usually comes
before the softmax (a scale, a mask, a cast, another view) and behind it (dropout) adds to that; a product with the
values makes it attention, which ``attend`` answers, without N² numbers. Anything else that is done with it computes it,
as the module would have: nothing needs to be known of the module, and what is not attention comes out as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from latte_convert import compat
from latte_convert.adapters.products import PRODUCTS, RULES, Made, Shape, dtype_of, named, product
from latte_convert.adapters.sdpa import Arguments
from latte_convert.graphs import exporting

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Found:
    """One computation of attention; ``*`` are the dimensions of batch and heads, as the module has them.

    Attributes:
        query: ``(*, Nq, d)``.
        key: ``(*, Nk, d)``; of grouped queries it has fewer heads.
        value: ``(*, Nk, dv)``.
        exact: Computes what the module itself would, ``(*, Nq, dv)``.
        scale: Factor on the logits; None is ``d**-0.5``.
        masks: Each boolean (True attends) or additive, and broadcast to the logits.
        causal: Whether a flag makes it causal.
        dropout: Dropout of attention weights that would be applied now.
        obstacle: What else is done to the logits or the weights, or None.
        origin: What was running when the logits were computed, see ``Watched``.
        parts: Where the module has put as many tokens together as there are keys: how many were of each kind.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    exact: Callable[[], Tensor]
    scale: float | None = None
    masks: tuple[Tensor, ...] = ()
    causal: bool = False
    dropout: float = 0.0
    obstacle: str | None = None
    origin: Any = None
    parts: Shape = ()


Attend = Callable[[Found], Tensor]
"""Answers attention with ``(*, Nq, dv)``."""

_depth: ContextVar[int] = ContextVar("latte_depth", default=0)


@contextmanager
def deeper() -> Iterator[None]:
    """What is called here is none of those that are watched around it."""
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def keep_apart(module: nn.Module) -> Callable[[], None]:
    """Have what a module computes be none of those that are watched around it; returns a function that ends that."""

    def enter(*_: Any) -> None:
        _depth.set(_depth.get() + 1)

    def leave(*_: Any) -> None:
        _depth.set(_depth.get() - 1)

    hooks = module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


class Watched(TorchFunctionMode):
    """A context in which attention is answered by a function.

    Args:
        attend: The function.
        origin: Noted where logits are computed, for the attention that they become: what is running.
        at_once: Whether logits are computed when the module computes them: for a module that is not known yet, which
            may change what they are made of in place.
    """

    def __init__(self, attend: Attend, origin: Callable[[], Any] = lambda: None, *, at_once: bool = False) -> None:
        super().__init__()
        self.attend, self.origin, self.at_once = attend, origin, at_once
        self._depth = _depth.get()
        self._parts: dict[int, Shape] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one call; whatever it calls itself is not looked at."""
        kwargs = kwargs or {}
        if _depth.get() != self._depth:
            return func(*args, **kwargs)
        if func in _FUSED:
            given = Arguments(*_plain(args), **_plain(kwargs))
            return self.answer(_fused(func, given, self.origin()))
        if func in PRODUCTS and not exporting() and not any(isinstance(each, Logits) for each in args):
            made = product(func, args, kwargs)
            if made is not None:
                return Logits.of(replace(made, origin=self.origin()), self, lambda: func(*args, **kwargs))
        if func in _JOINING:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def answer(self, found: Found) -> Tensor:
        """Attention, of tokens that may have been put together."""
        return self.attend(replace(found, parts=self._parts.get(found.key.shape[-2], ())))

    def _note(self, tensors: Any, dim: int = 0, **_: Any) -> None:
        if all(isinstance(each, Tensor) and each.dim() > 2 and each.dim() > dim for each in tensors):
            sizes = tuple(each.shape[dim] for each in tensors)
            self._parts[sum(sizes)] = sizes


def _fused(func: Any, given: Arguments, origin: Any) -> Found:
    """A call of ``scaled_dot_product_attention``."""
    masks = () if given.attn_mask is None else (given.attn_mask,)
    return Found(
        *given[:3], partial(given.given_to, func), given.scale, masks, given.is_causal, given.dropout_p, origin=origin
    )


class _Later:
    """A tensor that is computed when it is needed; only what a module itself asks for is kept."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute
        self.kept: Tensor | None = None

    def get(self) -> Tensor:
        return self.compute() if self.kept is None else self.kept

    def keep(self) -> Tensor:
        self.kept = self.get()
        return self.kept


class Logits(Tensor):
    """Logits of attention, or its weights, which are computed where something else than attention becomes of them."""

    made: Made
    later: _Later
    watched: Watched

    @classmethod
    def of(cls, made: Made, watched: Watched, compute: Callable[[], Tensor], dtype: torch.dtype | None = None) -> Any:
        """Logits that ``compute`` would give; one number stands for all of them, and it is none."""
        self = made.query.new_full((), float("nan"), dtype=dtype).expand(made.shape).as_subclass(cls)
        self.made, self.later, self.watched = made, _Later(compute), watched
        if watched.at_once:
            self.later.keep()
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation on logits."""
        kwargs = kwargs or {}
        self = next((each for each in args if isinstance(each, Logits)), None)
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if self is None or not (func in RULES or func in _CHANGES or func in PRODUCTS):
            return func(*_plain(args), **_plain(kwargs))
        output = _answered(self, func, args, kwargs) if func in PRODUCTS and self.made.weights else None
        return self._next(func, args, kwargs) if output is None else output

    def _next(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation makes of logits: others, or these where it is done in place."""
        name = func.__name__
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        made = RULES[func](self, args, kwargs) if func in RULES else None
        before, inputs = (
            self.later,
            compat.tree_map(lambda leaf: leaf.later if isinstance(leaf, Logits) else leaf, args),
        )

        def compute() -> Tensor:
            if not in_place:
                found: Tensor = func(*_plain(inputs), **_plain(kwargs))
                return found
            own = before.get()
            own = own if before.kept is None else own.clone()
            func(own, *_plain(inputs[1:]), **_plain(kwargs))
            return own

        if made is None:  # computed now, and followed only to say what stands in the way
            value = compute()
            if value.shape != self.made.shape:
                return value
            where = "weights" if self.made.weights else "logits"
            made = replace(self.made, obstacle=self.made.obstacle or f"'{name.strip('_')}' on its attention {where}")
            found = Logits.of(made, self.watched, lambda: value, value.dtype)
        else:
            found = Logits.of(made, self.watched, compute, dtype_of(self, func, args, kwargs))
        if not in_place:
            return found
        self.made, self.later = found.made, found.later
        return self


def _plain(tree: Any) -> Any:
    """Arguments with numbers in the place of logits."""

    def computed(leaf: Any) -> Any:
        if isinstance(leaf, _Later):
            return leaf.get()
        return leaf.later.keep() if isinstance(leaf, Logits) else leaf

    return compat.tree_map(computed, tree)


def _answered(weights: Logits, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The product of attention weights and values; None where it is another product."""
    made = weights.made
    try:
        found = PRODUCTS[func][1](weights, *args)
    except (TypeError, ValueError):  # other arguments than those of weights and values
        found = None
    if found is None or found[0].dim() != weights.dim() or found[0].shape[-2] != weights.shape[-1]:
        return None
    value, order = found

    def exact() -> Tensor:
        computed: Tensor = func(*(each.later.get() if each is weights else each for each in args), **kwargs)
        return computed.permute([order.index(place) for place in range(len(order))])

    unchanged = made.seen == made.versions
    answer = weights.watched.answer(
        Found(
            made.query, made.key, value.expand(*made.lead, *value.shape[-2:]), exact, made.scale, made.masks,
            dropout=made.dropout, origin=made.origin,
            obstacle=made.obstacle if unchanged else "its queries or keys are changed in place before its softmax",
        )
    )  # fmt: skip
    return answer.permute(order)


_SDPA = torch.ops.aten.scaled_dot_product_attention
_FUSED = {F.scaled_dot_product_attention, _SDPA, _SDPA.default}
_JOINING = {*named("cat", "concat", "concatenate")}
_CHANGES = {
    *named("tanh", "clamp", "clamp_", "sigmoid", "pow", "__pow__", "nan_to_num", "relu", "copy_", "__setitem__")
}
"""Functions behind which logits are followed, to say what stands in the way."""
_FACTS = {
    *named("size", "dim", "numel", "is_floating_point", "__len__"),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
}
"""What is asked of logits without their numbers."""
