"""An evaluation, top to bottom: check task and data, load, run both models over the samples, score, bootstrap."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte_convert import processes
from latte_convert.errors import DataError, InputError, UsageError, nearest
from latte_convert.evaluation.bootstrap import intervals, retention
from latte_convert.evaluation.result import EvalReport, GateReport, MetricReport
from latte_convert.evaluation.side_by_side import run_both
from latte_convert.evaluation.tasks import get_task, task_names
from latte_convert.evaluation.tasks.base import Setting, Task, require_two
from latte_convert.progress import Progress, progress_of
from latte_convert.reading import is_utf8
from latte_convert.work import digest

if TYPE_CHECKING:
    from latte_convert.artifact.load import Artifact
    from latte_convert.checkpoints.base import Checkpoint


def evaluate(
    directory: str | Path,
    task: str,
    data: Sequence[str | Path],
    *,
    samples: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    templates: Path | None = None,
    decoder: Path | None = None,
    metric: str | None = None,
    fail_under: float | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | bool = True,
) -> EvalReport:
    """Measure a hybrid beside its original on the same samples.

    Each sample is decoded and prepared once, and both models run on the same batch. Padding never enters: only inputs
    of equal shape are stacked.

    Args:
        directory: An artifact.
        task: One of ``task_names()``.
        data: Where the samples are; most tasks take one place.
        samples: How many to use at most, chosen by ``seed``; None for all.
        batch_size: Inputs in one call of a model.
        seed: Chooses samples, and seeds the bootstrap.
        templates: For ``zero-shot``: a file of prompt templates.
        decoder: For ``saliency``: an ONNX decoder of patch features.
        metric: The metric that the gate looks at; the task's main one where None.
        fail_under: Least retention of that metric; the report says whether it was met.
        device: ``auto``, ``cpu``, ``cuda``, ….
        trust_remote_code: Run Python code that came with the source checkpoint.
        progress: True shows bars; False shows nothing; a function is told of every input.

    Raises:
        UsageError: There is no such task or metric, an option is another task's, or ``fail_under`` is no retention.
        InputError: The task does not fit the model.
        DataError: Samples or labels cannot be used, or a metric is undefined on them.
        IntegrityError: The artifact is damaged.
        GateError: The hybrid's output is not finite.
    """
    from latte_convert.artifact.load import open_artifact
    from latte_convert.environment import choose_device

    start = time.perf_counter()
    kind = get_task(task)
    _check_metric(metric, [m.name for m in kind.metrics], task)
    if fail_under is not None and not 0 <= fail_under < math.inf:
        raise UsageError(f"fail_under must be a finite retention of 0 or more, such as 0.95, not {fail_under}.")
    for option, value, owner in (("templates", templates, "zero-shot"), ("decoder", decoder, "saliency")):
        if value is not None and task != owner:
            raise UsageError(f"{option} is for task '{owner}', not for '{task}'.")
    device = choose_device(device)
    setting = _setting(
        directory, data, trust_remote_code, samples=samples, seed=seed, templates=templates, decoder=decoder
    )
    _require_fit(kind, setting.source)
    job = kind(setting)
    require_two(len(job.examples), ", ".join(setting.data))
    artifact = open_artifact(directory, device=device, trust_remote_code=trust_remote_code)
    seen = [(each.id, repr(each.target)) for each in job.examples]
    same = {"artifact": artifact.manifest.fingerprint, "data": digest([seen, task, batch_size, seed])}
    processes.agree(same, "{}", "Give all of them the same command and files")
    loaded = time.perf_counter()
    done = run_both(job, artifact, batch_size, progress_of(progress))
    ran = time.perf_counter()
    original, hybrid = job.records(done.examples, done.original), job.records(done.examples, done.hybrid)
    require_two(len(original), ", ".join(setting.data))
    metrics = measure(job, original, hybrid, seed)
    primary = metric or job.metrics[0].name
    _check_metric(primary, metrics, task, whole=True)
    return EvalReport(
        **_provenance(artifact),
        task=task,
        data=list(setting.data),
        samples=len(original),
        skipped=done.skipped,
        truncated=setting.truncated,
        primary=primary,
        metrics=metrics,
        note=job.note,
        unused_sites=[name for name in artifact.kernels if not done.calls[name]],
        exact_sites=[name for name, calls in done.calls.items() if calls and calls == done.exact_calls[name]],
        exact_share=done.exact_calls.total() / done.calls.total() if done.calls.total() else None,
        resamples=job.resamples,
        seed=seed,
        batch_size=batch_size,
        device=device,
        seconds={"load": loaded - start, "run": ran - loaded, "score": time.perf_counter() - ran},
        gate=_gate(metrics[primary], primary, fail_under),
    )


def _setting(directory: str | Path, data: Sequence[str | Path], trust_remote_code: bool, **options: Any) -> Setting:
    """Read what the artifact is, but no weights."""
    from latte_convert.artifact.check import artifact_directory, manifest_of_library, open_source

    path = artifact_directory(directory)
    if not data:
        raise UsageError("give --data: the samples to evaluate on.")
    manifest = manifest_of_library(path, "run it on inputs of yours; its fidelity on those held out is in its report")
    source = open_source(path, manifest, trust_remote_code=trust_remote_code)
    places = tuple(str(item) for item in data)
    if odd := next((place for place in places if not is_utf8(place)), None):
        raise DataError(f"the name {odd!a} is not UTF-8, and no report can hold it: rename it.")
    return Setting(source, places, resolution=manifest.recipe.get("resolution"), **options)


def _require_fit(kind: type[Task], source: Checkpoint) -> None:
    reason = kind.fits(source)
    if reason is None:
        return
    fitting = [name for name in task_names() if get_task(name).fits(source) is None]
    raise InputError(
        f"task '{kind.name}' does not fit {source.model_class}: {reason}. Tasks that do: {', '.join(fitting)}."
    )


def _check_metric(name: str | None, known: Sequence[str] | Mapping[str, Any], task: str, whole: bool = False) -> None:
    """Refuse a metric that the task does not have; before it has run, just the part before ``@`` can be told."""
    wanted = None if name is None else name if whole else name.partition("@")[0]
    if wanted is not None and wanted not in known:
        raise UsageError(f"task '{task}' has no metric '{name}' ({nearest(wanted, known, limit=8)}).")


def measure(task: Task, original: Sequence[Any], hybrid: Sequence[Any], seed: int) -> dict[str, MetricReport]:
    """Every metric of both models, its retention, and the interval of that.

    Args:
        task: Scores records.
        original: The original's records.
        hybrid: The hybrid's records of the same samples.
        seed: Of the bootstrap.

    Raises:
        DataError: A metric is undefined on these samples.
    """
    before, after = task.score(original), task.score(hybrid)
    lower = {metric.name: metric.lower_is_better for metric in task.metrics}
    better = {name: lower[name.partition("@")[0]] for name in before}
    spread = intervals(task.score, original, hybrid, better, resamples=task.resamples, seed=seed)
    result = {}
    for name, value in before.items():
        for which, number in (("original", value), ("hybrid", after[name])):
            if not math.isfinite(number):
                raise DataError(
                    f"{', '.join(task.setting.data)}: {name} of the {which} is undefined on these {len(original)} "
                    "samples: labels or outputs are all alike. Give more, and more varied, samples."
                )
        kept = retention(value, after[name], lower_is_better=better[name])
        reason = None
        if kept is None:
            reason = "the original itself shows no positive quality on these samples"
        elif (interval := spread[name]) is None:
            reason = "undefined on most resamples: too few samples"
        elif len(set(interval)) == 1:
            reason = "the interval has no width: every resample keeps the same share"
        result[name] = MetricReport(
            original=value, hybrid=after[name], lower_is_better=better[name], retention=kept,
            interval=spread[name] if kept is not None else None, reason=reason,
        )  # fmt: skip
    return result


def _gate(metric: MetricReport, name: str, fail_under: float | None) -> GateReport | None:
    if fail_under is None:
        return None
    passed = metric.retention is not None and metric.retention >= fail_under
    return GateReport(metric=name, fail_under=fail_under, passed=passed)


def _provenance(artifact: Artifact) -> dict[str, Any]:
    from latte_convert.environment import library_versions, tool_version

    return {
        "tool_version": tool_version(),
        "library_versions": library_versions(),
        "artifact": str(artifact.path),
        "artifact_fingerprint": artifact.manifest.fingerprint,
        "source": artifact.manifest.source.id,
        "model_class": artifact.manifest.source.model_class,
    }
