"""Inputs, configurations and builders of the small models in ``tiny_models``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

Inputs = dict[str, Tensor]
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VIT = {**LAYERS, "image_size": 32, "patch_size": 8}
TEXT = {**LAYERS, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 1}
BART = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}
DINO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2,
    "image_size": 32,
    "patch_size": 8,
}
GQA = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def pixels(batch: int = 2, height: int = 32, width: int = 32, seed: int = 1) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(batch, 3, height, width, generator=generator)}


def text(lengths: tuple[int, ...] = (12, 7), vocabulary: int = 60, seed: int = 1) -> Inputs:
    """Right-padded token ids (pad 1, ids from 4) and their mask."""
    generator = torch.Generator().manual_seed(seed)
    size = max(lengths)
    mask = (torch.arange(size) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, vocabulary, (len(lengths), size), generator=generator)
    return {"input_ids": torch.where(mask.bool(), ids, torch.ones_like(ids)), "attention_mask": mask}


def seq2seq(start: int = 2) -> Inputs:
    ids = torch.tensor([[start, 5, 6, 7, 8], [start, 9, 10, 11, 12]])
    return {**text(), "decoder_input_ids": ids}


def clip() -> nn.Module:
    return hf.CLIPModel(
        hf.CLIPConfig(text_config={**TEXT, "bos_token_id": 2, "eos_token_id": 3}, vision_config=VIT, projection_dim=16)
    )


def siglip() -> nn.Module:
    return hf.SiglipModel(
        hf.SiglipConfig(text_config={**TEXT, "bos_token_id": 2, "eos_token_id": 3}, vision_config=VIT)
    )


def siglip2() -> nn.Module:
    vision = {**LAYERS, "num_patches": 16, "patch_size": 8}
    return hf.Siglip2Model(
        hf.Siglip2Config(text_config={**TEXT, "bos_token_id": 2, "eos_token_id": 3}, vision_config=vision)
    )


def siglip2_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {
        **text(),
        "pixel_values": torch.randn(2, 16, 3 * 8 * 8, generator=generator),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }


def owlvit_inputs() -> Inputs:
    return {**text((12, 7, 5, 9)), **pixels(2)}


def resnet() -> Any:
    return hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])


def detr_config(kind: Callable[..., Any] = hf.DetrConfig, **options: Any) -> Any:
    """Also of the classes that came from DETR."""
    return kind(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=resnet(),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_queries=6,
        **options,
    )


def detr_inputs() -> Inputs:
    mask = torch.ones(2, 64, 64, dtype=torch.long)
    mask[1, 40:] = 0
    mask[1, :, 48:] = 0
    return {**pixels(2, 64, 64), "pixel_mask": mask}


def whisper_config() -> Any:
    return hf.WhisperConfig(
        vocab_size=60,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )


def whisper_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_features": torch.randn(2, 8, 40, generator=generator),
        "decoder_input_ids": torch.tensor([[2, 5, 6, 7], [2, 9, 10, 11]]),
    }


SPEECH = {
    **LAYERS,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
}


def wav2vec2() -> nn.Module:
    return hf.Wav2Vec2Model(hf.Wav2Vec2Config(**SPEECH))


def wav2vec2_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 250:] = 0
    return {"input_values": torch.randn(2, 400, generator=generator) * mask, "attention_mask": mask}


def depth_anything() -> nn.Module:
    backbone = hf.Dinov2Config(**DINO, out_indices=[1, 2], reshape_hidden_states=False)
    return hf.DepthAnythingForDepthEstimation(
        hf.DepthAnythingConfig(
            backbone_config=backbone,
            patch_size=8,
            reassemble_hidden_size=32,
            reassemble_factors=[2, 1],
            neck_hidden_sizes=[8, 8],
            fusion_hidden_size=8,
            head_hidden_size=8,
            initializer_range=0.2,  # at the default, next to nothing of the backbone comes through its head
        )
    )


def yolos() -> nn.Module:
    return hf.YolosModel(hf.YolosConfig(**{**VIT, "image_size": [32, 32]}, num_detection_tokens=5))


def distilbert() -> nn.Module:
    return hf.DistilBertModel(
        hf.DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=48, pad_token_id=1)
    )


def modernbert() -> nn.Module:
    """Layers 0 and 2 are global, layer 1 sees two tokens to either side."""
    return hf.ModernBertModel(
        hf.ModernBertConfig(
            **{**TEXT, "num_hidden_layers": 3},
            global_attn_every_n_layers=2,
            local_attention=4,
            cls_token_id=2,
            sep_token_id=3,
            bos_token_id=2,
            eos_token_id=3,
        )
    )


def owlvit() -> nn.Module:
    text_config = {**TEXT, "max_position_embeddings": 16, "bos_token_id": 2, "eos_token_id": 3}
    return hf.OwlViTModel(hf.OwlViTConfig(text_config=text_config, vision_config=VIT, projection_dim=16))


def rt_detr_config(kind: Callable[..., Any] = hf.RTDetrConfig, backbone: Any = None) -> Any:
    """Also of the classes that came from RT-DETR."""
    resnet = hf.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
        layer_type="basic",
    )
    return kind(
        backbone_config=backbone or resnet,
        encoder_hidden_dim=32,
        encoder_in_channels=[8, 8, 8],
        encoder_layers=1,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        d_model=32,
        decoder_in_channels=[32, 32, 32],
        decoder_layers=2,
        decoder_ffn_dim=48,
        decoder_attention_heads=2,
        num_queries=6,
        num_denoising=0,
        initializer_range=0.2,  # at the default, little of the encoder comes out of its convolutions
    )


def d_fine() -> nn.Module:
    backbone = hf.HGNetV2Config(
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 8, 8, 8],
        stage_mid_channels=[8, 8, 8, 8],
        stage_out_channels=[8, 8, 8, 8],
        stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"],
    )
    return hf.DFineModel(rt_detr_config(hf.DFineConfig, backbone))


def rf_detr() -> nn.Module:
    """Two by two windows: layer 0 of the backbone looks inside them, layer 1 at all of them."""
    backbone = hf.RfDetrDinov2Config(**DINO, num_windows=2, out_indices=[1, 2])
    return hf.RfDetrModel(
        hf.RfDetrConfig(
            backbone_config=backbone,
            d_model=32,
            decoder_layers=2,
            decoder_self_attention_heads=2,
            decoder_cross_attention_heads=4,
            decoder_n_points=2,
            decoder_ffn_dim=48,
            num_queries=6,
            group_detr=2,
            c2f_num_blocks=1,
        )
    )


def dual_encoder() -> nn.Module:
    config = hf.VisionTextDualEncoderConfig.from_vision_text_configs(
        hf.ViTConfig(**VIT), hf.BertConfig(**TEXT), projection_dim=16
    )
    return hf.VisionTextDualEncoderModel(config)


class TorchDetector(nn.Module):
    """The original DETR in short, of PyTorch's own layers; as many object queries as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 16, 8, 8)
        self.transformer = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 24, 16))

    def forward(self, image: Tensor) -> Tensor:
        output: Tensor = self.transformer(self.backbone(image).flatten(2).mT, self.query)
        return output
