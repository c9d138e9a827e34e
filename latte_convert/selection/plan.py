"""The plan: what becomes what. Pure data, made and checked before the first module is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from latte_convert.attention import AttentionSite


@dataclass(frozen=True)
class Plan:
    """The immutable result of selection.

    Attributes:
        converted: Sites to convert, in order of the module tree.
        kept: Sites that stay exact, in order of the module tree.
        kernels: Name of the kernel that each converted site gets, by site.
        merges: Share of its tokens that each merged block works on, by block, in order of execution.
        min_tokens: With fewer keys than this, a converted site runs its exact branch.
    """

    converted: tuple[AttentionSite, ...]
    kept: tuple[AttentionSite, ...]
    kernels: Mapping[str, str]
    min_tokens: int = 0
    merges: Mapping[str, float] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether the original is all that comes of it."""
        return not self.converted and not self.merges
