"""A task: the model, the samples and the recipe of a conversion, opened and checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from latte_convert import processes
from latte_convert.adapters.convert import is_hybrid
from latte_convert.adapters.find import of_library
from latte_convert.adapters.host import Host
from latte_convert.adapters.observe import observed
from latte_convert.adapters.plain import plain_adapter
from latte_convert.adapters.ready import check_ready
from latte_convert.adapters.sites import reachable, restrict
from latte_convert.attention import AttentionSite
from latte_convert.checkpoints.module import load_module
from latte_convert.checkpoints.rebuild import check_factory, is_rebuilt, own_tensors, rebuilt
from latte_convert.data.decode import BadSample
from latte_convert.data.feed import (
    BatchFeed,
    Feed,
    FirstOf,
    Inputs,
    JoinedFeed,
    SampleFeed,
    digest_of,
    inputs_of,
    run,
)
from latte_convert.data.feed import place as placed_like
from latte_convert.data.ready import read_batches, ready_batches
from latte_convert.data.suitability import Suitability
from latte_convert.errors import CheckpointError, DataError, RecipeError, UsageError, first_line, is_shortage
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.measuring.outputs import final_outputs, named_outputs
from latte_convert.recipe import Candidate, Recipe
from latte_convert.wording import some
from latte_convert.work import Store, Work, digest

if TYPE_CHECKING:
    from latte_convert.checkpoints.base import Checkpoint
    from latte_convert.data.processor import Batch, Processor
    from latte_convert.data.samples import Modality, Sample, SampleSet

Samples = str | Path | Sequence[str | Path]
"""Where samples come from: a folder or file, ``hf:NAME``, or one of each modality that a model has a tower for."""


@dataclass(frozen=True)
class Task:
    """What is to be converted, with which samples and how. No stage changes it.

    Attributes:
        host: The original model with its adapter.
        recipe: The settings.
        sites: Every attention module, the ones that cannot or shall not be converted included, with the reason.
        candidates: The kernels that are fitted to each eligible site.
        fitting: Inputs to fit, score and choose with.
        holdout: Inputs to measure with; nothing is fitted to them.
        source: The checkpoint; None for a model that was given in memory.
        samples: The sample sets behind the inputs; empty for ready batches.
        processors: What prepared each of them.
        unexpected_keys: Tensors of the checkpoint that the model has no place for.
        notes: What is odd about the samples.
        snapshot: SHA-256 of every file of the checkpoint when it was opened.
        factory: Import path of a function that builds the model, where the caller named one.
        rebuilt: Whether the model's library builds it from a checkpoint or from the model's own configuration.
        work: Does the pieces of every stage, and keeps them where a directory was given.
    """

    host: Host
    recipe: Recipe
    sites: tuple[AttentionSite, ...]
    candidates: tuple[Candidate, ...]
    fitting: Feed
    holdout: Feed
    source: Checkpoint | None = None
    samples: tuple[SampleSet, ...] = ()
    processors: tuple[Processor, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    snapshot: Mapping[str, str] = field(default_factory=dict)
    factory: str | None = None
    rebuilt: bool = True
    work: Work = field(default_factory=Work)

    @property
    def scoring(self) -> Feed:
        """Inputs to score with: those to fit with, or the first of them."""
        count = self.recipe.score_samples
        return self.fitting if count is None else FirstOf(self.fitting, count)

    @property
    def weights_sha256(self) -> dict[str, str]:
        """SHA-256 of each weight file when it was opened; empty for a model that was given in memory."""
        return {path.name: self.snapshot[path.name] for path in self.source.weights} if self.source else {}

    def label(self, kernel: Kernel) -> str:
        """Name of a kernel, with the options that tell it from other candidates: ``near_far (clusters 64)``."""
        options = [each.options for each in self.candidates if each.kernel == kernel.name]
        names = sorted({name for each in options for name in each if len({repr(o.get(name)) for o in options}) > 1})
        shown = ", ".join(f"{name} {kernel.options.get(name)}" for name in names)
        return f"{kernel.name} ({shown})" if shown else kernel.name

    @property
    def protected(self) -> list[Path]:
        """What no output may replace: the source checkpoint and the samples."""
        paths = [Path(samples.source).expanduser() for samples in self.samples if not samples.source.startswith("hf:")]
        return [*paths, *([self.source.path] if self.source else [])]


def open_task(
    model: str | Path | nn.Module | None,
    calib: Samples | Iterable[dict[str, Any]],
    recipe: Recipe,
    *,
    device: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    model_factory: str | None = None,
    work: str | Path | None = None,
    offload: str | Path | None = None,
) -> Task:
    """Check everything that can be checked, samples first and weights last; ``convert`` explains the arguments.

    Raises:
        CheckpointError: The model cannot be found, loaded or converted.
        DataError: The samples cannot be used.
        RecipeError: The recipe does not fit the model.
    """
    kernels = recipe.kernels()
    places = _sample_places(calib)
    if isinstance(model, nn.Module) or model_factory is not None:
        _check_without_files(work, offload)
    if isinstance(model, nn.Module):
        return _open_loaded(model, calib, recipe, kernels, model_factory)
    if model_factory is not None:
        return _open_built(model, model_factory, places or calib, recipe, kernels, device)
    if model is None:
        raise UsageError("give a model, or a model factory that builds one.")
    if not places:
        raise DataError("ready batches go with a loaded model; give a folder or file of samples for a checkpoint.")
    from latte_convert.checkpoints.resolve import resolve
    from latte_convert.checkpoints.snapshot import take_snapshot
    from latte_convert.checkpoints.weights import check_header
    from latte_convert.data.samples import fingerprint
    from latte_convert.environment import choose_device, library_versions, tool_version

    device = choose_device(device)
    store = Store(work) if work is not None else None
    source = resolve(model, revision=revision, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    _check_placed(source.library, recipe)
    for file in source.weights:
        check_header(file)
    snapshot = take_snapshot(source)
    opened = _open_all(source, places, recipe)
    same = {"checkpoint": digest(snapshot), "choice of samples": fingerprint([found for found, _ in opened])}
    same["recipe"] = digest(recipe.model_dump(mode="json"))
    processes.agree(same, "{}", "Give all of them the same command and files")
    host, unexpected = _load(source, recipe, device, offload)
    fitting: list[Feed] = []
    holdout: list[Feed] = []
    used: list[SampleSet] = []
    notes: list[str] = []
    for found, processor in opened:
        seen = Suitability(getattr(processor.apply, "unk_token_id", None))
        samples = found.tried(partial(_try, host, processor, seen, _tried(host, processor, found)))
        fitted, held = samples.split(max(1, round(len(samples) * recipe.holdout)))
        fitting.append(SampleFeed(fitted, processor, host.model))
        holdout.append(SampleFeed(held, processor, host.model))
        used.append(samples)
        notes += [*seen.warnings(), *_copies(samples.copies, len(samples))]
    reached = reachable(host.sites(), [processor.towers(host.model) for _, processor in opened])
    feed = JoinedFeed(fitting)
    about = {
        "checkpoint": {"class": source.model_class, "config": source.config, "files": snapshot},
        "resolution": recipe.resolution,
        "libraries": {"latte_convert": tool_version(), **library_versions()},
        "device": device.partition(":")[0],
    }
    if store is not None:
        settings = recipe.resolved().model_dump(mode="json")
        store.begin({"checkpoint": digest(about), "choice of samples": fingerprint(used), **settings})
    return Task(
        host=host,
        recipe=recipe,
        sites=_usable(host, restrict(reached, recipe), feed, kernels),
        candidates=kernels,
        fitting=feed,
        holdout=JoinedFeed(holdout),
        source=source,
        samples=tuple(used),
        notes=tuple(notes),
        processors=tuple(processor for _, processor in opened),
        unexpected_keys=tuple(unexpected),
        snapshot=snapshot,
        work=Work(store, about),
    )


def _check_without_files(work: str | Path | None, offload: str | Path | None) -> None:
    """Refuse what takes the files of a checkpoint, where a model is built by the caller."""
    if work is not None:
        raise UsageError("work is kept for a checkpoint, which its files tell from others: give its directory.")
    if offload is not None:
        raise UsageError("a model that you build is in memory already: to offload it, give its checkpoint's directory.")


def _load(source: Checkpoint, recipe: Recipe, device: str, offload: str | Path | None) -> tuple[Host, list[str]]:
    """The original, and the keys of the checkpoint that it has no place for."""
    if offload is not None:
        from latte_convert.adapters.offload import open_offloaded

        return open_offloaded(source, recipe.resolution, Path(offload), device)
    loaded, unexpected = source.instantiate(source.original_tensors(), recipe.resolution)
    return Host.of(loaded.to(device)), unexpected


def _try(host: Host, processor: Processor, seen: Suitability, known: Mapping[str, str | None], sample: Sample) -> None:
    """Run the original on one sample, unless another process has.

    Raises:
        BadSample: Its processor, or the model itself, does not take it.
    """
    inputs = inputs_of(sample, processor, host.model)
    if sample.id not in known:
        _run(host.model, inputs)
    elif (reason := known[sample.id]) is not None:
        raise BadSample(reason)
    seen.add(inputs.kwargs)


def _tried(host: Host, processor: Processor, samples: SampleSet) -> dict[str, str | None]:
    """Why the original does not take samples, or None, by id: each process tries a part of them, where there are some.

    Raises:
        OthersFailed: Another process has failed.
    """
    if processes.size() == 1:
        return {}
    mine: dict[str, str | None] = {}
    for index in range(processes.rank(), len(samples), processes.size()):
        sample = samples[index]
        try:
            _run(host.model, inputs_of(sample, processor, host.model))
            mine[sample.id] = None
        except BadSample as error:
            mine[sample.id] = str(error)
    return {name: reason for part in processes.exchange(mine, "trying samples") for name, reason in part.items()}


def _run(model: nn.Module, inputs: Inputs) -> None:
    """Run the original once.

    Raises:
        BadSample: It does not run, or returns numbers that are not finite.
    """
    try:
        output = run(model, inputs)
    except Exception as error:  # whatever a model's forward runs into
        if is_shortage(error):
            raise
        shapes = {key: tuple(value.shape) for key, value in inputs.kwargs.items() if hasattr(value, "shape")}
        raise BadSample(f"{type(model).__name__} does not run on {shapes}: {first_line(error)}") from error
    broken = [name for name, tensor in named_outputs(output) if not bool(tensor.isfinite().all())]
    if broken:
        raise BadSample(
            f"the original model's own output is not finite on it ({', '.join(broken)}): its weights hold NaN, or "
            "overflow in this dtype"
        )


def _run_batch(model: nn.Module, batch: Batch, number: int, seen: Suitability) -> None:
    """Run the original on a ready batch, the ``number``-th.

    Raises:
        DataError: It does not run.
    """
    try:
        _run(model, Inputs(batch))
    except BadSample as error:
        raise DataError(f"batch {number}: {error}.") from error
    seen.add(batch)


def _check_rebuilt(model: nn.Module, inputs: Inputs) -> None:
    """Refuse a model that does something else than what a directory would give back: an artifact of it could not load.

    Raises:
        CheckpointError: It does.
    """
    again = rebuilt(model)
    try:
        found, other, expected = (dict(named_outputs(run(each, inputs))) for each in (model, model, again))
    except Exception:  # some tensor of a model is neither parameter nor buffer, and has no values on meta
        return
    for name, tensor in found.items():
        if name not in expected or (torch.equal(tensor, other[name]) and not torch.allclose(tensor, expected[name])):
            raise CheckpointError(
                f"this {type(model).__name__} does something else than what its class builds from its configuration "
                f"and tensors ('{name}' differs): an activation, a setting, a hook or a forward was changed in memory, "
                "which no directory keeps. Write it into the configuration, or name a function that builds this "
                "model: model_factory."
            )


def _copies(groups: list[list[str]], samples: int) -> Iterator[str]:
    """A warning where samples are copies of each other."""
    copies = sum(map(len, groups))
    if copies:
        yield (
            f"{copies} of {samples} samples look like another one ({some(map(' = '.join, groups))}): so many fewer "
            "tell anything new. Copies stay on one side, fitted or held out, where there are others."
        )


def _sample_places(calib: Any) -> list[str | Path]:
    """The places that samples come from; empty for ready batches."""
    if isinstance(calib, str | Path):
        return [calib]
    if isinstance(calib, Sequence) and calib and all(isinstance(item, str | Path) for item in calib):
        return list(calib)
    return []


def _open_built(
    weights: str | Path | None,
    factory: str,
    calib: Any,
    recipe: Recipe,
    kernels: tuple[Candidate, ...],
    device: str,
) -> Task:
    """A module that a function builds, on ready batches in memory or in files."""
    from latte_convert.environment import choose_device

    batches = read_batches(calib) if _sample_places(calib) else calib
    model = load_module(factory, weights).to(choose_device(device))
    like = next(model.parameters(), torch.empty(0))
    placed = [{name: placed_like(value, like) for name, value in batch.items()} for batch in batches]
    return _open_loaded(model, placed, recipe, kernels, factory, checked=True)


def _open_loaded(
    model: nn.Module,
    calib: Any,
    recipe: Recipe,
    kernels: tuple[Candidate, ...],
    factory: str | None,
    *,
    checked: bool = False,
) -> Task:
    if _sample_places(calib):
        raise DataError(
            "a loaded model has no preprocessing of its own: give an iterable of ready batches, "
            "or give the checkpoint's directory instead of the model."
        )
    if recipe.resolution is not None:
        raise RecipeError("resolution is for checkpoints: ready batches have their size already. Leave it out.")
    if is_hybrid(model):
        raise CheckpointError(
            f"this {type(model).__name__} is converted already: give the original, which 'latte restore' writes."
        )
    check_ready(model)
    if factory is not None and not checked:
        check_factory(factory, model)
    host = Host.of(model) if of_library(model) is not None else None
    if host is not None:  # its code tells, before anything runs
        _check_placed(host.adapter.name, recipe)
        restrict(host.sites(), recipe)
    batches = ready_batches(calib, max(2, recipe.min_samples))
    _agree_on(model, batches, recipe)
    held = max(1, round(len(batches) * recipe.holdout))
    seen = Suitability()
    model.eval()
    for number, batch in enumerate(batches, 1):
        _run_batch(model, batch, number, seen)
    samples = list(map(Inputs, batches))
    if host is None:
        host = Host.of(model, partial(plain_adapter, model, samples, grid=recipe.sides, prefix=recipe.prefix))
    sites = restrict(host.sites(), recipe)
    by_library = factory is None and is_rebuilt(model)
    if by_library:
        _check_rebuilt(model, Inputs(batches[0]))
    feed = BatchFeed(batches[:-held])
    usable = _usable(host, sites, feed, kernels)
    _check_grid(host, usable, samples[0], recipe)
    return Task(
        host=host,
        recipe=recipe,
        sites=usable,
        candidates=kernels,
        fitting=feed,
        holdout=BatchFeed(batches[-held:]),
        factory=factory,
        rebuilt=by_library,
        notes=tuple(seen.warnings()),
    )


def _agree_on(model: nn.Module, batches: Sequence[Batch], recipe: Recipe) -> None:
    """Make sure that all processes have built the same model, and read the same batches.

    Raises:
        InputError: They have not.
    """
    if processes.size() == 1:
        return
    same = {
        "model": digest_of(own_tensors(model)),
        "choice of samples": digest(list(map(digest_of, batches))),
        "recipe": digest(recipe.model_dump(mode="json")),
    }
    processes.agree(same, "{}", "Give all of them the same command and files, and seed what a model factory draws")


def _check_placed(library: str, recipe: Recipe) -> None:
    """Refuse a grid or a prefix for a model of a library.

    Raises:
        RecipeError: They are given.
    """
    given = [name for name in ("grid", "prefix") if getattr(recipe, name) is not None]
    if given:
        raise RecipeError(
            f"{' and '.join(given)}: {library} knows how the tokens of its models lie; this is for modules that no "
            "library knows. Leave it out."
        )


def _check_grid(host: Host, sites: Iterable[AttentionSite], inputs: Inputs, recipe: Recipe) -> None:
    """Refuse a grid that no site has.

    Raises:
        RecipeError: There is none; the message says how many tokens there are.
    """
    called = [site for site in sites if site.layout is not None]
    if recipe.sides is None or any(site.layout.grid == recipe.sides for site in called if site.layout):
        return
    keys: set[int] = set()
    with host.watch({site.name: lambda call: keys.add(call.key.shape[2]) for site in called}):
        host.run(inputs)
    before = "" if recipe.prefix is None else f" with {recipe.prefix} before them"
    raise RecipeError(
        f"grid {recipe.grid}: no attention site has the {prod(recipe.sides)} tokens of it{before}; the first sample "
        f"gives {some(map(str, sorted(keys))) or 'none'}."
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


def _usable(
    host: Host, sites: Sequence[AttentionSite], feed: Feed, kernels: Sequence[Candidate]
) -> tuple[AttentionSite, ...]:
    """The sites as their first calls show them; those that no kernel of the recipe can serve are not eligible.

    Raises:
        CheckpointError: No site is left to convert.
    """
    return _servable(observed(host, sites, FirstOf(feed, 1), final_outputs), kernels)


def _servable(sites: Iterable[AttentionSite], kernels: Sequence[Candidate]) -> tuple[AttentionSite, ...]:
    served = []
    for site in sites:
        asked = {"causal": site.causal, "cross": site.kind == "cross", "biased": site.biased}
        reasons = [get_kernel(each.kernel).obstacle(**asked) for each in kernels]
        refused = site.eligible and all(reason is not None for reason in reasons)
        served.append(replace(site, eligible=False, reason=reasons[0]) if refused else site)
    if not any(site.eligible for site in served):
        why = "; ".join(sorted({site.reason for site in served if site.reason}))
        raise CheckpointError(f"no attention site can be converted: {why}.")
    return tuple(served)
