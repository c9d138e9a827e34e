"""The plan: what becomes what. Pure data, made and checked before the first module is touched."""

from __future__ import annotations

from dataclasses import dataclass

from latte_convert.adapters.base import AttentionSite


@dataclass(frozen=True)
class Plan:
    """The immutable result of selection.

    Attributes:
        kernel: Name of the kernel that the converted sites get.
        converted: Sites to convert, in order of the module tree.
        kept: Sites that stay exact, in order of the module tree.
        min_tokens: With fewer keys than this, a converted site runs its exact branch.
    """

    kernel: str
    converted: tuple[AttentionSite, ...]
    kept: tuple[AttentionSite, ...]
    min_tokens: int = 0
