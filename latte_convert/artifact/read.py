"""Read the kernel parameters of an artifact, without building the model."""

from __future__ import annotations

from pathlib import Path

from latte_convert.artifact.adapter import kernel_files
from latte_convert.artifact.check import open_source
from latte_convert.artifact.manifest import Manifest
from latte_convert.errors import CheckpointError, IntegrityError
from latte_convert.names import is_ours


def site_parameters(directory: Path, manifest: Manifest) -> dict[str, dict[str, str]]:
    """The kernel parameters of each converted site as short text: a value, or the range of several."""
    from safetensors import SafetensorError, safe_open

    parameters: dict[str, dict[str, str]] = {site.name: {} for site in manifest.sites}
    try:
        for file in kernel_files(directory, manifest) if manifest.base else open_source(directory, manifest).weights:
            with safe_open(file, framework="numpy", backend="pread") as tensors:
                for key in filter(is_ours, tensors.keys()):
                    site, _, name = key.rpartition(".latte.")
                    value = tensors.get_tensor(key)
                    low, high = float(value.min()), float(value.max())
                    text = f"{low:.4g}" if value.size == 1 else f"{low:.4g}…{high:.4g}"
                    parameters.setdefault(site, {})[name] = text
    except (SafetensorError, OSError, CheckpointError) as error:
        raise IntegrityError(f"{directory}: its weights cannot be read: {error}") from None
    return parameters
