"""Sites as their first real calls show them, before anything is fitted.

What an adapter says of a site is read from attributes and code, and a library may do otherwise. Facts of a call (heads,
widths, causality, whether queries and keys are the same tokens, how these lie) are taken from the call. What no kernel
can serve, and what nothing reads, is not eligible, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionSite, CallShape, Handler, SiteCall
from latte_convert.data.feed import Inputs, call

UNREAD = "unused: what the model is for ({}) does not depend on it"
Outputs = Callable[[Any, Inputs], Mapping[str, Tensor]]
"""The outputs that stand for a model, of what it returned for some inputs."""


@dataclass
class _Seen:
    """What the calls of a site showed.

    Attributes:
        shape: Shape of the first call; None before it.
        reason: Why no kernel can serve the site, or None.
        read: Whether an output depends on it.
        judges: Names of the outputs that were looked at.
    """

    shape: CallShape | None = None
    reason: str | None = None
    read: bool = False
    judges: set[str] = field(default_factory=set)

    def note(self, found: SiteCall) -> None:
        self.shape = self.shape or found.shape
        if found.dropout:
            self.reason = self.reason or f"attention dropout of {found.dropout} in eval mode"
        self.reason = self.reason or found.obstacle


def observed(
    host: Host, sites: Sequence[AttentionSite], samples: Iterable[Inputs], outputs: Outputs
) -> list[AttentionSite]:
    """The sites with what their first calls show.

    A site that is never called stays as it is: who counts calls later says so.

    Args:
        host: The original, in eval mode; left as it was.
        sites: The sites.
        samples: One for each tower that samples reach.
        outputs: Tells what of a model's output is read.
    """
    seen = {site.name: _Seen() for site in sites if site.eligible}
    for inputs in samples if seen else ():
        _watch(host, inputs, outputs, seen)
    return [_corrected(site, seen[site.name]) if site.name in seen else site for site in sites]


def _corrected(site: AttentionSite, seen: _Seen) -> AttentionSite:
    shape, reason = seen.shape, seen.reason
    if shape is None:
        return site
    if reason is not None:  # its tensors need not be those of attention as it is known here
        return replace(site, eligible=False, reason=reason)
    if shape.queries == 1 < shape.keys and site.tower != "decoder":
        reason = "attention pooling: one query"
    elif not seen.read:
        reason = UNREAD.format(", ".join(sorted(seen.judges)))
    return replace(
        site,
        kind=site.kind if shape.layout.aligned else "cross",
        # One query sees all keys, causal or not.
        causal=site.causal if shape.queries == 1 else shape.causal,
        heads=shape.heads,
        head_dim=shape.head_dim,
        value_dim=None if shape.value_dim == shape.head_dim else shape.value_dim,
        layout=shape.layout,
        biased=shape.biased,
        eligible=reason is None,
        reason=reason,
    )


def _watch(host: Host, inputs: Inputs, outputs: Outputs, seen: Mapping[str, _Seen]) -> None:
    """Run the original on one sample; note the calls of its sites, and which of them its outputs depend on."""
    called: set[str] = set()
    marks: dict[str, Tensor] = {}

    def noting(name: str) -> Handler:
        def handler(found: SiteCall) -> Tensor | None:
            seen[name].note(found)
            called.add(name)
            if not torch.is_grad_enabled():
                return None
            mark = marks.setdefault(name, torch.zeros((), device=found.query.device, requires_grad=True))
            return found.exact() + mark.to(found.query.dtype)

        return handler

    with host.watch({name: noting(name) for name in seen}):
        judges, read = _reached(host, inputs, outputs, marks)
    read |= _matter(host, inputs, outputs, sorted(called - read))
    for name in called:
        seen[name].judges |= judges
        seen[name].read |= name in read


def _reached(host: Host, inputs: Inputs, outputs: Outputs, marks: Mapping[str, Tensor]) -> tuple[set[str], set[str]]:
    """The outputs, and the sites whose marks these were computed from, as autograd has it; no activation is kept."""
    nothing = torch.empty(0)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: nothing, lambda kept: kept):
            final = outputs(call(host.model, inputs), inputs)
    except RuntimeError:  # it writes into what needs a gradient, or turns it into NumPy's
        final = outputs(host.run(inputs), inputs)
    names = {id(mark): name for name, mark in marks.items()}
    left: list[Any] = [tensor.grad_fn for tensor in final.values()]
    visited: set[Any] = set()
    while left:
        if (node := left.pop()) is not None and node not in visited:
            visited.add(node)
            left += [before for before, _ in node.next_functions]
    leaves = (id(getattr(node, "variable", None)) for node in visited)
    return set(final), {names[leaf] for leaf in leaves if leaf in names}


def _matter(host: Host, inputs: Inputs, outputs: Outputs, sites: Sequence[str]) -> set[str]:
    """Of sites that gradients do not reach, those that change the outputs all the same: by an index, or a detour."""
    if not sites:
        return set()
    original = outputs(host.run(inputs), inputs)

    def matters(names: Sequence[str]) -> bool:
        with host.watch(dict.fromkeys(names, _garbled)):
            changed = outputs(host.run(inputs), inputs)
        return not all(torch.equal(original[name], changed[name]) for name in original)

    return {name for name in sites if matters([name])} if matters(sites) else set()


def _garbled(found: SiteCall) -> Tensor:
    """Something else than the site puts out, of about its size."""
    return -2 * found.exact().roll(1, 2).roll(1, 3)
