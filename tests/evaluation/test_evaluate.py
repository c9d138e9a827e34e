from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import latte_convert
from latte_convert.artifact.load import open_artifact
from latte_convert.errors import CheckpointError, DataError, GateError, InputError, UsageError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exact_artifact(tiny_dino, subjects, tmp_path_factory):
    """A hybrid that runs its exact branch throughout."""
    recipe = Recipe(kernel="latte", samples=4, k=2, min_tokens=10_000)
    return latte_convert.convert(tiny_dino, subjects / "train", recipe=recipe).save(tmp_path_factory.mktemp("e") / "h")


@pytest.fixture
def few(subjects, tmp_path):
    """Two images of two classes for training, and as many to test."""
    for split in ("train", "test"):
        for name in ("cat", "coffee"):
            (tmp_path / split / name).mkdir(parents=True)
            for path in sorted((subjects / split / name).iterdir())[:2]:
                shutil.copy(path, tmp_path / split / name)
    return tmp_path


def test_a_task_that_does_not_fit_says_which_do(dino_artifact, sentences):
    with pytest.raises(
        InputError, match=r"'sts' does not fit Dinov2Model: it takes image, not text.*fidelity, knn, linear-probe, sal"
    ):
        evaluate(dino_artifact, "sts", [sentences])


def test_names_that_do_not_exist(dino_artifact, few):
    with pytest.raises(UsageError, match=r"unknown task 'linear-prob'.*nearest: linear-probe"):
        evaluate(dino_artifact, "linear-prob", [few])
    with pytest.raises(UsageError, match=r"no metric 'top5'.*accuracy"):
        evaluate(dino_artifact, "knn", [few], metric="top5")
    with pytest.raises(UsageError, match="no metric 'cosine@nowhere'"):
        evaluate(dino_artifact, "fidelity", [few / "test"], metric="cosine@nowhere")
    with pytest.raises(CheckpointError, match="no artifact at"):
        evaluate(few / "none", "knn", [few])
    with pytest.raises(DataError, match="no such file or folder"):
        evaluate(dino_artifact, "knn", [few / "none"])


def test_a_hybrid_on_its_exact_branch_retains_all(exact_artifact, few):
    for task, metric in (("fidelity", "cosine"), ("saliency", "pearson")):
        report = evaluate(exact_artifact, task, [few / "test"], batch_size=3)
        assert report.metrics[metric].retention == pytest.approx(1.0, abs=1e-6)
        assert len(report.exact_sites) == 2
        assert report.exact_share == 1.0
        assert report.metrics[metric].reason == "the interval has no width: every resample keeps the same share"
    report = evaluate(exact_artifact, "knn", [few])
    accuracy = report.metrics["accuracy"]
    assert accuracy.original == accuracy.hybrid
    assert report.samples == 4


def test_the_batch_size_changes_nothing(dino_artifact, few):
    one, five = (
        evaluate(dino_artifact, "fidelity", [few / "test"], batch_size=size).metrics["cosine"] for size in (1, 5)
    )
    assert one.hybrid == pytest.approx(five.hybrid, abs=1e-5)
    assert one.interval == pytest.approx(five.interval, abs=1e-4)


def test_damaged_images_are_skipped_by_name(dino_artifact, few):
    (few / "test" / "cat" / "broken.jpg").write_bytes(b"no image")
    report = evaluate(dino_artifact, "knn", [few])
    assert [(item.id, item.reason) for item in report.skipped] == [
        ("test/cat/broken.jpg", "not an image, or of a format Pillow cannot read")
    ]
    assert report.samples == 4


def test_one_sample_is_refused(dino_artifact, few):
    for path in list((few / "test").rglob("*.jpg"))[1:]:
        path.unlink()
    with pytest.raises(DataError, match="1 usable sample; a metric needs at least 2"):
        evaluate(dino_artifact, "knn", [few])
    with pytest.raises(DataError, match="1 usable sample; a metric needs at least 2"):
        evaluate(dino_artifact, "fidelity", [few / "test"])


def test_an_undefined_metric_is_an_error_and_no_nan(minilm_artifact, tmp_path):
    path = tmp_path / "same.csv"
    path.write_text("s1,s2,score\nA man runs,A man walks,3\nA cat sits,A dog sits,3\n")
    with pytest.raises(DataError, match=r"same.csv: spearman of the original is undefined on these 2 samples"):
        evaluate(minilm_artifact, "sts", [path])


def test_a_hybrid_that_is_not_finite_is_named(dino_artifact, few, monkeypatch):
    from latte_convert.kernels.latte.kernel import LatteKernel

    attend = LatteKernel.attend
    monkeypatch.setattr(LatteKernel, "attend", lambda *args, **kwargs: attend(*args, **kwargs) * np.nan)
    with pytest.raises(GateError, match=r"hybrid's output is not finite on .*\.jpg"):
        evaluate(dino_artifact, "fidelity", [few / "test"])


def test_a_task_beside_the_converted_tower(tiny_clip, subjects, sentences, tmp_path):
    result = latte_convert.convert(
        tiny_clip, subjects / "train", recipe=Recipe(kernel="latte", samples=4, ratio=1.0, towers=("vision",))
    )
    out = result.save(tmp_path / "hybrid")
    with pytest.raises(InputError, match="'sts' runs none of the converted sites"):
        evaluate(out, "sts", [sentences])
    report = evaluate(out, "fidelity", [subjects / "test", sentences], samples=3)
    assert report.samples == 6
    assert (report.exact_sites, report.unused_sites, report.exact_share) == ([], [], 0.0)
    assert report.metrics["cosine@text.pooler_output"].hybrid == pytest.approx(1.0, abs=1e-6)
    assert report.metrics["cosine"].hybrid == report.metrics["cosine@image.pooler_output"].hybrid < 1


@torch.no_grad()
def test_both_models_are_left_as_they_were(dino_artifact):
    artifact = open_artifact(dino_artifact)
    pixels = torch.randn(2, 3, 56, 56)
    before = artifact.model(pixels).last_hidden_state
    with artifact.convert():
        hybrid = artifact.model(pixels).last_hidden_state
    assert torch.equal(artifact.model(pixels).last_hidden_state, before)
    assert torch.equal(latte_convert.load(dino_artifact)(pixels).last_hidden_state, hybrid)
    assert not torch.allclose(hybrid, before, atol=1e-3)


def test_what_the_original_does_not_run_on_is_skipped_by_name(dino_artifact, few, tmp_path, monkeypatch):
    """A batch with such a sample is run sample by sample, and the others count."""
    root = tmp_path / "images"
    shutil.copytree(few / "test", root)
    whole = evaluate(dino_artifact, "fidelity", [few / "test"], batch_size=3)
    Image.new("RGB", (180, 180), (1, 2, 3)).save(root / "blue.png")
    forward = transformers.Dinov2Model.forward

    def fussy(self, pixel_values, **kwargs):
        if any(float(image.std(dim=(-1, -2)).max()) < 1e-6 for image in pixel_values):
            raise RuntimeError("kernel size can't be greater than actual input size")
        return forward(self, pixel_values, **kwargs)

    monkeypatch.setattr(transformers.Dinov2Model, "forward", fussy)
    report = evaluate(dino_artifact, "fidelity", [root], batch_size=100)
    assert report.samples == whole.samples
    assert [item.id for item in report.skipped] == ["blue.png"]
    assert "Dinov2Model does not run on it: kernel size can't" in report.skipped[0].reason
    for name, metric in whole.metrics.items():
        assert report.metrics[name].hybrid == pytest.approx(metric.hybrid, abs=1e-4)
