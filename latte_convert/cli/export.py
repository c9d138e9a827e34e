"""``latte export``: a hybrid as a file that runs without this package."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from latte_convert.cli import console, interrupts, options

EXPORT = "Export"


class Target(str, Enum):
    """The formats."""

    onnx = "onnx"
    torch_export = "torch-export"
    torchscript = "torchscript"


def export(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="What 'latte convert' wrote; or a plain checkpoint, as 'latte convert' takes it, to compare with.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Directory to create.")],
    to: Annotated[Target, typer.Option("--to", rich_help_panel=EXPORT, help="Format of the file.")] = Target.onnx,
    tower: Annotated[
        list[str] | None,
        typer.Option(
            "--tower",
            metavar="TOWER",
            rich_help_panel=EXPORT,
            help="One tower instead of the whole model: vision, text, encoder or decoder. Repeatable: a file for each.",
        ),
    ] = None,
    resolution: Annotated[
        int | None,
        typer.Option(
            "--resolution",
            min=1,
            metavar="PX",
            rich_help_panel=EXPORT,
            help="Height and width of images, fixed in the file; any size if not given and the model has it.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=1,
            metavar="N",
            rich_help_panel=EXPORT,
            help="Tokens of every text, fixed in the file; any number if not given.",
        ),
    ] = None,
    opset: Annotated[
        int | None,
        typer.Option("--opset", rich_help_panel=EXPORT, help="Version of ONNX's operators; 20 if not given."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0,
            rich_help_panel=EXPORT,
            help="Largest accepted difference from PyTorch, relative to the root mean square of an output; exit code 4 "
            "past it. If not given 0.001, or what rounding makes a hybrid that groups tokens differ from itself.",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    trust_remote_code: options.Remote = False,
    json: options.Json = False,
) -> None:
    """Write a hybrid as ONNX, torch.export or TorchScript, checked against PyTorch, with its processor and a card.

    Example: latte export hybrid/ --to onnx --resolution 1036 --out onnx/
    """
    from latte_convert.exporting.run import export as write

    with console.log_to_stderr(), console.progress() as progress:
        exported = write(
            directory, out, to=to.value, tower=tower, resolution=resolution, tokens=tokens, opset=opset,
            tolerance=tolerance, overwrite=overwrite, trust_remote_code=trust_remote_code, progress=progress,
        )  # fmt: skip
        interrupts.heed()
    if json:
        console.document(exported.document())
        return
    for file in exported.files:
        console.result(str(file))
    console.result(f"largest difference from PyTorch: {exported.worst}")
