"""Small checkpoints of Transformers on disk, whose attention is far from uniform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_parts as parts
import torch
import transformers as hf

WORDS = ("a", "the", "man", "woman", "girl", "boy", "dog", "cat", "is", "on", "in", "of", "and", "playing")
MARKS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
VOCABULARY = {token: i for i, token in enumerate([*MARKS.values(), *WORDS])}
TEXT: dict[str, Any] = {
    **parts.LAYERS, "vocab_size": len(VOCABULARY), "max_position_embeddings": 80, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def sharpen(model: Any, *endings: str, factor: float = 12) -> Any:
    """Multiply weights: the library's initialisation gives nearly uniform attention."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(endings) and parameter.dim() == 2:
                parameter.mul_(factor)
    return model


def dino(path: Path, **settings: Any) -> Path:
    """A DINOv2 for images of 56 px in patches of 14, with its image processor."""
    torch.manual_seed(0)
    config = hf.Dinov2Config(image_size=56, patch_size=14, mlp_ratio=2, **settings)
    sharpen(hf.Dinov2Model(config), "weight").save_pretrained(path)
    hf.BitImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}).save_pretrained(path)
    return path


def words(path: Path, longest: int) -> Path:
    """A tokenizer of ``WORDS``, which puts each text between a first and a last token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **MARKS).save_pretrained(path)
    return path


def bert(path: Path) -> Path:
    """A BERT for texts of up to 80 tokens."""
    return _text(path, hf.BertModel(hf.BertConfig(**TEXT)))


def llama(path: Path) -> Path:
    """A causal one, with rotary positions."""
    return _text(path, hf.LlamaModel(hf.LlamaConfig(**TEXT)))


def _text(path: Path, model: Any) -> Path:
    sharpen(model, "query.weight", "key.weight", "q_proj.weight", "k_proj.weight", "word_embeddings.weight")
    model.save_pretrained(path)
    return words(path, TEXT["max_position_embeddings"])


def rt_detr(path: Path) -> Path:
    """An RT-DETR for images of 96 px."""
    hf.RTDetrForObjectDetection(parts.rt_detr_config()).save_pretrained(path)
    hf.RTDetrImageProcessor(size={"height": 96, "width": 96}).save_pretrained(path)
    return path


def whisper(path: Path) -> Path:
    """A Whisper whose encoder takes half a minute, and whose decoder 32 tokens."""
    settings = {**parts.whisper_config().to_dict(), "num_mel_bins": 80, "max_source_positions": 1500}
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**settings))
    sharpen(model, "q_proj.weight", "k_proj.weight").save_pretrained(path)
    hf.WhisperFeatureExtractor().save_pretrained(path)
    return words(path, 32)
