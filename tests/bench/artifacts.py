"""Artifacts made by hand: what a benchmark measures does not depend on how a kernel was fitted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from latte_convert.adapters.host import Host
from latte_convert.artifact.files import sha256_file, write_json
from latte_convert.artifact.manifest import CalibrationRecord, Manifest, SiteRecord, SourceRecord
from latte_convert.artifact.probe import record_probe
from latte_convert.artifact.save import copy_files, kernel_tensors
from latte_convert.artifact.tensors import digest, write_tensors
from latte_convert.attention import AttentionSite
from latte_convert.checkpoints.resolve import resolve
from latte_convert.data.feed import BatchFeed
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.names import MANIFEST


def every_second(sites: list[AttentionSite]) -> list[AttentionSite]:
    return sites[::2]


def make_artifact(
    checkpoint: Path,
    out: Path,
    batch: dict[str, Any] | None,
    *,
    choose: Callable[[list[AttentionSite]], list[AttentionSite]] = every_second,
    build: Callable[[AttentionSite], Kernel] = lambda site: LatteKernel(site.heads, site.head_dim),
    recipe: dict[str, Any] | None = None,
) -> Path:
    """Write an artifact of a checkpoint; ``batch`` gives the shape of its probe."""
    source = resolve(checkpoint)
    originals = source.original_tensors()
    model, _ = source.instantiate(originals)
    host = Host.of(model)
    sites = choose([site for site in host.sites() if site.eligible])
    torch.manual_seed(0)
    kernels = {site.name: build(site) for site in sites}
    out.mkdir()
    with host.convert(kernels):
        probe = record_probe(model, BatchFeed([batch])) if batch is not None else None
        weights = write_tensors({**originals, **kernel_tensors(model)}, out, source.weights_stem)
    names = [*copy_files(source.path, source.sidecars(), out), *weights]
    manifest = Manifest(
        tool_version="0",
        library_versions={},
        source=SourceRecord(
            id=str(checkpoint), revision=None, library=source.library, model_class=source.model_class,
            sha256={}, tensors_sha256=digest(originals), unexpected_keys=[],
        ),
        recipe=recipe or {},
        calibration=CalibrationRecord(fingerprint="", requested=1, used=1, held_out=1, skipped=[]),
        sites=[
            SiteRecord(
                name=site.name, kernel=kernels[site.name].name, heads=site.heads, head_dim=site.head_dim,
                causal=site.causal, options=kernels[site.name].options,
            )
            for site in sites
        ],
        min_tokens=0,
        probe=probe,
        files={name: sha256_file(out / name) for name in sorted(names)},
    )  # fmt: skip
    write_json(out / MANIFEST, manifest.model_dump(mode="json"))
    return out
