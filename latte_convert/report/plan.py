"""The plan of an earlier conversion, out of its report, for another checkpoint of the same architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from latte_convert.attention import AttentionSite
from latte_convert.errors import RecipeError, UsageError, nearest
from latte_convert.recipe import BUDGETS, Candidate, Recipe
from latte_convert.report.read import read_report
from latte_convert.report.schema import FitReport, SiteReport


@dataclass(frozen=True)
class Given:
    """What a report says becomes what.

    Attributes:
        report: Where it says so.
        sites: The converted sites, by name.
        kernels: The kernel of each of them.
        merges: Share of its tokens that each merged block works on.
    """

    report: Path
    sites: Mapping[str, SiteReport]
    kernels: Mapping[str, Candidate]
    merges: Mapping[str, float]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The kernels without repetitions."""
        found = list(self.kernels.values())
        return tuple(each for index, each in enumerate(found) if each not in found[:index])

    def recipe(self, wanted: Recipe) -> Recipe:
        """A recipe with these sites and kernels in the place of its own.

        Raises:
            UsageError: It says itself how much is converted, or where.
        """
        choices = (*BUDGETS, "towers", "include", "exclude", "merge", "candidates")
        said = [name for name in choices if getattr(wanted, name) not in (None, ())]
        if said:
            raise UsageError(f"{self.report} says which sites are converted: leave out {', '.join(said)}.")
        kernels = self.candidates
        chosen = (
            {"kernel": kernels[0].kernel, "options": kernels[0].options}
            if len(kernels) == 1
            else {"kernel": "auto", "options": {}, "candidates": kernels}
        )
        merge = min(self.merges.values(), default=None)
        return wanted.model_copy(update={**chosen, "include": tuple(self.sites), "ratio": 1.0, "merge": merge})

    def check(self, sites: Sequence[AttentionSite]) -> None:
        """Refuse a model that has other sites, or where one of them cannot be converted.

        Raises:
            RecipeError: It does.
        """
        there = {site.name: site for site in sites}
        for name, wanted in self.sites.items():
            site = there.get(name)
            if site is None:
                raise RecipeError(f"{self.report}: this model has no site '{name}' ({nearest(name, there)}).")
            if (site.heads, site.head_dim) != (wanted.heads, wanted.head_dim):
                raise RecipeError(
                    f"{self.report}: {name} has {wanted.heads} heads of {wanted.head_dim} channels there, and "
                    f"{site.heads} of {site.head_dim} in this model: the plan is of another architecture."
                )
            if not site.eligible:
                raise RecipeError(f"{self.report}: {name} cannot be converted in this model: {site.reason}.")


def read_plan(path: Path) -> Given:
    """The plan in the report of an artifact, or in a report file.

    Raises:
        InputError: There is no report, or it cannot be read.
        RecipeError: Nothing is converted in it.
    """
    report = read_report(path)
    sites = {site.name: site for site in report.sites if site.converted and site.fit is not None}
    if not sites:
        raise RecipeError(f"{path} converts no site: give a report of a conversion that does.")
    kernels = {name: _candidate(site.fit) for name, site in sites.items() if site.fit}
    return Given(path, sites, kernels, report.merges)


def _candidate(fit: FitReport) -> Candidate:
    """The kernel of a fit, without the widths that it has from its site."""
    return Candidate(
        kernel=fit.kernel, options={name: value for name, value in fit.options.items() if name != "value_dim"}
    )
