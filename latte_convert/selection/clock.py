"""How long a plan takes: measured, and foretold from what has been measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from latte_convert.selection.budget import Point
from latte_convert.selection.merging import schedule

LEAST = 0.1
"""Smallest share of its tokens that the last block may be left with by the tool itself."""
CLOSE = 0.96
"""A plan that takes this share of the time it may take, or more, is as light as it gets."""
STEPS = 3
"""Plans that are timed at most in search of the lightest."""


@dataclass
class Clock:
    """The time of plans, as a share of the original's.

    Foretold is ``c + a·mean(s) + b·mean(s²) + d·mean(s)``, where ``s`` is the share of its tokens that a block works
    on and the means are over all blocks: ``b`` counts blocks with softmax, ``d`` those with a kernel. The factors are
    fitted to what has been measured, and those of tokens are not negative.

    Attributes:
        blocks: The blocks whose tokens can be merged, and the site in each, in order of execution.
        speed: Measures how many times faster than the original a plan is.
    """

    blocks: Mapping[str, str]
    speed: Callable[[Point], float]
    _seen: list[tuple[Point, float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """The original is as fast as itself; half of the tokens and as few as may be are measured."""
        original = Point({}, 1.0, 0.0)
        self._seen.append((original, 1.0))
        for left, bend in ((0.5, 1.0), (LEAST, 0.35)):
            self.time(replace(original, merges=schedule(list(self.blocks), left, bend)))

    @property
    def fastest(self) -> tuple[Point, float]:
        """The plan with the highest speed that was measured, and that speed."""
        point, time = min(self._seen, key=lambda seen: seen[1])
        return point, 1 / time

    def time(self, point: Point) -> float:
        """Measured."""
        time = 1 / self.speed(point)
        self._seen.append((point, time))
        return time

    def foretold(self, point: Point) -> float:
        """As the sum above says."""
        return float(np.dot(self._factors(), self._terms(point)))

    def lighter(self, base: Point, time: float, bend: float) -> Point | None:
        """A plan with the lightest merging that is foretold to take no longer than ``time``; None where none is."""
        factors = self._factors()
        for left in np.linspace(1.0, LEAST, 181):
            merges = schedule(list(self.blocks), float(left), bend) if left < 1 else {}
            point = replace(base, merges=merges)
            if np.dot(factors, self._terms(point)) <= time + 1e-9:
                return point
        return None

    def lightest(self, base: Point, target: float, bend: float) -> Point | None:
        """The plan with the lightest merging among those measured to be fast enough; None where none is found.

        Args:
            base: The kernels of the plan.
            target: The least speed-up that is fast enough.
            bend: As in ``schedule``.
        """
        found, aim = None, 1 / target
        for _ in range(STEPS):
            point = self.lighter(base, aim, bend)
            if point is None or point == found:
                break
            time = self.time(point)
            if time <= 1 / target:
                found = point
                if time >= CLOSE / target or not point.merges:
                    break
            aim = self.foretold(point) / time / target  # what takes longer than foretold, others like it do as well
        return found

    def _terms(self, point: Point) -> tuple[float, float, float, float]:
        """What the time of a plan is a sum of."""
        shares = np.array([point.merges.get(block, 1.0) for block in self.blocks])
        kernel = np.array([site in point.kernels for site in self.blocks.values()])
        return 1.0, shares.mean(), (shares**2 * ~kernel).mean(), (shares * kernel).mean()

    def _factors(self) -> np.ndarray:
        """By least squares, with those of tokens not negative."""
        terms = np.array([self._terms(point) for point, _ in self._seen])
        times = np.array([time for _, time in self._seen])
        best, least = np.zeros(4), np.inf
        for used in (u for size in range(4) for u in combinations((1, 2, 3), size)):
            factors = np.zeros(4)
            factors[[0, *used]] = np.linalg.lstsq(terms[:, [0, *used]], times, rcond=None)[0]
            missed = float(np.square(terms @ factors - times).sum())
            if (factors[1:] >= 0).all() and missed < least - 1e-12:
                best, least = factors, missed
        return best
