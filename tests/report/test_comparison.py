from __future__ import annotations

import pytest
from report.samples import fit, make_evaluation, make_report

from latte_convert.report.compare import Comparison, compare
from latte_convert.report.schema import FlopsReport, Report


def with_flops(report: Report, hybrid: float) -> Report:
    assert report.cost is not None
    flops = FlopsReport(original=100.0, hybrid=hybrid)
    return report.model_copy(update={"cost": report.cost.model_copy(update={"flops": flops})})


def with_retention(retention: float) -> Report:
    return make_report(evaluations=[make_evaluation(retention=retention)])


def test_equal_reports_have_no_regression() -> None:
    found = compare(make_report(), make_report())
    assert found.ok
    assert [change.name for change in found.changes] == [
        "fidelity.last_hidden_state.cosine",
        "fidelity.last_hidden_state.prefix.cosine",
        "fidelity.pooler_output.cosine",
        "cost.flops_share",
    ]
    assert {change.change for change in found.changes} == {0.0}


@pytest.mark.parametrize(
    ("old", "new", "regressions"),
    [
        (make_report(cosine=0.98), make_report(cosine=0.97), 3),
        (make_report(cosine=0.98), make_report(cosine=0.976), 0),  # within the tolerance of 0.005
        (make_report(cosine=0.97), make_report(cosine=0.98), 0),
        (with_flops(make_report(), 40), with_flops(make_report(), 41), 1),
        (with_flops(make_report(), 41), with_flops(make_report(), 40), 0),
        (with_retention(0.98), with_retention(0.96), 1),
        (with_retention(0.96), with_retention(0.98), 0),
        (with_retention(0.98), make_report(), 1),  # no longer measured
        (make_report(), with_retention(0.5), 0),  # nothing to hold it against
        (make_report(), make_report(fidelity=False), 4),
    ],
)
def test_regressions(old: Report, new: Report, regressions: int) -> None:
    found = compare(old, new)
    assert len(found.regressions) == regressions
    assert found.ok == (regressions == 0)
    assert found.regressions == [change.name for change in found.changes if change.regression]


def test_evaluations_of_one_task_are_told_apart_by_their_data() -> None:
    places = [("clothing/",), ("labels.json", "images/"), ("clothing/",)]
    retentions = ([0.9, 0.8, 0.7], [0.9, 0.6, 0.5])
    old, new = (
        make_report(evaluations=[make_evaluation(data=data, retention=r) for data, r in zip(places, each, strict=True)])
        for each in retentions
    )
    found = {c.name: c for c in compare(old, new).changes if c.name.startswith("evaluation")}
    assert {name: (change.old, change.new, change.regression) for name, change in found.items()} == {
        "evaluation.knn[clothing/].top1.retention": (0.9, 0.9, False),
        "evaluation.knn[labels.json, images/].top1.retention": (0.8, 0.6, True),
        "evaluation.knn[clothing/]#2.top1.retention": (0.7, 0.5, True),
    }


def test_tolerance() -> None:
    old, new = make_report(cosine=0.98), make_report(cosine=0.95)
    assert not compare(old, new, tolerance=0.02).ok
    assert compare(old, new, tolerance=0.04).ok


def test_sites() -> None:
    old, new = make_report(convert=8), make_report(convert=8)
    robust = new.converted
    rows = [
        row.model_copy(update={"fit": fit(kernel="monarch")}) if row.name == robust[0] else row for row in new.sites
    ]
    new = new.model_copy(update={"converted": [*robust[:-1], "other"], "sites": rows})
    sites = compare(old, new).sites
    assert (sites.added, sites.removed) == (["other"], [robust[-1]])
    assert [change.model_dump() for change in sites.kernels] == [{"site": robust[0], "old": "latte", "new": "monarch"}]


def test_the_document_is_strict_json_and_reads_back() -> None:
    found = compare(make_report(), make_report(fidelity=False), old_path="a", new_path="b")
    assert Comparison.model_validate_json(found.model_dump_json()) == found
    assert found.schema_version == 1
    assert (found.old.path, found.new.path) == ("a", "b")
