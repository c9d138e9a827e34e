from __future__ import annotations

import math

import pytest
import torch
import transformers
from PIL import Image

import latte_convert
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.fidelity import FidelityTask


@torch.no_grad()
def test_cosine_and_error_of_output_and_block(dino_artifact, tiny_dino, subjects):
    report = evaluate(dino_artifact, "fidelity", [subjects / "test"], batch_size=5)
    processor = transformers.AutoImageProcessor.from_pretrained(tiny_dino)
    models = (transformers.AutoModel.from_pretrained(tiny_dino).eval(), latte_convert.load(dino_artifact))
    last, block = [], []
    for path in sorted((subjects / "test").rglob("*.jpg")):
        with Image.open(path) as image:
            pixels = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]
        states = [model(pixels, output_hidden_states=True) for model in models]
        last.append([state.last_hidden_state[0].double() for state in states])
        block.append([state.hidden_states[3][0].double() for state in states])
    for name, pairs in (("last_hidden_state", last), ("encoder.layer.2", block)):
        a, b = (torch.cat(part) for part in zip(*pairs, strict=True))
        cosine = report.metrics[f"cosine@{name}"].hybrid
        assert cosine == pytest.approx(float(torch.cosine_similarity(a, b).mean()), abs=1e-5)
        error = report.metrics[f"relative_error@{name}"]
        assert error.original == 0
        assert error.hybrid == pytest.approx(float((a - b).norm() / a.norm()), abs=1e-4)
        assert error.retention == pytest.approx(1 - error.hybrid)
    assert report.metrics["cosine"] == report.metrics["cosine@last_hidden_state"]
    assert report.metrics["cosine"].original == pytest.approx(1.0)
    assert report.metrics["cosine@last_hidden_state.prefix"].hybrid < 1
    assert not [name for name in report.metrics if name.startswith("top1")]  # these features are no logits


@torch.no_grad()
def test_top1_agreement_of_a_classifier(subjects, tmp_path):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48, image_size=48, patch_size=8,
        num_labels=5,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).eval()
    for name, parameter in model.named_parameters():
        if "attention" in name and name.endswith("weight"):
            parameter.mul_(25)
    source = tmp_path / "vit"
    model.save_pretrained(source)
    processor = transformers.ViTImageProcessor(size={"height": 48, "width": 48})
    processor.save_pretrained(source)
    recipe = latte_convert.Recipe(kernel="latte", samples=4, ratio=1.0)
    hybrid = latte_convert.convert(source, subjects / "train", recipe=recipe).save(tmp_path / "hybrid")
    report = evaluate(hybrid, "fidelity", [subjects / "test"])
    guesses = []
    for one in (model, latte_convert.load(hybrid)):
        pixels = []
        for path in sorted((subjects / "test").rglob("*.jpg")):
            with Image.open(path) as image:
                pixels.append(processor(image.convert("RGB"), return_tensors="pt")["pixel_values"])
        guesses.append(one(torch.cat(pixels)).logits.argmax(-1))
    assert report.metrics["top1"].hybrid == pytest.approx(float((guesses[0] == guesses[1]).float().mean()))
    assert report.metrics["cosine"] == report.metrics["cosine@logits"]
    assert report.primary == "likeness"
    assert report.metrics["likeness"].interval is not None


def test_every_final_output_is_measured_by_what_fits_it_and_the_worst_counts():
    """Boxes that move by half their width have a cosine of nearly 1; a third of them is shared."""
    logits = torch.tensor([[[4.0, 1.0], [1.0, 4.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.1, 0.1], [0.2, 0.8, 0.1, 0.1]]])
    before = {"logits": logits, "pred_boxes": boxes, "encoder.0": torch.ones(1, 3, 2)}
    after = {**before, "logits": logits.flip(-1), "pred_boxes": boxes + torch.tensor([0.05, 0.0, 0.0, 0.0])}
    task = object.__new__(FidelityTask)
    task._model, task._primaries = torch.nn.Identity(), {"logits": None, "pred_boxes": None}
    for other, worst, right in (
        (after, "logits", 2 / (1 + math.exp(3))),
        ({**after, "logits": logits}, "pred_boxes", 1 / 3),
    ):
        original, hybrid = task.compare([before, before], [other, other])
        scores = task.score(task.records([], hybrid))
        assert scores["likeness"] == scores[f"likeness@{worst}"] == pytest.approx(right)
        assert scores["likeness@pred_boxes"] == pytest.approx(1 / 3)
        assert scores["cosine@pred_boxes"] > 0.99
        assert "likeness@encoder.0" not in scores
        assert task.score(task.records([], original))["likeness"] == 1
