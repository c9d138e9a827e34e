"""What is damaged: small random checkpoints of every library and modality, their artifacts, samples and tables."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = ("a", "the", "man", "dog", "runs", "in", "on", "snow", "red", "boat", "and", "small")
MODELS = ("vit", "bert", "speech", "timm", "open_clip")
CALIBRATION = {"vit": "photos", "timm": "photos", "open_clip": "photos", "bert": "texts/lines.txt", "speech": "speech"}
"""Samples of each model."""


def build(folder: Path) -> None:
    """Write everything into a new folder."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    _write_samples(folder)
    (folder / "models").mkdir()
    makers: dict[str, Callable[[Path], None]] = {
        "vit": _vit, "bert": _bert, "speech": _speech, "timm": _timm, "open_clip": _open_clip
    }  # fmt: skip
    for name in MODELS:
        makers[name](folder / "models" / name)
        arguments = (*FEW, "--kernel", "latte", "--ratio", 1, "--out", folder / "artifacts" / name)
        latte("convert", folder / "models" / name, "--calib", folder / CALIBRATION[name], *arguments)
    vit, adapter = folder / "artifacts" / "vit", folder / "artifacts" / "adapter"
    latte("convert", folder / "models" / "vit", "--calib", folder / "photos", *FEW, "--kernel", "latte", "--adapter",
          "--ratio", 1, "--out", adapter)  # fmt: skip
    for command in (
        ("eval", vit, "--task", "fidelity", "--data", folder / "photos", "--out", vit / "eval-fidelity.json"),
        ("eval", vit, "--task", "knn", "--data", folder / "classes", "--out", vit / "eval-knn.json"),
        ("bench", vit, "--resolutions", "28,56", "--rounds", 2, "--no-compile", "--save"),
        ("report", vit),
    ):  # fmt: skip
        latte(*command)
    shutil.copytree(vit, folder / "artifacts" / "other")
    latte("report", folder / "artifacts" / "other", "--plots")


FEW = ("--samples", 4, "--min-samples", 2)


def latte(*arguments: Any) -> None:
    """Run a command in this process; it must succeed."""
    from latte_convert.cli.app import main

    said, before = io.StringIO(), sys.argv
    sys.argv = ["latte", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{sys.argv}: exit code {end.code}: {said.getvalue()[-2000:]}") from None
    finally:
        sys.argv = before


def _write_samples(folder: Path) -> None:
    import soundfile
    from PIL import Image

    noise = np.random.default_rng(0)

    def photo(path: Path, tint: int = 0) -> None:
        pixels = noise.integers(0, 156, (40, 60, 3)) + tint
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).resize((120, 80)).save(path)

    for i, suffix in enumerate(("jpg", "png", "jpg", "webp", "gif", "bmp", "tiff", "jpg")):
        photo(folder / "photos" / f"{i}.{suffix}")
    for part in ("train", "test"):
        for i in range(8):
            photo(folder / "classes" / part / ("cat", "dog")[i % 2] / f"{i}.png", tint=99 * (i % 2))
    (folder / "speech").mkdir()
    for i in range(6):
        wave = noise.normal(0, 0.1, 16_000).astype(np.float32)
        kind = ("PCM_16", "FLOAT", "PCM_24")[i % 3]
        soundfile.write(folder / "speech" / f"{i}.wav", wave, 16_000, subtype=kind)
    sentences = [" ".join(noise.choice(WORDS, 9)) for _ in range(24)]
    (folder / "texts").mkdir()
    (folder / "texts" / "lines.txt").write_text("\n".join(sentences) + "\n")
    rows = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(sentences)]
    (folder / "texts" / "lines.jsonl").write_text("\n".join(rows) + "\n")
    _write_tables(folder / "tables", sentences)


def _write_tables(folder: Path, sentences: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    with (folder / "pairs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("s1", "s2", "score"))
        table.writerows((sentences[i], sentences[-i], i / 5) for i in range(24))
    with (folder / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text",), *((text,) for text in sentences)])
    parquet.write_table(pyarrow.table({"text": sentences}), folder / "texts.parquet")
    for source in ("photos", "speech"):
        shutil.copytree(folder.parent / source, folder / source)
    names = sorted(path.name for path in (folder / "photos").iterdir())
    with (folder / "photos" / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file_name", "text"), *((name, "a cat") for name in names)])


def _vit(path: Path) -> None:
    import transformers

    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=7, mlp_ratio=1
    )
    transformers.Dinov2Model(config).save_pretrained(path)
    size = {"height": 56, "width": 56}
    transformers.BitImageProcessor(size={"shortest_edge": 56}, crop_size=size).save_pretrained(path)


def _bert(path: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=40,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=40, **special)
    fast.save_pretrained(path)


def _speech(path: Path) -> None:
    import transformers

    config = transformers.ASTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_length=128,
        num_mel_bins=32, patch_size=8, frequency_stride=8, time_stride=8,
    )  # fmt: skip
    transformers.ASTModel(config).save_pretrained(path)
    transformers.ASTFeatureExtractor(max_length=128, num_mel_bins=32).save_pretrained(path)


def _timm(path: Path) -> None:
    import timm
    from timm.models import save_for_hf

    model = timm.create_model("test_vit", pretrained=False, img_size=64)
    save_for_hf(model, str(path), safe_serialization=True, data_config={"input_size": (3, 64, 64)})


def _open_clip(path: Path) -> None:
    import open_clip
    from open_clip.push_to_hf_hub import save_config_for_hf
    from safetensors.torch import save_file

    path.mkdir()
    config: dict[str, Any] = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 4, "width": 24, "layers": 2, "head_width": 12, "mlp_ratio": 1.0},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 24, "heads": 2, "layers": 2},
    }
    model = open_clip.CLIP(**config)
    open_clip.model.set_model_preprocess_cfg(model, {"mean": [0.5, 0.5, 0.5], "std": [0.3, 0.3, 0.3]})
    save_config_for_hf(model, path / "open_clip_config.json", config)
    save_file({key: value.clone() for key, value in model.state_dict().items()}, path / "open_clip_model.safetensors")
