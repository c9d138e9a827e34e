"""Small random vision-language models of the real Transformers classes, with ready batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from tiny_parts import TEXT, VIT, Inputs, pixels
from torch import Tensor, nn

IMAGE = 50
"""Token that stands for a patch."""
LANGUAGE = {**TEXT, "num_key_value_heads": 4, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
GEMMA = {**LANGUAGE, "head_dim": 8}
QWEN = {**LANGUAGE, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
PROJECTED = {"image_token_id": IMAGE, "image_token_index": IMAGE}


def words(tokens: int, batch: int = 2) -> Tensor:
    """``(batch, n)`` token ids: a word, the ``tokens`` of an image, four words."""
    return torch.tensor([[4 + i, *[IMAGE] * tokens, *range(5 + i, 9 + i)] for i in range(batch)])


def with_image(tokens: int, height: int = 32, width: int = 32, batch: int = 2, **more: Any) -> Callable[[], Inputs]:
    """Inputs of a model that takes whole images: ``tokens`` tokens of the text stand for each."""

    def inputs() -> Inputs:
        ids = words(tokens, batch)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels(batch, height, width), **more}

    return inputs


def in_two_scales() -> Inputs:
    """Inputs of a LLaVA-OneVision: the whole image, and its one tile, each row of which ends in a line feed."""
    inputs = with_image(16 + 4 * 5)()
    tiles = inputs["pixel_values"][:, None].expand(-1, 2, -1, -1, -1)
    return {**inputs, "pixel_values": tiles.contiguous(), "image_sizes": torch.tensor([[32, 32]] * 2)}


def in_tiles() -> Inputs:
    """Inputs of a SmolVLM or an Idefics3: one tile of each image, of which four tokens are left."""
    inputs = with_image(4)()
    return {**inputs, "pixel_values": inputs["pixel_values"][:, None]}


def patches(grid: tuple[int, int, int], *, channels: int = 3, patch: int = 8, frames: int = 2) -> Inputs:
    """Inputs of a Qwen-VL: two images of a grid of patches each, cut up and flattened, and 2 x 2 patches a token."""
    generator = torch.Generator().manual_seed(1)
    count = grid[0] * grid[1] * grid[2]
    ids = words(count // 4)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(2 * count, channels * frames * patch**2, generator=generator),
        "image_grid_thw": torch.tensor([grid, grid]),
    }


def llava() -> nn.Module:
    """Reads the output of the last layer but one of its vision tower."""
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VIT), text_config=hf.LlamaConfig(**LANGUAGE), image_token_index=IMAGE
    )
    return hf.LlavaForConditionalGeneration(config)


def llava_onevision() -> nn.Module:
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**VIT, vision_use_head=False), text_config=hf.Qwen2Config(**LANGUAGE),
        image_token_index=IMAGE, image_grid_pinpoints=[[32, 32]],
    )  # fmt: skip
    return hf.LlavaOnevisionForConditionalGeneration(config)


def smolvlm(kind: Any = hf.SmolVLMForConditionalGeneration, config: Any = hf.SmolVLMConfig) -> nn.Module:
    vision = {**VIT, "model_type": "smolvlm_vision" if config is hf.SmolVLMConfig else "idefics3_vision"}
    return kind(
        config(
            vision_config=vision, text_config={**LANGUAGE, "model_type": "llama"}, image_token_id=IMAGE,
            scale_factor=2, pad_token_id=0,
        )
    )  # fmt: skip


def internvl() -> nn.Module:
    vision = {**VIT, "image_size": [32, 32], "patch_size": [8, 8]}
    config = hf.InternVLConfig(
        vision_config=vision, text_config={**LANGUAGE, "model_type": "qwen2"}, image_token_id=IMAGE
    )
    return hf.InternVLForConditionalGeneration(config)


def gemma3() -> nn.Module:
    text = hf.Gemma3TextConfig(**GEMMA, sliding_window=64, layer_types=["full_attention"] * 2)
    vision = {**VIT, "vision_use_head": False}
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=51,
        eoi_token_index=52,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


def pixtral() -> nn.Module:
    """LLaVA with Pixtral's vision tower, as the model is published."""
    config = hf.LlavaConfig(
        vision_config=hf.PixtralVisionConfig(**VIT), text_config=hf.MistralConfig(**GEMMA, sliding_window=None),
        image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    return hf.LlavaForConditionalGeneration(config)


def mistral3() -> nn.Module:
    config = hf.Mistral3Config(
        vision_config={**VIT, "model_type": "pixtral"},
        text_config={**GEMMA, "model_type": "mistral", "sliding_window": None},
        image_token_index=IMAGE, spatial_merge_size=2,
    )  # fmt: skip
    return hf.Mistral3ForConditionalGeneration(config)


def paligemma() -> nn.Module:
    config = hf.PaliGemmaConfig(
        vision_config={**VIT, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
        text_config={**GEMMA, "model_type": "gemma"}, image_token_index=IMAGE, projection_dim=32, hidden_size=32,
    )  # fmt: skip
    return hf.PaliGemmaForConditionalGeneration(config)


_EYES = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
         "in_channels": 3}  # fmt: skip


def qwen2_vl() -> nn.Module:
    vision = {**_EYES, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(vision_config=vision, text_config=QWEN, image_token_id=IMAGE, video_token_id=51,
                         vision_start_token_id=52, vision_end_token_id=53)
    )  # fmt: skip


def qwen2_5_vl() -> nn.Module:
    """Layer 0 looks inside windows of 2 x 2 merged patches, layer 1 at the whole image."""
    vision = {**_EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "window_size": 32,
              "fullatt_block_indexes": [1]}  # fmt: skip
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(vision_config=vision, text_config=QWEN, image_token_id=IMAGE, video_token_id=51,
                            vision_start_token_id=52, vision_end_token_id=53)
    )  # fmt: skip


def qwen3_vl() -> nn.Module:
    vision = {**_EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32,
              "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}  # fmt: skip
    text = {**GEMMA, "rope_parameters": QWEN["rope_parameters"]}
    return hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, video_token_id=51,
                         vision_start_token_id=52, vision_end_token_id=53)
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A model, and what is to be found in its vision tower.

    Attributes:
        build: Makes the model.
        inputs: Makes a batch for it.
        sites: Its attention layers in the vision tower, with the layout of their tokens, or the reason why they stay.
        processor: Makes its image processor, for images of 32 by 32.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    sites: dict[str, str]
    processor: Callable[[], Any]


def _layers(names: str, *found: str) -> dict[str, str]:
    return {names.replace("*", str(layer)): each for layer, each in enumerate(found)}


_UNUSED = "unused: what the model is for (logits) does not depend on it"
_WINDOWED = "windowed attention: it is linear already"
_TOWER = "model.vision_tower.encoder.layers.*.self_attn"
_BLOCKS = "model.visual.blocks.*.attn"

_SIZE = {"height": 32, "width": 32}


def _qwen_processor(side: int) -> Callable[[], Any]:
    return lambda: hf.Qwen2VLImageProcessor(patch_size=8, merge_size=2, min_pixels=side**2, max_pixels=2 * side**2)


def _pixtral_processor() -> Any:
    return hf.PixtralImageProcessor(size={"longest_edge": 32}, patch_size=8)


MODELS: dict[str, Row] = {
    "llava": Row(
        llava, with_image(16), _layers(_TOWER, "4 x 4 + 1 prefix", _UNUSED),
        lambda: hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=_SIZE),
    ),
    "llava_onevision": Row(
        llava_onevision, in_two_scales, _layers(_TOWER, "4 x 4", "4 x 4"),
        lambda: hf.LlavaOnevisionImageProcessor(size=_SIZE, image_grid_pinpoints=[[32, 32]]),
    ),
    "smolvlm": Row(
        smolvlm, in_tiles, _layers("model.vision_model.encoder.layers.*.self_attn", "4 x 4", "4 x 4"),
        lambda: hf.SmolVLMImageProcessor(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
        ),
    ),
    "internvl": Row(
        internvl, with_image(4),
        _layers("model.vision_tower.encoder.layer.*.attention", "4 x 4 + 1 prefix", "4 x 4 + 1 prefix"),
        lambda: hf.GotOcr2ImageProcessor(size=_SIZE, crop_to_patches=False),
    ),
    "gemma3": Row(
        gemma3, with_image(4), _layers(_TOWER, "4 x 4", "4 x 4"), lambda: hf.Gemma3ImageProcessor(size=_SIZE)
    ),
    "pixtral": Row(
        pixtral, with_image(12, 32, 24, batch=1, image_sizes=torch.tensor([[32, 24]])),
        _layers("model.vision_tower.transformer.layers.*.attention", "4 x 3", "4 x 3"), _pixtral_processor,
    ),
    "mistral3": Row(
        mistral3, with_image(4, batch=1, image_sizes=torch.tensor([[32, 32]])),
        _layers("model.vision_tower.transformer.layers.*.attention", "4 x 4", "4 x 4"), _pixtral_processor,
    ),
    "paligemma": Row(
        paligemma, with_image(16), _layers(_TOWER, "4 x 4", "4 x 4"), lambda: hf.SiglipImageProcessor(size=_SIZE)
    ),
    # Patches come in blocks of 2 x 2, one after another: no grid.
    "qwen2_vl": Row(
        qwen2_vl, lambda: patches((1, 4, 4)), _layers(_BLOCKS, "sequence", "sequence"), _qwen_processor(32)
    ),
    "qwen2_5_vl": Row(
        qwen2_5_vl, lambda: patches((1, 8, 4)), _layers(_BLOCKS, _WINDOWED, "sequence"), _qwen_processor(64)
    ),
    "qwen3_vl": Row(
        qwen3_vl, lambda: patches((1, 4, 4)), _layers(_BLOCKS, "sequence", "sequence"), _qwen_processor(32)
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """One of ``MODELS`` in eval mode, whose vision tower weighs in its output; the same for the same name."""
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in key:
                parameter.normal_(0, 0.2)
    return model
