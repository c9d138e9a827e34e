"""A conversion, top to bottom: open, fit, score, choose, measure, apply, report.

Everything before ``apply`` only reads the model; saving is a step of its own (``Result.save``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from latte_convert.artifact.record import record_conversion
from latte_convert.calibration.fitted import Fitted
from latte_convert.calibration.pipeline import calibrate, execution_order, recalibrate
from latte_convert.errors import CheckpointError, GateError
from latte_convert.measuring.fidelity import Fidelity, measure
from latte_convert.measuring.maps import attention_maps
from latte_convert.measuring.stripes import stripe_analysis
from latte_convert.measuring.times import AttentionTime, attention_time
from latte_convert.progress import Progress, Stopwatch, progress_of, silent
from latte_convert.recipe import Candidate, Recipe
from latte_convert.report.build import Findings, build_report, not_faster
from latte_convert.report.plan import read_plan
from latte_convert.report.schema import Report
from latte_convert.report.summary import summarise
from latte_convert.selection.budget import NOTHING_SAVED
from latte_convert.selection.choice import MARGIN, Choice, Scores, choose_plan, score_sites
from latte_convert.selection.effort import effort_of
from latte_convert.selection.given import fit_given
from latte_convert.selection.plan import Plan
from latte_convert.selection.policy import count
from latte_convert.task import Samples, Task, open_task

MARGINS = (MARGIN, MARGIN / 2, MARGIN / 6)
"""What a plan for ``min_fidelity`` alone may use up on the calibration samples, and then, where it misses the bound on
held-out samples, the plan after it."""


@dataclass
class Result:
    """A finished conversion.

    Attributes:
        model: The hybrid; the model that was given, converted in place.
        plan: What became what.
        report: All that was measured.
        task: What was converted, with which samples and how.
    """

    model: nn.Module
    plan: Plan
    report: Report
    task: Task

    def __repr__(self) -> str:
        """What was converted, how close it is and what it costs, in a few lines."""
        return f"{summarise(self.report)}\n  next      result.save(DIRECTORY)"

    def save(self, out: str | Path, *, overwrite: bool = False, adapter: bool = False) -> Path:
        """Save the hybrid as it is now, as ``latte_convert.save`` does, with the report beside it.

        ``report`` then names the artifact by its fingerprint.

        Returns:
            ``out``.

        Raises:
            OutputError: ``out`` exists and ``overwrite`` is off, or it cannot be written.
        """
        from latte_convert.artifact.card import Measured
        from latte_convert.artifact.save import save_artifact
        from latte_convert.report.card import measured
        from latte_convert.report.write import write_reports

        def describe(directory: Path, fingerprint: str) -> list[Measured]:
            self.report = self.report.model_copy(update={"artifact_fingerprint": fingerprint})
            write_reports(self.report, directory)
            return measured(self.report)

        return save_artifact(
            self.model,
            Path(out),
            overwrite=overwrite,
            adapter=adapter,
            protect=self.task.protected,
            describe=describe,
        )


def convert(
    model: str | Path | nn.Module | None,
    calib: Samples | Iterable[dict[str, Any]],
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    model_factory: str | None = None,
    sites_from: str | Path | None = None,
    work: str | Path | None = None,
    offload: str | Path | None = None,
    progress: Progress | bool = True,
) -> Result:
    """Convert a model into a hybrid, without training.

    Args:
        model: A local directory, a safetensors file, a Hub id, or a loaded model (converted in place). With
            ``model_factory``, the weights of what it builds, or None where it brings its own.
        calib: A folder or file of samples or ``hf:NAME``; a list of two, images and texts, for a model with a tower
            for each; or an iterable of ready batches (dictionaries of tensors, one sample each), which is what a
            loaded model takes; with ``model_factory`` also a folder of safetensors files with a batch each.
        recipe: The settings; the default recipe where None.
        device: ``auto``, ``cpu``, ``cuda``, ….
        revision: Branch, tag or commit of a Hub model.
        allow_pickle: Accept a checkpoint without safetensors.
        trust_remote_code: Run Python code that comes with a checkpoint.
        model_factory: ``package.module:function``, which is imported and called, and builds a module that no library
            builds from a configuration; ``load`` can call it. Without it, ``load`` wants such a model from its caller.
        sites_from: A report, or an artifact with one: its sites get its kernels, fitted to this model; nothing is
            scored or chosen.
        work: Directory that keeps each finished fit, score and trial of a checkpoint. A run that was ended is taken up
            where it was; what belongs to another checkpoint, to other samples or settings is never used.
        offload: For models larger than memory: the weights of each block of a checkpoint stay in its files, and are in
            memory while it runs. This directory takes what the files do not hold as it is needed.
        progress: True shows bars; False shows nothing; a function is told of every stage and step.

    Returns:
        The hybrid, the plan and the report. Nothing is written; call ``save``.

    Raises:
        CheckpointError: The model cannot be found, loaded or converted.
        DataError: The samples cannot be used.
        RecipeError: The recipe does not fit the model.
        GateError: No plan meets the budget, or the held-out fidelity is below ``min_fidelity``; the model is left as
            it was.
        OutputError: Work, or weights, cannot be kept where they should be.
    """
    clock, progress = Stopwatch(), progress_of(progress)
    given = None if sites_from is None else read_plan(Path(sites_from))
    recipe = recipe or Recipe()
    with clock("load"):
        task = open_task(
            model,
            calib,
            recipe if given is None else given.recipe(recipe),
            device=device,
            revision=revision,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            model_factory=model_factory,
            work=work,
            offload=offload,
        )
    attention = _attention(task, clock, progress)
    if given is None:
        fitted, choice, fidelity = _search(task, clock, progress)
    else:
        given.check(task.sites)
        with clock("calibrate"):
            fitted, choice = fit_given(task, given.kernels, given.merges, progress)
        choice, fidelity = _settle(task, fitted, choice, clock, progress)
    min_tokens = choice.plan.min_tokens
    _check_gates(task, fitted, choice, fidelity)
    with clock("maps"):
        maps = attention_maps(task.host, choice.kernels, next(iter(task.holdout)), min_tokens=min_tokens)
    task.host.convert(choice.changes, min_tokens=min_tokens)
    record_conversion(task, choice.plan)
    report = build_report(task, Findings(fitted, choice, attention, fidelity, tuple(maps), seconds=clock.seconds))
    return Result(task.host.model, choice.plan, report, task)


def _attention(task: Task, clock: Stopwatch, progress: Progress) -> AttentionTime:
    """What can be gained at all: told before anything is fitted."""
    with clock("time"):
        found = attention_time(task.host, [site for site in task.sites if site.eligible], task.fitting)
    progress(str(found), 0)
    return found


def _search(task: Task, clock: Stopwatch, progress: Progress) -> tuple[Fitted, Choice, Fidelity]:
    """Fit, score and choose; a plan that misses ``min_fidelity`` on held-out samples gives way to a safer one.

    Raises:
        GateError: No plan meets the budget.
    """
    progress(str(effort_of(task, converts=True)), 0)
    fitted, scores = analyse(task, clock, progress)
    for margin in MARGINS if count(fitted.sites, task.recipe) is None else MARGINS[:1]:
        with clock("select"):
            choice = choose_plan(task, fitted, scores, progress, margin=margin)
        if choice.plan.empty and count(fitted.sites, task.recipe) != 0:
            raise GateError(f"nothing can be converted: {NOTHING_SAVED}.")
        choice, fidelity = _settle(task, fitted, choice, clock, progress)
        if _kept(task, fidelity):
            break
    return fitted, choice, fidelity


def _settle(
    task: Task, fitted: Fitted, choice: Choice, clock: Stopwatch, progress: Progress
) -> tuple[Choice, Fidelity]:
    """Refit a plan where the recipe asks for it, and measure it on held-out samples."""
    if task.recipe.propagate_error:
        with clock("refit"):
            choice = _refit(task, choice, progress)
    with clock("measure"):
        fidelity = measure(
            task.host,
            fitted.eligible,
            choice.changes,
            task.holdout,
            min_tokens=choice.plan.min_tokens,
            work=task.work,
            progress=progress,
        )
    return choice, fidelity


def score(
    model: str | Path | nn.Module | None,
    calib: Samples | Iterable[dict[str, Any]],
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    model_factory: str | None = None,
    stripes: bool = False,
    work: str | Path | None = None,
    offload: str | Path | None = None,
    progress: Progress | bool = True,
) -> Report:
    """Measure how sensitive each attention site is; the model is left as it was.

    Arguments and errors are those of ``convert``; ``stripes`` adds the stripe analysis of every head.

    Returns:
        A report whose ``fidelity`` is None, with the sites that the recipe would convert.
    """
    clock, progress = Stopwatch(), progress_of(progress)
    with clock("load"):
        task = open_task(
            model,
            calib,
            recipe or Recipe(),
            device=device,
            revision=revision,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
            model_factory=model_factory,
            work=work,
            offload=offload,
        )
    attention = _attention(task, clock, progress)
    progress(str(effort_of(task, converts=False)), 0)
    fitted, scores = analyse(task, clock, progress)
    with clock("select"):
        choice = choose_plan(task, fitted, scores, progress)
    found = Findings(fitted, choice, attention, seconds=clock.seconds)
    if stripes:
        with clock("stripes"):
            found = replace(found, stripes=stripe_analysis(task.host, fitted.eligible, task.fitting, progress=progress))
    return build_report(task, found)


def analyse(task: Task, clock: Stopwatch, progress: Progress = silent) -> tuple[Fitted, Scores]:
    """Fit and score every eligible site; the model is left as it was.

    Raises:
        CheckpointError: No site is left that can be converted.
    """
    eligible = [site for site in task.sites if site.eligible]
    with clock("calibrate"):
        fits = calibrate(
            task.host,
            eligible,
            task.candidates,
            task.fitting,
            seed=task.recipe.seed,
            work=task.work,
            progress=progress,
        )
        fitted = Fitted.of(task.sites, fits)
    with clock("score"):
        return fitted, score_sites(task, fitted, progress)


def _refit(task: Task, choice: Choice, progress: Progress) -> Choice:
    """``propagate_error``: fit the chosen sites again, on what they get behind each other."""
    chosen = {site.name: site for site in choice.plan.converted}
    order = execution_order(task.host, chosen, task.fitting)
    refits = recalibrate(
        task.host,
        [chosen[name] for name in order],
        {name: Candidate(kernel=kernel.name, options=kernel.options) for name, kernel in choice.kernels.items()},
        task.fitting,
        seed=task.recipe.seed,
        work=task.work,
        progress=progress,
    )
    broken = [name for name, fit in refits.items() if fit.kernel is None]
    if broken:
        raise CheckpointError(f"{broken[0]} cannot be refitted on converted inputs: {refits[broken[0]].reason}")
    return replace(choice, fits={**choice.fits, **refits})


def _kept(task: Task, fidelity: Fidelity) -> bool:
    """Whether the held-out samples bear the fidelity that the recipe asks for."""
    least = task.recipe.min_fidelity
    return least is None or fidelity.outputs[fidelity.primary].likeness >= least


def _check_gates(task: Task, fitted: Fitted, choice: Choice, fidelity: Fidelity) -> None:
    """Refuse a hybrid whose held-out outputs are not finite, or further from the original's than the recipe allows.

    Raises:
        GateError: It is; the message says what to change.
    """
    for name, agreement in fidelity.outputs.items():
        if agreement.cosine != agreement.cosine:
            raise GateError(f"the hybrid's output '{name}' is not finite on the held-out samples; nothing was written.")
    if task.recipe.require_faster and fidelity.speedup <= 1:
        raise GateError(f"{not_faster(fidelity)} Nothing was written.")
    least = task.recipe.min_fidelity
    if least is not None and not _kept(task, fidelity):
        reached = fidelity.outputs[fidelity.primary].likeness
        fewer = "Convert fewer sites with --ratio or -k, offer more faithful kernels, or lower --min-fidelity."
        if count(fitted.sites, task.recipe) is None:
            fewer = (
                "Plans with more and more in reserve kept it on the calibration samples: give more --samples, or ask "
                "for a little less."
            )
        raise GateError(
            f"held-out fidelity is {_below(reached, least)} ({fidelity.primary}, {len(task.holdout)} samples) with "
            f"{len(choice.plan.converted)} sites converted, below the {least} asked for; nothing was written. {fewer}"
        )


def _below(value: float, bound: float) -> str:
    """A number with as many digits as it takes to see that it is below a bound."""
    return next((text for d in range(4, 17) if float(text := f"{value:.{d}f}") < bound), repr(value))
