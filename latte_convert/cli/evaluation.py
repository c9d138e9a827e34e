"""``latte eval``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latte_convert import processes
from latte_convert.cli import console, options
from latte_convert.wording import percent_down, some

if TYPE_CHECKING:
    from latte_convert.evaluation.result import EvalReport, MetricReport

_DATA, _GATE = "Data", "Gate"


def evaluate(
    directory: options.Directory,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            "-t",
            help="asr, classification, compositional, detection, fidelity, knn, linear-probe, retrieval, saliency, sts "
            "or zero-shot.",
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            "-d",
            metavar="DATA",
            rich_help_panel=_DATA,
            help="The samples with their labels, in the task's usual layout. Twice for labels and the folder of their "
            "images, and for fidelity of a two-tower model.",
        ),
    ],
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=2,
            rich_help_panel=_DATA,
            help="Samples to use at most; without it all, and 128 for fidelity.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, rich_help_panel=_DATA, help="Inputs in one call of a model.")
    ] = 16,
    seed: Annotated[
        int, typer.Option("--seed", min=0, rich_help_panel=_DATA, help="Seed of the choice and of the bootstrap.")
    ] = 0,
    templates: Annotated[
        Path | None,
        typer.Option(
            "--templates", metavar="FILE", rich_help_panel=_DATA, help="zero-shot: prompts, one a line with {}."
        ),
    ] = None,
    decoder: Annotated[
        Path | None,
        typer.Option(
            "--decoder", metavar="FILE", rich_help_panel=_DATA, help="saliency: ONNX decoder of the patch features."
        ),
    ] = None,
    fail_under: Annotated[
        float | None,
        typer.Option(
            "--fail-under",
            min=0,
            rich_help_panel=_GATE,
            help="Least share of the original's metric that the hybrid must keep, such as 0.95; exit code 4 below it.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            rich_help_panel=_GATE,
            help="Metric that --fail-under is for; without it the task's primary one.",
        ),
    ] = None,
    device: options.Device = "auto",
    trust_remote_code: options.Remote = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", rich_help_panel=options.OUTPUT, help="Write the result as .json, too."
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Measure task metrics of the hybrid beside the original on the same samples, and what is retained.

    Example: latte eval dinov2-hybrid --task knn --data clothing/ --fail-under 0.95
    """
    from latte_convert.artifact.results import write_document
    from latte_convert.evaluation.evaluate import evaluate as run

    if out is not None:
        _check_out(out, overwrite)
    processes.join()
    with console.log_to_stderr(), console.progress() as progress:
        report = run(
            directory, task, data, samples=samples, batch_size=batch_size, seed=seed, templates=templates,
            decoder=decoder, metric=metric, fail_under=fail_under, device=device,
            trust_remote_code=trust_remote_code, progress=progress,
        )  # fmt: skip
    if out is not None and processes.rank() == 0:
        _check_out(out, overwrite)  # another run may have written it since
        write_document(report.model_dump(mode="json"), out)
        if out.parent.resolve() == directory.resolve():
            console.note(f"next: latte report {shlex.quote(str(directory))}")
    processes.finish()
    _show(report)
    if json:
        console.document(report.model_dump(mode="json"))
    else:
        for name, value in report.metrics.items():
            if "@" not in name:
                console.result(f"{name}  {value.original:.4f}  {value.hybrid:.4f}  {_kept(value)}")
    _require_gate(report)


def _check_out(out: Path, overwrite: bool) -> None:
    from latte_convert.errors import UsageError
    from latte_convert.evaluation.result import EvalReport
    from latte_convert.report.write import check_report_target

    if out.suffix != ".json":
        raise UsageError(f"--out takes a .json file, not '{out.name}'.")
    check_report_target(out, overwrite=overwrite, kind=EvalReport)


def _show(report: EvalReport) -> None:
    """The table for the person at the terminal."""
    rows = [
        (name + (" *" if name == report.primary else ""), f"{m.original:.4f}", f"{m.hybrid:.4f}", _kept(m))
        for name, m in report.metrics.items()
    ]
    console.table(
        f"{report.task} on {report.samples} samples ({len(report.skipped)} skipped, {report.truncated} truncated)",
        ("metric", "original", "hybrid", "retention (95% interval)"),
        rows,
        right=(1, 2),
    )
    for item in report.skipped[:3]:
        console.note(f"skipped: {item.id}: {item.reason}")
    if report.unused_sites:
        console.note(
            f"{len(report.unused_sites)} converted sites are not part of this task: {some(report.unused_sites)}"
        )
    if report.exact_share == 1:
        console.note(
            "warning: every attention call of a converted site ran softmax: on samples of so few tokens nothing is "
            "cheaper, so this says nothing about the hybrid. Evaluate on longer samples."
        )
    elif report.exact_share:
        console.note(
            f"{report.exact_share:.1%} of the attention calls of converted sites ran softmax, on samples of few tokens "
            f"({len(report.exact_sites)} sites throughout)."
        )
    for name, metric in report.metrics.items():
        if metric.interval is not None and metric.reason is not None:
            console.note(f"{name}: {metric.reason}.")
    if report.note:
        console.note(report.note)


def _kept(metric: MetricReport) -> str:
    """Retention in percent, rounded down so that only a full one reads 100.00%."""
    if metric.retention is None:
        return f"- ({metric.reason})"
    interval = "" if metric.interval is None else f" [{', '.join(map(percent_down, metric.interval))}]"
    return percent_down(metric.retention) + interval


def _require_gate(report: EvalReport) -> None:
    from latte_convert.errors import GateError

    if report.gate is None or report.gate.passed:
        return
    metric = report.metrics[report.gate.metric]
    found = f"is {metric.retention:.6g}" if metric.retention is not None else f"cannot be given ({metric.reason})"
    raise GateError(
        f"retention of {report.gate.metric} {found}, below the {report.gate.fail_under:g} asked for. Convert fewer "
        "sites (--ratio, -k), choose another kernel, or lower --fail-under."
    )
