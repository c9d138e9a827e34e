"""The kernels that are compared, with their options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from latte_convert.kernels.base import Extras
from latte_convert.kernels.registry import get_kernel
from latte_convert.recipe import Candidate, Recipe

Table = Literal["main", "tte_jpn", "extras"]


@dataclass(frozen=True)
class Entry:
    """A line of the comparison.

    Attributes:
        label: What it is called, unique.
        kernel: Name of the kernel.
        options: Options of its constructor, over those that the kernel recommends.
        propagate: Whether the chosen sites are fitted again, each on what it gets behind converted ones.
        share: Far keys of ``near_far`` as one of this many tokens, so that they mean the same at every length.
        detail: Whether the overview leaves it out.
        table: Which table it belongs to: all kernels, or one of the two ablations.
        variant: Its column in a table of ablations.
    """

    label: str
    kernel: str
    options: dict[str, Any] = field(default_factory=dict)
    propagate: bool = False
    share: int | None = None
    detail: bool = False
    table: Table = "main"
    variant: str = ""

    def candidate(self, tokens: int) -> Candidate:
        """The kernel for a case with this many tokens."""
        size = {"clusters": max(1, tokens // self.share)} if self.share else {}
        return Candidate(kernel=self.kernel, options={**get_kernel(self.kernel).recommended, **self.options, **size})


def only(*names: str) -> dict[str, Any]:
    """All extras, on where they are named and else off, whatever a kernel recommends."""
    return {name: name in names for name in Extras.__annotations__}


def everything() -> dict[str, Any]:
    """All extras on; an output map takes the place of sigma."""
    return only(*Extras.__annotations__)


RIVALS = ("qt_vit", "elu", "relu", "performer")
"""Linear kernels of the cost of latte, the ones it has to beat."""

NEAR_FAR = ((2, 1, 32, 3), (2, 1, 20, 3), (2, 1, 10, 2), (4, 2, 10, 2), (8, 2, 8, 2), (8, 2, 4, 2))
"""Window, halo, far keys as one of this many tokens, and steps of k-means: from cheap to faithful."""
VIEWS = (1, 8)
DETAILS = ((2, 1, 32, 3), (2, 1, 10, 2), (8, 2, 4, 2))
"""Those that the overview leaves out."""

_BASE = only("exact_prefix", "sigma")
_PER_HEAD = {"granularity": "head"}


def _main() -> Iterator[Entry]:
    paper = Recipe.from_yaml("paper").kernels()[0]
    yield Entry("latte (paper)", paper.kernel, only() | paper.options, variant="TTE and JPN")
    linear = Recipe.from_yaml("linear")
    free = linear.kernels()[0]
    yield Entry("latte (all free)", free.kernel, only() | free.options, propagate=linear.propagate_error)
    for name in (*RIVALS, "pola", "taylor2"):
        yield Entry(name, name, _BASE)
    yield Entry("fitted", "fitted", only("exact_prefix", "key_shift", "output_map"))
    for steps in (1, 2):
        yield Entry(f"monarch, {steps} step{'s' * (steps > 1)}", "monarch", {"steps": steps, **only("exact_prefix")})
    for (window, halo, share, steps), views in product(NEAR_FAR, VIEWS):
        options = {"window": window, "halo": halo, "steps": steps, "views": views}
        label = f"near_far {window}/{halo}, 1/{share}, {steps} steps" + (f", {views} views" if views > 1 else "")
        yield Entry(label, "near_far", options, share=share, detail=(window, halo, share, steps) in DETAILS)
    for window, halo, far in ((2, 1, "pooled"), (0, 0, "clustered"), (0, 0, "pooled")):
        options = {"window": window, "halo": halo, "far": far}
        yield Entry(f"near_far {window}/{halo}, 1/10, {far}", "near_far", options, share=10, detail=True)
    yield Entry("blocks", "blocks", detail=True)
    yield Entry("near_far", "near_far")


def _tte_jpn() -> Iterator[Entry]:
    """The ablation of the source paper, with its own extras; with both it is ``latte (paper)``."""
    for variant, tte, jpn in (("TTE", True, False), ("JPN", False, True), ("neither", False, False)):
        options = {"tte": tte, "jpn": jpn, **only("sigma")}
        yield Entry(f"latte: {variant}", "latte", options, table="tte_jpn", variant=variant)


def _extras() -> Iterator[Entry]:
    """One extra more or less than ``exact_prefix`` and ``sigma``, for the kernels that are fitted in seconds."""
    closed = ("key_shift", "bias", "output_map")
    for kernel in ("latte", *RIVALS):
        added = closed if kernel == "performer" else (*closed, "input_map")
        yield from _ablation(kernel, added, all=everything())
    free = _PER_HEAD | everything()
    yield Entry("latte: all, per head", "latte", free, table="extras", variant="all, per head")
    for kernel, options in (("latte", free), ("relu", everything()), ("elu", everything())):
        label = f"{kernel}: all, refitted"
        yield Entry(label, kernel, options, propagate=True, table="extras", variant="all, refitted")
    for kernel in ("monarch", "near_far"):  # softmax of what they keep: a shift of the keys changes nothing
        yield from _ablation(kernel, ("bias", "output_map"))


def _ablation(kernel: str, added: Sequence[str], **more: dict[str, Any]) -> Iterator[Entry]:
    """One kernel with nothing, with what helps most, and with one more each."""
    variants = {"nothing": only(), "exact_prefix": only("exact_prefix"), "both": _BASE}
    variants |= {f"both, {name}": only("exact_prefix", "sigma", name) for name in added} | more
    size: dict[str, Any] = {"window": 2, "halo": 1} if kernel == "near_far" else {}
    share = 16 if kernel == "near_far" else None
    for variant, options in variants.items():
        label = f"{kernel}: {variant}"
        yield Entry(label, kernel, size | options, share=share, table="extras", variant=variant)


ENTRIES = (*_main(), *_tte_jpn(), *_extras())


def place(label: str) -> int:
    """Where a kernel stands in the tables; behind all others if it is none of them."""
    labels = [entry.label for entry in ENTRIES]
    return labels.index(label) if label in labels else len(labels)
