"""Convert sites on trial and see what becomes of the model's final output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from latte_convert.adapters.convert import Changes, identity
from latte_convert.adapters.host import Host, require_calls
from latte_convert.attention import AttentionCall
from latte_convert.data.feed import Feed, Inputs
from latte_convert.kernels.base import Kernel
from latte_convert.measuring.agreement import Agreement, merge_all
from latte_convert.measuring.outputs import add_outputs, final_outputs
from latte_convert.progress import Progress, silent
from latte_convert.selection.replay import Replay
from latte_convert.work import Work

T = TypeVar("T")

Candidates = Mapping[str, Sequence[Kernel]]
"""The fitted kernels that each site can get, by site."""


class Trial(NamedTuple):
    """One site with one of its candidate kernels.

    Attributes:
        site: Name of the site.
        kernel: Index of the kernel among the candidates of the site.
    """

    site: str
    kernel: int


@dataclass
class Spread:
    """Running sums of an output ``(..., D)``: how much its tokens vary around the mean of each feature."""

    tokens: int = 0
    total: Tensor | None = None
    squares: float = 0.0

    def add(self, output: Tensor) -> None:
        """Add an output of the original."""
        tokens = output.detach().double().reshape(-1, output.shape[-1])
        self.tokens += len(tokens)
        total = tokens.sum(0).cpu()
        self.total = total if self.total is None else self.total + total
        self.squares += float(tokens.square().sum())

    def merge(self, other: Spread) -> None:
        """Add what another one has seen."""
        self.tokens += other.tokens
        self.total = other.total if self.total is None or other.total is None else self.total + other.total
        self.squares += other.squares

    @property
    def norm(self) -> float:
        """Sum of squares around the mean; around zero where all tokens are the same, as one alone is."""
        if self.total is None:
            return 0.0
        centred = self.squares - float(self.total.square().sum()) / self.tokens
        return centred if centred > 1e-9 * self.squares else self.squares


@dataclass
class Tried:
    """What trials show on one input.

    Attributes:
        outputs: Agreement of the final outputs with the original's, by trial; of those that the input reaches.
        spreads: Spread of the original's.
        calls: How often the site of each trial was called.
    """

    outputs: dict[Any, dict[str, Agreement]] = field(default_factory=dict)
    spreads: dict[str, Spread] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def add(self, host: Host, trial: object, original: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> None:
        """Add the final outputs of a trial."""
        add_outputs(self.outputs.setdefault(trial, {}), host.model, original, converted)


_DATA = (Tried, Agreement, Spread)


@dataclass
class Drift:
    """How far the final outputs of a converted model are from the original's, over the samples that reach its sites.

    Attributes:
        outputs: Agreement of each final output, by name.
        spreads: Spread of each final output of the original, over all samples that have it.
    """

    outputs: dict[str, Agreement] = field(default_factory=dict)
    spreads: Mapping[str, Spread] = field(default_factory=dict)

    @property
    def error(self) -> float:
        """Squared error over the variance of the original, summed over outputs; infinite where it is not finite.

        What independent errors of several sites do to the output adds up in it, an offset that all tokens share
        does not hide it, and it is the same scale for every output and tower.
        """
        total = 0.0
        for name, agreement in self.outputs.items():
            if agreement.squared_error != 0:
                norm = self.spreads[name].norm
                total += agreement.squared_error / norm if norm else float("inf")
        return total if total == total else float("inf")

    @property
    def least_cosine(self) -> Agreement:
        """Agreement of the output with the least cosine; of a model that no sample reached, perfect."""
        return min(self.outputs.values(), key=lambda each: each.cosine, default=Agreement(cosine_sum=1.0, tokens=1))

    @property
    def worst(self) -> Agreement:
        """Agreement of the output that suffers most; of a model that no sample reached, perfect."""
        return min(self.outputs.values(), key=_likeness, default=Agreement(cosine_sum=1.0, tokens=1))


def _likeness(agreement: Agreement) -> float:
    """The likeness of an agreement, minus infinity where it is not a number."""
    return agreement.likeness if agreement.likeness == agreement.likeness else float("-inf")


def try_plan(host: Host, kernels: Changes, feed: Feed, *, min_tokens: int = 0) -> Drift:
    """What converting sites together does to the final output; the model is left as it was."""
    return try_plans(host, [kernels], feed, min_tokens=min_tokens)[0]


def try_plans(
    host: Host, plans: Sequence[Changes], feed: Feed, *, min_tokens: int = 0, work: Work | None = None
) -> list[Drift]:
    """``try_plan`` for several plans; the original runs once."""

    def tried(missing: Sequence[int]) -> Iterator[Tried]:
        for index in missing:
            inputs, seen = feed[index], Tried()
            original = _run_original(host, inputs, seen)
            for number, changes in enumerate(plans):
                with host.convert(changes, min_tokens=min_tokens):
                    seen.add(host, number, original, final_outputs(host.run(inputs), inputs))
            yield seen

    known = [identity(changes) for changes in plans] if work else []
    pieces = (work or Work()).each(
        "plans", len(feed), tried, lambda index: [known, min_tokens, feed.identity(index)], _DATA
    )
    drifts = _drifts(pieces, range(len(plans)))
    return [drifts[number] for number in range(len(plans))]


def try_each(
    host: Host,
    candidates: Candidates,
    trials: Iterable[Trial],
    feed: Feed,
    *,
    base: Mapping[str, int] | None = None,
    min_tokens: int = 0,
    work: Work | None = None,
    progress: Progress = silent,
) -> dict[Trial, Drift]:
    """What each conversion alone, on top of those made already, does to the final output.

    A trial costs what the model computes from its block on: the rest is played back from a pass without it.

    Args:
        host: The original; left as it was.
        candidates: The fitted kernels of each site.
        trials: The conversions to try, one at a time.
        feed: Calibration inputs.
        base: Index of the kernel of each site that is converted already; a trial of such a site replaces it.
        min_tokens: As in the plan.
        work: What is kept of earlier runs, and keeps what this one does.
        progress: Told of every sample.

    Returns:
        The drift from the original of each trial, over the samples that reach its site.

    Raises:
        CheckpointError: A site is never called.
        OutputError: Work cannot be kept.
    """
    trials = list(trials)
    made = {site: candidates[site][index] for site, index in (base or {}).items()}
    blocks = {trial.site: host.block(trial.site) for trial in trials}
    replay = Replay(host.model, blocks.values())

    def tried(missing: Sequence[int]) -> Iterator[Tried]:
        advance = progress("Trying conversions", len(missing))
        # The routes stay on from the recorded pass to its trials: what adapters note of a pass, such as the size of
        # the map that patches come from, they note in modules that are played back.
        with host.watch(dict.fromkeys(blocks, _leave)):
            for index in missing:
                inputs, seen = feed[index], Tried(calls=dict.fromkeys(blocks, 0))
                with nullcontext() if made else replay.record():
                    original = _run_original(host, inputs, seen)
                if made:
                    with host.convert(made, min_tokens=min_tokens), replay.record():
                        host.run(inputs)
                for trial in trials:
                    block = blocks[trial.site]
                    if not replay.reached(block):
                        continue
                    kernels = {**made, trial.site: candidates[trial.site][trial.kernel]}
                    with host.convert(kernels, min_tokens=min_tokens) as applied, replay.before(block):
                        seen.add(host, trial, original, final_outputs(host.run(inputs), inputs))
                    seen.calls[trial.site] += applied.handlers[trial.site].calls
                advance()
                yield seen

    known: list[Any] = []
    if work:
        kernels = {trial: candidates[trial.site][trial.kernel].identity() for trial in trials}
        known = [identity(made), kernels, min_tokens]
    pieces = (work or Work()).each("trials", len(feed), tried, lambda index: [known, feed.identity(index)], _DATA)
    require_calls({site: sum(piece.calls[site] for piece in pieces) for site in blocks})
    return _drifts(pieces, trials)


def _drifts(pieces: Sequence[Tried], trials: Iterable[T]) -> dict[T, Drift]:
    """What trials show on all inputs, in their order: sums come out the same whoever made the pieces."""
    spreads: dict[str, Spread] = {}
    drifts = {trial: Drift(spreads=spreads) for trial in trials}
    for piece in pieces:
        for name, spread in piece.spreads.items():
            spreads.setdefault(name, Spread()).merge(spread)
        for trial, outputs in piece.outputs.items():
            merge_all(drifts[trial].outputs, outputs)
    return drifts


def _run_original(host: Host, inputs: Inputs, seen: Tried) -> dict[str, Tensor]:
    """Final outputs of the original, whose spread is noted."""
    outputs = final_outputs(host.run(inputs), inputs)
    for name, tensor in outputs.items():
        seen.spreads.setdefault(name, Spread()).add(tensor)
    return outputs


def _leave(_call: AttentionCall) -> Tensor | None:
    """Handler that leaves a call to the original."""
    return None
