"""The charts of a report as PNG files, for slides and for pages that take no HTML. Drawn with Matplotlib."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latte_convert.errors import OutputError, UsageError
from latte_convert.report.axes import Axis
from latte_convert.report.curves import MEASURES, VARIANTS, bench_axes, bench_rows, fidelity_of, pareto, plan_kind
from latte_convert.report.html import RAMP
from latte_convert.report.schema import AttentionMap, Heatmap, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#566271", "#8c4a12", "#1d6b66", "#6a3d9a", "#9c2f5c")
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", "--", ":", "-.", (0, (1, 2)))

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#665e54",
    "axes.labelcolor": "#25211c",
    "text.color": "#25211c",
    "xtick.color": "#665e54",
    "ytick.color": "#665e54",
    "grid.color": "#ddd6ca",
    "hatch.linewidth": 1.0,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def plot_paths(report: Report, directory: Path, stem: str = "report") -> list[Path]:
    """The files that ``write_plots`` would write.

    Raises:
        UsageError: Matplotlib is not installed.
    """
    _require_matplotlib()
    return [directory / f"{stem}-{name}.png" for name, _ in _figures(report)]


def write_plots(report: Report, directory: Path, stem: str = "report") -> list[Path]:
    """Write every chart that the report has numbers for as ``STEM-CHART.png``; existing files are replaced.

    Args:
        report: The report.
        directory: Where to; it exists.
        stem: What the names begin with.

    Returns:
        The files, in the order of the page.

    Raises:
        UsageError: Matplotlib is not installed.
        OutputError: A file cannot be written.
    """
    _require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    paths = []
    with rc_context(_STYLE):
        for name, figure in _figures(report):
            path = directory / f"{stem}-{name}.png"
            FigureCanvasAgg(figure)
            try:
                figure.savefig(path, dpi=160, metadata={"Software": None})
            except OSError as error:
                raise OutputError(f"{path} was not written: {error.strerror or error}.") from error
            paths.append(path)
    return paths


def _require_matplotlib() -> None:
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError:
        raise UsageError(
            "plots need Matplotlib: pip install 'matplotlib>=3.8,<4', or leave out --plots; report.html has the charts."
        ) from None


def _figures(report: Report) -> Iterator[tuple[str, Figure]]:
    if any(site.score and site.score.value is not None for site in report.sites):
        yield "sensitivity", _sensitivity(report)
    if report.fidelity and report.fidelity.blocks:
        yield "blocks", _blocks(report)
    if any(fidelity_of(point) is not None for point in report.frontier or ()):
        yield "frontier", _frontier(report)
    if report.maps:
        yield "maps", _maps(report.maps)
    for name, index in (("latency", 0), ("attention-latency", 1), ("memory", 2), ("attention-memory", 3)):
        if report.bench and bench_rows(report.bench, MEASURES[index]):
            yield name, _curves(report, index)


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_axisbelow(True)
    return figure, axes


def _sensitivity(report: Report) -> Figure:
    sites = [site for site in report.sites if site.score and site.score.value is not None]
    values = [site.score.value or 0.0 for site in sites if site.score]
    figure, axes = _axes(7, 1.2 + 0.24 * len(sites))
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > 100:
        axes.set_xscale("log")
    for converted, label in ((True, "converted"), (False, "kept exact")):
        rows = [i for i, site in enumerate(sites) if site.converted is converted]
        if rows:
            axes.barh(
                rows,
                [values[i] for i in rows],
                color=COLOURS[1] if converted else "white",
                edgecolor=COLOURS[1] if converted else COLOURS[0],
                hatch=None if converted else "////",
                label=label,
            )
    axes.set_yticks(range(len(sites)), [site.name for site in sites], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x")
    axes.set_xlabel("Sensitivity (low is robust)")
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def _blocks(report: Report) -> Figure:
    figure, axes = _axes(7, 3.4)
    blocks = report.fidelity.blocks if report.fidelity else {}
    cosines = [agreement.cosine for agreement in blocks.values()]
    numbers = range(1, len(cosines) + 1)
    axes.plot(numbers, cosines, color="#665e54", linewidth=1)
    for converted, label in ((True, "has a converted site"), (False, "all exact")):
        rows = [
            i
            for i, name in enumerate(blocks)
            if any(site == name or site.startswith(f"{name}.") for site in report.converted) is converted
        ]
        axes.plot(
            [numbers[i] for i in rows],
            [cosines[i] for i in rows],
            linestyle="none",
            marker="o",
            color=COLOURS[1] if converted else COLOURS[0],
            markerfacecolor=COLOURS[1] if converted else "white",
            label=label,
        )
    axes.grid(axis="y")
    axes.set_xlabel("Block")
    axes.set_ylabel("Cosine with the original")
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def _frontier(report: Report) -> Figure:
    figure, axes = _axes(7, 4)
    placed = [(point, value) for point in report.frontier or () if (value := fidelity_of(point)) is not None]
    front = pareto([(100 * point.flops_share, value) for point, value in placed])
    axes.plot(*zip(*front, strict=True), color="#665e54", linewidth=1)
    kinds = list(dict.fromkeys(plan_kind(point) for point, _ in placed))
    for i, kind in enumerate(kinds):
        colour = COLOURS[i % len(COLOURS)]
        for measured in (True, False):
            of_kind = [p for p in placed if plan_kind(p[0]) == kind and (p[0].cosine is not None) is measured]
            if of_kind:
                axes.plot(
                    [100 * point.flops_share for point, _ in of_kind],
                    [value for _, value in of_kind],
                    linestyle="none",
                    marker=MARKERS[i % len(MARKERS)],
                    color=colour,
                    markerfacecolor=colour if measured else "white",
                    label=kind if measured else f"{kind}, predicted",
                )
    chosen = [(100 * point.flops_share, value) for point, value in placed if point.chosen]
    if chosen:
        axes.plot(
            *zip(*chosen, strict=True),
            linestyle="none",
            marker="o",
            markersize=13,
            markerfacecolor="none",
            color="#25211c",
            label="chosen",
        )
    axes.grid()
    axes.set_xlim(left=0)
    axes.set_xlabel("Attention FLOPs, % of exact attention")
    axes.set_ylabel("Cosine")
    figure.legend(loc="outside upper right", ncols=3)
    return figure


def _curves(report: Report, index: int) -> Figure:
    figure, axes = _axes(7, 4)
    measure = MEASURES[index]
    if report.bench:
        for name, pairs in bench_rows(report.bench, measure).items():
            style = list(VARIANTS).index(name)
            axes.plot(
                *zip(*pairs, strict=True),
                color=COLOURS[style],
                marker=MARKERS[style],
                linestyle=DASHES[style],
                label=VARIANTS[name],
            )
        for name, found in measure.crossovers(report.bench).items():
            if found and found.tokens:
                label = f"{name} is faster from {found.tokens:,} on"
                axes.axvline(found.tokens, color="#25211c", linewidth=1, linestyle=(0, (4, 4)), label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        _log_ticks(axes, bench_axes(bench_rows(report.bench, measure)))
    axes.grid()
    axes.set_title(measure.title, loc="left")
    axes.set_xlabel("Tokens")
    axes.set_ylabel(measure.unit)
    figure.legend(loc="outside lower right", ncols=3)
    return figure


def _log_ticks(axes: Axes, scales: tuple[Axis, Axis]) -> None:
    """The logarithmic axes of the page, ticks included."""
    for scale, axis, limit in ((scales[0], axes.xaxis, axes.set_xlim), (scales[1], axes.yaxis, axes.set_ylim)):
        axis.set_ticks(scale.ticks, [f"{tick:,.6g}" for tick in scale.ticks])
        axis.set_ticks([], minor=True)
        limit(scale.low * 0.95, scale.high * 1.05)


def _maps(maps: list[AttentionMap]) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    colours = LinearSegmentedColormap.from_list("latte", [tuple(c / 255 for c in colour) for colour in RAMP])
    figure = Figure(figsize=(3.2 * len(maps), 6.8), layout="constrained")
    grid = figure.subplots(2, len(maps), squeeze=False)
    for column, map_ in enumerate(maps):
        shares = map_.heads[map_.head]
        grid[0, column].set_title(f"{map_.site}\nhead {map_.head + 1}, {shares.moved:.0%} moved", fontsize=8, pad=12)
        for row, (label, heatmap) in enumerate((("softmax", map_.exact), (map_.kernel, map_.converted))):
            axes = grid[row, column]
            axes.imshow(_shares(map_, heatmap) ** 0.5, cmap=colours, vmin=0, vmax=max(heatmap.peak, 1e-12) ** 0.5)
            edge = map_.shape[1] / 32
            for x, y, mark in (
                (heatmap.columns, [-edge] * len(heatmap.columns), "v"),
                ([-edge] * len(heatmap.rows), heatmap.rows, ">"),
            ):
                (marks,) = axes.plot(
                    x, y, mark, color=COLOURS[1], markersize=4, clip_on=False, scalex=False, scaley=False
                )
                marks.set_in_layout(False)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_xlabel("keys", fontsize=8)
            axes.set_ylabel(f"{label}: queries", fontsize=8, labelpad=12)
    return figure


def _shares(map_: AttentionMap, heatmap: Heatmap) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The cells of a map as shares of the attention."""
    levels = np.frombuffer(base64.b64decode(heatmap.levels), dtype=np.uint8).reshape(map_.shape)
    return heatmap.peak * (levels / 255.0) ** 2
