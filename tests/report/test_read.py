from __future__ import annotations

import json
from pathlib import Path

import pytest
from report.samples import HEX, make_bench, make_evaluation, make_full, make_manifest, make_report, write_artifact

from latte_convert.errors import InputError, IntegrityError
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


def test_an_artifact_gains_what_bench_and_eval_wrote(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_artifact(tmp_path / "hybrid", make_report())
    (path / "bench.json").write_text(make_bench().model_dump_json())
    for task in ("sts", "knn"):
        (path / f"eval-{task}.json").write_text(make_evaluation(task=task).model_dump_json())
    report = read_report(path)
    assert report.bench == make_bench()
    assert report.evaluations is not None
    assert [evaluation.task for evaluation in report.evaluations] == ["knn", "sts"]
    assert read_report(path / "report.json") == make_report(), "a file stands for itself"
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["bench.json", "eval-knn.json"])
@pytest.mark.parametrize("fingerprint", [HEX, None], ids=["another", "not recorded"])
def test_what_another_artifact_left_is_no_part_of_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, fingerprint: str | None
) -> None:
    path = write_artifact(tmp_path / "hybrid", make_report())
    found = make_bench() if name == "bench.json" else make_evaluation()
    (path / name).write_text(found.model_copy(update={"artifact_fingerprint": fingerprint}).model_dump_json())
    (path / "eval-sts.json").write_text(make_evaluation(task="sts").model_dump_json())
    report = read_report(path)
    assert report.bench is None
    assert report.evaluations == [make_evaluation(task="sts")]
    [warning] = caplog.messages
    assert f"a result in {path / name} was measured on another artifact" in warning


def test_a_report_that_holds_results_of_another_artifact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As an older version left it. What is of this artifact stays."""
    foreign = make_bench().model_copy(update={"artifact_fingerprint": None})
    path = write_artifact(tmp_path / "hybrid", make_full().model_copy(update={"bench": foreign}))
    report = read_report(path)
    assert report.bench is None
    assert report.evaluations == make_full().evaluations
    assert [str(path / "report.json") in message for message in caplog.messages] == [True]


def test_the_stored_min_tokens_joins_the_report(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "hybrid", make_report(), min_tokens=856)
    assert read_report(path).min_tokens == 856


def test_a_report_of_another_artifact(tmp_path: Path) -> None:
    own = make_report(artifact_fingerprint=make_manifest().fingerprint)
    path = write_artifact(tmp_path / "hybrid", own)
    assert read_report(path / "report.json") == own
    assert read_report(path) == own.model_copy(update={"min_tokens": 0})
    foreign = make_report(artifact_fingerprint=HEX)
    write_report(foreign, path / "report.json")
    for place in (path, path / "report.json"):
        with pytest.raises(InputError, match=r"report\.json is of another artifact than the latte\.json beside it"):
            read_report(place)
    write_report(foreign, path / "last.json")
    assert read_report(path / "last.json") == foreign, "under any other name it is kept for a comparison"


def test_a_report_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    for place in (tmp_path, tmp_path / "report.json"):
        with pytest.raises(InputError, match=r"/report\.json: it is a folder") as caught:
            read_report(place)
        assert "report.json/report.json" not in str(caught.value)


def test_a_report_that_was_kept_without_its_artifact(tmp_path: Path) -> None:
    write_report(make_full(), tmp_path / "report.json")
    assert read_report(tmp_path) == make_full()
    (tmp_path / "eval-knn.json").write_text(make_evaluation().model_dump_json())
    with pytest.raises(IntegrityError, match=r"it has no latte\.json"):
        read_report(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no .*report.json"),
        ("{", "report.json:1: not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        ('{"schema_version": ' + "9" * 5000 + "}", "thousands of digits"),
        ("[]", "no schema_version"),
        ('{"a": 1}', "no schema_version"),
        ('{"schema_version": "1"}', "its schema_version is not a whole number"),
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
    path = write_artifact(tmp_path / "hybrid", make_report())
    (path / "bench.json").write_text("{}")
    with pytest.raises(InputError, match=r"bench\.json is not a report"):
        read_report(path)


def test_json_schema_accepts_a_full_report() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(Report.model_json_schema()).validate(make_full().model_dump(mode="json"))
