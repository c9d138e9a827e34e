"""Read an artifact back: the library's own class, converted, strict on every key."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from latte_convert.adapters.convert import Applied, is_hybrid
from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import Merge, merges_of
from latte_convert.adapters.mha import tower_of
from latte_convert.adapters.plain import PlainAdapter
from latte_convert.artifact.adapter import read_adapter
from latte_convert.artifact.check import artifact_directory, check_files, check_probe, open_source, original_tensors
from latte_convert.artifact.manifest import Manifest, SiteRecord, read_manifest
from latte_convert.artifact.record import record_loading
from latte_convert.attention import Adapter, AttentionSite
from latte_convert.checkpoints.module import build_module
from latte_convert.errors import CheckpointError, IntegrityError, LatteError, UsageError, first_line, nearest
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.registry import get_kernel, kernel_names
from latte_convert.names import is_ours
from latte_convert.recipe import Recipe
from latte_convert.wording import some

if TYPE_CHECKING:
    from latte_convert.checkpoints.base import Checkpoint


@dataclass
class Artifact:
    """An artifact that was read: the original, and the kernels that make a hybrid of it.

    Attributes:
        path: Its directory.
        host: The original, in eval mode.
        kernels: The kernel of each converted site, by name.
        manifest: What the artifact records.
        source: The checkpoint inside it, for processors and modalities.
    """

    path: Path
    host: Host
    kernels: dict[str, Kernel]
    manifest: Manifest
    source: Checkpoint

    @property
    def model(self) -> nn.Module:
        """The model of ``host``."""
        return self.host.model

    @property
    def merges(self) -> dict[str, Merge]:
        """The blocks whose tokens are merged, by name."""
        return merges_of(self.manifest.shares)

    def convert(self) -> Applied:
        """Turn ``model`` into the hybrid, in place; ``undo`` of the handle, or its end as a context, turns it back."""
        applied = self.host.convert({**self.kernels, **self.merges}, min_tokens=self.manifest.min_tokens)
        record_loading(self.model, self.manifest, self.source, applied)
        return applied


def load(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    allow_import: bool = False,
    base: str | Path | None = None,
    verify: bool = False,
    offload: str | Path | None = None,
) -> nn.Module:
    """Load a hybrid.

    Args:
        directory: An artifact.
        model: For an artifact of a module that no library builds from a configuration: an original of the same class
            and shapes, which is filled and converted in place.
        device: Where to put the model.
        trust_remote_code: Run Python code that came with the source checkpoint.
        allow_import: Import and call the function that the artifact names as the builder of such a module.
        base: For an adapter: another copy of the checkpoint that it belongs to, where the recorded one is gone.
        verify: Check first what ``latte_convert.verify`` checks.
        offload: Leave the weights of blocks in the artifact's files, as ``convert`` does; for forward passes.

    Returns:
        The library's own class, in eval mode, with the converted sites in place.

    Raises:
        IntegrityError: A tensor is missing, unknown, or of another shape than the manifest says; or the original in
            the artifact cannot be loaded.
        CheckpointError: There is no such directory; or the module it is of was not given, or has other tensors; or
            an adapter's base is gone.
    """
    path = artifact_directory(directory)
    if verify:
        check_files(path)
    artifact = open_artifact(
        path,
        model=model,
        device=device,
        trust_remote_code=trust_remote_code,
        allow_import=allow_import,
        base=base,
        offload=offload,
    )
    if verify:
        original_tensors(artifact.source, artifact.manifest)
    artifact.convert()
    if verify:
        check_probe(artifact.model, artifact.manifest, path)
    return artifact.model


def open_artifact(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    allow_import: bool = False,
    base: str | Path | None = None,
    offload: str | Path | None = None,
) -> Artifact:
    """Read an artifact without converting its model, to run original and hybrid beside each other.

    Args and errors are those of ``load``.
    """
    path = artifact_directory(directory)
    manifest = read_manifest(path)
    module = _module(path, manifest, model, allow_import)
    source = open_source(path, manifest, trust_remote_code=trust_remote_code, module=module, base=base)
    if offload is not None and module is not None:
        raise UsageError(f"{path} holds a module that no library builds, which is in memory: leave out the offload.")
    tensors = _read(path, manifest, source, on_disk=offload is not None)
    ours = {key: tensors[key] for key in tensors if is_ours(key)}
    kernels = build_kernels(manifest, ours)
    try:
        if module is None and source.model_class != manifest.source.model_class:
            raise IntegrityError(
                f"{path}: config.json gives {source.model_class}, the manifest says {manifest.source.model_class}; "
                "one of them was changed."
            )
        resolution = manifest.recipe.get("resolution")
        if offload is not None:
            from latte_convert.adapters.offload import open_offloaded

            host, unexpected = open_offloaded(source, resolution, Path(offload), device)
        else:
            originals = {key: tensor for key, tensor in tensors.items() if key not in ours}
            filled, unexpected = source.instantiate(originals, resolution)
            host = Host.of(filled, None if module is None else partial(_remembered, filled, manifest))
            if manifest.weights == "in memory":
                _keep_dtypes(filled, originals)
            filled.to(device)
    except CheckpointError as error:
        if module is not None:
            raise  # the module that was given is at fault, not the artifact
        raise IntegrityError(str(error)) from None
    strange = sorted(set(unexpected) - set(manifest.source.unexpected_keys))
    if strange:
        raise IntegrityError(f"{path} holds tensors that the model does not know: {some(strange, 5)}.")
    names = [site.name for site in host.sites()]
    if unknown := next((name for name in kernels if name not in names), None):
        raise IntegrityError(f"the model has no attention site '{unknown}' ({nearest(unknown, names)}).")
    blocks = list(dict.fromkeys(map(host.block, names)))
    if unknown := next((merge.name for merge in manifest.merges if merge.name not in blocks), None):
        raise IntegrityError(f"the model has no block '{unknown}' ({nearest(unknown, blocks)}).")
    return Artifact(path, host, kernels, manifest, source)


def _remembered(model: nn.Module, manifest: Manifest, apart: Sequence[str]) -> Adapter:
    """The adapter of a module that no library builds, from what was seen when it was converted."""
    assert manifest.module is not None
    kept = [name for name in manifest.module.attention if name not in {site.name for site in manifest.sites}]
    sites = [
        *(AttentionSite(s.name, tower_of(s.name), "self", s.causal, s.heads, s.head_dim, biased=s.biased)
          for s in manifest.sites),
        *(AttentionSite(name, tower_of(name), "self", False, 1, 1, eligible=False) for name in kept),
    ]  # fmt: skip
    placed = Recipe.model_construct(grid=manifest.recipe.get("grid"), prefix=manifest.recipe.get("prefix"))
    return PlainAdapter(model, sites, apart=apart, grid=placed.sides, prefix=placed.prefix)


def _read(path: Path, manifest: Manifest, source: Checkpoint, *, on_disk: bool) -> Mapping[str, Tensor]:
    """The tensors of a hybrid: all in one place, or the base's and an adapter's."""
    try:
        if manifest.base is not None:
            originals = source.original_on_disk() if on_disk else source.original_tensors()
            return ChainMap(read_adapter(path, manifest), originals)  # type: ignore[arg-type]
        return source.on_disk() if on_disk else source.read_tensors()
    except CheckpointError as error:
        raise IntegrityError(str(error)) from None


def _module(path: Path, manifest: Manifest, given: nn.Module | None, allow_import: bool) -> nn.Module | None:
    """The module to fill: the one given, or the one that the recorded function builds; None where a library does.

    Raises:
        CheckpointError: It takes one and there is none, or the one given is a hybrid.
        UsageError: One was given that is not needed.
    """
    record = manifest.module
    if record is None:
        if given is not None:
            raise UsageError(f"{path} says itself what builds its {manifest.source.model_class}: leave out `model`.")
        return None
    if given is not None:
        if is_hybrid(given):
            raise CheckpointError(f"the {type(given).__name__} given is a hybrid already: give the original.")
        return given
    if record.factory is not None and allow_import:
        return build_module(record.factory)
    way = "give it one to fill: latte_convert.load(directory, model=…)"
    if record.factory is not None:
        way += f", or allow_import=True (--allow-import) to have {record.factory} imported and called"
    raise CheckpointError(f"{path} holds the tensors of a {record.kind}, and no code that builds one: {way}.")


def _keep_dtypes(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give each tensor of a model the dtype it was saved in: a library casts all of them to the most common one."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for key, stored in tensors.items():
        if key in named and named[key].dtype != stored.dtype and named[key].shape == stored.shape:
            named[key].data = stored.clone()


def build_kernels(manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Kernel]:
    """Build every kernel that the manifest names and fill it, strictly.

    Raises:
        IntegrityError: A tensor is missing, unknown, or of another shape.
    """
    left = dict(tensors)
    kernels = {site.name: _build(site, left) for site in manifest.sites}
    if left:
        raise IntegrityError(f"unknown tensors that no site of the manifest owns: {some(sorted(left), 5)}.")
    return kernels


def _build(site: SiteRecord, tensors: dict[str, Tensor]) -> Kernel:
    """A kernel with its own tensors, which are taken out of ``tensors``."""
    kernel = _make(site, "meta")  # its shapes, before any memory is taken for them
    stored: dict[str, Tensor] = {}
    for name, tensor in kernel.state_dict().items():
        if name == "_extra_state":
            stored[name] = kernel.get_extra_state()
            continue
        key = f"{site.name}.latte.{name}"
        if key not in tensors:
            raise IntegrityError(f"tensor '{key}' is missing: the artifact is incomplete. Convert again.")
        stored[name] = tensors.pop(key).clone()
        if stored[name].shape != tensor.shape:
            raise IntegrityError(
                f"tensor '{key}' has shape {tuple(stored[name].shape)}, the manifest implies {tuple(tensor.shape)}."
            )
    kernel = _make(site, "cpu")
    kernel.load_state_dict(stored, assign=True)  # in the precision they were saved in
    return kernel


def _make(site: SiteRecord, device: str) -> Kernel:
    if site.kernel not in kernel_names():
        raise IntegrityError(
            f"{site.name}: kernel '{site.kernel}' is unknown here ({nearest(site.kernel, kernel_names())}). Install "
            "the package that offers it, or import the module that registers it, and load again."
        )
    try:
        with torch.device(device):
            kernel: Kernel = get_kernel(site.kernel)(site.heads, site.head_dim, **site.options)
    except (TypeError, ValueError, RuntimeError, MemoryError, LatteError) as error:
        raise IntegrityError(
            f"{site.name}: the manifest's kernel '{site.kernel}' cannot be built: {first_line(error)}."
        ) from None
    return kernel
