"""``latte eval``: streams, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import latte_convert
from latte_convert.artifact.manifest import read_manifest
from latte_convert.evaluation.result import EvalReport

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def textures(tmp_path_factory) -> Path:
    """Noise of two colours in ``train`` and ``test``, 5 images a class."""
    root, rng = tmp_path_factory.mktemp("textures"), np.random.default_rng(0)
    for split in ("train", "test"):
        for channel, name in enumerate(("red", "green")):
            (root / split / name).mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(0, 90, (56, 56, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def artifact(tiny_dino: Path, textures: Path, tmp_path_factory) -> Path:
    recipe = latte_convert.Recipe(kernel="latte", samples=4, ratio=1.0)
    result = latte_convert.convert(tiny_dino, textures / "train", recipe=recipe)
    return result.save(tmp_path_factory.mktemp("eval") / "hybrid")


def test_results_on_stdout_and_the_table_on_stderr(latte, artifact, textures):
    code, stdout, stderr = latte("eval", artifact, "--task", "knn", "--data", textures)
    assert code == 0
    name, original, hybrid, *kept = stdout.split()
    assert name == "accuracy"
    assert float(original) == 1  # red and green noise are told apart
    assert kept[0] == f"{100 * float(hybrid) / float(original):.2f}%"
    assert "knn on 10 samples (0 skipped, 0 truncated)" in stderr
    assert "accuracy *" in stderr
    assert "own classifier" in stderr
    assert "\x1b" not in stderr


def test_json_is_one_document_and_the_same_in_a_file(latte, artifact, textures, tmp_path):
    out = tmp_path / "eval.json"
    arguments = ("eval", artifact, "--task", "fidelity", "--data", textures / "test", "--json", "--out", out)
    code, stdout, _ = latte(*arguments, "--samples", 4, "--batch-size", 3, "--seed", 5)
    assert code == 0
    content = json.loads(stdout)
    assert json.loads(out.read_text()) == content
    report = EvalReport.model_validate(content)
    assert (report.samples, report.batch_size, report.seed, report.task) == (4, 3, 5, "fidelity")
    assert report.gate is None
    assert report.artifact_fingerprint == read_manifest(artifact).fingerprint
    assert "cosine@encoder.layer.0" in report.metrics
    code, stdout, stderr = latte(*arguments)
    assert (code, stdout) == (3, "")
    assert "exists already" in stderr
    assert latte(*arguments, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latte.json", "is part of the artifact"),
        ("config.json", "is part of the artifact"),
        ("report.json", "holds the report of a conversion"),
    ],
)
def test_what_an_artifact_consists_of_is_never_replaced(latte, artifact, textures, name, message):
    before = (artifact / name).read_bytes()
    arguments = ("eval", artifact, "--task", "knn", "--data", textures, "--out", artifact / name, "--overwrite")
    code, stdout, stderr = latte(*arguments)
    assert (code, stdout) == (3, "")
    assert message in stderr
    assert (artifact / name).read_bytes() == before


def test_a_missed_gate_exits_4_and_still_reports(latte, artifact, textures):
    arguments = ("eval", artifact, "--task", "fidelity", "--data", textures / "test", "--json", "--fail-under")
    code, stdout, stderr = latte(*arguments, 1.0)
    assert code == 4
    assert json.loads(stdout)["gate"] == {"metric": "likeness", "fail_under": 1.0, "passed": False}
    assert "retention of likeness is 0." in stderr
    assert "below the 1 asked for" in stderr
    code, stdout, _ = latte(*arguments, 0.0, "--metric", "cosine@encoder.layer.0")
    assert code == 0
    assert json.loads(stdout)["gate"] == {"metric": "cosine@encoder.layer.0", "fail_under": 0.0, "passed": True}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--task", "knn", "--data", "{textures}/none"), 3, "no such file or folder"),
        (("--task", "knm", "--data", "{textures}"), 2, "unknown task 'knm'"),
        (("--task", "knn", "--data", "{textures}", "--metric", "map"), 2, "no metric 'map'"),
        (("--task", "knn", "--data", "{textures}", "--samples", "1"), 2, "--samples"),
        (("--task", "knn", "--data", "{textures}", "--out", "x.html"), 2, "--out takes a .json file"),
        (("--task", "knn", "--data", "{textures}", "--fail-under", "nan"), 2, "fail-under"),
        (("--task", "knn", "--data", "{textures}", "--fail-under", "inf"), 2, "fail_under must be a finite"),
        (("--task", "knn", "--data", "{textures}", "--templates", "x"), 2, "templates is for task 'zero-shot'"),
        (("--task", "knn", "--data", "{textures}", "--decoder", "x"), 2, "decoder is for task 'saliency'"),
        (("--task", "saliency", "--data", "{textures}/test", "--decoder", "x.onnx"), 3, "no such file"),
        (("--task", "knn"), 2, "--data"),
    ],
)
def test_mistakes(latte, artifact, textures, arguments, code, message):
    found, stdout, stderr = latte("eval", artifact, *(str(a).format(textures=textures) for a in arguments))
    assert (found, stdout) == (code, "")
    assert message in stderr


def test_no_artifact(latte, textures, tmp_path):
    code, _, stderr = latte("eval", tmp_path / "none", "--task", "knn", "--data", textures)
    assert code == 3
    assert "there is no artifact at" in stderr
    code, _, stderr = latte("eval", tmp_path, "--task", "knn", "--data", textures)
    assert code == 5
    assert "latte.json" in stderr


def test_the_published_schema_is_that_of_the_document(latte, artifact, textures):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(latte("schema", "eval")[1])
    document = json.loads(latte("eval", artifact, "--task", "knn", "--data", textures, "--json")[1])
    jsonschema.validate(document, schema)
    document["metrics"]["accuracy"]["original"] = "much"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)
