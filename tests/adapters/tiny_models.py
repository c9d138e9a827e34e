"""Small random models of the real Transformers classes, built offline, with inputs and the expected sites.

The expected sites are worked out by hand from the configurations, not by running the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Sites:
    """``names`` (with ``*`` for a layer number) and what every one of them must be."""

    names: str
    layers: int
    tower: str
    heads: int
    head_dim: int
    kind: str = "self"
    causal: bool = False
    reason: str | None = None  # a part of the reason of an ineligible site
    projection: str | None = None  # output projection, relative to the site ("../output.dense" for a sibling)

    def expand(self) -> list[str]:
        return [self.names.replace("*", str(i)) for i in range(self.layers)]


@dataclass(frozen=True)
class Family:
    """A family of models."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    sites: tuple[Sites, ...]


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


_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_VIT = {**_LAYERS, "image_size": 32, "patch_size": 8}
_TEXT = {**_LAYERS, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 1}
_BART = {
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
_BERT_SITES = Sites("encoder.layer.*.attention.self", 2, "text", 4, 8, projection="../output.dense")


def _towers(prefix: str, projection: str = "out_proj", *, causal_text: bool) -> tuple[Sites, ...]:
    return (
        Sites(
            f"text_model.{prefix}layers.*.self_attn",
            2,
            "text",
            4,
            8,
            causal=causal_text,
            projection=projection,
        ),
        Sites(f"vision_model.{prefix}layers.*.self_attn", 2, "vision", 4, 8, projection=projection),
    )


def _clip() -> nn.Module:
    return hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**_TEXT, "bos_token_id": 2, "eos_token_id": 3}, vision_config=_VIT, projection_dim=16
        )
    )


def _siglip() -> nn.Module:
    return hf.SiglipModel(
        hf.SiglipConfig(text_config={**_TEXT, "bos_token_id": 2, "eos_token_id": 3}, vision_config=_VIT)
    )


def _siglip2() -> nn.Module:
    vision = {**_LAYERS, "num_patches": 16, "patch_size": 8}
    return hf.Siglip2Model(
        hf.Siglip2Config(text_config={**_TEXT, "bos_token_id": 2, "eos_token_id": 3}, vision_config=vision)
    )


def _siglip2_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    return {
        **text(),
        "pixel_values": torch.randn(2, 16, 3 * 8 * 8, generator=generator),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }


def _owlvit_inputs() -> Inputs:
    return {**text((12, 7, 5, 9)), **pixels(2)}


def _resnet() -> Any:
    return hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])


def _detr_config(kind: Callable[..., Any] = hf.DetrConfig, **options: Any) -> Any:
    """Also of the classes that came from DETR."""
    return kind(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=_resnet(),
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


def _detr_inputs() -> Inputs:
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


def _whisper_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_features": torch.randn(2, 8, 40, generator=generator),
        "decoder_input_ids": torch.tensor([[2, 5, 6, 7], [2, 9, 10, 11]]),
    }


def _wav2vec2() -> nn.Module:
    return hf.Wav2Vec2Model(
        hf.Wav2Vec2Config(
            **_LAYERS,
            vocab_size=32,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
        )
    )


def _wav2vec2_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 250:] = 0
    return {"input_values": torch.randn(2, 400, generator=generator) * mask, "attention_mask": mask}


def _depth_anything() -> nn.Module:
    backbone = hf.Dinov2Config(**_DINO, out_indices=[1, 2], reshape_hidden_states=False)
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


_DINO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2,
    "image_size": 32,
    "patch_size": 8,
}


def _seq2seq_sites(cross: str = "encoder_attn") -> tuple[Sites, ...]:
    return (
        Sites("encoder.layers.*.self_attn", 2, "encoder", 4, 8, projection="out_proj"),
        Sites("decoder.layers.*.self_attn", 2, "decoder", 2, 16, causal=True, projection="out_proj"),
        Sites(f"decoder.layers.*.{cross}", 2, "decoder", 2, 16, kind="cross", projection="out_proj"),
    )


def _vision(names: str, projection: str = "o_proj") -> tuple[Sites, ...]:
    return (Sites(names, 2, "vision", 4, 8, projection=projection),)


def _probe() -> Sites:
    return Sites("vision_model.head.attention", 1, "vision", 4, 8, reason="probe")


def _yolos() -> nn.Module:
    return hf.YolosModel(hf.YolosConfig(**{**_VIT, "image_size": [32, 32]}, num_detection_tokens=5))


def _distilbert() -> nn.Module:
    return hf.DistilBertModel(
        hf.DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=48, pad_token_id=1)
    )


def _modernbert() -> nn.Module:
    """Layers 0 and 2 are global, layer 1 sees two tokens to either side."""
    return hf.ModernBertModel(
        hf.ModernBertConfig(
            **{**_TEXT, "num_hidden_layers": 3},
            global_attn_every_n_layers=2,
            local_attention=4,
            cls_token_id=2,
            sep_token_id=3,
            bos_token_id=2,
            eos_token_id=3,
        )
    )


def _owlvit() -> nn.Module:
    text_config = {**_TEXT, "max_position_embeddings": 16, "bos_token_id": 2, "eos_token_id": 3}
    return hf.OwlViTModel(hf.OwlViTConfig(text_config=text_config, vision_config=_VIT, projection_dim=16))


def _rt_detr_config(kind: Callable[..., Any] = hf.RTDetrConfig, backbone: Any = None) -> Any:
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


def _d_fine() -> nn.Module:
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
    return hf.DFineModel(_rt_detr_config(hf.DFineConfig, backbone))


def _rf_detr() -> nn.Module:
    """Two by two windows: layer 0 of the backbone looks inside them, layer 1 at all of them."""
    backbone = hf.RfDetrDinov2Config(**_DINO, num_windows=2, out_indices=[1, 2])
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


def _dual_encoder() -> nn.Module:
    config = hf.VisionTextDualEncoderConfig.from_vision_text_configs(
        hf.ViTConfig(**_VIT), hf.BertConfig(**_TEXT), projection_dim=16
    )
    return hf.VisionTextDualEncoderModel(config)


_DETR_SITES = (
    Sites("encoder.layers.*.self_attn", 2, "encoder", 4, 8, projection="o_proj"),
    Sites("decoder.layers.*.self_attn", 2, "decoder", 2, 16, projection="o_proj"),
    Sites("decoder.layers.*.encoder_attn", 2, "decoder", 2, 16, kind="cross", projection="o_proj"),
)
_RT_DETR_SITES = (
    Sites("encoder.aifi.0.layers.0.self_attn", 1, "encoder", 4, 8, projection="o_proj"),
    Sites("decoder.layers.*.self_attn", 2, "decoder", 2, 16, projection="o_proj"),
    Sites("decoder.layers.*.encoder_attn", 2, "decoder", 2, 16, kind="cross", reason="deformable"),
)


def _under(prefix: str, sites: tuple[Sites, ...]) -> tuple[Sites, ...]:
    """The sites of a base model inside a model with a head."""
    return tuple(replace(group, names=f"{prefix}.{group.names}") for group in sites)


FAMILIES: tuple[Family, ...] = (
    Family(
        "dinov2",
        lambda: hf.Dinov2Model(hf.Dinov2Config(**_DINO)),
        pixels,
        _vision("encoder.layer.*.attention"),
    ),
    Family(
        "dinov2_with_registers",
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**_DINO, num_register_tokens=3)),
        pixels,
        _vision("encoder.layer.*.attention"),
    ),
    Family(
        "dinov3_vit",
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**_VIT, num_register_tokens=3)),
        pixels,
        _vision("model.layer.*.attention"),
    ),
    Family("vit", lambda: hf.ViTModel(hf.ViTConfig(**_VIT)), pixels, _vision("layers.*.attention")),
    Family("deit", lambda: hf.DeiTModel(hf.DeiTConfig(**_VIT)), pixels, _vision("layers.*.attention")),
    Family("yolos", _yolos, pixels, _vision("encoder.layer.*.attention.attention", "../output.dense")),
    Family("depth_anything", _depth_anything, pixels, _vision("backbone.encoder.layer.*.attention")),
    Family("bert", lambda: hf.BertModel(hf.BertConfig(**_TEXT)), text, (_BERT_SITES,)),
    Family("roberta", lambda: hf.RobertaModel(hf.RobertaConfig(**_TEXT)), text, (_BERT_SITES,)),
    Family("xlm_roberta", lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**_TEXT)), text, (_BERT_SITES,)),
    Family(
        "distilbert",
        _distilbert,
        text,
        (Sites("transformer.layer.*.attention", 2, "text", 4, 8, projection="out_lin"),),
    ),
    Family(
        "modernbert",
        _modernbert,
        text,
        (
            Sites("layers.0.attn", 1, "text", 4, 8, projection="Wo"),
            Sites("layers.1.attn", 1, "text", 4, 8, reason="windowed"),
            Sites("layers.2.attn", 1, "text", 4, 8, projection="Wo"),
        ),
    ),
    Family("clip", _clip, lambda: {**text(), **pixels()}, _towers("encoder.", causal_text=True)),
    Family("siglip", _siglip, lambda: {**text(), **pixels()}, (*_towers("encoder.", causal_text=False), _probe())),
    Family("siglip2", _siglip2, _siglip2_inputs, (*_towers("encoder.", causal_text=False), _probe())),
    Family("owlvit", _owlvit, _owlvit_inputs, _towers("encoder.", causal_text=True)),
    Family("detr", lambda: hf.DetrModel(_detr_config()), _detr_inputs, _DETR_SITES),
    Family(
        "table_transformer",  # computes attention by hand, and is read all the same
        lambda: hf.TableTransformerModel(_detr_config(hf.TableTransformerConfig)),
        _detr_inputs,
        tuple(replace(group, projection="out_proj") for group in _DETR_SITES),
    ),
    Family("whisper", lambda: hf.WhisperModel(whisper_config()), _whisper_inputs, _seq2seq_sites()),
    Family("bart", lambda: hf.BartModel(hf.BartConfig(**_BART)), seq2seq, _seq2seq_sites()),
    Family("marian", lambda: hf.MarianModel(hf.MarianConfig(**_BART)), seq2seq, _seq2seq_sites()),
    Family(
        "wav2vec2",
        _wav2vec2,
        _wav2vec2_inputs,
        (Sites("encoder.layers.*.attention", 2, "audio", 4, 8, projection="out_proj"),),
    ),
    Family(
        "llama",
        lambda: hf.LlamaModel(hf.LlamaConfig(**_TEXT, bos_token_id=2, eos_token_id=3)),
        text,
        (Sites("layers.*.self_attn", 2, "text", 4, 8, causal=True, projection="o_proj"),),
    ),
    Family("rt_detr", lambda: hf.RTDetrModel(_rt_detr_config()), lambda: pixels(2, 64, 64), _RT_DETR_SITES),
    Family(
        "deformable_detr",
        lambda: hf.DeformableDetrModel(_detr_config(hf.DeformableDetrConfig, num_feature_levels=1)),
        _detr_inputs,
        (
            Sites("encoder.layers.*.self_attn", 2, "encoder", 4, 8, reason="deformable"),
            Sites("decoder.layers.*.self_attn", 2, "decoder", 2, 16, projection="o_proj"),
            Sites("decoder.layers.*.encoder_attn", 2, "decoder", 2, 16, kind="cross", reason="deformable"),
        ),
    ),
    Family(
        "conditional_detr",  # query and key of its cross-attention are twice as wide as the value
        lambda: hf.ConditionalDetrModel(_detr_config(hf.ConditionalDetrConfig)),
        _detr_inputs,
        _DETR_SITES,
    ),
    Family(
        "rt_detr_v2",
        lambda: hf.RTDetrV2Model(_rt_detr_config(hf.RTDetrV2Config)),
        lambda: pixels(2, 64, 64),
        _RT_DETR_SITES,
    ),
    Family("d_fine", _d_fine, lambda: pixels(2, 64, 64), _RT_DETR_SITES),
    Family(
        "rf_detr",
        _rf_detr,
        lambda: pixels(2, 64, 64),
        (
            Sites("backbone.backbone.encoder.layer.0.attention", 1, "vision", 4, 8, reason="windowed"),
            Sites("backbone.backbone.encoder.layer.1.attention", 1, "vision", 4, 8, projection="o_proj"),
            Sites("decoder.layers.*.self_attn", 2, "decoder", 2, 16, projection="o_proj"),
            Sites("decoder.layers.*.cross_attn", 2, "decoder", 4, 8, kind="cross", reason="deformable"),
        ),
    ),
    Family(
        "vision_text_dual_encoder",
        _dual_encoder,
        lambda: {**text(), **pixels()},
        (
            *_under("vision_model", _vision("layers.*.attention")),
            *_under("text_model", (_BERT_SITES,)),
        ),
    ),
    Family(
        "detr_object_detection",
        lambda: hf.DetrForObjectDetection(_detr_config()),
        _detr_inputs,
        _under("model", _DETR_SITES),
    ),
    Family(
        "rt_detr_object_detection",
        lambda: hf.RTDetrForObjectDetection(_rt_detr_config()),
        lambda: pixels(2, 64, 64),
        _under("model", _RT_DETR_SITES),
    ),
    Family(
        "dinov2_image_classification",
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**_DINO, num_labels=3)),
        pixels,
        _vision("dinov2.encoder.layer.*.attention"),
    ),
    Family(
        "bert_masked_lm",  # its decoder is tied to the word embeddings
        lambda: hf.BertForMaskedLM(hf.BertConfig(**_TEXT)),
        text,
        _under("bert", (_BERT_SITES,)),
    ),
    Family(
        "whisper_generation",  # likewise
        lambda: hf.WhisperForConditionalGeneration(whisper_config()),
        _whisper_inputs,
        _under("model", _seq2seq_sites()),
    ),
    Family(
        "clip_vision_projection",
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**_VIT, projection_dim=16)),
        pixels,
        _vision("vision_model.encoder.layers.*.self_attn", "out_proj"),
    ),
)

_GQA = {**_TEXT, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3}
_T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

NOT_CONVERTIBLE: tuple[Family, ...] = (
    Family(
        "t5",
        lambda: hf.T5Model(hf.T5Config(**_T5)),
        seq2seq,
        (
            Sites("encoder.block.*.layer.0.SelfAttention", 2, "encoder", 4, 8, reason="relative-position bias"),
            Sites(
                "decoder.block.*.layer.0.SelfAttention",
                2,
                "decoder",
                4,
                8,
                causal=True,
                reason="relative-position bias",
            ),
            Sites(
                "decoder.block.*.layer.1.EncDecAttention",
                2,
                "decoder",
                4,
                8,
                kind="cross",
                reason="relative-position bias",
            ),
        ),
    ),
    Family(
        "beit",
        lambda: hf.BeitModel(hf.BeitConfig(**_VIT, use_relative_position_bias=True)),
        pixels,
        (Sites("layers.*.attention", 2, "vision", 4, 8, reason="relative-position bias"),),
    ),
    Family(
        "swin",
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
        ),
        pixels,
        (Sites("encoder.layers.0.blocks.*.attention", 2, "vision", 2, 8, reason="relative-position bias"),),
    ),
    Family(
        "sam",  # layer 0 is windowed besides
        lambda: hf.SamVisionModel(
            hf.SamVisionConfig(
                **_VIT, mlp_dim=48, output_channels=8, window_size=2, global_attn_indexes=[1], num_pos_feats=4
            )
        ),
        pixels,
        (Sites("vision_encoder.layers.*.attn", 2, "vision", 4, 8, reason="relative-position bias"),),
    ),
    Family(
        "llama_gqa",
        lambda: hf.LlamaModel(hf.LlamaConfig(**_GQA)),
        text,
        (Sites("layers.*.self_attn", 2, "text", 4, 8, causal=True, reason="grouped-query"),),
    ),
    Family(
        "qwen2_gqa",
        lambda: hf.Qwen2Model(hf.Qwen2Config(**_GQA)),
        text,
        (Sites("layers.*.self_attn", 2, "text", 4, 8, causal=True, reason="grouped-query"),),
    ),
    Family(
        "gemma2",
        lambda: hf.Gemma2Model(hf.Gemma2Config(**{**_GQA, "num_key_value_heads": 4}, head_dim=8, sliding_window=4)),
        text,
        (
            Sites("layers.0.self_attn", 1, "text", 4, 8, causal=True, reason="windowed"),
            Sites("layers.1.self_attn", 1, "text", 4, 8, causal=True, reason="soft cap"),
        ),
    ),
)

BY_NAME = {family.name: family for family in (*FAMILIES, *NOT_CONVERTIBLE)}


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """The small model of a family, the same for the same name, in eval mode."""
    torch.manual_seed(0)
    model = BY_NAME[name].build().eval()
    if attention != "sdpa":  # the default; convolutional backbones refuse to be told so
        model.set_attn_implementation(attention)
    return model


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
