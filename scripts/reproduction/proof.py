"""Stand-ins for everything that comes from the Hub: the project's own small models, and rendered data.

Data goes through the writers that the Hub's rows go through, from rows with the same columns.
"""

from __future__ import annotations

import io
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from scenes import render, write_scenes
from train_tiny_clip import COLOURS, NUMBERS, SIZE, caption, largest

from reproduction.hub_data import DATA, rows_of, write_folder
from reproduction.rows import CLIP, SIGLIP

TINY = Path(__file__).resolve().parents[2] / "tests" / "models"
_WORDS = ("good", "bad", "fine", "poor", "a", "the", "film", "plot", "very")
_LAYER = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}


def prepare(root: Path, count: int) -> tuple[Path, Path]:
    """Write data and models; returns their folders, which are what ``--data`` and ``--models`` take.

    Args:
        root: An empty folder.
        count: Samples of each dataset.
    """
    data, models = root / "data", root / "models"
    write_scenes(root / "scenes", "train", 32)
    shutil.copytree(root / "scenes" / "images", data / "coco-train")
    (data / "sst2-train.txt").write_text("\n".join(text for text, _ in reviews(32, seed=1)) + "\n")
    for name, rows in _datasets(count).items():
        write_folder(DATA[name], rows_of(rows, DATA[name].columns), data / name)
    shutil.copytree(TINY / "tiny-detr", models / "facebook" / "detr-resnet-50")
    shutil.copytree(TINY / "tiny-clip", models / CLIP)
    torch.manual_seed(0)
    _rt_detr(models / "PekingU" / "rtdetr_r34vd")
    _siglip(models / SIGLIP)
    _roberta(models / "siebert" / "sentiment-roberta-large-english")
    return data, models


def _datasets(count: int) -> dict[str, Any]:
    """Datasets with the columns and features that those of the Hub have."""
    from datasets import ClassLabel, Dataset

    classes = [f"{colour} {number}" for colour in COLOURS for number in NUMBERS]
    named = Dataset.from_list([{"image": png, "label": classes.index(name)} for png, name in labelled(count)])
    named = _as_images(named, "image").cast_column("label", ClassLabel(names=classes))
    sentences = Dataset.from_list([{"sentence": text, "label": label} for text, label in reviews(count)])
    return {
        "coco": _as_images(Dataset.from_list(list(boxes(count))), "image"),
        "coco-captions": _as_images(Dataset.from_list(list(captioned(count))), "jpg"),
        "sugarcrepe": _as_images(Dataset.from_list(list(opposed(count))), "images"),
        "cifar10": named.rename_column("image", "img"),
        "eurosat": named,
        "food101": named,
        "sst2": sentences.cast_column("label", ClassLabel(names=["negative", "positive"])),
    }


def _as_images(dataset: Any, column: str) -> Any:
    from datasets import Image as ImageFeature

    return dataset.cast_column(column, ImageFeature())


def boxes(count: int) -> Iterator[dict[str, Any]]:
    """Scenes as ``BrandonLSX/coco-2017`` has its images."""
    for index in range(count):
        scene = render("heldout", index)
        corners = scene.boxes.tolist()
        box = [[x0, y0, x1 - x0, y1 - y0] for x0, y0, x1, y1 in corners]
        yield {
            "image": _png(scene.image), "image_id": index + 1, "file_name": f"{index:012d}.png",
            "width": scene.image.shape[1], "height": scene.image.shape[0],
            "annotations": {
                "category_id": (scene.labels + 1).tolist(), "category_name": [str(i) for i in scene.labels],
                "bbox": box, "area": [w * h for _, _, w, h in box], "iscrowd": [0] * len(box),
            },
        }  # fmt: skip


def captioned(count: int) -> Iterator[dict[str, Any]]:
    """Scenes as ``clip-benchmark`` has COCO's captions: one a line."""
    for scene in _scenes(count):
        yield {"jpg": _png(scene.image), "txt": "\n".join(_captions(scene)), "__key__": "s"}


def opposed(count: int) -> Iterator[dict[str, Any]]:
    """Scenes with a caption, and the same with another colour."""
    colours = list(COLOURS)
    for scene in _scenes(count):
        right = _captions(scene)[0]
        colour = largest(scene, 1)[0].colour
        other = colours[(colours.index(colour) + 1) % len(colours)]
        yield {"images": _png(scene.image), "caption": right, "negative_caption": right.replace(colour, other)}


def labelled(count: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Scenes and what their largest digit is: ``red seven``."""
    for scene in _scenes(count):
        item = largest(scene, 1)[0]
        yield _png(scene.image), f"{item.colour} {NUMBERS[item.digit]}"


def reviews(count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Sentences of random words, negative and positive in turn."""
    rng = np.random.default_rng(seed)
    return [(" ".join(rng.choice(_WORDS, 6 + index % 3)), index % 2) for index in range(count)]


def _scenes(count: int) -> Iterator[Any]:
    """Held-out scenes with two digits or more."""
    drawn = (render("heldout", index, 0, SIZE) for index in itertools.count())
    return itertools.islice((scene for scene in drawn if len(scene.labels) > 1), count)


def _captions(scene: Any) -> list[str]:
    return [caption(len(scene.labels), largest(scene, most)) for most in (1, 2)]


def _png(pixels: Any) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def _rt_detr(path: Path) -> None:
    """A random RT-DETR that knows the digits."""
    digits = {i: str(i) for i in range(10)}
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[8, 8, 8], encoder_layers=1,
        encoder_attention_heads=4, encoder_ffn_dim=48, d_model=32, decoder_in_channels=[32, 32, 32], decoder_layers=2,
        decoder_ffn_dim=48, decoder_attention_heads=2, num_queries=40, num_denoising=0, initializer_range=0.2,
        id2label=digits, label2id={name: i for i, name in digits.items()},
    )  # fmt: skip
    transformers.RTDetrForObjectDetection(config).eval().save_pretrained(path)
    transformers.RTDetrImageProcessor(size={"height": 96, "width": 96}).save_pretrained(path)


def _siglip(path: Path) -> None:
    """A random SigLIP that reads the captions."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY / "tiny-clip")
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3}
    text = {**_LAYER, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": 24, "projection_size": 32}
    config = transformers.SiglipConfig(text_config=text, vision_config={**_LAYER, "image_size": 64, "patch_size": 8})
    transformers.SiglipModel(config).eval().save_pretrained(path)
    transformers.SiglipImageProcessor(size={"height": 64, "width": 64}).save_pretrained(path)
    tokenizer.save_pretrained(path)


def _roberta(path: Path) -> None:
    """A random RoBERTa with a head for sentiment."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {0: "NEGATIVE", 1: "POSITIVE"}
    config = transformers.RobertaConfig(
        **_LAYER, vocab_size=len(vocabulary), max_position_embeddings=20, initializer_range=0.3, type_vocab_size=1,
        id2label=names, label2id={name: i for i, name in names.items()},
    )  # fmt: skip
    transformers.RobertaForSequenceClassification(config).eval().save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=18, **special).save_pretrained(
        path
    )
