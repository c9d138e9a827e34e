"""Any module: attention is found in a run of it, wherever it calls PyTorch for it, and answered there.

One run under ``dataflow.Watched`` shows every attention that is computed, each in the innermost module that was running
from its logits to its values. That module is the site; where it computes several in one call, each has an empty module
``call_0``, ``call_1``, … in it, which is the site. A routed module runs its own forward under the same watch.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from latte_convert.adapters.calls import attention_call
from latte_convert.adapters.dataflow import Found, Watched, deeper, keep_apart
from latte_convert.adapters.layout import GivenSize, SiteLayout
from latte_convert.adapters.mha import TorchAdapter, tower_of
from latte_convert.adapters.route import NAME, Route, replaced_forward, route, route_site
from latte_convert.attention import AttentionSite, Handler, SiteCall
from latte_convert.data.feed import Inputs, run
from latte_convert.errors import CheckpointError
from latte_convert.graphs import exporting
from latte_convert.wording import some

_PLACE = re.compile(r"call_\d+")
_APART = (nn.MultiheadAttention,)


class Place(nn.Module):
    """Stands for one of several attentions that the module around it computes in a call; it computes nothing itself."""


class PlainAdapter(TorchAdapter):
    """Any module: ``nn.MultiheadAttention`` in it, and what was seen to compute attention by other ways.

    Args:
        model: The model; it gets a ``Place`` where a site is called after one.
        found: Sites that were seen. Those in modules that it does not have are left out.
        projections: The linear layer that reads each one's output, where it was seen.
        apart: Modules in which attention is somebody else's.
        grid: See ``Recipe``.
        prefix: See ``Recipe``.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Iterable[AttentionSite],
        projections: dict[str, str] | None = None,
        apart: Iterable[str] = (),
        grid: tuple[int, ...] | None = None,
        prefix: int | None = None,
    ) -> None:
        super().__init__(grid, prefix)
        self._projections = projections or {}
        self._apart = [*apart, *(name for name, module in model.named_modules() if isinstance(module, _APART))]
        self._found = {site.name: site for site in found if site.name not in self._apart and _has(model, site.name)}

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        """Attention modules in order of the module tree."""
        known = self._found | {site.name: site for site in super().sites(model)}
        return [known[name] for name, _ in model.named_modules() if name in known]

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        """Send the attention of one module to ``handler``; routes nest, and undo in any order."""
        if site not in self._found:
            return super().route(model, site, handler)
        own = owner(model, site)
        with ExitStack() as undo:
            for name in self._inside(own):
                undo.callback(keep_apart(model.get_submodule(name)))
            undo.callback(route_site(
                model, site, handler, stand_in if own == site else None, image=True, prefix=self.prefix,
                grid=self.grid, causal=self._found[site].causal, biased=self._found[site].biased,
            ))  # fmt: skip
            if own != site:
                undo.callback(route(model.get_submodule(own), _left, stand_in))
            return undo.pop_all().close

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        """The linear layer that was seen to read the attention output; None where none did."""
        if site not in self._found:
            return super().output_projection(model, site)
        name = self._projections.get(site)
        return None if name is None else model.get_submodule(name)  # type: ignore[return-value]

    def _inside(self, own: str) -> list[str]:
        """The modules inside of another one whose attention is their own."""
        start = f"{own}." if own else ""
        names = {*self._apart, *(_own(name) for name in self._found)}
        return sorted(name for name in names if name != own and name.startswith(start))


def _own(site: str) -> str:
    """The module that computes a site."""
    head, _, last = site.rpartition(".")
    return head if _PLACE.fullmatch(last) else site


def owner(model: nn.Module, site: str) -> str:
    """The module that computes a site of a model."""
    return _own(site) if isinstance(model.get_submodule(site), Place) else site


def _has(model: nn.Module, site: str) -> bool:
    """Whether a model has the module of a site; a place in one that it has is made."""
    try:
        module = model.get_submodule(_own(site))
    except AttributeError:
        return False
    if _own(site) != site and not hasattr(module, site.rpartition(".")[2]):
        module.add_module(site.rpartition(".")[2], Place())
    return True


def _left(_call: SiteCall) -> Tensor | None:
    """Handler of a module whose places have their own."""
    return None


def stand_in(module: nn.Module, _route: Route, original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module with its attention handed over."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        number = count()

        def attend(found: Found) -> Tensor:
            place = getattr(module, f"call_{next(number)}", None)
            site = place if isinstance(place, Place) else module
            return _answer(site, site.__dict__.get(NAME), found)

        with deeper(), Watched(attend):
            output = original(module, *args, **kwargs)
        if exporting() and not next(number):  # a graph has no logits that are computed later
            raise CheckpointError(
                f"{type(module).__name__} writes its attention out, and an exported graph can have nothing else there: "
                "have it call scaled_dot_product_attention, or exclude it."
            )
        return output

    # A compiled graph would not see which products are attention.
    disabled: Callable[..., Any] = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    return disabled


def _answer(site: nn.Module, its_route: Route | None, found: Found) -> Tensor:
    """What the latest handler of a site makes of an attention, or the original."""
    if its_route is None or not its_route.handlers:
        return found.exact()
    layout, order = _placed(its_route.layout, found)
    given = found if order is None else _ordered(found, order)
    output = its_route.ask(_described(site, layout, given, its_route.causal, its_route.biased))
    if output is None:
        return found.exact()
    output = output.to(found.value.dtype).reshape(*found.query.shape[:-1], found.value.shape[-1])
    return output if order is None else output.index_select(-2, order.argsort())


def _placed(layout: SiteLayout, found: Found) -> tuple[SiteLayout, Tensor | None]:
    """The layout of image tokens among others, and the order in which all these others stand before them.

    A module may have put the tokens of a text before or behind those of its image; and frames one after another, each
    with a class or camera token of its own.
    """
    keys = found.key.shape[-2]
    if found.query.shape[-2] != keys or found.causal:
        return layout, None
    tokens = torch.arange(keys, device=found.key.device)
    if found.parts and layout.prefix is None:
        for size in (prod(size) for seen in layout.maps for size in seen.sizes()):
            if size in found.parts:
                behind = sum(found.parts[found.parts.index(size) + 1 :])
                return replace(layout, prefix=keys - size), tokens.roll(behind) if behind else None
    if found.query.dim() == 4 and (frames := layout.of_frames(keys, found.query.shape[0])) is not None:
        before, grid = frames
        tokens = tokens.reshape(grid[0], -1)
        order = torch.cat([tokens[:, :before].flatten(), tokens[:, before:].flatten()]) if before else None
        return replace(layout, prefix=grid[0] * before, maps=(GivenSize(grid),)), order
    return layout, None


def _ordered(found: Found, order: Tensor) -> Found:
    """An attention with its tokens in another order."""

    def ordered(tensor: Tensor, dim: int = -2) -> Tensor:
        return tensor.index_select(dim, order) if tensor.dim() > 1 and tensor.shape[dim] > 1 else tensor

    return replace(
        found,
        query=ordered(found.query), key=ordered(found.key), value=ordered(found.value),
        exact=lambda: ordered(found.exact()),
        masks=tuple(ordered(mask.index_select(-1, order)) for mask in found.masks),
    )  # fmt: skip


def _described(
    site: nn.Module, layout: SiteLayout, found: Found, causal: bool = False, biased: bool | None = None
) -> SiteCall:
    """An attention as a call of a site: without dimensions of its own for heads it has one."""
    lead = found.query.dim() - 2

    def four(tensor: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:lead], *(1,) * (2 - lead), *tensor.shape[lead:])

    masks = [four(mask.reshape((1,) * (lead + 2 - mask.dim()) + mask.shape)) for mask in found.masks]
    query, key, value = map(four, (found.query, found.key, found.value))
    return attention_call(
        site, layout, query, key, value, lambda: four(found.exact()), scale=found.scale, masks=masks,
        causal=found.causal, triangle=causal, either=True, biased=biased, obstacle=found.obstacle,
        dropout=found.dropout,
    )  # fmt: skip


# -- The run that finds them -----------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A call of a module that is running, and how many attentions it has computed."""

    module: nn.Module
    attended: int = 0


@dataclass
class _Seen:
    """What one run of a model showed.

    Attributes:
        sites: The first call of each module and place.
        calls: How often each was called.
        projections: The layer that read the output of each.
    """

    sites: dict[tuple[nn.Module, int], AttentionSite] = field(default_factory=dict)
    calls: Counter[tuple[nn.Module, int]] = field(default_factory=Counter)
    projections: dict[tuple[nn.Module, int], nn.Module] = field(default_factory=dict)


def plain_adapter(
    model: nn.Module,
    samples: Sequence[Inputs],
    apart: Iterable[str] = (),
    *,
    grid: tuple[int, ...] | None = None,
    prefix: int | None = None,
) -> PlainAdapter:
    """The adapter of a module that no other adapter knows, from what it does with the first samples.

    Args:
        model: The model, in eval mode.
        samples: What it is run on. Of the same shapes as the first, all must show the same attention.
        apart: Modules that other adapters know.
        grid: See ``Recipe``.
        prefix: See ``Recipe``.

    Raises:
        CheckpointError: It computes no attention that can be seen, or another number of times on other samples.
    """
    _check_compiled(model, apart)
    seen = _look(model, samples[0], set(apart))
    alike = (each for each in samples[1:] if _shapes(each) == _shapes(samples[0]))
    if (other := next(alike, None)) is not None:
        again = _look(model, other, set(apart))
        if again.calls != seen.calls:
            raise CheckpointError(
                f"this {type(model).__name__} computes attention {seen.calls.total()} times on one sample, and "
                f"{again.calls.total()} times or in other modules on another of the same shapes: that depends on data "
                "in Python, so that nothing can be fitted to it. Convert a part of the model in which it does not."
            )
    names = {module: name for name, module in model.named_modules()}
    several = {module for module, place in seen.sites if place}

    def name(module: nn.Module, place: int) -> str:
        own: str = names[module]
        if module is not model and module not in several:
            return own
        return f"{own}.call_{place}" if own else f"call_{place}"

    sites = [replace(site, name=name(*key)) for key, site in seen.sites.items()]
    projections = {name(*key): names[layer] for key, layer in seen.projections.items()}
    adapter = PlainAdapter(model, sites, projections, apart, grid, prefix)
    if not adapter.sites(model) and not list(apart):
        raise CheckpointError(_nothing(model))
    return adapter


def _check_compiled(model: nn.Module, apart: Iterable[str]) -> None:
    """Refuse a module with compiled parts: what is converted in them would not run."""
    inside = (name for name, module in model.named_modules() if type(module).__name__ == "OptimizedModule")
    compiled = [name for name in inside if not any(f"{name}.".startswith(f"{each}.") for each in apart)]
    if compiled:
        raise CheckpointError(
            f"parts of this {type(model).__name__} are compiled ({some(compiled)}), and compiled code does not see "
            "what is converted: give the modules themselves, convert them, then compile the hybrid."
        )


def _nothing(model: nn.Module) -> str:
    """Why no attention was seen."""
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    why = f"; what is scripted ({some(scripted)}) is not seen, give the module that it was made of" if scripted else ""
    return (
        f"this {type(model).__name__} computed no attention on the first sample that could be seen: no call of "
        f"scaled_dot_product_attention, and no softmax between two products of activations{why}."
    )


def _shapes(inputs: Inputs) -> list[Any]:
    return [(name, getattr(value, "shape", None)) for name, value in inputs.kwargs.items()]


class _Looking(Watched):
    """Sees, too, which linear layer reads what attention puts out."""

    read: Callable[[Tensor, Tensor], None]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one call."""
        if func is F.linear and len(args) > 1:
            self.read(args[0], args[1])
        return super().__torch_function__(func, types, args, kwargs)


def _look(model: nn.Module, inputs: Inputs, apart: set[str]) -> _Seen:
    """Run a model, and note every attention that it computes."""
    seen = _Seen()
    others = {
        module for name, module in model.named_modules()
        if isinstance(module, _APART) or any(f"{name}.".startswith(f"{each}.") for each in apart)
    }  # fmt: skip
    layers = {id(module.weight): module for module in model.modules() if isinstance(module, nn.Linear)}
    latest: list[Any] = []

    with _running(model) as stack:

        def attend(found: Found) -> Tensor:
            shared = [now for now, then in zip(stack, found.origin, strict=False) if now is then]
            own, output = shared[-1], found.exact()
            if not any(each.module in others for each in shared):
                key = own.module, own.attended
                own.attended += 1
                seen.calls[key] += 1
                seen.sites.setdefault(key, _site(model, own.module, found))
                latest[:] = [key, output.transpose(-2, -3).flatten(-2)] if output.dim() > 3 else [key, output]
            return output

        def read(tokens: Tensor, weight: Tensor) -> None:
            if latest and tokens.numel() == latest[1].numel() and torch.equal(tokens.flatten(), latest[1].flatten()):
                if id(weight) in layers:
                    seen.projections.setdefault(latest[0], layers[id(weight)])
                latest.clear()

        looking = _Looking(attend, lambda: tuple(stack), at_once=True)
        looking.read = read
        with looking:
            run(model, inputs)
    return seen


def _site(model: nn.Module, module: nn.Module, found: Found) -> AttentionSite:
    """The site of an attention; its name comes later."""
    name = next(name for name, each in model.named_modules() if each is module)
    query, key = found.query, found.key
    call = None if query.dim() > 4 else _described(module, SiteLayout(), found)
    reason = "attention inside blocks of tokens" if call is None else call.obstacle
    reason = reason or replaced_forward(module)
    return AttentionSite(
        name=name, tower=tower_of(name), kind="self" if query.shape[-2] == key.shape[-2] else "cross",
        causal=call is not None and call.causal, heads=query.shape[-3] if query.dim() > 3 else 1,
        head_dim=query.shape[-1], eligible=reason is None, reason=reason,
        biased=call is not None and call.bias is not None,
    )  # fmt: skip


@contextmanager
def _running(model: nn.Module) -> Iterator[list[_Running]]:
    """The calls of a model's modules that are running, the outermost first."""
    modules, thread = set(model.modules()), threading.get_ident()
    stack: list[_Running] = []

    def enter(module: nn.Module, _args: Any) -> None:
        if module in modules and threading.get_ident() == thread:
            stack.append(_Running(module))

    def leave(module: nn.Module, _args: Any, _output: Any) -> None:
        if module in modules and threading.get_ident() == thread:
            stack.pop()

    with ExitStack() as undo:
        undo.callback(register_module_forward_pre_hook(enter).remove)
        undo.callback(register_module_forward_hook(leave, always_call=True).remove)
        yield stack
