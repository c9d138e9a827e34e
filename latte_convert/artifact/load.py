"""Read an artifact back: the library's own class, converted, strict on every key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from latte_convert.adapters.resolve import resolve
from latte_convert.artifact.manifest import Manifest, SiteRecord, read_manifest
from latte_convert.errors import CheckpointError, IntegrityError
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.registry import get_kernel
from latte_convert.names import is_ours
from latte_convert.rewrite.apply import apply


def load(directory: str | Path, *, device: str = "cpu", trust_remote_code: bool = False) -> nn.Module:
    """Load a hybrid.

    Args:
        directory: An artifact.
        device: Where to put the model.
        trust_remote_code: Run Python code that came with the source checkpoint.

    Returns:
        The library's own class, in eval mode, with the converted sites in place.

    Raises:
        IntegrityError: A tensor is missing, unknown, or of another shape than the manifest says.
        CheckpointError: There is no such directory, or the original in it cannot be loaded.
    """
    from latte_convert.adapters import find_adapter

    path = Path(directory).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"there is no artifact at '{directory}'.")
    manifest = read_manifest(path)
    try:
        source = resolve(path, trust_remote_code=trust_remote_code)
        tensors = source.read_tensors()
    except CheckpointError as error:
        raise IntegrityError(str(error)) from None
    ours = {key: tensor for key, tensor in tensors.items() if is_ours(key)}
    kernels = build_kernels(manifest, ours)
    if source.model_class != manifest.source.model_class:
        raise IntegrityError(
            f"{path}: config.json gives {source.model_class}, the manifest says {manifest.source.model_class}; "
            "one of them was changed."
        )
    try:
        originals = {key: t for key, t in tensors.items() if key not in ours}
        model, unexpected = source.instantiate(originals, _resolution(manifest))
    except CheckpointError as error:
        raise IntegrityError(str(error)) from None
    strange = sorted(set(unexpected) - set(manifest.source.unexpected_keys))
    if strange:
        raise IntegrityError(f"{path} holds tensors that the model does not know: {', '.join(strange[:5])}.")
    apply(model, find_adapter(model), kernels, min_tokens=manifest.min_tokens)
    return model.to(device)


def _resolution(manifest: Manifest) -> int | None:
    resolution = manifest.recipe.get("resolution")
    if resolution is None or (isinstance(resolution, int) and resolution > 0):
        return resolution
    raise IntegrityError(f"the manifest's recipe has resolution {resolution!r}, which is no number of pixels.")


def build_kernels(manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Kernel]:
    """Build every kernel that the manifest names and fill it, strictly.

    Raises:
        IntegrityError: A tensor is missing, unknown, or of another shape.
    """
    left = dict(tensors)
    kernels = {site.name: _build(site, left) for site in manifest.sites}
    if left:
        raise IntegrityError(f"unknown tensors that no site of the manifest owns: {', '.join(sorted(left)[:5])}.")
    return kernels


def _build(site: SiteRecord, tensors: dict[str, Tensor]) -> Kernel:
    try:
        kernel: Kernel = get_kernel(site.kernel)(site.heads, site.head_dim, **site.options)
    except TypeError as error:
        raise IntegrityError(
            f"{site.name}: the manifest's options do not fit kernel '{site.kernel}': {error}."
        ) from None
    with torch.no_grad():
        for name, parameter in kernel.named_parameters():
            key = f"{site.name}.latte.{name}"
            if key not in tensors:
                raise IntegrityError(f"tensor '{key}' is missing: the artifact is incomplete. Convert again.")
            tensor = tensors.pop(key)
            if tensor.shape != parameter.shape:
                raise IntegrityError(
                    f"tensor '{key}' has shape {tuple(tensor.shape)}, the manifest implies {tuple(parameter.shape)}."
                )
            parameter.copy_(tensor)
    return kernel
