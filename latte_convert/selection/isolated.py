"""Sensitivity of one site at a time: what converting it alone does to the final output."""

from __future__ import annotations

from collections.abc import Sequence

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionSite
from latte_convert.data.feed import Feed
from latte_convert.progress import Progress, silent
from latte_convert.selection.scores import Score
from latte_convert.selection.trials import Candidates, Trial, try_each
from latte_convert.work import Work


def isolated_scores(
    host: Host,
    sites: Sequence[AttentionSite],
    candidates: Candidates,
    feed: Feed,
    *,
    min_tokens: int = 0,
    work: Work | None = None,
    progress: Progress = silent,
) -> dict[str, list[Score]]:
    """Convert one site at a time and score the change of the final output.

    The value is the squared error of the final output over its variance (``Drift.error``): the sum over sites
    predicts what they do together, where the source paper's score predicts none of it. The final output is the
    primary one of the model, or of each tower that samples reach.

    Args:
        host: The original; left as it was.
        sites: The sites to score.
        candidates: The fitted kernels of each of them.
        feed: Calibration inputs.
        min_tokens: As in the plan.
        work: What is kept of earlier runs, and keeps what this one does.
        progress: Told of every sample.

    Returns:
        The scores of each site, by name, in the order of its candidates; infinite where the output is not finite.

    Raises:
        CheckpointError: A site is never called.
    """
    trials = [Trial(site.name, index) for site in sites for index in range(len(candidates[site.name]))]
    drifts = try_each(host, candidates, trials, feed, min_tokens=min_tokens, work=work, progress=progress)
    scores: dict[str, list[Score]] = {site.name: [] for site in sites}
    for trial in trials:
        drift = drifts[trial]
        scores[trial.site].append(Score(drift.error, drift.least_cosine.cosine, drift.least_cosine.mse))
    return scores
