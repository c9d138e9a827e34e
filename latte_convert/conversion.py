"""A conversion, top to bottom: load, sites, capture, fit, score, select, apply, verify.

Everything before ``apply`` is read-only on the model; saving is a step of its own (``Result.save``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from latte_convert.adapters.convert import apply
from latte_convert.calibration.pipeline import calibrate, execution_order, recalibrate
from latte_convert.errors import CheckpointError, GateError
from latte_convert.measuring.fidelity import measure
from latte_convert.measuring.maps import attention_maps
from latte_convert.measuring.stripes import stripe_analysis
from latte_convert.opening import Job, Samples, prepare
from latte_convert.progress import Progress, silent
from latte_convert.recipe import Candidate, Recipe
from latte_convert.report.build import build_report
from latte_convert.report.schema import Report
from latte_convert.selection.choice import choose_plan
from latte_convert.selection.plan import Plan
from latte_convert.selection.policy import count
from latte_convert.wording import some


@dataclass
class Result:
    """A finished conversion.

    Attributes:
        model: The hybrid; the model that was given, converted in place.
        plan: What became what.
        report: All that was measured.
    """

    model: nn.Module
    plan: Plan
    report: Report
    job: Job

    def save(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Write the artifact; see ``latte_convert.artifact.save``. ``report`` then names it by its fingerprint.

        Returns:
            ``out``.

        Raises:
            OutputError: ``out`` exists and ``overwrite`` is off, or it cannot be written.
        """
        from latte_convert.artifact.save import save_artifact

        self.report = save_artifact(self.job, self.plan, self.report, Path(out), overwrite=overwrite)
        return Path(out)


def convert(
    model: str | Path | nn.Module,
    calib: Samples | Iterable[dict[str, Any]],
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Result:
    """Convert a model into a hybrid, without training.

    Args:
        model: A local directory, a safetensors file, a Hub id, or a loaded model (converted in place).
        calib: A folder or file of samples or ``hf:NAME``; a list of two, images and texts, for a model with a tower
            for each; or an iterable of ready batches (dictionaries of tensors, one sample each), which is what a
            loaded model takes.
        recipe: The settings; the default recipe where None.
        device: ``auto``, ``cpu``, ``cuda``, ….
        revision: Branch, tag or commit of a Hub model.
        allow_pickle: Accept a checkpoint without safetensors.
        trust_remote_code: Run Python code that comes with a checkpoint.
        progress: Told of every stage and step.

    Returns:
        The hybrid, the plan and the report. Nothing is written; call ``save``.

    Raises:
        CheckpointError: The model cannot be found, loaded or converted.
        DataError: The samples cannot be used.
        RecipeError: The recipe does not fit the model.
        GateError: The held-out fidelity is below ``min_fidelity``; the model is left as it was.
    """
    job = prepare(
        model,
        calib,
        recipe or Recipe(),
        device=device,
        revision=revision,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    plan = analyse(job, progress)
    if job.recipe.propagate_error:
        _refit(job, plan, progress)
    with job.timed("measure"):
        job.fidelity = measure(
            job.model,
            job.adapter,
            job.eligible,
            job.kernels(plan.converted),
            job.holdout,
            min_tokens=plan.min_tokens,
            progress=progress,
        )
    _gate(job)
    with job.timed("maps"):
        job.maps = attention_maps(
            job.model,
            job.adapter,
            job.kernels(plan.converted),
            next(iter(job.holdout)),
            min_tokens=plan.min_tokens,
        )
    apply(job.model, job.adapter, job.kernels(plan.converted), min_tokens=plan.min_tokens)
    return Result(job.model, plan, build_report(job), job)


def score(
    model: str | Path | nn.Module,
    calib: Samples | Iterable[dict[str, Any]],
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    stripes: bool = False,
    progress: Progress = silent,
) -> Report:
    """Measure how sensitive each attention site is; the model is left as it was.

    Arguments and errors are those of ``convert``; ``stripes`` adds the stripe analysis of every head.

    Returns:
        A report whose ``fidelity`` is None, with the sites that the recipe would convert.
    """
    job = prepare(
        model,
        calib,
        recipe or Recipe(),
        device=device,
        revision=revision,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    analyse(job, progress)
    if stripes:
        with job.timed("stripes"):
            job.stripes = stripe_analysis(job.model, job.adapter, job.eligible, job.fitting, progress=progress)
    return build_report(job)


def analyse(job: Job, progress: Progress = silent) -> Plan:
    """Fit and score every eligible site, and select; the model is left as it was.

    Raises:
        CheckpointError: No site is left that can be converted.
        RecipeError: The recipe asks for more sites than there are.
        GateError: No plan meets the recipe's budget.
    """
    with job.timed("calibrate"):
        fits = calibrate(
            job.model,
            job.adapter,
            job.eligible,
            job.candidates,
            job.fitting,
            seed=job.recipe.seed,
            progress=progress,
        )
    failed = {name: each[0].reason for name, each in fits.items() if all(fit.kernel is None for fit in each)}
    job.sites = [
        dataclasses.replace(site, eligible=False, reason=failed[site.name]) if site.name in failed else site
        for site in job.sites
    ]
    if not job.eligible:
        raise CheckpointError(
            "no attention site can be converted: " + "; ".join(sorted(set(map(str, failed.values()))))
        )
    job.fitted = {site.name: [fit for fit in fits[site.name] if fit.kernel is not None] for site in job.eligible}
    candidates = {name: [fit.kernel for fit in each if fit.kernel is not None] for name, each in job.fitted.items()}
    choose_plan(job, candidates, progress)
    broken = [name for name, score in job.scores.items() if score.value == float("inf")]
    if broken:
        job.warnings.append(f"{len(broken)} sites are not finite when linear and were not chosen: {some(broken)}.")
    assert job.plan is not None
    if not job.plan.converted:
        job.warnings.append(
            "nothing was converted: exact attention is all that the recipe's budget asks for or allows. Set ratio or "
            "k, or a lower max_flops or min_fidelity."
        )
    return job.plan


def _refit(job: Job, plan: Plan, progress: Progress) -> None:
    """``propagate_error``: fit the chosen sites again, on what they get behind each other."""
    chosen = {site.name: site for site in plan.converted}
    with job.timed("refit"):
        order = execution_order(job.model, job.adapter, chosen, job.fitting)
        refits = recalibrate(
            job.model,
            job.adapter,
            [chosen[name] for name in order],
            {name: Candidate(kernel=k.name, options=k.options) for name, k in job.kernels(plan.converted).items()},
            job.fitting,
            seed=job.recipe.seed,
            progress=progress,
        )
    broken = [name for name, fit in refits.items() if fit.kernel is None]
    if broken:
        raise CheckpointError(f"{broken[0]} cannot be refitted on converted inputs: {refits[broken[0]].reason}")
    job.fits.update(refits)


def _gate(job: Job) -> None:
    fidelity, least = job.fidelity, job.recipe.min_fidelity
    if fidelity is None:
        return
    for name, agreement in fidelity.outputs.items():
        if agreement.cosine != agreement.cosine:
            raise GateError(f"the hybrid's output '{name}' is not finite on the held-out samples; nothing was written.")
    if least is None:
        return
    cosine = fidelity.outputs[fidelity.primary].cosine
    if cosine < least:
        converted = len(job.plan.converted) if job.plan else 0
        fewer = "Convert fewer sites with --ratio or -k, offer more faithful kernels, or lower --min-fidelity."
        if count(job.sites, job.recipe) is None:
            fewer = "The plan kept it on the calibration samples: give more --samples, or ask for a little less."
        raise GateError(
            f"held-out fidelity is {_below(cosine, least)} (cosine of {fidelity.primary}) with {converted} sites "
            f"converted, below the {least} asked for; nothing was written. {fewer}"
        )


def _below(value: float, bound: float) -> str:
    """A number with as many digits as it takes to see that it is below a bound."""
    return next((text for d in range(4, 17) if float(text := f"{value:.{d}f}") < bound), repr(value))
