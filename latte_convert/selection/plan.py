"""The plan: what becomes what. Pure data, made and checked before the first module is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from latte_convert.attention import AttentionSite


@dataclass(frozen=True)
class Plan:
    """The immutable result of selection.

    Attributes:
        converted: Sites to convert, in order of the module tree.
        kept: Sites that stay exact, in order of the module tree.
        kernels: Name of the kernel that each converted site gets, by site.
        min_tokens: With fewer keys than this, a converted site runs its exact branch.
    """

    converted: tuple[AttentionSite, ...]
    kept: tuple[AttentionSite, ...]
    kernels: Mapping[str, str]
    min_tokens: int = 0
