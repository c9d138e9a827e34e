"""Play back what a forward pass computed before a block, so that a change in that block costs only what follows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from latte_convert import compat


@dataclass
class _Call:
    """One call of a module: when it began and ended, in ticks, and what it returned.

    Attributes:
        versions: PyTorch's count of in-place changes of each tensor returned, at the end of the call.
    """

    start: int
    end: int = 0
    output: Any = None
    versions: tuple[int, ...] = ()

    def close(self, tick: int, output: Any) -> None:
        """The module returned ``output``."""
        self.end, self.output, self.versions = tick, output, _versions(output) or ()

    @property
    def intact(self) -> bool:
        """Whether the output is made of tensors and constants, and nothing has written into it since."""
        return bool(self.versions) and _versions(self.output) == self.versions


class Replay:
    """The outputs of one forward pass, module by module.

    Whatever a pass has finished before it reaches a block cannot depend on that block. The modules that are recorded
    are the blocks and, on the way down to them, the siblings of their ancestors: a backbone, an encoder, the
    embeddings. Of these, ``before`` plays back the ones that returned before the block was entered. Computed again
    are modules that a pass calls more than once, that return anything but tensors and constants (a key-value cache),
    or whose output was changed in place later. Hooks on a module that is played back run, those inside it do not: what
    they note must be kept from the recorded pass. Tensors are neither copied nor moved, so what follows gets the same
    bits in the same memory layout.

    Args:
        model: The model.
        blocks: Names of the blocks to be changed one at a time.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str]) -> None:
        names = list(dict.fromkeys(blocks))
        self._blocks = {name: model.get_submodule(name) for name in names}
        self._modules = list(dict.fromkeys(child for name in names for child in _siblings(model, name)))
        self._calls: dict[nn.Module, list[_Call]] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the pass that runs in this context; it takes the place of the one before."""
        self._calls = {module: [] for module in self._modules}
        ticks = 0

        def recorder(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def recording(*args: Any, **kwargs: Any) -> Any:
                nonlocal ticks
                call = _Call(start=ticks)
                self._calls[module].append(call)
                ticks += 1
                output = forward(*args, **kwargs)
                call.close(ticks, output)
                ticks += 1
                return output

            return recording

        with _forwards({module: recorder(module, module.forward) for module in self._modules}):
            yield

    def reached(self, block: str) -> bool:
        """Whether the recorded pass called a block."""
        return bool(self._calls.get(self._blocks[block]))

    @contextmanager
    def before(self, block: str) -> Iterator[None]:
        """Play back all that the recorded pass finished before it entered ``block``, which it must have reached."""
        entered = self._calls[self._blocks[block]][0].start
        finished = {
            module: calls[0].output
            for module, calls in self._calls.items()
            if len(calls) == 1 and calls[0].end < entered and calls[0].intact
        }

        def player(forward: Callable[..., Any], output: Any) -> Callable[..., Any]:
            @functools.wraps(forward)
            def playing(*_args: Any, **_kwargs: Any) -> Any:
                return output

            return playing

        with _forwards({module: player(module.forward, output) for module, output in finished.items()}):
            yield


def _siblings(model: nn.Module, block: str) -> Iterator[nn.Module]:
    """The children of every ancestor of a block, the block among them."""
    parent = model
    for part in block.split("."):
        yield from parent.children()
        parent = parent.get_submodule(part)


@contextmanager
def _forwards(replacements: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules another ``forward`` for the time of the context."""

    def restore(module: nn.Module, own: Callable[..., Any] | None) -> None:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own

    with ExitStack() as stack:
        for module, forward in replacements.items():
            stack.callback(restore, module, module.__dict__.get("forward"))
            module.__dict__["forward"] = forward
        yield


def _versions(output: Any) -> tuple[int, ...] | None:
    """In-place changes of each tensor in an output so far; None where something in it cannot be played back."""
    leaves = compat.tree_leaves(output)
    if not all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str) for leaf in leaves):
        return None
    versions = [compat.version(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return None if None in versions else tuple(number for number in versions if number is not None)
