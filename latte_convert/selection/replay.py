"""Play back what a forward pass computed before a block, so that a change in that block costs only what follows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from latte_convert import compat


class _Contents:
    """What nested containers held when they were looked at: each item, and PyTorch's count of its in-place changes."""

    def __init__(self, *trees: Any) -> None:
        self._leaves = compat.tree_leaves(trees)
        self._versions = [compat.version(leaf) if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]

    def still(self, *trees: Any) -> bool:
        """Whether the containers hold the same items, and these are as they were; False where that cannot be told."""
        now = _Contents(*trees)
        same = len(now._leaves) == len(self._leaves) and all(map(operator.is_, now._leaves, self._leaves))
        return same and None not in self._versions and now._versions == self._versions

    @property
    def plain(self) -> bool:
        """Whether all items are tensors and constants, at least one of them a tensor."""
        known = all(leaf is None or isinstance(leaf, _PLAIN) for leaf in self._leaves)
        return known and any(isinstance(leaf, Tensor) for leaf in self._leaves)


_PLAIN = (Tensor, bool, int, float, str, torch.Size, torch.dtype, torch.device)


@dataclass
class _Call:
    """One call of a module: when it began and ended, in ticks, and what it returned.

    Attributes:
        output: What it returned, in containers of our own: the caller may write into those that it got.
        contents: What these hold.
        aside: Whether it did more than return: it wrote into what it was given, or kept a tensor for later.
    """

    start: int
    end: int = 0
    output: Any = None
    contents: _Contents = field(default_factory=_Contents)
    aside: bool = False

    def close(self, tick: int, output: Any, aside: bool) -> None:
        """The module returned ``output``."""
        self.end, self.aside, self.output = tick, aside, _copy(output)
        self.contents = _Contents(self.output)

    @property
    def intact(self) -> bool:
        """Whether playing the output back does what the call did: nothing has written into its tensors since."""
        return self.contents.plain and not self.aside and self.contents.still(self.output)


class Replay:
    """The outputs of one forward pass, module by module.

    Whatever a pass has finished before it reaches a block cannot depend on that block. The modules that are recorded
    are the blocks and, on the way down to them, the siblings of their ancestors: a backbone, an encoder, the
    embeddings. Of these, ``before`` plays back the ones that returned before the block was entered. Computed again
    are modules that a pass calls more than once, that return anything but tensors and constants (a key-value cache),
    that write into what they are given or keep a tensor for later, or whose output was changed in place.

    Hooks on a module that is played back run, those inside it do not: what they note must be kept from the recorded
    pass. Tensors are neither copied nor moved, so what follows gets the same bits in the same memory layout; the
    containers around them are new for every caller, which may write into them.

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
                given = _Contents(args, kwargs, _kept(module))
                output = forward(*args, **kwargs)
                call.close(ticks, output, aside=not given.still(args, kwargs, _kept(module)))
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
                return _copy(output)

            return playing

        with _forwards({module: player(module.forward, output) for module, output in finished.items()}):
            yield


def _siblings(model: nn.Module, block: str) -> Iterator[nn.Module]:
    """The children of every ancestor of a block, the block among them; the model itself where that is the block."""
    if not block:
        yield model
        return
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


def _kept(module: nn.Module) -> list[Tensor]:
    """The tensors that a module and those in it hold beside their parameters, buffers among them."""
    values = [
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in ("_parameters", "_modules")
    ]
    return [leaf for leaf in compat.tree_leaves(values) if isinstance(leaf, Tensor)]


def _copy(output: Any) -> Any:
    """The same tensors and constants in containers of their own."""
    return compat.tree_map(lambda leaf: leaf, output)
