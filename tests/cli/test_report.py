"""``latte report``: pages rebuilt and compared from what artifacts record, without a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from report.samples import make_bench, make_evaluation, make_report, write_artifact

from latte_convert.report.read import read_report
from latte_convert.report.schema import Report
from latte_convert.report.write import write_report

Latte = Callable[..., tuple[int, str, str]]


@pytest.fixture
def latte(latte: Latte) -> Latte:
    """``latte report``."""
    return partial(latte, "report")


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    path = write_artifact(tmp_path / "hybrid", make_report())
    (path / "bench.json").write_text(make_bench().model_dump_json())
    (path / "eval-knn.json").write_text(make_evaluation().model_dump_json())
    return path


def test_rebuilds_in_place_with_what_was_measured_since(latte: Latte, hybrid: Path) -> None:
    code, out, err = latte(hybrid)
    assert code == 0
    assert err.splitlines()[-1] == f"next: latte bench {hybrid} --write"
    assert out.split() == [str(hybrid / "report.html"), str(hybrid / "report.json")]
    page = (hybrid / "report.html").read_text(encoding="utf-8")
    assert "Speed and memory over lengths" in page
    assert "98.6 % retained" in page
    saved = Report.model_validate_json((hybrid / "report.json").read_text(encoding="utf-8"))
    assert saved.bench == make_bench()
    first = page
    assert latte(hybrid)[0] == 0
    assert (hybrid / "report.html").read_text(encoding="utf-8") == first, "a second time changes nothing"


def test_a_result_of_another_artifact_is_left_out_with_a_warning(latte: Latte, hybrid: Path, tmp_path: Path) -> None:
    other = write_artifact(tmp_path / "other", make_report(), files={"model.safetensors": "0"})
    copied = other / "eval-knn.json"
    copied.write_bytes((hybrid / "eval-knn.json").read_bytes())
    code, _, err = latte(other)
    assert code == 0
    assert err.startswith(f"warning: a result in {copied} was measured on another artifact")
    assert "98.6 % retained" not in (other / "report.html").read_text(encoding="utf-8")
    code, out, err = latte("--compare", hybrid, other)
    assert (code, json.loads(out)["regressions"]) == (4, ["evaluation.knn[clothing/].top1.retention"])
    assert str(copied) in err


def test_out_and_json(latte: Latte, hybrid: Path, tmp_path: Path) -> None:
    page = tmp_path / "site" / "dino.html"
    code, out, _ = latte(hybrid, "--out", page, "--json")
    assert (code, json.loads(out)) == (0, {"written": [str(page), str(page.with_suffix(".json"))]})
    assert not (hybrid / "report.html").exists()
    code, _, err = latte(hybrid, "--out", page)
    assert code == 3
    assert "--overwrite" in err
    assert latte(hybrid, "--out", page, "--overwrite")[0] == 0


def test_nothing_beside_the_page_is_replaced_either(latte: Latte, hybrid: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.with_suffix(".json").write_text("mine")
    (tmp_path / "other-sensitivity.png").write_text("mine")
    for target, options in ((page, ()), (tmp_path / "other.html", ("--plots",))):
        code, out, err = latte(hybrid, "--out", target, *options)
        assert (code, out) == (3, "")
        assert "exists already" in err
        assert not target.exists()
    assert page.with_suffix(".json").read_text() == "mine"
    assert (tmp_path / "other-sensitivity.png").read_text() == "mine"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("latte.html", "latte.json is part of the artifact it lies in"),
        ("sub/config.html", "config.json is part of the artifact it lies in"),
        ("eval-knn.html", "eval-knn.json holds what 'latte eval' measured"),
        ("bench.html", "bench.json holds what 'latte bench' measured"),
    ],
)
def test_what_an_artifact_consists_of_is_never_replaced(latte: Latte, tmp_path: Path, page: str, message: str) -> None:
    hybrid = write_artifact(
        tmp_path / "hybrid", make_report(), files={"model.safetensors": "0", "sub/config.json": "1"}
    )
    (hybrid / "sub").mkdir()
    (hybrid / "sub" / "config.json").write_text("{}")
    (hybrid / "eval-knn.json").write_text(make_evaluation().model_dump_json())
    (hybrid / "bench.json").write_text(make_bench().model_dump_json())
    before = {path: path.read_bytes() for path in hybrid.rglob("*.json")}
    for options in ((), ("--overwrite",)):
        code, out, err = latte(hybrid, "--out", hybrid / page, *options)
        assert (code, out) == (3, "")
        assert message in err
    assert {path: path.read_bytes() for path in hybrid.rglob("*.json")} == before
    assert not (hybrid / page).exists()


def test_a_report_of_another_artifact_is_not_believed(latte: Latte, hybrid: Path, tmp_path: Path) -> None:
    foreign = make_report(cosine=0.9999, artifact_fingerprint="0" * 64)
    path = write_artifact(tmp_path / "copied", foreign)
    for arguments in ((path,), ("--compare", hybrid, path), ("--compare", hybrid, path / "report.json")):
        code, out, err = latte(*arguments)
        assert (code, out) == (3, "")
        assert f"{path / 'report.json'} is of another artifact" in err


def test_results_that_only_the_report_holds_are_not_lost(latte: Latte, tmp_path: Path) -> None:
    foreign = [make_evaluation(task=task).model_copy(update={"artifact_fingerprint": None}) for task in ("knn", "sts")]
    hybrid = write_artifact(tmp_path / "hybrid", make_report(evaluations=foreign))
    before = (hybrid / "report.json").read_bytes()
    for options in ((), ("--out", hybrid / "report.html", "--overwrite")):
        code, out, err = latte(hybrid, *options)
        assert (code, out) == (3, "")
        assert err.count("warning: ") == 1
        assert "would be lost (knn on clothing/; sts on clothing/)" in err
        assert (hybrid / "report.json").read_bytes() == before
    assert latte(hybrid, "--out", tmp_path / "page.html")[0] == 0
    (hybrid / "eval-knn.json").write_text(make_evaluation().model_dump_json())  # measured again
    (hybrid / "eval-old.json").write_text(foreign[1].model_dump_json())  # kept in a file
    assert latte(hybrid)[0] == 0
    assert Report.model_validate_json((hybrid / "report.json").read_bytes()).evaluations == [make_evaluation()]


def test_the_page_of_a_file_lies_beside_it(latte: Latte, hybrid: Path) -> None:
    before = (hybrid / "report.json").read_bytes()
    older = hybrid / "older.json"
    write_report(make_report(cosine=0.9), older)
    code, out, _ = latte(older)
    assert (code, out.split()) == (0, [str(older.with_suffix(".html")), str(older)])
    assert (hybrid / "report.json").read_bytes() == before


def test_an_out_that_cannot_be_written(latte: Latte, hybrid: Path) -> None:
    code, out, err = latte(hybrid, "--out", hybrid / "report.json" / "page.html")
    assert (code, out) == (3, "")
    assert "report.json is not a folder" in err


def test_plots(latte: Latte, hybrid: Path) -> None:
    pytest.importorskip("resvg_py")
    code, out, _ = latte(hybrid, "--plots")
    assert code == 0
    assert {Path(line).name for line in out.split()} == {path.name for path in hybrid.glob("report*")}
    assert len(list(hybrid.glob("report-*.png"))) == 6


def test_several_side_by_side(latte: Latte, hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_artifact(tmp_path / "careful", make_report(convert=4))
    monkeypatch.chdir(tmp_path)
    code, out, _ = latte(hybrid, other)
    assert (code, out) == (0, "report.html\n")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "2 artifacts side by side" in page
    assert 'class="wrap">careful<' in page
    assert latte(hybrid, other)[0] == 3, "a page that is there is not replaced"


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (1, ["--out", "page.txt"], "takes an .html file"),
        (1, ["--compare"], "takes two reports, OLD and NEW, not 1"),
        (3, ["--compare"], "takes two reports, OLD and NEW, not 3"),
        (2, ["--plots"], "is for one artifact"),
        (2, [], "is given twice"),
        (2, ["--compare", "--out", "page.html"], "writes no page"),
        (2, ["--compare", "--tolerance", "inf"], "--tolerance takes a share"),
    ],
)
def test_usage(latte: Latte, hybrid: Path, count: int, options: list[str], message: str) -> None:
    code, out, err = latte(*[hybrid] * count, *options)
    assert (code, out) == (2, "")
    assert message in err


class TestCompare:
    def test_no_regression(self, latte: Latte, hybrid: Path) -> None:
        code, out, _ = latte("--compare", hybrid, hybrid / "report.json", "--tolerance", 1)
        document = json.loads(out)
        assert document["regressions"] == ["evaluation.knn[clothing/].top1.retention"], (
            "the file alone has no evaluation"
        )
        assert code == 4
        code, out, _ = latte("--compare", hybrid, hybrid)
        assert (code, json.loads(out)["ok"]) == (0, True)

    def test_hybrids_of_different_models(self, latte: Latte, hybrid: Path, tmp_path: Path) -> None:
        report = make_report()
        source = report.source.model_copy(update={"model_class": "BertModel"})
        other = write_artifact(tmp_path / "other", report.model_copy(update={"source": source}))
        code, out, err = latte("--compare", hybrid, other)
        assert (code, out) == (3, "")
        assert "takes two hybrids of one model" in err

    def test_regression(self, latte: Latte, hybrid: Path, tmp_path: Path) -> None:
        worse = write_artifact(tmp_path / "worse", make_report(cosine=0.9))
        code, out, err = latte(hybrid / "report.json", worse, "--compare")
        assert code == 4
        assert not json.loads(out)["ok"]
        assert "fidelity.last_hidden_state.cosine" in err
        assert latte(hybrid / "report.json", worse, "--compare", "--tolerance", 0.05)[0] == 0

    @pytest.mark.parametrize("content", [None, "{", '{"schema_version": 9}', "[]"])
    def test_what_is_no_report(self, latte: Latte, hybrid: Path, tmp_path: Path, content: str | None) -> None:
        path = tmp_path / "other.json"
        if content is not None:
            path.write_text(content)
        code, out, err = latte("--compare", hybrid, path)
        assert (code, out) == (3, "")
        assert str(path) in err


def test_reading_runs_no_model(hybrid: Path) -> None:
    import subprocess

    program = (
        "import sys; from pathlib import Path; from latte_convert.report.read import read_report; "
        f"read_report(Path({str(hybrid)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert read_report(hybrid).evaluations == [make_evaluation()]
