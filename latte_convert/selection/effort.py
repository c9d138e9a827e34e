"""How much a conversion will compute, before it does: runs of transformer blocks."""

from __future__ import annotations

from dataclasses import dataclass

from latte_convert.calibration.fit import passes_for
from latte_convert.task import Task


@dataclass(frozen=True)
class Effort:
    """Runs of blocks, each on one sample.

    Attributes:
        fits: Passes of the original over the samples that kernels are fitted to.
        scores: Trials, each from its block on, and the passes they are compared with; a greedy run's first round.
        measuring: Original and hybrid on held-out samples, and the timing of both; 0 where nothing is converted.
    """

    fits: int
    scores: int
    measuring: int

    def __str__(self) -> str:
        """In words."""
        measuring = f", {self.measuring:,} on held-out samples" if self.measuring else ""
        total = self.fits + self.scores + self.measuring
        return f"{total:,} runs of blocks ahead: {self.fits:,} for fits, {self.scores:,} for scores{measuring}"


def effort_of(task: Task, *, converts: bool) -> Effort:
    """What is ahead of a task, without what is kept of it already.

    Args:
        task: The task.
        converts: Whether held-out samples are measured.
    """
    sites = [site for site in task.sites if site.eligible]
    eligible = [task.host.block(site.name) for site in sites]
    passes = max(passes_for(site, candidate) for site in sites for candidate in task.candidates)
    blocks = list(dict.fromkeys(task.host.block(site.name) for site in task.sites))
    place = {block: number for number, block in enumerate(blocks)}
    whole = len(blocks)
    behind = sum(whole - place[block] for block in eligible)
    trials = whole if task.recipe.scorer == "paper" else behind * len(task.candidates)
    reached = [place[block] + 1 for block in eligible] if task.work.store else [whole]
    return Effort(
        fits=passes * len(task.fitting) * sum(reached),
        scores=len(task.scoring) * (whole + trials),
        measuring=len(task.holdout) * 5 * whole if converts else 0,
    )
