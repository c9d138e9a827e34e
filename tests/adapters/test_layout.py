"""What kernels are told of prefix and grid, against values worked out by hand from image and patch sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from helpers import Exact, assert_same, eligible
from open_clip.model import CLIP
from timm_models import PATCHED, create
from timm_models import build as build_timm
from tiny_models import BY_NAME, build
from tiny_parts import TorchDetector, pixels, text
from torch import Tensor, nn

from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.host import Host
from latte_convert.adapters.layout import SiteLayout
from latte_convert.attention import TokenLayout

NONE = TokenLayout()
CROSS = TokenLayout(aligned=False)


def layouts(model: nn.Module, *args: Any, **inputs: Any) -> dict[str, TokenLayout]:
    """The layout of the latest call of each site that can be converted."""
    seen: dict[str, TokenLayout] = {}

    def note(name: str) -> Callable[[Any], None]:
        return lambda call: seen.update({name: call.layout})

    with Host(model, find_adapter(model)).watch({name: note(name) for name in eligible(model)}), torch.no_grad():
        model(*args, **inputs)
    assert set(seen) == set(eligible(model))
    return seen


def _interpolated(height: int, width: int) -> dict[str, Any]:
    return {**pixels(2, height, width), "interpolate_pos_encoding": True}


def _masked(height: int, width: int) -> dict[str, Tensor]:
    """The second image has padding below and to the right; the feature map is that of the whole batch."""
    mask = torch.ones(2, height, width, dtype=torch.long)
    mask[1, height // 2 :] = 0
    mask[1, :, width // 2 :] = 0
    return {**pixels(2, height, width), "pixel_mask": mask}


def _detector(height: int, width: int) -> dict[str, TokenLayout]:
    grid = (height, width)
    return {
        "encoder.layers.0.self_attn": TokenLayout(0, grid),
        "decoder.layers.0.self_attn": NONE,
        "decoder.layers.0.encoder_attn": TokenLayout(0, grid, aligned=False),
    }


@pytest.mark.parametrize(
    ("family", "inputs", "expected"),
    [
        ("vit", _interpolated(32, 48), {"layers.0.attention": TokenLayout(1, (4, 6))}),
        ("deit", _interpolated(48, 32), {"layers.0.attention": TokenLayout(2, (6, 4))}),
        ("dinov2", pixels(2, 32, 72), {"encoder.layer.1.attention": TokenLayout(1, (4, 9))}),  # 36 is a square
        ("dinov2_with_registers", pixels(2, 32, 40), {"encoder.layer.0.attention": TokenLayout(4, (4, 5))}),
        ("dinov3_vit", pixels(2, 40, 32), {"model.layer.0.attention": TokenLayout(4, (5, 4))}),
        ("depth_anything", pixels(2, 32, 48), {"backbone.encoder.layer.0.attention": TokenLayout(1, (4, 6))}),
        ("yolos", pixels(2, 32, 32), {"encoder.layer.0.attention.attention": NONE}),  # detection tokens at the end
        ("rf_detr", pixels(2, 64, 64), {"backbone.backbone.encoder.layer.1.attention": NONE}),  # window by window
        (
            "clip",
            {**text(), **_interpolated(32, 64)},
            {
                "vision_model.encoder.layers.0.self_attn": TokenLayout(1, (4, 8)),
                "text_model.encoder.layers.0.self_attn": NONE,
            },
        ),
        (
            "siglip",
            {**text(), **_interpolated(64, 32)},
            {
                "vision_model.encoder.layers.0.self_attn": TokenLayout(0, (8, 4)),
                "text_model.encoder.layers.0.self_attn": NONE,
            },
        ),
        # Patches come flattened, of images of different shapes, to a linear layer: 16 of them need not be 4 by 4.
        ("siglip2", BY_NAME["siglip2"].inputs(), {"vision_model.encoder.layers.0.self_attn": NONE}),
        ("detr", _masked(96, 160), _detector(12, 20)),
        ("conditional_detr", _masked(96, 160), _detector(12, 20)),
        ("table_transformer", _masked(96, 160), _detector(12, 20)),
        ("detr", pixels(1, 16, 24), _detector(2, 3)),  # as many positions as object queries
        (
            "rt_detr",
            pixels(2, 64, 128),
            {"encoder.aifi.0.layers.0.self_attn": TokenLayout(0, (2, 4)), "decoder.layers.0.self_attn": NONE},
        ),
        (
            "whisper",
            BY_NAME["whisper"].inputs(),
            {
                "encoder.layers.0.self_attn": NONE,
                "decoder.layers.0.self_attn": NONE,
                "decoder.layers.0.encoder_attn": CROSS,
            },
        ),
        ("bert", text(), {"encoder.layer.0.attention.self": NONE}),
        ("wav2vec2", BY_NAME["wav2vec2"].inputs(), {"encoder.layers.0.attention": NONE}),
    ],
)  # fmt: skip
def test_transformers(family: str, inputs: dict[str, Any], expected: dict[str, TokenLayout]) -> None:
    found = layouts(build(family), **inputs)
    assert {name: found[name] for name in expected} == expected


def test_torch_attention_inside_transformers() -> None:
    """BridgeTower's vision tower has it; the tokens are in the first dimension there."""
    layers = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = hf.BridgeTowerConfig(
        text_config={**layers, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 1},
        vision_config={**layers, "image_size": 32, "patch_size": 8}, **layers,
    )  # fmt: skip
    model, inputs = hf.BridgeTowerModel(config).eval(), {**text(), **_interpolated(32, 48)}
    name = "vision_model.visual.transformer.resblocks.0.attn"
    found = layouts(model, **inputs)
    assert found[name] == TokenLayout(1, (4, 6))
    assert found["cross_modal_text_layers.0.crossattention.self"] == CROSS
    with torch.no_grad():
        expected = model(**inputs)
        with Host(model, find_adapter(model)).watch({name: Exact()}):
            assert_same(model(**inputs), expected)
    assert find_adapter(model).output_projection(model, name) is model.get_submodule(f"{name}.out_proj")
    assert name in eligible(model)


def test_a_decoder_that_reads_an_image() -> None:
    """Keys of its cross-attention are the class token and the patches of the encoder."""
    layers = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        hf.ViTConfig(**layers, image_size=32, patch_size=8), hf.BertConfig(**layers, vocab_size=60, pad_token_id=1)
    )
    inputs = {**_interpolated(32, 64), "decoder_input_ids": text()["input_ids"]}
    assert layouts(hf.VisionEncoderDecoderModel(config).eval(), **inputs) == {
        "encoder.layers.0.attention": TokenLayout(1, (4, 8)),
        "decoder.bert.encoder.layer.0.attention.self": NONE,
        "decoder.bert.encoder.layer.0.crossattention.self": TokenLayout(1, (4, 8), aligned=False),
    }


def test_patches_of_a_spectrogram() -> None:
    """16 mel bins and 40 frames in patches of 4 by 4, every 4 bins and 3 frames; class and distillation token."""
    config = hf.ASTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, patch_size=4,
        frequency_stride=4, time_stride=3, max_length=40, num_mel_bins=16,
    )  # fmt: skip
    found = layouts(hf.ASTModel(config).eval(), input_values=torch.randn(2, 40, 16))
    assert found == {"layers.0.attention": TokenLayout(2, (4, 13))}


@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("vit_tiny_patch16_224", {"img_size": (56, 84)}, 1),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True}, 1),
        ("vit_tiny_patch16_224", {"dynamic_img_size": True, "class_token": False, "global_pool": "avg"}, 0),
        ("deit_tiny_distilled_patch16_224", {"img_size": (56, 84)}, 2),
        ("vit_small_patch14_reg4_dinov2", {"img_size": (56, 84)}, 5),
        ("eva02_tiny_patch14_224", {"dynamic_img_size": True}, 1),
    ],
)
def test_timm(name: str, options: dict[str, Any], prefix: int) -> None:
    found = layouts(create(name, **{**PATCHED, **options}), torch.randn(1, 3, 56, 84))
    assert found == dict.fromkeys(["blocks.0.attn", "blocks.1.attn"], TokenLayout(prefix, (4, 6)))


def test_timm_pyramids_and_linear_embeddings() -> None:
    """PVTv2 at 64 by 128: strides 4 to 32, keys shrunk to stride 32 everywhere, which the last stage has anyway."""
    found = layouts(build_timm("pvt"), torch.randn(1, 3, 64, 128))
    shrunk = TokenLayout(0, (2, 4), aligned=False)
    expected = {f"stages.{stage}.blocks.0.attn": shrunk for stage in range(3)}
    assert found == {**expected, "stages.3.blocks.0.attn": TokenLayout(0, (2, 4))}
    visformer = layouts(build_timm("visformer"), torch.randn(1, 3, 64, 64))
    assert visformer == {"stage2.0.attn": TokenLayout(0, (4, 4)), "stage3.0.attn": TokenLayout(0, (2, 2))}


def test_naflex_patches_have_no_grid_even_behind_an_image_of_as_many() -> None:
    model = build_timm("naflex")
    place = torch.cartesian_prod(torch.arange(6), torch.arange(4))[None]
    patches = {"patches": torch.randn(1, 24, 768), "patch_coord": place, "patch_valid": torch.ones(1, 24).bool()}
    seen: list[TokenLayout] = []
    with Host.of(model).watch({"blocks.0.attn": lambda call: seen.append(call.layout)}), torch.no_grad():
        model(torch.randn(1, 3, 64, 96))
        model(patches)
    assert seen == [TokenLayout(4, (4, 6)), TokenLayout(4)]


def test_the_order_of_hiera_is_no_raster() -> None:
    """It lists the tokens of a mask unit's like places first, also where a stage attends to all of them."""
    model = create(
        "hiera_tiny_224", img_size=128, num_classes=5, embed_dim=24, stages=(1, 1, 1, 1), mask_unit_attn=(False,) * 4
    )
    assert {found.grid for found in layouts(model, torch.randn(1, 3, 128, 128)).values()} == {None}


_VIDEO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
_CLIP = torch.randn(1, 4, 3, 32, 32)


def _pit() -> nn.Module:
    return create("pit_ti_distilled_224", img_size=64, depth=[1, 1, 1])


@pytest.mark.parametrize(
    ("build", "inputs", "expected"),
    [
        (
            lambda: hf.VideoMAEModel(hf.VideoMAEConfig(**_VIDEO, intermediate_size=48, num_frames=4)),
            {"pixel_values": _CLIP},
            {"encoder.layer.0.attention.attention": "2 x 4 x 4"},
        ),
        (
            lambda: hf.VivitModel(hf.VivitConfig(**_VIDEO, intermediate_size=48, num_frames=4, tubelet_size=[2, 8, 8])),
            {"pixel_values": _CLIP},
            {"layers.0.attention": "2 x 4 x 4 + 1 prefix"},
        ),
        (
            lambda: hf.VJEPA2Model(
                hf.VJEPA2Config(
                    **_VIDEO, mlp_ratio=2, crop_size=32, frames_per_clip=4, pred_hidden_size=24,
                    pred_num_attention_heads=4, pred_num_hidden_layers=1,
                )
            ),
            {"pixel_values_videos": _CLIP},
            {"encoder.layer.0.attention": "2 x 4 x 4"},
        ),
        (
            lambda: hf.XCLIPVisionModel(
                hf.XCLIPVisionConfig(
                    **_VIDEO, intermediate_size=48, num_frames=4, mit_hidden_size=32, mit_intermediate_size=48,
                    mit_num_attention_heads=4, mit_num_hidden_layers=1,
                )
            ),
            {"pixel_values": torch.randn(4, 3, 32, 32)},
            {"encoder.layers.0.self_attn": "4 x 4 + 2 prefix", "encoder.layers.0.message_attn": "sequence + 1 prefix"},
        ),
        (
            _pit, {"x": torch.randn(1, 3, 64, 64)},
            {"transformers.0.blocks.0.attn": "7 x 7 + 2 prefix", "transformers.2.blocks.0.attn": "2 x 2 + 2 prefix"},
        ),
        (
            lambda: hf.Sam2HieraDetModel(
                hf.Sam2HieraDetConfig(
                    hidden_size=16, num_attention_heads=1, blocks_per_stage=[1, 1, 2, 1], image_size=[128, 96],
                    embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 2, 4, 8],
                    window_size_per_stage=[4, 2, 2, 2], global_attention_blocks=[3],
                    window_positional_embedding_background_size=[4, 4],
                )
            ),
            {"pixel_values": torch.randn(1, 3, 128, 96)},
            {"blocks.3.attn": "8 x 6"},
        ),
    ],
    ids=["videomae", "vivit", "vjepa2", "xclip", "pit", "sam2"],
)  # fmt: skip
def test_videos_and_pyramids(
    build: Callable[[], nn.Module], inputs: dict[str, Tensor], expected: dict[str, str]
) -> None:
    """Frames are merged two by two by a tubelet; the sizes are those of the strides, worked out by hand."""
    found = layouts(build().eval(), **inputs)
    assert {name: str(found[name]) for name in expected} == expected


def test_two_scales_side_by_side() -> None:
    """CrossViT: patches of 12 of all of the image, of 16 of 224 of its pixels."""
    found = layouts(create("crossvit_tiny_240"), torch.randn(1, 3, 240, 240))
    assert found["blocks.0.blocks.0.0.attn"] == TokenLayout(1, (20, 20))
    assert found["blocks.0.blocks.1.0.attn"] == TokenLayout(1, (14, 14))


def test_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.VisionTransformer(48, 8, 1, 2, 32, 64).eval()
    assert layouts(model, torch.randn(1, 3, 48, 48)) == {
        "encoder.layers.encoder_layer_0.self_attention": TokenLayout(1, (6, 6))
    }


@pytest.mark.parametrize("custom", [{}, {"qk_norm": True, "scale_heads": True}], ids=["torch", "own"])
def test_open_clip(custom: dict[str, Any]) -> None:
    vision = {"image_size": (32, 48), "patch_size": 8, "width": 32, "layers": 1, "head_width": 8, **custom}
    model = CLIP(16, vision, {"context_length": 24, "width": 32, "heads": 4, "layers": 1}).eval()
    found = layouts(model, torch.randn(2, 3, 32, 48), torch.randint(1, 9, (2, 24)))  # as many words as patches
    assert found == {
        "visual.transformer.resblocks.0.attn": TokenLayout(1, (4, 6)),
        "transformer.resblocks.0.attn": NONE,
    }


def test_a_detector_of_plain_torch() -> None:
    assert layouts(TorchDetector().eval(), torch.randn(1, 3, 32, 48)) == {
        "transformer.encoder.layers.0.self_attn": TokenLayout(0, (4, 6)),
        "transformer.decoder.layers.0.self_attn": NONE,
        "transformer.decoder.layers.0.multihead_attn": TokenLayout(0, (4, 6), aligned=False),
    }


def test_alignment_needs_as_many_keys_as_queries() -> None:
    layout = SiteLayout(prefix=0)
    assert (layout.of(5, 5).aligned, layout.of(1, 5).aligned) == (True, False)
    assert not SiteLayout(prefix=0, cross=True).of(5, 5).aligned


def test_dropped_tokens_lie_on_no_grid() -> None:
    model = create("vit_tiny_patch16_224", **PATCHED, patch_drop_rate=0.5).train()
    assert layouts(model, torch.randn(1, 3, 56, 56))["blocks.0.attn"] == TokenLayout(1, None)
