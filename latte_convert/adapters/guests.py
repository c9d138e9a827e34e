"""Models of a known library inside another module: under a head, in an ``nn.Sequential``, in another library's wrapper.

A guest is left to the adapter of its own library, which sees it as a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from latte_convert.attention import Adapter, AttentionSite, Handler


@dataclass(frozen=True)
class Guest:
    """A model inside another one.

    Attributes:
        path: Its dotted path.
        model: The model.
        adapter: The adapter of its library.
        tower: The tower that it is, where the model around it says so.
    """

    path: str
    model: nn.Module
    adapter: Adapter
    tower: str | None = None

    def holds(self, site: str) -> bool:
        """Whether a module of the model around it is inside of it."""
        return site.startswith(f"{self.path}.")

    def sites(self) -> list[AttentionSite]:
        """Its attention modules, under their names in the model around it."""
        return [
            replace(site, name=f"{self.path}.{site.name}", tower=self.tower or site.tower)
            for site in self.adapter.sites(self.model)
        ]

    def route(self, site: str, handler: Handler) -> Callable[[], None]:
        """As its adapter does it."""
        return self.adapter.route(self.model, site[len(self.path) + 1 :], handler)

    def output_projection(self, site: str) -> nn.Linear | None:
        """As its adapter finds it."""
        return self.adapter.output_projection(self.model, site[len(self.path) + 1 :])


class GuestAdapter:
    """A module with models of known libraries in it, and perhaps attention of its own.

    Args:
        own: Takes the attention outside of the guests.
        guests: The guests.
    """

    def __init__(self, own: Adapter, guests: Sequence[Guest]) -> None:
        self.name = own.name
        self._own = own
        self._guests = guests

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """Attention modules in order of the module tree."""
        found = {site.name: site for site in self._own.sites(model) if self._guest_of(site.name) is None}
        found |= {site.name: site for guest in self._guests for site in guest.sites()}
        return [found[name] for name, _ in model.named_modules() if name in found]

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the calls of one attention module to ``handler``; routes nest, and undo in any order."""
        guest = self._guest_of(site)
        return self._own.route(model, site, handler) if guest is None else guest.route(site, handler)

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The linear layer that reads the attention output, or None where it cannot be told."""
        guest = self._guest_of(site)
        return self._own.output_projection(model, site) if guest is None else guest.output_projection(site)

    def _guest_of(self, site: str) -> Guest | None:
        return next((guest for guest in self._guests if guest.holds(site)), None)
