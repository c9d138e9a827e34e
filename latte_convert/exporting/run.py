"""``export``: open, capture, write, check, and only then let the directory appear."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latte_convert.artifact.files import atomic_directory, check_outside, check_target, visible, write_json
from latte_convert.artifact.save import copy_files
from latte_convert.environment import library_versions, tool_version
from latte_convert.errors import (
    CheckpointError,
    GateError,
    OutputError,
    UsageError,
    first_line,
    is_shortage,
    nearest,
)
from latte_convert.exporting.card import write_card
from latte_convert.exporting.check import TOLERANCE, Difference, differences
from latte_convert.exporting.formats import FORMATS, Format, Onnx
from latte_convert.exporting.graph import capture
from latte_convert.exporting.inputs import Texts
from latte_convert.exporting.parts import Part, Size, make_parts
from latte_convert.exporting.subject import Subject, open_subject
from latte_convert.names import CARD
from latte_convert.progress import Progress, progress_of
from latte_convert.reading import read_json

logger = logging.getLogger("latte_convert")

RECORD = "export.json"
"""File of an exported directory that says what it is."""


@dataclass(frozen=True)
class Exported:
    """An exported directory.

    Attributes:
        path: The directory.
        files: The models in it.
        differences: What was compared with PyTorch.
    """

    path: Path
    files: tuple[Path, ...]
    differences: tuple[Difference, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "files": [str(file) for file in self.files],
            "worst": asdict(self.worst),
            "differences": [asdict(each) for each in self.differences],
        }

    @property
    def worst(self) -> Difference:
        """The largest difference from PyTorch."""
        return max(self.differences, key=lambda each: each.value)


def export(
    model: str | Path,
    out: str | Path,
    *,
    to: str = "onnx",
    tower: str | Sequence[str] | None = None,
    resolution: int | None = None,
    tokens: int | None = None,
    opset: int | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | bool = True,
) -> Exported:
    """Write a hybrid as files that run without this package, and check them against PyTorch.

    Args:
        model: A directory of ``latte convert``; or a plain checkpoint, to compare with.
        out: Directory to create.
        to: ``onnx``, ``torch-export`` or ``torchscript``.
        tower: One tower or several, a file for each; None for the whole model.
        resolution: Height and width of images in pixels, fixed. None: any, where model and kernels hold it.
        tokens: Tokens of every text, fixed. None: any number.
        opset: Version of ONNX's operators.
        tolerance: Largest accepted difference from PyTorch, relative to the root mean square of an output. None:
            0.001; or, of a hybrid that chooses which tokens go together, what rounding makes it differ from itself.
        overwrite: Replace what an earlier export wrote.
        trust_remote_code: Run Python code that comes with the checkpoint.
        progress: Whether to show bars, or what shows them.

    Raises:
        GateError: The file computes something else than PyTorch.
        CheckpointError: The model, or a kernel in it, cannot be exported.
        UsageError: There is no such format, tower or opset.
        OutputError: ``out`` exists, or cannot be written.
        InputError: A library is not installed.
    """
    out, towers = Path(out), [tower] if isinstance(tower, str) else list(tower or ())
    form = _format(to, opset)
    form.prepare()
    source = Path(model).expanduser()
    check_outside(out, source)
    check_target(out, overwrite=overwrite, protect=[source], known=_known(out))
    subject = open_subject(model, resolution=resolution, trust_remote_code=trust_remote_code)
    parts = make_parts(subject, towers, Size(images=resolution is not None, tokens=tokens))
    advance = progress_of(progress)("export", len(parts))
    with atomic_directory(out, overwrite=overwrite) as directory:
        found: list[Difference] = []
        for part in parts:
            found += _written(part, form, directory / f"{part.stem}{form.suffix}")
            advance()
        _require(found, tolerance)
        _write_rest(directory, subject, parts, form, to, found)
    files = tuple(out / f"{part.stem}{form.suffix}" for part in parts)
    return Exported(out, files, tuple(found))


def _written(part: Part, form: Format, file: Path) -> list[Difference]:
    """Write a part and compare it; for images of one size, where model or runtime hold no other."""
    try:
        form.write(capture(part), part, file)
        return _checked(part, form, file)
    except CheckpointError as error:
        if not part.inputs.open:
            raise
        part.inputs.open = False
        program = capture(part)
        if isinstance(part.inputs, Texts):
            raise CheckpointError(f"{error}. --tokens fixes the number of tokens of every text.") from error
        form.write(program, part, file)
        found = _checked(part, form, file)
        height, width = part.inputs.sizes()[0]
        logger.warning("images have %d x %d px; for any size, %s", height, width, error)
        return found


def _checked(part: Part, form: Format, file: Path) -> list[Difference]:
    try:
        return differences(part, form.open(file, part))
    except Exception as error:  # whatever a runtime makes of a graph
        if is_shortage(error):
            raise
        raise CheckpointError(
            f"{form.runtime} does not run what was written of {type(part.model).__name__}: {first_line(error)}"
        ) from error


def _format(to: str, opset: int | None) -> Format:
    if to not in FORMATS:
        raise UsageError(f"there is no format '{to}' ({nearest(to, FORMATS)}).")
    if to == "onnx":
        return Onnx() if opset is None else Onnx(opset)
    if opset is not None:
        raise UsageError(f"--opset is for ONNX; leave it out with --to {to}.")
    return FORMATS[to]()


def _known(out: Path) -> list[str]:
    """The files that an earlier export wrote there."""
    if not (out / RECORD).is_file():
        return []
    content = read_json(out / RECORD, OutputError, absent="it is gone", advice="Remove the directory.")
    files = content.get("files") if isinstance(content, dict) else None
    return [RECORD, *map(str, files)] if isinstance(files, list) else []


def _require(found: list[Difference], tolerance: float | None) -> None:
    off = [each for each in found if not (each.close if tolerance is None else each.value <= tolerance)]
    if off:
        raise GateError(
            f"what was exported differs from PyTorch by {max(off, key=lambda each: each.value)}; "
            f"{TOLERANCE if tolerance is None else tolerance:g} is accepted (--tolerance). Nothing was written."
        )


def _write_rest(
    directory: Path, subject: Subject, parts: list[Part], form: Format, to: str, found: list[Difference]
) -> None:
    """The processor's files, the card, and the record."""
    source = subject.source
    copy_files({name: source.sidecar(name) for name in source.sidecars() if name != CARD}, directory)
    write_card(directory, subject, parts, form, found)
    record: dict[str, Any] = {
        "format": to,
        "source": subject.name,
        "sites": len(subject.kernels),
        "tool_version": tool_version(),
        "library_versions": library_versions(),
        "differences": [asdict(each) for each in found],
        "files": visible(directory),
    }
    write_json(directory / RECORD, record)
