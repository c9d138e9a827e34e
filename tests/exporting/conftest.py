"""Small checkpoints, and artifacts made of them, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import latte_convert


@pytest.fixture(scope="session")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DINOv2 of two layers, with its image processor."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14, mlp_ratio=2
    )
    model = transformers.Dinov2Model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                parameter.mul_(12)  # the library's initialisation gives nearly uniform attention
    path = tmp_path_factory.mktemp("export") / "dino"
    model.save_pretrained(path)
    processor = transformers.BitImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def hybrid(dino: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its artifact with the LATTE kernel in one layer."""
    recipe = latte_convert.Recipe(kernel="latte", samples=4, k=1)
    result = latte_convert.convert(dino, photos, recipe=recipe, progress=False)
    return result.save(tmp_path_factory.mktemp("export") / "hybrid")


@pytest.fixture(scope="session")
def bert(tiny_clip: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers with the word-level tokenizer of ``tiny_clip``, for texts of up to 64 tokens."""
    import transformers

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_clip, model_max_length=64)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = transformers.BertModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query.weight", "key.weight", "word_embeddings.weight")):
                parameter.mul_(12)
    path = tmp_path_factory.mktemp("export") / "bert"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
