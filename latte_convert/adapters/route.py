"""Routes: who computes the attention of a module.

A routed module carries a ``Route`` with the handlers of its calls. Calls reach it in one of two ways. Transformers
looks its attention function up for each call, and the one it finds asks the route. Any other module gets a subclass of
its class whose ``forward`` does, as PyTorch's parametrisations and FSDP do it: unlike a ``forward`` of the instance it
is bound anew in copies, pickles and the replicas of ``DataParallel``, and wrappers that replace the instance's (the
hooks of accelerate) keep what they do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor, nn

from latte_convert.adapters.layout import SiteLayout, watch
from latte_convert.attention import Handler, SiteCall
from latte_convert.compat import WRAPPED_FORWARD

NAME = "latte_route"
"""Attribute of a routed module."""
BOUND = "latte_bound"
"""Attribute with the module itself and its stand-in: a copy, which has another self, makes its own."""


@dataclass
class Route:
    """Who computes the calls of one module, and what is known of them beforehand.

    Attributes:
        causal: Whether the site is causal where a call does not say.
        layout: How its tokens lie.
        biased: Whether additive masks of its calls hold a bias; None: as their values tell.
        eager: Where the library asks the route itself, the attention function behind its "eager".
        handlers: By order of routing; the latest one computes.
        replaced: The module's own values of the attributes that it has otherwise while it is routed.
        added: How many handlers there have been.
    """

    causal: bool = False
    layout: SiteLayout = field(default_factory=SiteLayout)
    biased: bool | None = False
    eager: Any = None
    handlers: dict[int, Handler] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)
    added: int = 0

    def ask(self, call: SiteCall) -> Tensor | None:
        """What the latest handler makes of a call; None leaves it to the original."""
        return self.handlers[max(self.handlers)](call)


StandIn = Callable[[nn.Module, Route, Callable[..., Any]], Callable[..., Any]]
"""From a module, its route and the forward of its class to the function that runs in the place of its ``forward``."""


def route(
    module: nn.Module,
    handler: Handler,
    stand_in: StandIn | None = None,
    *,
    causal: bool = False,
    layout: SiteLayout | None = None,
    biased: bool | None = False,
    eager: Any = None,
    attributes: Mapping[str, Any] | None = None,
) -> Callable[[], None]:
    """Send the attention of a module to ``handler``; routes nest, and can be undone in any order.

    Args:
        module: The module.
        handler: Computes the attention output, or returns None for the original's.
        stand_in: Makes what runs in the place of the module's ``forward``; None: the library asks the route itself.
        causal: Whether the site is causal where a call does not say.
        layout: How its tokens lie; all but the handler of the first route holds for all of them.
        biased: As in ``Route``.
        eager: As in ``Route``.
        attributes: Values that attributes of the module have while it is routed, such as the switch of a library
            between SDPA and arithmetic of its own.

    Returns:
        A function that takes this route away; with the last one the module is as it was. A second call does nothing.
    """
    found: Route | None = module.__dict__.get(NAME)
    if found is None:
        found = Route(causal, layout or SiteLayout(), biased, eager)
        found.replaced = {name: module.__dict__[name] for name in attributes or {}}
        module.__dict__.update(attributes or {}, **{NAME: found})
        if stand_in is not None:
            kind: Any = type(module)
            _change_class(module, _routed_class(kind, stand_in))
            _bind(module)
    found.added += 1
    key = found.added
    found.handlers[key] = handler

    def undo() -> None:
        if found.handlers.pop(key, None) is None or found.handlers:
            return
        module.__dict__.update(found.replaced)
        for name in (NAME, BOUND):
            module.__dict__.pop(name, None)
        if (original := vars(type(module)).get("latte_original")) is not None:
            _change_class(module, original)

    return undo


def route_site(
    model: nn.Module,
    site: str,
    handler: Handler,
    stand_in: StandIn | None = None,
    *,
    image: bool,
    prefix: int | None = None,
    cross: bool = False,
    grid: tuple[int, ...] | None = None,
    **settings: Any,
) -> Callable[[], None]:
    """``route`` for a module of a model, with the layout of its tokens; its arguments as in ``watch``."""
    module = model.get_submodule(site)
    with ExitStack() as undo:
        layout = watch(model, site, undo, image=image, prefix=prefix, cross=cross, grid=grid)
        undo.callback(route(module, handler, stand_in, layout=layout, **settings))
        if stand_in is not None:
            # A fused encoder layer of PyTorch computes attention itself unless a module in it has hooks.
            undo.callback(module.register_forward_pre_hook(_nothing).remove)
        return undo.pop_all().close


def replaced_forward(module: nn.Module) -> str | None:
    """Why a module whose ``forward`` must be taken over cannot be: something else has replaced it; or None."""
    own = "forward" in module.__dict__ and WRAPPED_FORWARD not in module.__dict__
    return "its forward was replaced by something else" if own else None


def _nothing(_module: nn.Module, _args: Any) -> None:
    """Hook that does nothing but be there."""


@functools.cache
def _routed_class(original: Any, stand_in: StandIn) -> Any:
    """A subclass that looks like ``original`` and whose forward is the stand-in's while there is a route."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = self.__dict__.get(BOUND)
        if bound is None:  # undone, while a wrapper still holds this method
            return original.forward(self, *args, **kwargs)
        if bound[0] is not self:  # a replica has the dictionary of its original
            bound = _bind(self)
        return bound[1](*args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        _, _, state, *rest = super(routed, self).__reduce_ex__(protocol)
        kept = {name: value for name, value in state.items() if name != BOUND}
        return (_new, (original, stand_in), kept, *rest)

    def set_state(self: nn.Module, state: dict[str, Any]) -> None:
        super(routed, self).__setstate__(state)
        _bind(self)

    names = {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
    members = {**names, "forward": forward, "__reduce_ex__": reduce, "__setstate__": set_state}
    routed: Any = type(
        original.__name__, (original,), {**members, "latte_original": original, "latte_stand_in": stand_in}
    )
    return routed


def _new(original: Any, stand_in: StandIn) -> Any:
    """A module without state, for copies and pickles."""
    return nn.Module.__new__(_routed_class(original, stand_in))


def _bind(module: Any) -> tuple[nn.Module, Callable[..., Any]]:
    """Have a module's own route and parameters used when it is called."""
    original: Any = type(module).latte_original
    # Called on the class: as an attribute of the instance, the stand-in would be a method.
    bound = module, type(module).latte_stand_in(module, module.__dict__[NAME], original.forward)
    module.__dict__[BOUND] = bound
    return bound


def _change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind
    if WRAPPED_FORWARD in module.__dict__:
        module.__dict__[WRAPPED_FORWARD] = MethodType(kind.forward, module)
