"""What an adapter tells the rest of the package about a library's attention modules.

An adapter knows three things about a library: where the attention modules are (``sites``), how to take over
one of them (``route``), and which layer reads its output (``output_projection``). It knows nothing about
kernels: a handler decides what a routed module computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from latte_convert.kernels.cost import CallShape

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of one attention call are arranged.

    Attributes:
        prefix: Number of leading tokens that are not on the grid (CLS, registers).
        grid: ``(height, width)`` of the remaining keys, or None for a sequence.
        aligned: Whether query ``i`` and key ``i`` are the same token (self-attention).
    """

    prefix: int = 0
    grid: tuple[int, int] | None = None
    aligned: bool = True


@dataclass(frozen=True)
class AttentionSite:
    """One attention module that is, or could be, converted.

    Attributes:
        name: Dotted path of the module inside the model.
        tower: ``vision``, ``text``, ``audio``, ``encoder`` or ``decoder``.
        kind: ``self`` or ``cross``.
        causal: Whether a query sees only the keys up to its own position.
        heads: Number of heads.
        head_dim: Channels per head.
        eligible: Whether the site can be converted.
        reason: Why it cannot, or None.
    """

    name: str
    tower: str
    kind: Literal["self", "cross"]
    causal: bool
    heads: int
    head_dim: int
    eligible: bool = True
    reason: str | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One call of a routed attention module.

    Attributes:
        module: The routed module.
        query: ``(B, H, Nq, d)`` after projection, QK-norm and rotary embedding.
        key: ``(B, H, Nk, d)``.
        value: ``(B, H, Nk, dv)``.
        scale: Factor on the logits.
        mask: Boolean key mask ``(B, Nk)``, True where a key takes part, or None.
        causal: Whether query i sees only the keys up to ``i + Nk - Nq``.
        layout: How the tokens are arranged.
        exact: Computes the original attention output ``(B, H, Nq, dv)``.
        obstacle: What this call asks for that no linear kernel honours, or None.
        dropout: Dropout of attention weights that the original would apply now.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    mask: Tensor | None
    causal: bool
    layout: TokenLayout
    exact: Callable[[], Tensor]
    obstacle: str | None = None
    dropout: float = 0.0

    @property
    def shape(self) -> CallShape:
        """What the cost of this call depends on."""
        return CallShape(
            queries=self.query.shape[2],
            keys=self.key.shape[2],
            heads=self.query.shape[1],
            head_dim=self.query.shape[3],
            value_dim=self.value.shape[3],
            causal=self.causal,
            prefix=self.layout.prefix,
            grid=self.layout.grid,
            aligned=self.layout.aligned,
        )

    def sample(self, index: int) -> AttentionCall:
        """The same call for one sample of the batch, as a batch of one."""
        one = slice(index, index + 1)
        return replace(
            self,
            query=self.query[one],
            key=self.key[one],
            value=self.value[one],
            mask=None if self.mask is None else self.mask[one],
        )


Handler = Callable[[AttentionCall], "Tensor | None"]
"""Computes what a routed module puts out, ``(B, H, Nq, dv)``; None leaves the call to the original."""


class Adapter(Protocol):
    """One library's way of doing attention."""

    name: str

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """All attention modules in order of the module tree, the ones that cannot be converted included."""

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the calls of a site to ``handler``; returns a function that puts the original back."""

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The linear layer that reads the attention output, or None where it cannot be told."""


_ADAPTERS = (
    ("transformers", "hf", "HFAdapter"),
    ("timm", "timm", "TimmAdapter"),
    ("open_clip", "open_clip", "OpenClipAdapter"),
    (None, "mha", "TorchAdapter"),
)


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter of the library that ``model`` comes from.

    Raises:
        CheckpointError: No adapter knows the model's class.
    """
    from importlib import import_module

    from latte_convert.errors import CheckpointError

    # Library by library, so that a Transformers model does not import timm; the last takes any model that has
    # torch.nn.MultiheadAttention in it.
    for library, home, name in _ADAPTERS:
        if library is None or library in {kind.__module__.partition(".")[0] for kind in type(model).__mro__}:
            adapter: Any = getattr(import_module(f"latte_convert.adapters.{home}"), name)
            if adapter.accepts(model):
                found: Adapter = adapter()
                return found
    raise CheckpointError(
        f"{type(model).__module__}.{type(model).__qualname__} is not a model this version can convert: it takes models "
        "of transformers, timm and open_clip, and others that use torch.nn.MultiheadAttention."
    )


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """List every attention module of a model, the ones that cannot be converted included.

    Raises:
        CheckpointError: No adapter knows the model's class.
    """
    return find_adapter(model).sites(model)


def enclosing_block(model: nn.Module, site: str) -> str:
    """Name of the transformer block around a site: its nearest ancestor that is an item of a module list.

    Where a model has no such list, the site itself stands in for its block.
    """
    from torch import nn

    parts = site.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList | nn.Sequential):
            return ".".join(parts[: end + 1])
    return site
