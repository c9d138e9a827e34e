"""Towers, causality, windows and channels of models that say little about them; worked out from their papers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_parts as parts
import torch
import transformers as hf
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.adapters.observe import observed
from latte_convert.attention import AttentionSite
from latte_convert.data.feed import Inputs
from latte_convert.measuring.outputs import final_outputs

SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}


def sam2() -> nn.Module:
    """Block 3 of five sees all of the image; the others look inside windows."""
    config = hf.Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, blocks_per_stage=[1, 1, 2, 1], image_size=[64, 64],
        embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[4, 2, 2, 2], global_attention_blocks=[3],
        window_positional_embedding_background_size=[4, 4],
    )  # fmt: skip
    return hf.Sam2HieraDetModel(config)


def florence2() -> nn.Module:
    vision = {"embed_dim": [16, 16], "depths": [1, 1], "num_heads": [2, 2], "num_groups": [2, 2], "window_size": 2,
              "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True],
              "projection_dim": 32}  # fmt: skip
    text = {**parts.BART, "model_type": "bart"}
    return hf.Florence2Model(hf.Florence2Config(vision_config=vision, text_config=text, image_token_id=50))


def oneformer() -> nn.Module:
    """It says that it takes two inputs: ``main_input_name`` is a list."""
    backbone = hf.SwinConfig(**{**SWIN, "depths": [1] * 4, "num_heads": [2] * 4},
                             out_features=["stage1", "stage2", "stage3", "stage4"])  # fmt: skip
    config = hf.OneFormerConfig(backbone_config=backbone, hidden_dim=32, num_attention_heads=2, encoder_layers=1,
                                decoder_layers=2, conv_dim=32, mask_dim=32, text_encoder_width=16,
                                text_encoder_num_layers=1, num_queries=4, dim_feedforward=16,
                                encoder_feedforward_dim=16)  # fmt: skip
    return hf.OneFormerModel(config)


def vjepa2() -> nn.Module:
    return hf.VJEPA2Model(
        hf.VJEPA2Config(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, mlp_ratio=2, crop_size=32, patch_size=8,
            frames_per_clip=4, pred_hidden_size=24, pred_num_attention_heads=4, pred_num_hidden_layers=1,
        )
    )  # fmt: skip


def git() -> nn.Module:
    return hf.GitModel(hf.GitConfig(**parts.TEXT, vision_config=parts.VIT, bos_token_id=2, eos_token_id=3))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (sam2, {"blocks.0.attn": "vision, windowed", "blocks.3.attn": "vision", "blocks.4.attn": "vision, windowed"}),
        (
            florence2,
            {
                "vision_tower.blocks.0.0.channel_block.channel_attn": "vision, attention over channels",
                "vision_tower.blocks.0.0.spatial_block.window_attn": "vision, windowed",
                "language_model.encoder.layers.0.self_attn": "encoder",
                "language_model.decoder.layers.0.self_attn": "decoder causal",
            },
        ),
        (
            oneformer,
            {
                "pixel_level_module.encoder.swin.encoder.layers.0.blocks.0.attention": "vision, windowed attention",
                "transformer_module.decoder.layers.0.cross_attn.multihead_attn": "decoder",
            },
        ),
        (vjepa2, {"encoder.layer.0.attention": "vision", "predictor.layer.0.attention": "vision"}),
        (
            git,
            {
                "image_encoder.vision_model.encoder.layers.0.self_attn": "vision",
                "encoder.layer.0.attention.self": "text causal, computes attention itself",
            },
        ),
    ],
    ids=["sam2", "florence2", "oneformer", "vjepa2", "git"],
)
def test_roles(build: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    with torch.device("meta"):
        sites = {site.name: site for site in Host.of(build()).sites()}
    for name, said in expected.items():
        role, _, reason = said.partition(", ")
        site = sites[name]
        assert (f"{site.tower}{' causal' if site.causal else ''}", site.eligible) == (role, not reason), name
        assert reason in (site.reason or ""), name


def _seen(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, AttentionSite]:
    host = Host.of(model.eval())
    return {site.name: site for site in observed(host, host.sites(), [Inputs(batch)], final_outputs)}


@pytest.mark.parametrize(
    ("build", "read"),
    [
        (lambda: hf.Dinov2Backbone(hf.Dinov2Config(**parts.DINO, out_indices=[1, 2])), [True, True]),
        (lambda: hf.Dinov2Backbone(hf.Dinov2Config(**parts.DINO, out_indices=[1])), [True, False]),
        (lambda: hf.SwinBackbone(hf.SwinConfig(**SWIN, out_indices=[1, 2])), []),
    ],
    ids=["two maps", "the first map", "windows"],
)
def test_backbones_return_only_feature_maps(build: Any, read: list[bool]) -> None:
    """What leads to one of the maps is read, what comes behind the last of them is not."""
    sites = _seen(build(), parts.pixels())
    assert [site.eligible for site in sites.values() if "windowed" not in (site.reason or "")] == read
