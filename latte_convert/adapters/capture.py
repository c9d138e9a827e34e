"""Look into a running model: route its sites to recorders, and read its block outputs.

Every hook and every route is a context manager that removes itself on any exit, Ctrl-C included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from latte_convert.attention import Adapter, Handler
from latte_convert.errors import CheckpointError
from latte_convert.wording import some


@contextmanager
def routed(model: nn.Module, adapter: Adapter, handlers: Mapping[str, Handler]) -> Iterator[None]:
    """Send the calls of sites to handlers for the time of the context."""
    with ExitStack() as stack:
        for site, handler in handlers.items():
            stack.callback(adapter.route(model, site, handler))
        yield


@contextmanager
def outputs_of(model: nn.Module, modules: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Collect the latest output of modules by name; the dictionary is filled by each forward pass.

    Where a module returns a tuple, its first item counts.
    """
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            first = (output[0] if isinstance(output, tuple | list) else output).detach()
            # PyTorch's encoder layers hand padded batches on as nested tensors.
            outputs[name] = first.to_padded_tensor(0.0) if first.is_nested else first

        return hook

    with ExitStack() as stack:
        for name in dict.fromkeys(modules):
            handle = model.get_submodule(name).register_forward_hook(record(name))
            stack.callback(handle.remove)
        yield outputs


def require_calls(calls: Mapping[str, int]) -> None:
    """Stop where a site was never called: a fused path skips it, and converting it would change nothing.

    Raises:
        CheckpointError: Naming the sites.
    """
    silent_sites = [name for name, count in calls.items() if count == 0]
    if silent_sites:
        raise CheckpointError(
            f"{len(silent_sites)} attention sites were never called by the calibration inputs ({some(silent_sites)}): "
            "a fused path or another tower computes the output. Exclude them, or give inputs that reach them."
        )
