from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import TensorProto, helper
from PIL import Image

import latte_convert
from latte_convert.errors import DataError
from latte_convert.evaluation.evaluate import evaluate
from latte_convert.evaluation.tasks.saliency import pearson


@pytest.fixture
def decoder(tmp_path):
    """The largest channel of each patch, as ONNX."""
    node = helper.make_node("ReduceMax", ["features"], ["map"], axes=[1], keepdims=0)
    graph = helper.make_graph(
        [node],
        "largest",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", 48, "height", "width"])],
        [helper.make_tensor_value_info("map", TensorProto.FLOAT, ["batch", "height", "width"])],
    )
    path = tmp_path / "largest.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def test_pearson():
    reference = np.array([0.0, 1.0, 2.0, 4.0])
    assert pearson(reference, 3 * reference + 1) == pytest.approx(1.0)
    assert pearson(reference, -reference) == pytest.approx(-1.0)
    # Deviations (-1.75, -.75, .25, 2.25) and (1, -1, -1, 1): products sum to 1, squares to 8.75 and 4.
    assert pearson(reference, np.array([1.0, -1.0, -1.0, 1.0])) == pytest.approx(1 / np.sqrt(8.75 * 4))
    assert pearson(reference, np.ones(4)) == 0.0
    assert np.isnan(pearson(np.ones(4), reference))


@torch.no_grad()
def expected(artifact, source, folder, heat) -> float:
    processor = transformers.AutoImageProcessor.from_pretrained(source)
    models = (transformers.AutoModel.from_pretrained(source).eval(), latte_convert.load(artifact))
    correlations = []
    for path in sorted(folder.rglob("*.jpg")):
        with Image.open(path) as image:
            pixels = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]
        maps = [heat(model(pixels).last_hidden_state[0]).numpy() for model in models]
        correlations.append(np.corrcoef(*maps)[0, 1])
    return float(np.mean(correlations))


def test_patches_like_the_cls_token(dino_artifact, tiny_dino, subjects):
    def heat(tokens):
        return torch.nn.functional.normalize(tokens[1:], dim=1) @ torch.nn.functional.normalize(tokens[0], dim=0)

    found = evaluate(dino_artifact, "saliency", [subjects / "test"], batch_size=5).metrics["pearson"]
    assert found.original == pytest.approx(1.0)
    assert found.hybrid == pytest.approx(expected(dino_artifact, tiny_dino, subjects / "test", heat), abs=1e-4)


def test_a_decoder_of_patch_features(dino_artifact, tiny_dino, subjects, decoder):
    found = evaluate(dino_artifact, "saliency", [subjects / "test"], decoder=decoder).metrics["pearson"]
    wanted = expected(dino_artifact, tiny_dino, subjects / "test", lambda tokens: tokens[1:].amax(1))
    assert found.hybrid == pytest.approx(wanted, abs=1e-4)


def test_no_decoder_of_these_features(dino_artifact, subjects, tmp_path):
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"bad.onnx is no decoder that ONNX Runtime can run"):
        evaluate(dino_artifact, "saliency", [subjects / "test"], decoder=tmp_path / "bad.onnx")
