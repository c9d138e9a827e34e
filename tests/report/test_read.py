from __future__ import annotations

import json
from pathlib import Path

import pytest
from report.samples import make_bench, make_evaluation, make_full, make_report

from latte_convert.errors import InputError
from latte_convert.report.read import read_report
from latte_convert.report.schema import Report
from latte_convert.report.write import write_report


def test_a_report_without_the_new_sections_reads(tmp_path: Path) -> None:
    content = make_report().model_dump(mode="json")
    for section in ("frontier", "maps", "stripes", "bench", "evaluations"):
        del content[section]
    (tmp_path / "report.json").write_text(json.dumps(content))
    assert read_report(tmp_path) == make_report()


def test_every_section_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(make_full(), path)
    assert read_report(path) == make_full()


def test_an_artifact_gains_what_bench_and_eval_wrote(tmp_path: Path) -> None:
    write_report(make_report(), tmp_path / "report.json")
    (tmp_path / "bench.json").write_text(make_bench().model_dump_json())
    for task in ("sts", "knn"):
        (tmp_path / f"eval-{task}.json").write_text(make_evaluation(task=task).model_dump_json())
    report = read_report(tmp_path)
    assert report.bench == make_bench()
    assert report.evaluations is not None
    assert [evaluation.task for evaluation in report.evaluations] == ["knn", "sts"]
    assert read_report(tmp_path / "report.json") == make_report(), "a file stands for itself"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no .*report.json"),
        ("{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        ('{"schema_version": ' + "9" * 5000 + "}", "cannot be read as JSON"),
        ("[]", "no schema_version"),
        ('{"a": 1}', "no schema_version"),
        ('{"schema_version": 2}', "version 2 of the schema; this latte_convert reads version 1"),
        ('{"schema_version": 1}', "not a report of this kind: tool_version: Field required"),
    ],
)
def test_what_is_no_report(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "report.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=message) as caught:
        read_report(tmp_path)
    assert caught.value.exit_code == 3


def test_a_damaged_bench_is_named(tmp_path: Path) -> None:
    write_report(make_report(), tmp_path / "report.json")
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(InputError, match=r"bench\.json is not a report"):
        read_report(tmp_path)


@pytest.mark.parametrize("name", ["bench.json", "eval-knn.json"])
def test_what_was_measured_of_another_model_is_named(tmp_path: Path, name: str) -> None:
    write_report(make_report(), tmp_path / "report.json")
    found = make_bench() if name == "bench.json" else make_evaluation()
    (tmp_path / name).write_text(found.model_copy(update={"source": "other/model"}).model_dump_json())
    with pytest.raises(InputError, match=rf"{name} is of a hybrid of 'other/model', this artifact is one of 'facebook"):
        read_report(tmp_path)


def test_json_schema_accepts_a_full_report() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(Report.model_json_schema()).validate(make_full().model_dump(mode="json"))
