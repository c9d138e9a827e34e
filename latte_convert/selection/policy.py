"""From scores to a plan: which sites are candidates, and how many of them are converted."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from latte_convert.attention import AttentionSite
from latte_convert.errors import CheckpointError, RecipeError, nearest
from latte_convert.recipe import DEFAULT_RATIO, Recipe
from latte_convert.selection.plan import Plan


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names a site: a run of whole dotted parts, each with shell wildcards.

    ``layers.1`` matches ``encoder.layers.1.self_attn`` but not ``encoder.layers.10.self_attn``.
    """
    wanted, parts = pattern.split("."), name.split(".")
    return any(
        all(fnmatch.fnmatchcase(part, want) for part, want in zip(parts[i:], wanted, strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )


def restrict(sites: Sequence[AttentionSite], recipe: Recipe) -> list[AttentionSite]:
    """Apply ``towers``, ``include`` and ``exclude``: what they leave out becomes ineligible, with the reason.

    Raises:
        RecipeError: A pattern or a tower matches no site.
        CheckpointError: No site is left to convert.
    """
    _check_names(sites, recipe)
    restricted = []
    for site in sites:
        reason = _left_out(site, recipe) if site.eligible else None
        restricted.append(site if reason is None else replace(site, eligible=False, reason=reason))
    if not any(site.eligible for site in restricted):
        reasons = dict.fromkeys(site.reason for site in restricted if site.reason)
        raise CheckpointError(
            "no attention site can be converted: " + ("; ".join(reasons) if reasons else "the model has none") + "."
        )
    return restricted


def _check_names(sites: Sequence[AttentionSite], recipe: Recipe) -> None:
    """Refuse towers and patterns that name nothing: they are typing errors."""
    names = [site.name for site in sites]
    towers = sorted({site.tower for site in sites})
    for tower in recipe.towers:
        if tower not in towers:
            raise RecipeError(f"towers: the model has no tower '{tower}' ({nearest(tower, towers)}).")
    for key, patterns in (("include", recipe.include), ("exclude", recipe.exclude)):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                raise RecipeError(
                    f"{key} pattern '{pattern}' matches no attention site ({nearest(pattern, names)}); "
                    "a pattern is a run of whole dotted parts, such as 'layers.1' or 'encoder.*.attention'."
                )


def _left_out(site: AttentionSite, recipe: Recipe) -> str | None:
    """Why the recipe does not want a site, or None."""
    if recipe.towers and site.tower not in recipe.towers:
        return "its tower is not among those of the recipe"
    if recipe.include and not _any(recipe.include, site.name):
        return "not included by the recipe"
    return "excluded by the recipe" if _any(recipe.exclude, site.name) else None


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
    ratio = recipe.ratio
    if ratio is None:
        if any(limit is not None for limit in (recipe.max_flops, recipe.target_speedup, recipe.min_fidelity)):
            return None
        ratio = DEFAULT_RATIO
    return round(ratio * eligible)


def plan(sites: Sequence[AttentionSite], kernels: Mapping[str, str], recipe: Recipe) -> Plan:
    """The plan that gives some of the sites a kernel each.

    Args:
        sites: All sites, after ``restrict``.
        kernels: Name of the kernel of each site to convert, by site.
        recipe: ``min_tokens``.
    """
    return Plan(
        converted=tuple(site for site in sites if site.name in kernels),
        kept=tuple(site for site in sites if site.name not in kernels),
        kernels={site.name: kernels[site.name] for site in sites if site.name in kernels},
        min_tokens=recipe.min_tokens,
    )


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)
