"""Tables, bars and the plot, from the JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from comparison.kernels import ENTRIES, RIVALS, place

Row = dict[str, Any]
CLS = "last_hidden_state.prefix"
PATCHES = "last_hidden_state.patches"
NEEDED = 0.75
"""CLS cosine that latte has to reach on DINOv2-S with two thirds of the layers."""
BARS = (
    ("dinov2-392", 8, 1 / 3, {"CLS": 0.995, "patches": 0.993, "task": 0.995}),
    ("dinov2-392", 8, 1 / 6, {"CLS": 0.992, "patches": 0.988}),
    ("dinov2-392", 12, 1 / 3, {"CLS": 0.985, "patches": 0.975}),
    ("dinov2-518", 8, 1 / 4, {"CLS": 0.994, "patches": 0.993}),
    ("whisper", 4, 1 / 5, {"cosine": 0.991}),
    ("dinov2-392", 8, 1 / 2, {"CLS": 0.999, "patches": 0.999, "task": 0.999}),
)
"""Case, layers, FLOPs at most, and what near_far has to reach with them; the last is what it aims at."""


def markdown(results: dict[str, Any]) -> str:
    """All tables: an overview, the bars, then for each case all kernels and the ablations."""
    parts = [overview(results), "\n".join(["**Bars**", "", *bars(results)])]
    for case in results["cases"].values():
        parts.append(main_table(case))
        parts.extend(filter(None, (tte_jpn_table(case), extras_table(case))))
    return "\n\n".join(parts) + "\n"


def overview(results: dict[str, Any]) -> str:
    """The kernels on every case with two thirds of the layers converted: FLOPs, fidelity, task metric."""
    details = {entry.label for entry in ENTRIES if entry.detail}
    cases = {name: rows_of(case, "main") for name, case in results["cases"].items()}
    cases = {name: [row for row in rows if row["kernel"] not in details] for name, rows in cases.items()}
    cases = {name: rows for name, rows in cases.items() if rows}
    at = {name: [row for row in rows if row["sites"] == levels(rows)[-2:][0]] for name, rows in cases.items()}
    heads = [f"{name}, {at[name][0]['sites']} of {at[name][0]['of']}" for name in cases]
    lines = [
        "Two thirds of the layers. In each cell: share of their exact FLOPs, cosine (of CLS / of patches), metric of "
        "the task.",
        "",
        f"| kernel | {' | '.join(heads)} |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for label in sorted({row["kernel"] for rows in cases.values() for row in rows}, key=place):
        own = (next((row for row in rows if row["kernel"] == label), None) for rows in at.values())
        lines.append(f"| {label} | {' | '.join(map(overview_cell, own))} |")
    tasks = "; ".join(f"{name}: {case['metric']}" for name, case in results["cases"].items())
    return "\n".join([*lines, "", f"Tasks: {tasks}."])


def overview_cell(row: Row | None) -> str:
    """FLOPs, fidelity and task of one kernel on one case."""
    if row is None:
        return "-"
    cosines = fidelity_cells([row]).replace(", ", " / ")
    return f"{row['flops_share']:.0%}: {cosines}; {figure(row['task'])}{fallback(row)}"


def fallback(row: Row) -> str:
    """How much of what a row measured ran softmax after all; rows of an older version do not say."""
    share = max(row.get("exact_share", 0.0), row.get("task_exact_share", 0.0))
    return f" ({share:.0%} of calls ran softmax)" if share else ""


def main_table(case: dict[str, Any]) -> str:
    """Every kernel with the figures for each number of layers side by side."""
    rows = rows_of(case, "main")
    counts = levels(rows)
    timings = case.get("timings", {})
    shown = " / ".join(map(str, counts))
    lines = [
        f"**{case['about']}.** {case['metric']}: {figure(case['original_task'])} of the original. "
        f"Slashes: {shown} of {rows[0]['of'] if rows else '?'} layers.",
        "",
        f"| kernel | FLOPs | ms | MiB | {fidelity_heading(rows)} | relative error | {case['metric']} |",
        "|---|---|---|---|---|---|---|",
    ]
    if "exact" in timings:
        lines.append(f"| softmax | 100% | {' | '.join(time_cells(timings['exact']))} | - | - | - |")
    for label in dict.fromkeys(row["kernel"] for row in rows):
        own = [row for row in rows if row["kernel"] == label]
        cells = [
            label,
            f"{own[-1]['flops_share']:.1%}",
            *time_cells(timings.get(label)),
            fidelity_cells(own),
            " / ".join(figure(row["relative_error"]) for row in own),
            " / ".join(figure(row["task"]) for row in own),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tte_jpn_table(case: dict[str, Any]) -> str:
    """The ablation of the source paper."""
    rows = rows_of(case, "tte_jpn")
    if not rows:
        return ""
    same = [row for row in rows_of(case, "main") if row["kernel"] == "latte (paper)"]
    rows = [row for row in same if row["sites"] == rows[0]["sites"]] + rows
    lines = [
        f"latte, {rows[0]['sites']} of {rows[0]['of']} layers:",
        "",
        f"| | error of the fit | {fidelity_heading(rows)} | relative error | {case['metric']} |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        rest = [fidelity_cells([row]), figure(row["relative_error"]), figure(row["task"])]
        lines.append(f"| {row['variant']} | {figure(row['fit_error'])} | {' | '.join(rest)} |")
    return "\n".join(lines)


def extras_table(case: dict[str, Any]) -> str:
    """Kernels against what each of them was given on top."""
    rows = rows_of(case, "extras")
    if not rows:
        return ""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = [
        f"What the extras do, {rows[0]['sites']} of {rows[0]['of']} layers, {rows[0]['held_out']} held-out samples, "
        f"{fidelity_heading(rows)} (both: `exact_prefix` and `sigma`):",
        "",
        f"| kernel | {' | '.join(variants)} |",
        "|---" * (len(variants) + 1) + "|",
    ]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = {row["variant"]: row for row in rows if row["name"] == name}
        cells = [fidelity_cells([own[variant]]) if variant in own else "-" for variant in variants]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bars(results: dict[str, Any]) -> Iterator[str]:
    """What the project wants to be true of the real models, and whether it is."""
    yield from reaches_bars(results["cases"])
    for name, case in results["cases"].items():
        rows = rows_of(case, "main")
        if not case["real"] or not rows:
            continue
        for count in levels(rows):
            at = [row for row in rows if row["sites"] == count]
            yield from beats_monarch(f"{name}, {count} layers", at)
            yield from beats_rivals(f"{name}, {count} layers", at)
        if name.startswith("dinov2"):
            yield from reaches_needed(name, rows)


def reaches_bars(cases: dict[str, Any]) -> Iterator[str]:
    """For each of ``BARS`` the near_far that is nearest to it, or farthest past it."""
    for name, sites, most, wanted in BARS:
        rows = [row for row in rows_of(cases.get(name, {"rows": []}), "main") if row["sites"] == sites]
        rows = [row for row in rows if row["name"] == "near_far" and row["flops_share"] <= most]
        if rows:
            margins = [min(part(row, what) - least for what, least in wanted.items()) for row in rows]
            best = rows[margins.index(max(margins))]
            shown = ", ".join(f"{what} {part(best, what):.4f} (bar {least})" for what, least in wanted.items())
            claim = (
                f"{name}, {sites} layers, at most {most:.0%}: {best['kernel']} at {best['flops_share']:.1%}: {shown}"
            )
            yield line(max(margins) >= 0, claim)


def part(row: Row, what: str) -> float:
    """A figure of a row; what is broken is no good at all."""
    found = {"CLS": row["cosines"].get(CLS), "patches": row["cosines"].get(PATCHES), "task": row["task"]}
    value = found.get(what, row["cosine"])
    return -1.0 if value is None else float(value)


def beats_monarch(where: str, rows: Sequence[Row]) -> Iterator[str]:
    """The best near_far that needs no more FLOPs than monarch, against it."""
    for monarch in (row for row in rows if row["name"] == "monarch"):
        limit = monarch["flops_share"]
        ours = [row for row in rows if row["name"] == "near_far" and row["flops_share"] <= limit]
        if ours:
            best = max(ours, key=cosine)
            claim = f"{where}: {best['kernel']} ({best['flops_share']:.1%} of the FLOPs) {cosine(best):.4f}"
            yield line(
                cosine(best) > cosine(monarch), f"{claim}, {monarch['kernel']} ({limit:.1%}) {cosine(monarch):.4f}"
            )


def beats_rivals(where: str, rows: Sequence[Row]) -> Iterator[str]:
    """Latte with everything free against the best of the rivals."""
    ours = [row for row in rows if row["kernel"] == "latte (all free)"]
    rivals = [row for row in rows if row["name"] in RIVALS]
    if ours and rivals:
        best = max(rivals, key=cosine)
        claim = f"{where}: latte (all free) {cosine(ours[0]):.4f}, best rival {best['kernel']} {cosine(best):.4f}"
        yield line(cosine(ours[0]) > cosine(best), claim)


def reaches_needed(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """The CLS token of latte with everything free."""
    for row in rows:
        if row["kernel"] == "latte (all free)" and row["sites"] == round(2 / 3 * row["of"]):
            found = row["cosines"][CLS] or 0.0
            yield line(found >= NEEDED, f"{name}, {row['sites']} layers: CLS of latte (all free) {found:.3f}")


def line(holds: bool, claim: str) -> str:
    """A claim and whether it holds."""
    return f"- {'yes' if holds else '**no**'}: {claim}"


def plot(results: dict[str, Any], path: Path) -> None:
    """Fidelity against FLOPs with two thirds of the layers converted, a panel a case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in results["cases"].values() if rows_of(case, "main")]
    names = list(dict.fromkeys(series(row) for case in cases for row in rows_of(case, "main")))
    columns = max(1, min(3, len(cases)))
    height = max(1, -(-len(cases) // columns))
    picture, axes = pyplot.subplots(height, columns, figsize=(4.4 * columns, 3.6 * height), squeeze=False)
    for axis in list(axes.flat)[len(cases) :]:
        axis.set_visible(False)
    shown: dict[str, Any] = {}
    for axis, case in zip(axes.flat, cases, strict=False):
        panel(axis, case, names)
        handles, labels = axis.get_legend_handles_labels()
        shown = dict(zip(labels, handles, strict=True)) | shown
    picture.legend([shown[name] for name in names], names, loc="lower center", ncols=6)
    picture.tight_layout(rect=(0, 0.03 + 0.06 / height, 1, 1))
    picture.savefig(path, dpi=120)
    pyplot.close(picture)


def series(row: Row) -> str:
    """What shares a mark in the plot: a kernel, and ``near_far`` with several views apart."""
    views = row.get("options", {}).get("views", 1)
    return f"{row['name']}, {views} views" if views > 1 else str(row["name"])


def panel(axis: Any, case: dict[str, Any], names: Sequence[str]) -> None:
    """One case: a mark for each kernel, higher is better and further left is cheaper."""
    counts = levels(rows_of(case, "main"))
    middle = counts[len(counts) // 2]
    rows = [row for row in rows_of(case, "main") if row["sites"] == middle]
    for i, name in enumerate(names):
        own = [row for row in rows if series(row) == name]
        if own:
            where = [100 * row["flops_share"] for row in own], [max(1 - cosine(row), 1e-6) for row in own]
            axis.plot(*where, marker="osD^vP*X"[i % 8], color=f"C{i % 10}", ls="", alpha=0.8, label=name)
    axis.set(xscale="log", yscale="log", title=case["about"].split(";")[0])
    axis.set(xlabel="attention FLOPs, % of exact", ylabel=f"1 - cosine, {middle} of {rows[0]['of']} layers")
    axis.set_xticks([5, 10, 20, 50, 100, 200, 500], minor=False)
    axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter("{x:.0f}")
    shares = [100 * row["flops_share"] for row in rows]
    axis.set_xlim(0.85 * min(shares), 1.2 * max(shares))
    axis.invert_yaxis()
    axis.grid(alpha=0.3)


def rows_of(case: dict[str, Any], table: str) -> list[Row]:
    """Rows of one table in the order in which they were measured."""
    return [row for row in case["rows"] if row["table"] == table]


def levels(rows: Sequence[Row]) -> list[int]:
    """Numbers of converted sites that rows are about."""
    return sorted({row["sites"] for row in rows})


def cosine(row: Row) -> float:
    """The cosine of a row."""
    return part(row, "cosine")


def figure(value: float | None) -> str:
    """Three digits behind the point; a dash for what was not measured or is no number."""
    return "-" if value is None else f"{value:.3f}"


def fidelity_heading(rows: Sequence[Row]) -> str:
    """What ``fidelity_cells`` shows."""
    return "cosine of CLS, of patches" if rows and CLS in rows[0]["cosines"] else "cosine"


def fidelity_cells(rows: Sequence[Row]) -> str:
    """Cosines of several rows, with CLS and patches apart where a model has them."""
    if CLS not in rows[0]["cosines"]:
        return " / ".join(figure(row["cosine"]) for row in rows)
    return ", ".join(" / ".join(figure(row["cosines"][part]) for row in rows) for part in (CLS, PATCHES))


def time_cells(timings: Row | None) -> tuple[str, str]:
    """Milliseconds and MiB of one call."""
    if timings is None:
        return "-", "-"
    return f"{timings['ms']:.1f}", f"{timings['peak_bytes'] / 2**20:.1f}"
