"""Small random open_clip models, and checkpoints of them as open_clip writes them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.coca_model import CoCa
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.push_to_hf_hub import save_config_for_hf
from safetensors.torch import save_file
from torch import nn

PREPROCESS = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bilinear", "resize_mode": "squash"}
VISION = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8, "mlp_ratio": 2.0}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2}
CUSTOM = {"qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "scale_attn": True, "scale_fc": True}
SIGLIP = {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "map", "timm_proj": "none"}
COCA = {
    "embed_dim": 32,
    "vision_cfg": {
        **VISION, "attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 9, "output_tokens": True
    },
    "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True},
    "multimodal_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 4, "layers": 2},
}  # fmt: skip
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "clip": (CLIP, {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}),
    "quick_gelu": (CLIP, {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT, "quick_gelu": True}),
    "custom": (CLIP, {"embed_dim": 16, "vision_cfg": {**VISION, **CUSTOM}, "text_cfg": {**TEXT, **CUSTOM}}),
    "coca": (CoCa, COCA),
    "coca correct mask": (CoCa, {**COCA, "text_cfg": {**TEXT, "embed_cls": True, "output_tokens": True}}),
    "siglip": (
        CustomTextCLIP,
        {
            "embed_dim": 64,
            "init_logit_bias": -10,
            "vision_cfg": SIGLIP,
            "text_cfg": {**TEXT, "no_causal_mask": True, "pool_type": "last", "proj_bias": True},
        },
    ),
}


@cache
def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls, config = MODELS[name]
    model = cls(**config)
    if name == "coca correct mask":
        model.text.correct_cls_mask = True
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("text_projection"):  # CoCa leaves it to whatever memory holds
                nn.init.normal_(parameter, std=0.1)
            if "attn" in key and parameter.dim() == 2:
                parameter.add_(torch.randn_like(parameter) * 0.2)  # attention that is far from uniform
    return model.eval()


def build(name: str) -> nn.Module:
    return copy.deepcopy(_build(name))


def write(path: Path, name: str = "clip", *, dtype: torch.dtype = torch.float32, weights: str | None = None) -> Path:
    """A checkpoint as open_clip writes it."""
    path.mkdir()
    model: Any = build(name).to(dtype)
    _, config = MODELS[name]
    if name != "clip":
        config = {**config, "custom_text": not isinstance(model, open_clip.CLIP)}
    open_clip.model.set_model_preprocess_cfg(model, PREPROCESS)
    save_config_for_hf(model, path / "open_clip_config.json", config)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    if weights is None:
        save_file(tensors, path / "open_clip_model.safetensors")
    else:
        torch.save(tensors, path / weights)
    return path
