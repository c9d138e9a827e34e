"""Hybrids of each family as ONNX files, run with ONNX Runtime and NumPy alone; and what is refused, with its reason."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import open_clip_models
import pytest
import small_checkpoints
import timm_models
import torch
import transformers
from torch import Tensor

import latte_convert

MODELS = Path(__file__).parents[1] / "models"
CLUSTERED = {"kernel": "near_far", "options": {"window": 2, "halo": 1, "clusters": 8, "far": "clustered"}}
STRANGER = """
import json, sys
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
for turn in json.loads(sys.argv[2]):
    found = session.run(None, dict(np.load(f"in-{turn}.npz")))
    np.savez(f"out-{turn}.npz", **dict(zip([output.name for output in session.get_outputs()], found)))
assert not {"torch", "transformers", "latte_convert"} & set(sys.modules)
"""
Tensors = dict[str, Tensor]


def pixels(name: str) -> Callable[[int, int, int], Tensors]:
    return lambda batch, height, width: {name: torch.randn(batch, 3, height, width)}


def texts(batch: int, tokens: int) -> Tensors:
    """Each text but the first is padded."""
    ids = torch.randint(4, len(small_checkpoints.VOCABULARY), (batch, tokens))
    mask = (torch.arange(tokens) < tokens - 3 * torch.arange(batch)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def of_open_clip(batch: int, tokens: int) -> Tensors:
    text = torch.randint(1, 49000, (batch, tokens))
    text[:, -1] = 49407  # the end, at which CLIP reads
    return {"text": text}


def whole(model: Any, inputs: Tensors) -> Tensors:
    return {name: value for name, value in model(**inputs).items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Row:
    """A small model of a family: what writes it, what it is converted on and how; what is exported of it, and called.

    ``sizes`` are those of its inputs; a text whose last tokens are padding is compared where there are none.
    """

    write: Callable[[Path], Path]
    data: tuple[str, ...]
    recipe: dict[str, Any]
    inputs: Callable[..., Tensors]
    sizes: list[tuple[int, ...]]
    call: Callable[[Any, Tensors], Tensors] = whole
    tower: str | None = None
    outputs: set[str] = field(default_factory=lambda: {"last_hidden_state"})


LATTE: dict[str, Any] = {"kernel": "latte", "ratio": 1.0}
DETECTED = {"logits", "pred_boxes"}
ROWS: dict[str, Row] = {
    "DETR": Row(
        lambda _: MODELS / "tiny-detr", ("photos",), {"kernel": "latte", "k": 3}, pixels("pixel_values"),
        [(96, 96), (64, 128)], outputs=DETECTED,
    ),
    "RT-DETR": Row(
        small_checkpoints.rt_detr, ("photos",), LATTE, pixels("pixel_values"), [(96, 96)], outputs=DETECTED
    ),
    "timm": Row(
        timm_models.write, ("photos",), LATTE, pixels("x"), [(56, 56)],
        lambda model, inputs: {"logits": model(**inputs)}, outputs={"logits"},
    ),
    "open_clip, images": Row(
        open_clip_models.write, ("photos", "sentences"), LATTE, pixels("image"), [(32, 32)],
        lambda model, inputs: {"image_embeds": model.encode_image(**inputs)}, "vision", {"image_embeds"},
    ),
    "open_clip, texts": Row(
        open_clip_models.write, ("photos", "sentences"), LATTE, of_open_clip, [(16,)],
        lambda model, inputs: {"text_embeds": model.encode_text(**inputs)}, "text", {"text_embeds"},
    ),
    "CLIP, clustered": Row(
        lambda _: MODELS / "tiny-clip", ("photos",), {**CLUSTERED, "k": 2}, pixels("pixel_values"), [(64, 64)],
        lambda model, inputs: {"image_embeds": model.get_image_features(**inputs).pooler_output}, "vision",
        {"image_embeds"},
    ),
    "Llama, causal": Row(small_checkpoints.llama, ("sentences",), LATTE, texts, [(80,), (23,)]),
    "BERT, padded": Row(small_checkpoints.bert, ("sentences",), LATTE, texts, [(80,), (23,)]),
    "Whisper's encoder": Row(
        small_checkpoints.whisper, ("speech",),
        {**LATTE, "include": ("model.encoder.*",), "samples": 2, "holdout": 0.5},
        lambda batch, bins, steps: {"input_features": torch.randn(batch, bins, steps)}, [(80, 3000)],
        lambda model, inputs: whole(model.get_encoder(), inputs), "encoder",
    ),
}  # fmt: skip


def run_alone(file: Path, turns: list[Tensors], folder: Path, program: str) -> list[dict[str, np.ndarray]]:
    """What a process that has none of our modules makes of a file."""
    for turn, inputs in enumerate(turns):
        np.savez(folder / f"in-{turn}.npz", **{name: value.numpy() for name, value in inputs.items()})
    command = [sys.executable, "-c", program, str(file), json.dumps(list(range(len(turns))))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return [dict(np.load(folder / f"out-{turn}.npz")) for turn in range(len(turns))]


@dataclass(frozen=True)
class Made:
    """A row's file, inputs to run it with, and what the hybrid in PyTorch returns."""

    file: Path
    turns: list[Tensors]
    expected: list[Tensors]


@pytest.fixture(scope="module")
def make(
    photos: Path, sentences: Path, speech: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Made]:
    data = {"photos": photos, "sentences": sentences, "speech": speech}

    @functools.cache
    def made(name: str) -> Made:
        row, folder = ROWS[name], tmp_path_factory.mktemp("family")
        recipe = latte_convert.Recipe(**{"samples": 6, **row.recipe})
        source = row.write(folder / "source")
        result = latte_convert.convert(source, [data[kind] for kind in row.data], recipe=recipe, progress=False)
        saved = result.save(folder / "hybrid")
        exported = latte_convert.export(saved, folder / "onnx", tower=row.tower, progress=False)
        assert len({each.size for each in exported.differences}) == len(row.sizes)
        model = latte_convert.load(saved)
        turns = [row.inputs(batch, *size) for size in row.sizes for batch in (1, 3)]
        with torch.no_grad():
            return Made(*exported.files, turns, [row.call(model, inputs) for inputs in turns])

    return made


def compare(row: Row, made: Made, found: list[dict[str, np.ndarray]], most: float) -> None:
    for inputs, expected, actual in zip(made.turns, made.expected, found, strict=True):
        for output in row.outputs:
            values = [actual[output], expected[output].numpy()]
            if "attention_mask" in inputs:
                seen = inputs["attention_mask"].bool().numpy()
                values = [value[seen] for value in values]
            np.testing.assert_allclose(*values, rtol=most, atol=most, err_msg=output)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_stranger_runs_it(name: str, make: Callable[[str], Made], tmp_path: Path) -> None:
    made = make(name)
    compare(ROWS[name], made, run_alone(made.file, made.turns, tmp_path, STRANGER), 1e-4)


OPENVINO = """
import json, sys
import numpy as np
import openvino

model = openvino.Core().compile_model(sys.argv[1], "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
for turn in json.loads(sys.argv[2]):
    found = model(dict(np.load(f"in-{turn}.npz")))
    np.savez(f"out-{turn}.npz", **{output.get_any_name(): value for output, value in found.items()})
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT, padded", "CLIP, clustered"])
def test_openvino_runs_it(name: str, make: Callable[[str], Made], tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install openvino")
    made = make(name)
    compare(ROWS[name], made, run_alone(made.file, made.turns, tmp_path, OPENVINO), 1e-4)


def siglip2(path: Path) -> Path:
    import tiny_parts

    tiny_parts.siglip2().save_pretrained(path)
    transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16).save_pretrained(path)
    return small_checkpoints.words(path, 64)


def longformer(path: Path) -> Path:
    config = transformers.LongformerConfig(**small_checkpoints.TEXT, attention_window=[4, 4], sep_token_id=2)
    transformers.LongformerModel(config).save_pretrained(path)
    return small_checkpoints.words(path, 64)


def performer(path: Path) -> Path:
    """A causal hybrid whose kernel loops over the text."""
    recipe = latte_convert.Recipe(kernel="performer", samples=6, ratio=1.0)
    sentences = Path(__file__).parents[1] / "data" / "sentences.csv"
    source = small_checkpoints.llama(path.parent / "source")
    return latte_convert.convert(source, sentences, recipe=recipe, progress=False).save(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "arguments", "reason"),
    [
        (siglip2, ("--tower", "vision"), r"it takes no images, but what is cut from them: pixel_values of shape"),
        (longformer, (), r"its control flow depends on the values of tensors\.?$"),
        (performer, (), r"something else for every sequence_length\. --tokens fixes the number of tokens"),
    ],
)
def test_what_has_no_graph_is_refused(write: Any, arguments: tuple, reason: str, latte: Any, tmp_path: Path) -> None:
    code, out, err = latte("export", write(tmp_path / "model"), *arguments, "--out", tmp_path / "out")
    assert (code, out) == (3, "")
    assert "cannot be exported" in err
    words = " ".join(err.split())
    assert re.search(reason, words), words
    assert not (tmp_path / "out").exists()
