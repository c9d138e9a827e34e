"""A job: what a conversion knows so far, and everything that is checked before it starts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from latte_convert.adapters.find import find_adapter
from latte_convert.attention import AttentionSite
from latte_convert.calibration.candidates import candidates
from latte_convert.calibration.fit import Fit, obstacle
from latte_convert.data.feed import BatchFeed, Feed, JoinedFeed, SampleFeed, run
from latte_convert.errors import CheckpointError, DataError, RecipeError, first_line
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.measuring.fidelity import Fidelity, named_outputs
from latte_convert.measuring.stripes import Stripes
from latte_convert.recipe import Candidate, Recipe
from latte_convert.selection.budget import Point
from latte_convert.selection.plan import Plan
from latte_convert.selection.policy import restrict
from latte_convert.selection.scores import Score
from latte_convert.wording import some

if TYPE_CHECKING:
    from latte_convert.attention import Adapter
    from latte_convert.checkpoints.base import Checkpoint
    from latte_convert.data.feed import Processor
    from latte_convert.data.samples import Modality, SampleSet
    from latte_convert.report.schema import AttentionMap

Samples = str | Path | Sequence[str | Path]
"""Where samples come from: a folder or file, ``hf:NAME``, or one of each modality that a model has a tower for."""


@dataclass
class Job:
    """What a conversion knows so far. Each stage fills in its part.

    ``fitted`` holds every candidate that could be fitted to a site, ``fits`` the one the site gets, or would get.
    ``frontier`` holds plans that were weighed, and whether it is the chosen one.
    """

    model: nn.Module
    adapter: Adapter
    recipe: Recipe
    sites: list[AttentionSite]
    fitting: Feed
    holdout: Feed
    source: Checkpoint | None = None
    samples: tuple[SampleSet, ...] = ()
    processors: tuple[Processor, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    candidates: list[Candidate] = field(default_factory=list)
    fitted: dict[str, list[Fit]] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)
    scores: dict[str, Score] = field(default_factory=dict)
    stripes: dict[str, Stripes] = field(default_factory=dict)
    plan: Plan | None = None
    frontier: list[tuple[Point, bool]] = field(default_factory=list)
    fidelity: Fidelity | None = None
    maps: list[AttentionMap] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def eligible(self) -> list[AttentionSite]:
        """Sites that can be converted, in order of the module tree."""
        return [site for site in self.sites if site.eligible]

    def kernels(self, sites: Iterable[AttentionSite]) -> dict[str, Kernel]:
        """The fitted kernels of sites, by name."""
        return {s.name: kernel for s in sites if (kernel := self.fits[s.name].kernel) is not None}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the wall time of a stage to ``seconds``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def prepare(
    model: str | Path | nn.Module,
    calib: Samples | Iterable[dict[str, Any]],
    recipe: Recipe,
    *,
    device: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Job:
    """Check everything that can be checked, samples first and weights last; see ``convert`` for the arguments."""
    kernels = candidates(recipe)
    sources = _sample_sources(calib)
    if isinstance(model, nn.Module):
        return _prepare_loaded(model, None if sources else calib, recipe, kernels)
    if not sources:
        raise DataError("ready batches go with a loaded model; give a folder or file of samples for a checkpoint.")
    from latte_convert.checkpoints.resolve import resolve
    from latte_convert.environment import choose_device

    start = time.perf_counter()
    device = choose_device(device)
    source = resolve(model, revision=revision, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    opened = _open_all(source, sources, recipe)
    loaded, unexpected = source.instantiate(source.original_tensors(), recipe.resolution)
    loaded = loaded.to(device)
    fitting: list[Feed] = []
    holdout: list[Feed] = []
    for samples, processor in opened:
        fitted, held = samples.split(max(1, round(len(samples) * recipe.holdout)))
        fitting.append(SampleFeed(fitted, processor, loaded))
        holdout.append(SampleFeed(held, processor, loaded))
    adapter = find_adapter(loaded)
    job = Job(
        model=loaded,
        adapter=adapter,
        recipe=recipe,
        sites=_servable(
            restrict(_reachable(adapter.sites(loaded), [p.towers(loaded) for _, p in opened]), recipe), kernels
        ),
        fitting=JoinedFeed(fitting),
        holdout=JoinedFeed(holdout),
        candidates=kernels,
        samples=tuple(samples for samples, _ in opened),
        processors=tuple(processor for _, processor in opened),
        source=source,
        unexpected_keys=tuple(unexpected),
    )
    if unexpected:
        job.warnings.append(
            f"{len(unexpected)} tensors of the checkpoint have no place in {source.model_class} "
            f"({some(unexpected)}); they are kept in the artifact."
        )
    _check_first_sample(job)
    job.seconds["load"] = time.perf_counter() - start
    return job


def _check_first_sample(job: Job) -> None:
    """Run one sample of each kind: a processor whose images have another size than the model's shows here."""
    seen: set[str] = set()
    for feed in job.fitting.feeds if isinstance(job.fitting, JoinedFeed) else []:
        inputs = next(iter(feed))
        try:
            output = run(job.model, inputs)
        except (ValueError, RuntimeError, TypeError, IndexError, KeyError) as error:
            shapes = {key: tuple(value.shape) for key, value in inputs.kwargs.items() if hasattr(value, "shape")}
            reason = first_line(error)
            raise CheckpointError(
                f"{type(job.model).__name__} does not run on what its processor makes of a sample {shapes}: {reason}"
            ) from error
        seen |= {name for name, tensor in named_outputs(output) if not bool(tensor.isfinite().all())}
    if seen:
        raise CheckpointError(
            f"the original model's own output is not finite ({', '.join(sorted(seen))}): its weights hold NaN or "
            "overflow in this dtype."
        )


def _sample_sources(calib: Any) -> list[str | Path]:
    """The places that samples come from; empty for ready batches."""
    if isinstance(calib, str | Path):
        return [calib]
    if isinstance(calib, Sequence) and calib and all(isinstance(item, str | Path) for item in calib):
        return list(calib)
    return []


def _prepare_loaded(model: nn.Module, calib: Any, recipe: Recipe, kernels: list[Candidate]) -> Job:
    if calib is None:
        raise DataError(
            "a loaded model has no preprocessing of its own: give an iterable of ready batches, "
            "or give the checkpoint's directory instead of the model."
        )
    if recipe.resolution is not None:
        raise RecipeError("resolution is for checkpoints: ready batches have their size already. Leave it out.")
    adapter = find_adapter(model)
    batches = list(calib)
    if len(batches) < recipe.min_samples:
        raise DataError(f"{len(batches)} batches given, at least {recipe.min_samples} are needed.")
    held = max(1, round(len(batches) * recipe.holdout))
    return Job(
        model=model.eval(),
        adapter=adapter,
        recipe=recipe,
        sites=_servable(restrict(adapter.sites(model), recipe), kernels),
        fitting=BatchFeed(batches[:-held]),
        holdout=BatchFeed(batches[-held:]),
        candidates=kernels,
    )


def _open_all(source: Checkpoint, calib: Sequence[str | Path], recipe: Recipe) -> list[tuple[SampleSet, Processor]]:
    """Samples and processor for each source of samples, each of another modality."""
    left = list(source.modalities)
    opened = []
    for place in calib:
        if not left:
            raise DataError(
                f"{source.model_class} takes {' and '.join(source.modalities)} samples: give one --calib for each, "
                f"not {len(calib)}."
            )
        samples, processor = _open(source, place, recipe, left)
        left.remove(samples.modality)
        opened.append((samples, processor))
    if recipe.resolution is not None and not any(samples.modality == "image" for samples, _ in opened):
        raise RecipeError(f"resolution is for images; the samples here are {opened[0][0].modality}.")
    return opened


def _open(
    source: Checkpoint, calib: str | Path, recipe: Recipe, kinds: Sequence[Modality]
) -> tuple[SampleSet, Processor]:
    """Samples and processor of the first of ``kinds`` that the data has."""
    from latte_convert.data.samples import open_samples

    failure: DataError | None = None
    for kind in kinds:
        processor = source.processor_at(kind, recipe.resolution)
        try:
            samples = open_samples(
                calib,
                kind,
                samples=recipe.samples,
                seed=recipe.seed,
                strict=recipe.strict,
                min_samples=recipe.min_samples,
                sampling_rate=processor.sampling_rate,
            )
        except DataError as error:
            failure = failure or error
            continue
        return samples, processor
    raise failure or DataError(f"{calib} has no usable sample.")


def _reachable(sites: list[AttentionSite], towers: Sequence[set[str] | None]) -> list[AttentionSite]:
    """Sites of towers that no samples reach are not eligible."""
    if any(reached is None for reached in towers):
        return sites
    known = {tower for reached in towers for tower in reached or ()}
    return [
        dataclasses.replace(site, eligible=False, reason=f"no samples reach the {site.tower} tower")
        if site.eligible and site.tower not in known
        else site
        for site in sites
    ]


def _servable(sites: list[AttentionSite], kernels: Sequence[Candidate]) -> list[AttentionSite]:
    """Sites that no kernel of the recipe can serve are not eligible.

    Raises:
        CheckpointError: No site is left to convert.
    """
    served = []
    for site in sites:
        reasons = [obstacle(get_kernel(each.kernel), site) for each in kernels]
        refused = site.eligible and all(reason is not None for reason in reasons)
        served.append(dataclasses.replace(site, eligible=False, reason=reasons[0]) if refused else site)
    if not any(site.eligible for site in served):
        why = "; ".join(sorted({site.reason for site in served if site.reason}))
        raise CheckpointError(f"no attention site can be converted: {why}.")
    return served
