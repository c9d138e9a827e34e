"""Which sites a recipe lets through, by tower and by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import replace

from latte_convert.attention import AttentionSite
from latte_convert.errors import CheckpointError, RecipeError, nearest
from latte_convert.recipe import Recipe


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


def reachable(sites: Iterable[AttentionSite], towers: Sequence[set[str] | None]) -> list[AttentionSite]:
    """Sites of towers that no samples reach are not eligible; None among ``towers`` reaches all of them."""
    if any(reached is None for reached in towers):
        return list(sites)
    known = {tower for reached in towers for tower in reached or ()}
    return [
        replace(site, eligible=False, reason=f"no samples reach the {site.tower} tower")
        if site.eligible and site.tower not in known
        else site
        for site in sites
    ]


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


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)
