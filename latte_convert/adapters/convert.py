"""Swap attention modules for linear kernels, merge tokens between blocks, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from latte_convert.adapters.merging import Merge, Step, is_block_of, merged_block, met
from latte_convert.adapters.route import route
from latte_convert.attention import Adapter, CallShape, SiteCall
from latte_convert.data.feed import anchor
from latte_convert.errors import CheckpointError
from latte_convert.graphs import in_one_graph
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.softmax import softmax_attention
from latte_convert.names import ATTRIBUTE


@dataclass
class Converted:
    """Handler of a site: its kernel, or the exact branch on short sequences and where it has none.

    Attributes:
        site: Name of the site, for messages.
        min_tokens: A sample with fewer keys of its own than this gets the original's output.
        calls: How often the site was called since it was converted (not counted in compiled graphs).
        exact_calls: How many of these calls ran softmax on all samples: on few tokens, where nothing else is cheaper.
        shape: Of the latest call, with the tokens that were left of it.
    """

    site: str
    min_tokens: int = 0
    calls: int = field(default=0, compare=False)
    exact_calls: int = field(default=0, compare=False)
    shape: CallShape | None = field(default=None, compare=False)

    def __call__(self, call: SiteCall) -> Tensor | None:
        """Attention output ``(B, H, Nq, dv)``, or None for the exact branch.

        Raises:
            CheckpointError: The call asks for something no linear kernel honours.
        """
        call = met(call)
        graph = in_one_graph()
        if not (graph or torch.compiler.is_compiling()):
            self._count(call)
        if self.min_tokens and call.mask is not None and not graph:
            from latte_convert.kernels.alone import by_length  # it imports PyTorch's compiler

            return by_length(self._attend, call, self.min_tokens)
        return _exact(call) if call.key.shape[2] < self.min_tokens else self._attend(call)

    def _attend(self, call: SiteCall) -> Tensor:
        kernel: Kernel = getattr(call.module, ATTRIBUTE)
        unserved = None if call.bias is None else kernel.obstacle(causal=False, cross=False, biased=True)
        if (obstacle := call.obstacle or unserved) is not None:
            raise CheckpointError(f"{self.site}: {obstacle}; exclude this site.")
        if call.dropout > 0:
            raise CheckpointError(
                f"{self.site}: attention dropout of {call.dropout} has no meaning in a linear kernel. "
                "Call model.eval(), or set the model's attention dropout to 0 to fine-tune."
            )
        return kernel(call)

    def _count(self, call: SiteCall) -> None:
        """Count a call; its longest sample is the last to fall back to softmax."""
        kernel: Kernel = getattr(call.module, ATTRIBUTE)
        longest = call.longest().shape
        self.shape = call.shape
        self.calls += 1
        self.exact_calls += longest.keys < self.min_tokens or kernel.is_softmax(kernel.inner(longest))


@dataclass
class Beside:
    """Handler of a site that stays exact in a block whose tokens are merged.

    Attributes:
        shape: As in ``Converted``.
    """

    shape: CallShape | None = field(default=None, compare=False)

    def __call__(self, call: SiteCall) -> Tensor | None:
        """Softmax on what is left of the tokens; None where none have been merged."""
        call = met(call)
        self.shape = call.shape
        return _exact(call)


def _exact(call: SiteCall) -> Tensor | None:
    """The exact branch: the original's own, or softmax on merged tokens."""
    return None if call.merged is None else softmax_attention(call)


@dataclass
class Applied:
    """A set of sites that are converted now.

    Attributes:
        handlers: The handler of each converted site, by name.
        beside: The handlers of sites that stay exact in blocks whose tokens are merged.
    """

    handlers: dict[str, Converted]
    _undo: list[Callable[[], None]]
    beside: dict[str, Beside] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, CallShape]:
        """The shape of the latest call of each site, with the tokens that were left of it."""
        handlers: dict[str, Converted | Beside] = {**self.handlers, **self.beside}
        return {name: handler.shape for name, handler in handlers.items() if handler.shape is not None}

    def undo(self) -> None:
        """Put every site back to the original, in reverse order. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def on_undo(self, callback: Callable[[], None]) -> None:
        """Have ``undo`` call something more, before it puts the sites back."""
        self._undo.append(callback)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def unused(self) -> list[str]:
        """Converted sites that were never called: a fused path or wrong wiring skips them."""
        return [name for name, handler in self.handlers.items() if handler.calls == 0]


def is_hybrid(model: nn.Module) -> bool:
    """Whether a model, or a part of it, runs linear attention in place of its own, or merges tokens.

    True for what ``convert`` and ``load`` return and for models that hold one; False for an original, also where it was
    read from the directory of an artifact by its own library.
    """
    return any(isinstance(getattr(module, ATTRIBUTE, None), Kernel | Merge) for module in model.modules())


Changes = Mapping[str, "Kernel | Merge"]
"""What becomes of modules, by name: the kernel of a site, and how many tokens a block works on."""


def identity(changes: Changes) -> dict[str, Any]:
    """All that what they do depends on, besides the model."""
    return {name: change.identity() if isinstance(change, Kernel) else change.share for name, change in changes.items()}


def apply(model: nn.Module, adapter: Adapter, changes: Changes, *, min_tokens: int = 0) -> Applied:
    """Convert sites and merge tokens in place.

    Args:
        model: The model; its own parameters are not touched.
        adapter: The adapter of its library.
        changes: The kernel of each site to convert, and the blocks whose tokens are merged, in order of execution.
        min_tokens: With fewer keys than this, a site runs its exact branch, and no tokens merge.

    Returns:
        A handle that undoes the conversion.

    Raises:
        CheckpointError: A site or block is converted already, or is not part of the model.
    """
    for name in changes:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise CheckpointError(f"the model has no attention site or block '{name}'") from None
        if hasattr(module, ATTRIBUTE):
            raise CheckpointError(f"'{name}' is converted already")
    applied = Applied(handlers={}, _undo=[])
    merges = {name: change for name, change in changes.items() if isinstance(change, Merge)}
    try:
        for name, change in changes.items():
            if isinstance(change, Kernel):
                applied.handlers[name] = Converted(name, min_tokens)
                _attach(model, name, change, applied)
                applied._undo.append(adapter.route(model, name, applied.handlers[name]))
        if merges:
            _merge(model, adapter, merges, applied, min_tokens)
    except BaseException:
        applied.undo()
        raise
    return applied


def _merge(model: nn.Module, adapter: Adapter, merges: Mapping[str, Merge], applied: Applied, min_tokens: int) -> None:
    """Merge tokens between blocks; the sites in them that stay exact have to know."""
    for site in adapter.sites(model):
        if is_block_of(merges, site.name) and site.name not in applied.handlers:
            applied.beside[site.name] = Beside()
            applied._undo.append(adapter.route(model, site.name, applied.beside[site.name]))
    following = [*[merge.share for merge in merges.values()][1:], None]
    for index, ((name, merge), left) in enumerate(zip(merges.items(), following, strict=True)):
        _attach(model, name, merge, applied)
        applied._undo.append(route(model.get_submodule(name), Step(index == 0, left, min_tokens), merged_block))


def _attach(model: nn.Module, name: str, change: Kernel | Merge, applied: Applied) -> None:
    """Put what a module becomes beside its own modules, until the conversion is undone."""
    module = model.get_submodule(name)
    near = next(module.parameters(), None)
    device = near if near is None else (anchor(model) if near.is_meta else near).device
    module.add_module(ATTRIBUTE, change.to(device=device).train(module.training))
    applied._undo.append(lambda: delattr(module, ATTRIBUTE))
