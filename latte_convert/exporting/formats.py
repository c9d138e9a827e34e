"""The formats: how each is written, and how it is run to check it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from latte_convert.compat import require
from latte_convert.errors import CheckpointError, UsageError, first_line
from latte_convert.exporting.graph import quiet_torch
from latte_convert.exporting.operators import translations
from latte_convert.exporting.parts import Part
from latte_convert.exporting.script import script

Run = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]
"""From inputs by name to outputs in their order."""

OPSETS = range(18, 24)
"""ONNX operator sets that can be written."""
_MOST_BYTES = 2_000_000_000
"""Of weights inside an ONNX file: protobuf takes no more."""


class Format(ABC):
    """One format of files."""

    suffix: ClassVar[str]
    runtime: ClassVar[str]

    def prepare(self) -> None:  # noqa: B027  # most need nothing
        """Check that what it needs is installed.

        Raises:
            InputError: It is not; the message names the extra.
        """

    @abstractmethod
    def write(self, program: Any, part: Part, path: Path) -> None:
        """Write a graph.

        Raises:
            CheckpointError: The format has no form of it.
        """

    @abstractmethod
    def open(self, path: Path, part: Part) -> Run:
        """The function in a file, run by the runtime that it is for."""


class Onnx(Format):
    """ONNX, run by ONNX Runtime on a CPU.

    Args:
        opset: Version of ONNX's operators.

    Raises:
        UsageError: It cannot be written.
    """

    suffix = ".onnx"
    runtime = "ONNX Runtime"

    def __init__(self, opset: int = 20) -> None:
        if opset not in OPSETS:
            raise UsageError(
                f"--opset {opset} cannot be written: give {OPSETS[0]} to {OPSETS[-1]}"
                + (", older ones lack operators that this needs." if opset < OPSETS[0] else ".")
            )
        self.opset = opset

    def prepare(self) -> None:
        """ONNX, its translator from PyTorch, and the runtime."""
        for library in ("onnx", "onnxscript", "onnxruntime"):
            require(library, "export")

    def write(self, program: Any, part: Part, path: Path) -> None:
        """Write a graph; weights of more than 2 GB lie beside it, in ``<name>.data``."""
        try:
            with quiet_torch():
                exported: Any = torch.onnx.export(
                    program,
                    dynamo=True,
                    opset_version=self.opset,
                    input_names=list(part.inputs.example),
                    output_names=list(part.outputs),
                    verbose=False,
                    custom_translation_table=translations(),
                )
        except Exception as error:  # the translator meets an operator that it does not know, or a shape it cannot tell
            raise CheckpointError(f"{type(part.model).__name__} has no form in ONNX: {first_line(error)}") from error
        _name_axes(exported.model, part)
        size = sum(p.numel() * p.element_size() for p in part.parameters())
        exported.save(path, external_data=size > _MOST_BYTES)

    def open(self, path: Path, part: Part) -> Run:
        """A session."""
        onnxruntime = require("onnxruntime", "export")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def run(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
            outputs = session.run(list(part.outputs), {name: value.numpy() for name, value in inputs.items()})
            return tuple(torch.from_numpy(output) for output in outputs)

        return run


class TorchExport(Format):
    """``torch.export``'s own files, which AOTInductor compiles too."""

    suffix = ".pt2"
    runtime = "PyTorch"

    def write(self, program: Any, part: Part, path: Path) -> None:
        """Write a graph."""
        torch.export.save(program, path)

    def open(self, path: Path, part: Part) -> Run:
        """The module of the graph."""
        module = torch.export.load(path).module()

        def run(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return tuple(module(**inputs))

        return run


class TorchScript(Format):
    """TorchScript, which libtorch runs without Python."""

    suffix = ".pt"
    runtime = "TorchScript"

    def write(self, program: Any, part: Part, path: Path) -> None:
        """Write a graph."""
        jit: Any = torch.jit
        try:
            with quiet_torch():
                jit.save(script(program), path)
        except Exception as error:  # an operator that TorchScript has not
            raise CheckpointError(
                f"{type(part.model).__name__} has no form in TorchScript: {first_line(error)}"
            ) from error

    def open(self, path: Path, part: Part) -> Run:
        """The function of the file."""
        jit: Any = torch.jit
        with quiet_torch():
            module = jit.load(path)

        def run(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return tuple(module(**inputs))

        return run


def _name_axes(model: Any, part: Part) -> None:
    """Give open axes the names that ``optimum`` writes, in the place of the exporter's symbols."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        wanted = part.inputs.axis_names().get(value.name, {})
        for axis, dim in enumerate(value.shape):
            if not isinstance(dim, int) and axis in wanted:
                names[str(dim)] = wanted[axis]
    import onnx_ir

    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is None:
            continue
        shape = [names.get(str(dim), dim) if not isinstance(dim, int) else dim for dim in value.shape]
        value.shape = onnx_ir.Shape(shape)


FORMATS: dict[str, type[Format]] = {"onnx": Onnx, "torch-export": TorchExport, "torchscript": TorchScript}
