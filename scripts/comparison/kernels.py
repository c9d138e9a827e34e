"""The kernels that are compared, with their options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from latte_convert.calibration.candidates import candidates
from latte_convert.kernels.base import Extras
from latte_convert.recipe import Candidate, Recipe

PAPER = Path(__file__).resolve().parents[2] / "configs" / "paper.yaml"
Table = Literal["main", "tte_jpn", "extras"]


@dataclass(frozen=True)
class Entry:
    """A line of the comparison.

    Attributes:
        label: What it is called, unique.
        kernel: Name of the kernel.
        options: Options of its constructor.
        share: Far keys of ``near_far`` as one of this many tokens, so that they mean the same at every length.
        table: Which table it belongs to: all kernels, or one of the two ablations.
        variant: Its column in a table of ablations.
    """

    label: str
    kernel: str
    options: dict[str, Any] = field(default_factory=dict)
    share: int | None = None
    table: Table = "main"
    variant: str = ""

    def candidate(self, tokens: int) -> Candidate:
        """The kernel for a case with this many tokens; what is given neither here nor there has its default."""
        if self.label == "latte (paper)":
            return candidates(Recipe.from_yaml(PAPER))[0]
        options = self.options | ({"clusters": max(1, tokens // self.share)} if self.share else {})
        return candidates(Recipe(kernel=self.kernel, options=options))[0]


def only(*names: str) -> dict[str, Any]:
    """All extras, on where they are named and else off, whatever a kernel recommends."""
    return {name: name in names for name in Extras.__annotations__}


def everything() -> dict[str, Any]:
    """All extras on; an output map takes the place of sigma."""
    return only(*Extras.__annotations__)


RIVALS = ("qt_vit", "elu", "relu", "performer")
"""Linear kernels of the cost of latte, the ones it has to beat."""

_BASE = only("exact_prefix", "sigma")
_FAR = {"window": 0, "halo": 0, **only("exact_prefix")}
_PER_HEAD = {"granularity": "head"}


def _main() -> Iterator[Entry]:
    yield Entry("latte (paper)", "latte")
    yield Entry("latte (all free)", "latte", _PER_HEAD | everything())
    for name in (*RIVALS, "pola", "taylor2"):
        yield Entry(name, name, _BASE)
    yield Entry("fitted", "fitted", _BASE | {"key_shift": True})
    for steps in (1, 2):
        yield Entry(f"monarch, {steps} step{'s' * (steps > 1)}", "monarch", {"steps": steps, **only("exact_prefix")})
    for far in ("pooled", "clustered"):
        for share in (32, 16, 8, 4):
            yield Entry(f"near_far, {far} 1/{share}", "near_far", {**_FAR, "far": far}, share=share)
    yield Entry("near_far", "near_far")


def _tte_jpn() -> Iterator[Entry]:
    """The ablation of the source paper, with its own extras; both on is ``latte (paper)``."""
    for tte, jpn in ((True, True), (True, False), (False, True), (False, False)):
        variant = f"{'with' if tte else 'no'} TTE, {'with' if jpn else 'no'} JPN"
        options = {"tte": tte, "jpn": jpn, **only("sigma")}
        yield Entry(f"latte: {variant}", "latte", options, table="tte_jpn", variant=variant)


def _extras() -> Iterator[Entry]:
    """One extra more or less than ``exact_prefix`` and ``sigma``, kernel by kernel."""
    for kernel in ("latte", *RIVALS, "fitted", "monarch", "near_far"):
        own = {"share": 16} if kernel == "near_far" else {}
        start = {"window": 0, "halo": 0} if kernel == "near_far" else {}
        for variant, options in _variants():
            yield Entry(f"{kernel}: {variant}", kernel, start | options, table="extras", variant=variant, **own)
    yield Entry("latte: all, per head", "latte", _PER_HEAD | everything(), table="extras", variant="all, per head")


def _variants() -> Iterator[tuple[str, dict[str, Any]]]:
    base = ("exact_prefix", "sigma")
    yield "none", only()
    for name in base:
        yield f"{name} only", only(name)
    yield "both", only(*base)
    for name in Extras.__annotations__:
        if name not in base:
            yield f"both + {name}", only(*base, name)
    yield "all", everything()


ENTRIES = (*_main(), *_tte_jpn(), *_extras())
