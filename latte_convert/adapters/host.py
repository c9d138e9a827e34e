"""A model together with the knowledge of where its attention is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from latte_convert.adapters.convert import Applied, Changes, apply
from latte_convert.adapters.find import Otherwise, find_adapter
from latte_convert.adapters.plain import owner
from latte_convert.attention import Adapter, AttentionSite, Handler
from latte_convert.data.feed import Inputs, run
from latte_convert.errors import CheckpointError
from latte_convert.names import OFFLOADED
from latte_convert.wording import some

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Host:
    """A loaded model and the adapter of its library: what every stage looks into and, at last, converts.

    Whatever is put into the model, hooks and handlers, is a context that takes it out on any exit, Ctrl-C included.

    Attributes:
        model: The model.
        adapter: Knows the library's attention modules.
    """

    model: nn.Module
    adapter: Adapter

    @classmethod
    def of(cls, model: nn.Module, otherwise: Otherwise | None = None) -> Host:
        """A model with the adapter of its library, or with the one that ``otherwise`` makes, see ``find_adapter``.

        Raises:
            CheckpointError: No adapter knows the model's class.
        """
        return cls(model, find_adapter(model, otherwise))

    def sites(self) -> list[AttentionSite]:
        """Every attention module in order of the module tree, the ones that cannot be converted included.

        Raises:
            CheckpointError: One has no whole number of heads: some libraries build what their configuration says.
        """
        sites = self.adapter.sites(self.model)
        for site in sites:
            if not (isinstance(site.heads, int) and isinstance(site.head_dim, int)):
                raise CheckpointError(
                    f"{site.name} has {site.heads} heads of {site.head_dim} channels: the configuration is wrong."
                )
        return sites

    def run(self, inputs: Inputs) -> Any:
        """Run the model, or one tower of it, without gradients."""
        return run(self.model, inputs)

    def block(self, site: str) -> str:
        """Name of the transformer block around a site: its nearest ancestor that is an item of a module list.

        Where a model has no such list, the site itself stands in for its block, or the module whose calls it is of.
        """
        parts = site.split(".")
        for end in range(len(parts) - 1, 0, -1):
            around, block = (self.model.get_submodule(".".join(parts[:e])) for e in (end, end + 1))
            if isinstance(around, nn.ModuleList | nn.Sequential) and not isinstance(block, _NEVER_CALLED):
                return ".".join(parts[: end + 1])
        return owner(self.model, site)

    def output_projection(self, site: str) -> nn.Linear | None:
        """The linear layer that reads a site's attention output, or None where it cannot be told."""
        return self.adapter.output_projection(self.model, site)

    @contextmanager
    def weights_of(self, site: str) -> Iterator[None]:
        """The weights of a site in memory, for who reads them outside of a forward; those of most models always are."""
        offloaded = self.model.__dict__.get(OFFLOADED)
        with nullcontext() if offloaded is None else offloaded.brought_in(self.model.get_submodule(self.block(site))):
            yield

    @contextmanager
    def watch(self, handlers: Mapping[str, Handler]) -> Iterator[None]:
        """Send the calls of sites to handlers for the time of the context."""
        with ExitStack() as stack:
            for site, handler in handlers.items():
                stack.callback(self.adapter.route(self.model, site, handler))
            yield

    @contextmanager
    def outputs_of(self, modules: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Collect the latest output of modules by name; the dictionary is filled by each forward pass.

        Where a module returns a tuple, its first item counts. Copies: a module may write into its input.
        """
        outputs: dict[str, Tensor] = {}

        def record(name: str) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple | list) else output
                if not isinstance(first, Tensor):  # a model that is its own block may return anything
                    return
                first = first.detach()
                # PyTorch's encoder layers hand padded batches on as nested tensors.
                outputs[name] = first.to_padded_tensor(0.0) if first.is_nested else first.clone()

            return hook

        with ExitStack() as stack:
            for name in dict.fromkeys(modules):
                handle = self.model.get_submodule(name).register_forward_hook(record(name))
                stack.callback(handle.remove)
            yield outputs

    def convert(self, changes: Changes, *, min_tokens: int = 0) -> Applied:
        """Convert sites and merge tokens in place.

        Args:
            changes: The kernel of each site to convert, and the blocks whose tokens are merged. The model's own
                parameters are not touched.
            min_tokens: With fewer keys than this, a site runs its exact branch.

        Returns:
            A handle that undoes the conversion, or does so at its end as a context.

        Raises:
            CheckpointError: A site is converted already, or is not part of the model.
        """
        return apply(self.model, self.adapter, changes, min_tokens=min_tokens)


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
