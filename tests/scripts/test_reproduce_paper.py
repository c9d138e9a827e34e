"""scripts/reproduce_paper.py: the paper's figures, every row offline, and nothing where nothing was measured."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'latte-convert[demo]'")
pytest.importorskip("pycocotools", reason="pycocotools is not installed: pip install 'latte-convert[eval]'")
import reproduce_paper  # noqa: E402
from reproduction.hub_data import CALIBRATION, DATA, rows_of, write_folder  # noqa: E402
from reproduction.rows import ROWS  # noqa: E402

from latte_convert.evaluation.tasks import get_task  # noqa: E402

pytestmark = pytest.mark.slow

BY_NAME = {row.name: row for row in ROWS}
PROVED = ("detr", "siglip", "clip-tte", "clip-sugarcrepe", "clip-eurosat", "roberta")
"""A row of each task, and two that share no model; `--offline-proof` without `--row` runs all."""


@pytest.mark.parametrize(
    ("row", "metric", "latte", "qt_vit"),
    [
        ("detr", "ap", 95.0, 85.5),
        ("rt-detr", "ap", 95.3, 82.9),
        ("clip", "t2i_r5", 97.7, 51.1),
        ("siglip", "t2i_r5", 99.1, 90.2),
    ],
)
def test_the_papers_figures_give_the_retention_that_it_states(row, metric, latte, qt_vit):
    figures = BY_NAME[row].figures[metric]
    assert 100 * figures.latte / figures.original == pytest.approx(latte, abs=0.06)
    assert 100 * figures.qt_vit / figures.original == pytest.approx(qt_vit, abs=0.06)


def test_every_row_can_be_run_as_it_is_written():
    assert len(BY_NAME) == len(ROWS) == 17
    for row in ROWS:
        metrics = {metric.name for metric in get_task(row.task).metrics}
        assert set(row.figures) <= metrics
        assert set(row.data) <= set(DATA)
        assert row.calib in CALIBRATION
        recipe = reproduce_paper.recipe_of(row, "latte")
        assert (recipe.kernel, recipe.scorer, recipe.mse_weight) == ("latte", "paper", 10.0)
        assert recipe.options["exact_prefix"] is False
    assert reproduce_paper.recipe_of(BY_NAME["clip-18-of-24"], "latte").ratio == 0.75
    tte = reproduce_paper.recipe_of(BY_NAME["clip-tte"], "latte")
    assert (tte.options["tte"], tte.options["jpn"], tte.towers) == (True, False, ("vision",))
    assert reproduce_paper.recipe_of(BY_NAME["clip"], "near_far").options == {}
    qt_vit = reproduce_paper.recipe_of(BY_NAME["clip"], "qt_vit")
    assert qt_vit.kernels()[0].options["exact_prefix"] is False


def test_the_ablation_is_of_latte_alone():
    pairs = [(row.name, kernel) for row, kernel in reproduce_paper.runs(["clip", "clip-tte"], ["latte", "qt_vit"])]
    assert pairs == [("clip", "latte"), ("clip", "qt_vit"), ("clip-tte", "latte")]


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    """The folder of a proof of some rows, and of one more in a second run."""
    out = tmp_path_factory.mktemp("proof")
    names = [part for name in PROVED for part in ("--row", name)]
    assert reproduce_paper.main(["--out", str(out), "--offline-proof", *names]) == 0
    return out


def test_the_offline_proof_measures_its_rows_and_no_other(proof):
    document = json.loads((proof / "reproduction.json").read_text())
    assert document["offline_proof"] is True
    for row in document["rows"]:
        assert set(row["ours"]) == ({"latte"} if row["name"] in PROVED else set())
        for run in row["ours"].values():
            assert run["samples"] == reproduce_paper.PROOF_SAMPLES
            assert run["replaced"] is True
            assert set(run["metrics"]) == set(row["figures"])
            assert all(
                0 <= metric[which] <= 1 for metric in run["metrics"].values() for which in ("original", "hybrid")
            )


def test_the_proof_has_the_right_average_precision(proof):
    """The same scenes, without files, rows, tasks: what the training script measures."""
    import train_tiny_detr
    from scenes import render

    model, processor = train_tiny_detr.load(ROOT / "tests" / "models" / "tiny-detr")
    wanted = train_tiny_detr.evaluate(model, processor, [render("heldout", i) for i in range(24)])
    rows = {row["name"]: row for row in json.loads((proof / "reproduction.json").read_text())["rows"]}
    metrics = rows["detr"]["ours"]["latte"]["metrics"]
    assert metrics["ap"]["original"] == pytest.approx(wanted["AP"], abs=1e-6)
    assert metrics["ap50"]["original"] == pytest.approx(wanted["AP50"], abs=1e-6)


def test_the_table_has_ours_beside_the_papers_and_blanks_elsewhere(proof):
    text = (proof / "reproduction.md").read_text()
    assert "say nothing about the paper" in text
    lines = {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in text.splitlines() if "| ap" in line}
    (ap,) = [line for line in lines if line[0] == "detr" and line[2] == "ap"]
    assert ap[3:6] == ("42.0", "35.9", "39.9")
    value = json.loads((proof / "reproduction.json").read_text())["rows"][0]["ours"]["latte"]["metrics"]["ap"]
    assert ap[6:8] == (f"{100 * value['original']:.1f}", f"{100 * value['hybrid']:.1f}")
    (other,) = [line for line in lines if line[0] == "rt-detr" and line[2] == "ap"]
    assert other[3:] == ("49.0", "40.6", "46.7", "", "", "")


def test_results_are_merged_and_a_proof_stays_apart(proof, tmp_path, capsys):
    out = shutil.copytree(proof, tmp_path / "proof")
    before = json.loads((out / "reproduction.json").read_text())
    assert reproduce_paper.main(["--out", str(out), "--offline-proof", "--row", "rt-detr"]) == 0
    after = {row["name"]: row["ours"] for row in json.loads((out / "reproduction.json").read_text())["rows"]}
    assert after.pop("rt-detr")["latte"]["samples"] == 24
    assert after == {row["name"]: row["ours"] for row in before["rows"] if row["name"] != "rt-detr"}
    with pytest.raises(SystemExit, match="holds results of an offline proof"):
        reproduce_paper.main(["--out", str(out), "--row", "roberta"])


def test_without_a_connection_a_row_fails_and_stays_empty(tmp_path, capsys):
    data = tmp_path / "data"
    write_folder(
        DATA["sst2"], [{"text": "a film", "label": "positive"}, {"text": "a plot", "label": "negative"}], data / "sst2"
    )
    arguments = ["--out", str(tmp_path / "out"), "--data", str(data), "--row", "roberta", "--row", "detr"]
    assert reproduce_paper.main(arguments) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in errors if " (latte):" in line] == ["detr (latte)", "roberta (latte)"]
    assert not (tmp_path / "out" / "reproduction.json").exists()


def test_an_unknown_row(capsys):
    with pytest.raises(SystemExit) as error:
        reproduce_paper.main(["--row", "clp"])
    assert error.value.code == 2
    assert "nearest: clip" in capsys.readouterr().err


def test_files_are_the_originals_bytes_and_classes_have_names(tmp_path):
    from datasets import ClassLabel, Dataset, Image

    content = (ROOT / "scripts" / "results" / "report.png").read_bytes()
    rows = Dataset.from_list([{"img": {"bytes": content, "path": None}, "label": 1}])
    rows = rows.cast_column("img", Image()).cast_column("label", ClassLabel(names=["Forest", "AnnualCrop"]))
    write_folder(DATA["cifar10"], rows_of(rows, DATA["cifar10"].columns), tmp_path / "cifar10")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")] == [
        "cifar10/Annual_Crop/000000.png"
    ]
    assert (tmp_path / "cifar10" / "Annual_Crop" / "000000.png").read_bytes() == content
    texts = Dataset.from_list([{"sentence": 'A "film", good', "label": 0}]).cast_column(
        "label", ClassLabel(names=["no"])
    )
    write_folder(DATA["sst2"], rows_of(texts, DATA["sst2"].columns), tmp_path / "sst2")
    with (tmp_path / "sst2" / "texts.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"text": 'A "film", good', "label": "no"}]


def test_a_failed_download_leaves_no_folder(tmp_path):
    def broken():
        yield {"text": "a film", "label": "positive"}
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        write_folder(DATA["sst2"], broken(), tmp_path / "sst2")
    assert not (tmp_path / "sst2").exists()
