"""Convert sites one after another, each time the one that costs the final output least for what it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from latte_convert.adapters.host import Host
from latte_convert.data.feed import Feed
from latte_convert.measuring.agreement import Agreement
from latte_convert.progress import Progress, silent
from latte_convert.selection.budget import Point, SiteCost, flops_share
from latte_convert.selection.trials import Candidates, Drift, Trial, try_each
from latte_convert.work import Work

WIDTH = 4
"""Trials that one pass over the samples makes: the passes without a trial are shared among them."""


@dataclass(frozen=True)
class Step:
    """One conversion of a greedy run.

    Attributes:
        site: The site that is converted, or gets a cheaper kernel than it had.
        kernel: Index of its kernel among the candidates.
        error: Error of the final output after the step, see ``Drift.error``.
        agreement: Agreement of the final output after the step.
    """

    site: str
    kernel: int
    error: float
    agreement: Agreement


class _Moves:
    """The conversions that are still open, with the latest estimate of what each adds to the error.

    An estimate comes from a round before, on fewer conversions. It is good for the order in which moves are tried
    and for passing over those that are far from the best; a move is made on a measurement only.
    """

    def __init__(self, costs: Mapping[str, SiteCost] | None, errors: Mapping[str, Sequence[float]]) -> None:
        self.added = {
            Trial(site, index): error
            for site, values in errors.items()
            for index, error in enumerate(values)
            if error < float("inf")
        }
        self._costs = costs
        self._made: dict[str, int] = {}

    def price(self, move: Trial) -> float:
        """Error that a move adds, per FLOP it saves; what lowers the error comes first, the most saving of it."""
        saved, added = self._saved(move), self.added[move]
        return added / saved if added > 0 else added * saved

    def measured(self, drifts: Mapping[Trial, Drift], error: float) -> None:
        """Replace estimates by what trials on top of a plan of error ``error`` gave."""
        for move, drift in drifts.items():
            if drift.error < float("inf"):
                self.added[move] = drift.error - error
            else:
                del self.added[move]

    def make(self, made: Trial) -> None:
        """Convert: of the site's other kernels those that are cheaper stay open, and add the difference."""
        error = self.added[made]
        self._made[made.site] = made.kernel
        for move in [move for move in self.added if move.site == made.site]:
            if self._costs is not None and self._saved(move) > 0:
                self.added[move] -= error
            else:
                del self.added[move]

    def _saved(self, move: Trial) -> int:
        """FLOPs that a move saves now; one, where sites are counted instead."""
        if self._costs is None:
            return 1
        cost, now = self._costs[move.site], self._made.get(move.site)
        return cost.saving(move.kernel) - (0 if now is None else cost.saving(now))


def greedy_order(
    host: Host,
    candidates: Candidates,
    errors: Mapping[str, Sequence[float]],
    feed: Feed,
    *,
    costs: Mapping[str, SiteCost] | None = None,
    min_tokens: int = 0,
    work: Work | None = None,
    enough: Callable[[Sequence[Step]], bool] = lambda _steps: False,
    progress: Progress = silent,
) -> list[Step]:
    """Convert step by step, by the least error added to the final output.

    Every step is the best of the measured ones; lazily so (Minoux 1978; CELF, Leskovec et al. 2007): moves are
    measured in the order of their last known price, until the best measured one is no dearer than the next estimate.
    What a conversion adds mostly grows with what is converted already; where it falls, a move is made late.

    Args:
        host: The original; left as it was.
        candidates: The fitted kernels of each site.
        errors: Error of each candidate alone, as ``isolated_scores`` gives it: the first estimates.
        feed: Calibration inputs.
        costs: FLOPs of each site: a step is the one that adds least error per FLOP saved, and goes on to give
            sites cheaper kernels until all have their cheapest. With None each site is converted once, to the kernel
            that adds least error.
        min_tokens: As in the plan.
        work: What is kept of earlier runs, and keeps what this one does.
        enough: Told of the steps so far; true ends the run.
        progress: Told of every step.

    Returns:
        The steps in order. A kernel whose output is not finite is in none of them.

    Raises:
        CheckpointError: A site is never called.
    """
    moves = _Moves(costs, errors)
    steps: list[Step] = []
    chosen: dict[str, int] = {}
    advance = progress("Choosing greedily", len(moves.added) if costs else len(errors))
    while moves.added and not enough(steps):
        error = steps[-1].error if steps else 0.0
        known: dict[Trial, Drift] = {}
        while moves.added and (best := min(moves.added, key=moves.price)) not in known:
            tried = sorted(moves.added.keys() - known.keys(), key=lambda move: (moves.price(move), move))[:WIDTH]
            known |= try_each(host, candidates, tried, feed, base=chosen, min_tokens=min_tokens, work=work)
            moves.measured({move: known[move] for move in tried}, error)
        if not moves.added:
            break
        moves.make(best)
        chosen[best.site] = best.kernel
        steps.append(Step(best.site, best.kernel, known[best].error, known[best].worst))
        advance()
    return steps


def path(steps: Sequence[Step], costs: Mapping[str, SiteCost]) -> list[Point]:
    """The plans along a greedy run, from the original to its last step, with measured fidelity."""
    points = [Point({}, 1.0, 0.0, 1.0)]
    for step in steps:
        kernels = {**points[-1].kernels, step.site: step.kernel}
        points.append(Point(kernels, flops_share(kernels, costs), step.error, step.agreement.likeness))
    return points
