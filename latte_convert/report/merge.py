"""An adapter and its base become a whole artifact, with the report that the adapter has."""

from __future__ import annotations

from pathlib import Path

from latte_convert.artifact.card import Measured
from latte_convert.artifact.check import artifact_directory, check_files
from latte_convert.artifact.files import check_outside
from latte_convert.artifact.load import open_artifact
from latte_convert.artifact.save import save_artifact
from latte_convert.errors import UsageError
from latte_convert.names import REPORT
from latte_convert.report.card import measured
from latte_convert.report.read import read_report
from latte_convert.report.write import write_reports


def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write the whole artifact of an adapter.

    Args:
        adapter: Directory of an adapter.
        out: Directory to create.
        base: Another copy of the checkpoint that it belongs to.
        overwrite: Replace an existing artifact.
        trust_remote_code: Run Python code that came with the base.

    Returns:
        ``out``.

    Raises:
        UsageError: It is no adapter, but whole already.
        CheckpointError: There is no such directory, or the base is gone.
        IntegrityError: The adapter is not what its manifest says, or the base has changed.
        OutputError: ``out`` exists and ``overwrite`` is off, or it cannot be written.
    """
    path = artifact_directory(adapter)
    check_outside(Path(out), path)
    if check_files(path).base is None:
        raise UsageError(f"{path} is whole already: only an adapter ('latte convert --adapter') is merged.")
    report = read_report(path / REPORT) if (path / REPORT).exists() else None
    artifact = open_artifact(path, base=base, trust_remote_code=trust_remote_code)
    artifact.convert()

    def describe(directory: Path, fingerprint: str) -> list[Measured]:
        if report is None:
            return []
        renewed = report.model_copy(update={"artifact_fingerprint": fingerprint})
        write_reports(renewed, directory)
        return measured(renewed)

    return save_artifact(artifact.model, Path(out), overwrite=overwrite, protect=[path], describe=describe)
