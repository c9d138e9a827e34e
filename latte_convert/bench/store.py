"""What a benchmark leaves in an artifact: ``min_tokens`` in its manifest, and ``bench.json`` beside its report."""

from __future__ import annotations

from pathlib import Path

from latte_convert.artifact import probe as probes
from latte_convert.artifact.load import open_artifact
from latte_convert.artifact.manifest import Manifest, read_manifest
from latte_convert.artifact.results import update_manifest, write_document
from latte_convert.artifact.verify import verify
from latte_convert.bench.result import BenchReport
from latte_convert.names import BENCH


def write_min_tokens(directory: Path, min_tokens: int, *, trust_remote_code: bool = False) -> Manifest:
    """Store ``min_tokens`` in an artifact that verifies, and the probe's answer with it.

    The probe may be shorter than the new ``min_tokens``; the hybrid then answers it as the original does.

    Args:
        directory: The artifact.
        min_tokens: With fewer keys than this, a converted site runs its exact branch.
        trust_remote_code: Run Python code that came with the source checkpoint.

    Raises:
        IntegrityError: The artifact is not what its manifest says; nothing is written.
        OutputError: The manifest cannot be written.
    """
    verify(directory, trust_remote_code=trust_remote_code)
    manifest = read_manifest(directory).model_copy(update={"min_tokens": min_tokens})
    if manifest.probe is not None:
        artifact = open_artifact(directory, trust_remote_code=trust_remote_code)
        artifact.manifest = manifest
        with artifact.convert():
            probe = manifest.probe
            _, output = probes.answer(artifact.model, probe.method, probe.inputs, probe.seed, probe.output)
        probe = probe.model_copy(update={"values": probes.sample_values(output)})
        manifest = manifest.model_copy(update={"probe": probe})
    changed = {"min_tokens": min_tokens, "probe": manifest.probe}
    return update_manifest(directory, lambda current: current.model_copy(update=changed))


def save_report(directory: Path, report: BenchReport) -> Path:
    """Write ``bench.json`` into an artifact, whole or not at all; the previous one is replaced.

    Raises:
        OutputError: It cannot be written.
    """
    path = directory / BENCH
    write_document(report.model_dump(mode="json"), path)
    return path
