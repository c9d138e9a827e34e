"""Swap attention modules for linear kernels, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from latte_convert.attention import Adapter, SiteCall
from latte_convert.errors import CheckpointError
from latte_convert.graphs import in_one_graph
from latte_convert.kernels.base import Kernel
from latte_convert.names import ATTRIBUTE


@dataclass
class Converted:
    """Handler of a converted site: its kernel, or the exact branch on short sequences.

    Attributes:
        site: Name of the site, for messages.
        min_tokens: A sample with fewer keys of its own than this gets the original's output.
        calls: How often the site was called since it was converted (not counted in compiled graphs).
        exact_calls: How many of these calls ran softmax on all samples: on few tokens, where nothing else is cheaper.
    """

    site: str
    min_tokens: int = 0
    calls: int = field(default=0, compare=False)
    exact_calls: int = field(default=0, compare=False)

    def __call__(self, call: SiteCall) -> Tensor | None:
        """Attention output ``(B, H, Nq, dv)``, or None for the exact branch.

        Raises:
            CheckpointError: The call asks for something no linear kernel honours.
        """
        graph = in_one_graph()
        if not (graph or torch.compiler.is_compiling()):
            self._count(call)
        if self.min_tokens and call.mask is not None and not graph:
            from latte_convert.kernels.alone import by_length  # it imports PyTorch's compiler

            return by_length(self._attend, call, self.min_tokens)
        return None if call.key.shape[2] < self.min_tokens else self._attend(call)

    def _attend(self, call: SiteCall) -> Tensor:
        if call.obstacle is not None:
            raise CheckpointError(f"{self.site}: {call.obstacle}; exclude this site.")
        if call.dropout > 0:
            raise CheckpointError(
                f"{self.site}: attention dropout of {call.dropout} has no meaning in a linear kernel. "
                "Call model.eval(), or set the model's attention dropout to 0 to fine-tune."
            )
        kernel: Kernel = getattr(call.module, ATTRIBUTE)
        return kernel(call)

    def _count(self, call: SiteCall) -> None:
        """Count a call; its longest sample is the last to fall back to softmax."""
        kernel: Kernel = getattr(call.module, ATTRIBUTE)
        longest = call.longest().shape
        self.calls += 1
        self.exact_calls += longest.keys < self.min_tokens or kernel.is_softmax(kernel.inner(longest))


@dataclass
class Applied:
    """A set of sites that are converted now.

    Attributes:
        handlers: The handler of each converted site, by name.
    """

    handlers: dict[str, Converted]
    _undo: list[Callable[[], None]]

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
    """Whether a model, or a part of it, runs linear attention in place of its own.

    True for what ``convert`` and ``load`` return and for models that hold one; False for an original, also where it was
    read from the directory of an artifact by its own library.
    """
    return any(isinstance(getattr(module, ATTRIBUTE, None), Kernel) for module in model.modules())


def apply(model: nn.Module, adapter: Adapter, kernels: Mapping[str, Kernel], *, min_tokens: int = 0) -> Applied:
    """Convert sites in place.

    Args:
        model: The model; its own parameters are not touched.
        adapter: The adapter of its library.
        kernels: The kernel of each site to convert, by site name.
        min_tokens: With fewer keys than this, a site runs its exact branch.

    Returns:
        A handle that undoes the conversion.

    Raises:
        CheckpointError: A site is converted already, or is not part of the model.
    """
    for name in kernels:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise CheckpointError(f"the model has no attention site '{name}'") from None
        if hasattr(module, ATTRIBUTE):
            raise CheckpointError(f"site '{name}' is converted already")
    applied = Applied(handlers={}, _undo=[])
    try:
        for name, kernel in kernels.items():
            handler = Converted(name, min_tokens)
            applied.handlers[name] = handler
            module = model.get_submodule(name)
            device = next((p.device for p in module.parameters()), None)
            module.add_module(ATTRIBUTE, kernel.to(device=device).train(module.training))
            applied._undo.append(lambda module=module: delattr(module, ATTRIBUTE))  # type: ignore[misc]
            applied._undo.append(adapter.route(model, name, handler))
    except BaseException:
        applied.undo()
        raise
    return applied
