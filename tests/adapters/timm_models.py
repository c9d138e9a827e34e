"""Small random timm models, one for each way that timm does attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import Attention, set_fused_attn
from timm.models import save_for_hf
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 56, "num_classes": 5}
PATCHED = {**SMALL, "patch_size": 14}

# Architecture, keyword arguments, prefix tokens.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "vit": ("vit_tiny_patch16_224", PATCHED, 1),
    "vit without class token": ("vit_tiny_patch16_224", {**PATCHED, "class_token": False, "global_pool": "avg"}, 0),
    "parallel blocks": ("vit_tiny_patch16_224", {**PATCHED, "block_fn": ParallelScalingBlock}, 1),
    "qk norm": ("vit_tiny_patch16_224", {**PATCHED, "qk_norm": True}, 1),
    "attention norm": ("vit_tiny_patch16_224", {**PATCHED, "scale_attn_norm": True}, 1),
    "deit distilled": ("deit_tiny_distilled_patch16_224", PATCHED, 2),
    "deit3": ("deit3_small_patch16_224", PATCHED, 1),
    "dinov2 with registers": ("vit_small_patch14_reg4_dinov2", SMALL, 5),
    "rope": ("vit_small_patch16_rope_224", PATCHED, 1),
    "mixed rope": ("vit_small_patch16_rope_mixed_224", PATCHED, 1),
    "eva02": ("eva02_tiny_patch14_224", SMALL, 1),
    "dinov3": ("vit_small_patch16_dinov3", PATCHED, 5),
    "naflex": ("naflexvit_base_patch16_gap", {k: v for k, v in SMALL.items() if k != "img_size"}, 4),
    "visformer": ("visformer_tiny", {**SMALL, "img_size": 64, "depth": (1, 1, 1)}, 0),
    "pvt": ("pvt_v2_b0", {"num_classes": 5, "depths": (1, 1, 1, 1)}, 0),
    "hiera": ("hiera_tiny_224", {"img_size": 64, "num_classes": 5, "embed_dim": 24, "stages": (1, 1, 1, 1)}, 0),
}


def build(name: str, *, fused: bool = True) -> nn.Module:
    """One of ``MODELS``, whose attention is far from uniform and weighs in its output."""
    architecture, arguments, _ = MODELS[name]
    return sharp(create(architecture, fused=fused, **arguments))


def gated(*, fused: bool = True) -> nn.Module:
    """A model with a gate on each attention output."""
    model = create("vit_tiny_patch16_224", fused=fused, **PATCHED)
    for block in model.blocks:
        block.attn = Attention(48, 3, qkv_bias=True, gated=True)
        block.attn.fused_attn = fused
    return sharp(model)


def create(architecture: str, *, fused: bool = True, **arguments: Any) -> Any:
    torch.manual_seed(0)
    set_fused_attn(fused)
    try:
        return timm.create_model(architecture, **arguments).eval()
    finally:
        set_fused_attn(True)


def sharp(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gamma", "gamma_1", "gamma_2")) and parameter.dim() == 1:
                parameter.fill_(0.5)
            elif name.endswith("weight") and parameter.dim() == 2:
                parameter.normal_(0, 0.25)
    return model


def images(model: Any, batch: int = 2) -> Tensor:
    size = 64 if type(model).__name__ in ("NaFlexVit", "PyramidVisionTransformerV2", "Hiera", "Visformer") else 56
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", PATCHED | {"qk_norm": True}),
    "registers": ("vit_small_patch14_reg4_dinov2", PATCHED),
    "eva02": ("eva02_tiny_patch14_224", PATCHED),
    "rope": ("vit_small_patch16_rope_mixed_224", PATCHED),
}


def write(path: Path, name: str = "vit", dtype: torch.dtype = torch.float32) -> Path:
    """A random checkpoint, written by timm."""
    architecture, arguments = CHECKPOINTS[name]
    model = sharp(create(architecture, **arguments)).to(dtype)
    data = {"input_size": (3, 56, 56), "mean": (0.4, 0.5, 0.6), "crop_pct": 0.9}
    save_for_hf(model, str(path), safe_serialization=True, data_config=data)
    return path
