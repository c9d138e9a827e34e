"""How many sites a recipe converts, and the plan that does so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from latte_convert.attention import AttentionSite
from latte_convert.errors import RecipeError
from latte_convert.recipe import Recipe
from latte_convert.selection.plan import Plan


def count(sites: Sequence[AttentionSite], recipe: Recipe) -> int | None:
    """How many sites a recipe converts; None where a budget of fidelity or cost decides.

    Args:
        sites: All sites, after ``restrict``.
        recipe: ``k``, or the ``ratio`` of eligible sites, or neither.

    Raises:
        RecipeError: ``k`` is more than there are eligible sites.
    """
    eligible = sum(site.eligible for site in sites)
    if recipe.k is not None:
        if recipe.k > eligible:
            raise RecipeError(f"k is {recipe.k}, but only {eligible} of {len(sites)} sites are eligible.")
        return recipe.k
    ratio = recipe.resolved().ratio
    return None if ratio is None else round(ratio * eligible)


def plan(
    sites: Sequence[AttentionSite],
    kernels: Mapping[str, str],
    recipe: Recipe,
    merges: Mapping[str, float] | None = None,
) -> Plan:
    """The plan that gives some of the sites a kernel each.

    Args:
        sites: All sites, after ``restrict``.
        kernels: Name of the kernel of each site to convert, by site.
        recipe: ``min_tokens``.
        merges: Share of its tokens that each merged block works on.
    """
    return Plan(
        converted=tuple(site for site in sites if site.name in kernels),
        kept=tuple(site for site in sites if site.name not in kernels),
        kernels={site.name: kernels[site.name] for site in sites if site.name in kernels},
        min_tokens=recipe.min_tokens,
        merges=merges or {},
    )
