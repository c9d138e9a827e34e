from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import latte_convert
from latte_convert.errors import DataError, UsageError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.knn import KnnTask
from latte_convert.evaluation.tasks.linear_probe import LinearProbeTask


@torch.no_grad()
def features(model, processor, folder):
    """CLS features and class names, image by image."""
    vectors, names = [], []
    for path in sorted(folder.rglob("*.jpg")):
        with Image.open(path) as image:
            pixels = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]
        vectors.append(model(pixels).last_hidden_state[0, 0].numpy())
        names.append(path.parent.name)
    return np.stack(vectors), names


def vote(train, names, query) -> str:
    """The class with the largest sum of exp(cosine / 0.07) over all neighbours (18 are fewer than 20)."""
    similarity = train @ query / np.linalg.norm(train, axis=1) / np.linalg.norm(query)
    votes: dict[str, float] = {}
    for name, value in zip(names, similarity, strict=True):
        votes[name] = votes.get(name, 0.0) + np.exp(value / 0.07)
    return max(votes, key=lambda name: votes[name])


def test_knn_by_hand(dino_artifact, tiny_dino, subjects):
    report = evaluate(dino_artifact, "knn", [subjects], batch_size=7)
    processor = transformers.AutoImageProcessor.from_pretrained(tiny_dino)
    models = (transformers.AutoModel.from_pretrained(tiny_dino).eval(), latte_convert.load(dino_artifact))
    accuracies = []
    for model in models:
        train, names = features(model, processor, subjects / "train")
        test, wanted = features(model, processor, subjects / "test")
        right = [vote(train, names, query) == name for query, name in zip(test, wanted, strict=True)]
        accuracies.append(np.mean(right))
    found = report.metrics["accuracy"]
    assert (found.original, found.hybrid) == (pytest.approx(accuracies[0]), pytest.approx(accuracies[1]))
    assert report.samples == 12
    assert "own features" in report.note


def test_linear_probe_is_a_softmax_regression(dino_artifact, tiny_dino, subjects):
    report = evaluate(dino_artifact, "linear-probe", [subjects / "train", subjects / "test"])
    processor = transformers.AutoImageProcessor.from_pretrained(tiny_dino)
    model = transformers.AutoModel.from_pretrained(tiny_dino).eval()
    train, names = features(model, processor, subjects / "train")
    test, wanted = features(model, processor, subjects / "test")
    classes = sorted(set(names))
    scale = train.std(0)
    x, z = (torch.tensor((part - train.mean(0)) / scale, dtype=torch.float64) for part in (train, test))
    targets = torch.tensor([classes.index(name) for name in names])
    # The same objective by another solver: cross-entropy summed over samples + |W|^2 / 2, bias free.
    weight = torch.zeros(len(classes), x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(classes), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def objective():
        solver.zero_grad()
        loss = (
            torch.nn.functional.cross_entropy(x @ weight.T + bias, targets, reduction="sum") + weight.square().sum() / 2
        )
        loss.backward()
        return loss

    solver.step(objective)
    guesses = (z @ weight.T + bias).argmax(1)
    accuracy = np.mean([classes[i] == name for i, name in zip(guesses.tolist(), wanted, strict=True)])
    assert report.metrics["accuracy"].original == pytest.approx(accuracy)


@pytest.mark.parametrize("task", [KnnTask, LinearProbeTask])
def test_clusters_are_told_apart(task):
    rng = np.random.default_rng(0)
    centres = np.eye(3, 8) * 5
    targets = np.repeat([0, 1, 2], 10)
    train, test = (centres[targets] + rng.normal(size=(30, 8)) * 0.1 for _ in range(2))
    assert np.array_equal(task.classify(None, train, targets, test), targets)


def test_a_test_class_that_is_not_trained(dino_artifact, subjects, tmp_path):
    root = tmp_path / "data"
    shutil.copytree(subjects, root)
    (root / "test" / "coffee").rename(root / "test" / "tea")
    with pytest.raises(DataError, match=r"test/tea/.*jpg: 'tea' is not one of the 3 classes"):
        evaluate(dino_artifact, "knn", [root])
    shutil.rmtree(root / "train" / "coffee")
    shutil.rmtree(root / "train" / "cat")
    with pytest.raises(DataError, match="images of one class only"):
        evaluate(dino_artifact, "knn", [root])


def test_layouts(dino_artifact, subjects):
    with pytest.raises(DataError, match=r"no folder .*train: 'knn' needs train/CLASS/ and test/CLASS/"):
        evaluate(dino_artifact, "knn", [subjects / "train"])
    with pytest.raises(UsageError, match="one folder with train/ and test/ in it, or those two"):
        evaluate(dino_artifact, "knn", [subjects] * 3)


def test_samples_limits_what_is_tested(dino_artifact, subjects):
    assert evaluate(dino_artifact, "knn", [subjects], samples=5).samples == 5
