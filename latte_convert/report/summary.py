"""A report in a few lines, for a prompt or a notebook cell."""

from __future__ import annotations

from latte_convert.report import text
from latte_convert.report.compare import flops_share
from latte_convert.report.schema import Report
from latte_convert.report.verdict import worth_of
from latte_convert.wording import rounded_down


def summarise(report: Report) -> str:
    """What was converted, how close it is to the original, what it costs, and whether it is worth it."""
    worth, fidelity = worth_of(report), report.fidelity
    made = report.made if worth else report.made.replace("converted", "would be converted")
    lines = [f"{report.source.model_class}: {made}"]
    if worth and fidelity:
        plural = "" if fidelity.samples == 1 else "s"
        measured = f"{rounded_down(worth.likeness)} {fidelity.least.measure} of {fidelity.primary}"
        lines.append(f"  fidelity  {measured} on {fidelity.samples} held-out sample{plural}")
        share = flops_share(report)
        if share is not None:
            lines.append(f"  FLOPs     {text.percent(share)} of those of exact attention")
        if worth.speedup is not None:
            lines.append(f"  speed     {text.times(worth.speedup)} ({worth.speed_detail})")
        lines.append(f"  verdict   {worth.verdict}")
    if report.warnings:
        lines.append(f"  warnings  {len(report.warnings)}, in report.warnings")
    return "\n".join(lines)
