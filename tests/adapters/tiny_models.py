"""Small random models of the real Transformers classes, built offline, with inputs and the expected sites.

The expected sites are worked out by hand from the configurations, not by running the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import tiny_parts as parts
import torch
import transformers as hf
from torch import nn


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
    inputs: Callable[[], parts.Inputs]
    sites: tuple[Sites, ...]


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
        lambda: hf.Dinov2Model(hf.Dinov2Config(**parts.DINO)),
        parts.pixels,
        _vision("encoder.layer.*.attention"),
    ),
    Family(
        "dinov2_with_registers",
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**parts.DINO, num_register_tokens=3)),
        parts.pixels,
        _vision("encoder.layer.*.attention"),
    ),
    Family(
        "dinov3_vit",
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**parts.VIT, num_register_tokens=3)),
        parts.pixels,
        _vision("model.layer.*.attention"),
    ),
    Family("vit", lambda: hf.ViTModel(hf.ViTConfig(**parts.VIT)), parts.pixels, _vision("layers.*.attention")),
    Family("deit", lambda: hf.DeiTModel(hf.DeiTConfig(**parts.VIT)), parts.pixels, _vision("layers.*.attention")),
    Family("yolos", parts.yolos, parts.pixels, _vision("encoder.layer.*.attention.attention", "../output.dense")),
    Family("depth_anything", parts.depth_anything, parts.pixels, _vision("backbone.encoder.layer.*.attention")),
    Family("bert", lambda: hf.BertModel(hf.BertConfig(**parts.TEXT)), parts.text, (_BERT_SITES,)),
    Family("roberta", lambda: hf.RobertaModel(hf.RobertaConfig(**parts.TEXT)), parts.text, (_BERT_SITES,)),
    Family("xlm_roberta", lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**parts.TEXT)), parts.text, (_BERT_SITES,)),
    Family(  # ESM-2
        "esm",
        lambda: hf.EsmModel(hf.EsmConfig(**parts.TEXT, position_embedding_type="rotary", mask_token_id=32)),
        parts.text,
        (_BERT_SITES,),
    ),
    Family(
        "esmc",
        lambda: hf.EsmcModel(hf.EsmcConfig(**parts.TEXT, num_key_value_heads=4, head_dim=8)),
        parts.text,
        (Sites("layers.*.self_attn", 2, "text", 4, 8, projection="o_proj"),),
    ),
    Family(
        "distilbert",
        parts.distilbert,
        parts.text,
        (Sites("transformer.layer.*.attention", 2, "text", 4, 8, projection="out_lin"),),
    ),
    Family(
        "modernbert",
        parts.modernbert,
        parts.text,
        (
            Sites("layers.0.attn", 1, "text", 4, 8, projection="Wo"),
            Sites("layers.1.attn", 1, "text", 4, 8, reason="windowed"),
            Sites("layers.2.attn", 1, "text", 4, 8, projection="Wo"),
        ),
    ),
    Family("clip", parts.clip, lambda: {**parts.text(), **parts.pixels()}, _towers("encoder.", causal_text=True)),
    Family(
        "siglip",
        parts.siglip,
        lambda: {**parts.text(), **parts.pixels()},
        (*_towers("encoder.", causal_text=False), _probe()),
    ),
    Family("siglip2", parts.siglip2, parts.siglip2_inputs, (*_towers("encoder.", causal_text=False), _probe())),
    Family("owlvit", parts.owlvit, parts.owlvit_inputs, _towers("encoder.", causal_text=True)),
    Family("detr", lambda: hf.DetrModel(parts.detr_config()), parts.detr_inputs, _DETR_SITES),
    Family(
        "table_transformer",  # computes attention by hand, and is read all the same
        lambda: hf.TableTransformerModel(parts.detr_config(hf.TableTransformerConfig)),
        parts.detr_inputs,
        tuple(replace(group, projection="out_proj") for group in _DETR_SITES),
    ),
    Family("whisper", lambda: hf.WhisperModel(parts.whisper_config()), parts.whisper_inputs, _seq2seq_sites()),
    Family("bart", lambda: hf.BartModel(hf.BartConfig(**parts.BART)), parts.seq2seq, _seq2seq_sites()),
    Family("marian", lambda: hf.MarianModel(hf.MarianConfig(**parts.BART)), parts.seq2seq, _seq2seq_sites()),
    Family(
        "wav2vec2",
        parts.wav2vec2,
        parts.wav2vec2_inputs,
        (Sites("encoder.layers.*.attention", 2, "audio", 4, 8, projection="out_proj"),),
    ),
    Family(  # two of its heads share their keys
        "eurobert",
        lambda: hf.EuroBertModel(hf.EuroBertConfig(**parts.GQA)),
        parts.text,
        (Sites("layers.*.self_attn", 2, "text", 4, 8, projection="o_proj"),),
    ),
    Family(
        "llama",
        lambda: hf.LlamaModel(hf.LlamaConfig(**parts.TEXT, bos_token_id=2, eos_token_id=3)),
        parts.text,
        (Sites("layers.*.self_attn", 2, "text", 4, 8, causal=True, projection="o_proj"),),
    ),
    Family("rt_detr", lambda: hf.RTDetrModel(parts.rt_detr_config()), lambda: parts.pixels(2, 64, 64), _RT_DETR_SITES),
    Family(
        "deformable_detr",
        lambda: hf.DeformableDetrModel(parts.detr_config(hf.DeformableDetrConfig, num_feature_levels=1)),
        parts.detr_inputs,
        (
            Sites("encoder.layers.*.self_attn", 2, "encoder", 4, 8, reason="deformable"),
            Sites("decoder.layers.*.self_attn", 2, "decoder", 2, 16, projection="o_proj"),
            Sites("decoder.layers.*.encoder_attn", 2, "decoder", 2, 16, kind="cross", reason="deformable"),
        ),
    ),
    Family(
        "conditional_detr",  # query and key of its cross-attention are twice as wide as the value
        lambda: hf.ConditionalDetrModel(parts.detr_config(hf.ConditionalDetrConfig)),
        parts.detr_inputs,
        _DETR_SITES,
    ),
    Family(
        "rt_detr_v2",
        lambda: hf.RTDetrV2Model(parts.rt_detr_config(hf.RTDetrV2Config)),
        lambda: parts.pixels(2, 64, 64),
        _RT_DETR_SITES,
    ),
    Family("d_fine", parts.d_fine, lambda: parts.pixels(2, 64, 64), _RT_DETR_SITES),
    Family(
        "rf_detr",
        parts.rf_detr,
        lambda: parts.pixels(2, 64, 64),
        (
            Sites("backbone.backbone.encoder.layer.0.attention", 1, "vision", 4, 8, reason="windowed"),
            Sites("backbone.backbone.encoder.layer.1.attention", 1, "vision", 4, 8, projection="o_proj"),
            Sites("decoder.layers.*.self_attn", 2, "decoder", 2, 16, projection="o_proj"),
            Sites("decoder.layers.*.cross_attn", 2, "decoder", 4, 8, kind="cross", reason="deformable"),
        ),
    ),
    Family(
        "vision_text_dual_encoder",
        parts.dual_encoder,
        lambda: {**parts.text(), **parts.pixels()},
        (
            *_under("vision_model", _vision("layers.*.attention")),
            *_under("text_model", (_BERT_SITES,)),
        ),
    ),
    Family(
        "detr_object_detection",
        lambda: hf.DetrForObjectDetection(parts.detr_config()),
        parts.detr_inputs,
        _under("model", _DETR_SITES),
    ),
    Family(
        "rt_detr_object_detection",
        lambda: hf.RTDetrForObjectDetection(parts.rt_detr_config()),
        lambda: parts.pixels(2, 64, 64),
        _under("model", _RT_DETR_SITES),
    ),
    Family(
        "dinov2_image_classification",
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**parts.DINO, num_labels=3)),
        parts.pixels,
        _vision("dinov2.encoder.layer.*.attention"),
    ),
    Family(
        "bert_masked_lm",  # its decoder is tied to the word embeddings
        lambda: hf.BertForMaskedLM(hf.BertConfig(**parts.TEXT)),
        parts.text,
        _under("bert", (_BERT_SITES,)),
    ),
    Family(
        "whisper_generation",  # likewise
        lambda: hf.WhisperForConditionalGeneration(parts.whisper_config()),
        parts.whisper_inputs,
        _under("model", _seq2seq_sites()),
    ),
    Family(
        "clip_vision_projection",
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**parts.VIT, projection_dim=16)),
        parts.pixels,
        _vision("vision_model.encoder.layers.*.self_attn", "out_proj"),
    ),
)


def _biased(model: nn.Module) -> nn.Module:
    """A model whose tables of relative positions are not zero, as they are at first."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("relative_position_bias_table", "rel_pos_h", "rel_pos_w", "relative_attention_bias.weight")):
            nn.init.normal_(parameter)
    return model


_WIDE = {**parts.VIT, "image_size": 64, "initializer_range": 0.1}

BIASED: tuple[Family, ...] = (
    Family(
        "t5",
        lambda: _biased(hf.T5Model(hf.T5Config(**parts.T5))),
        lambda: {**parts.seq2seq(), **parts.text((50, 37))},
        (
            Sites("encoder.block.*.layer.0.SelfAttention", 2, "encoder", 4, 8, projection="o"),
            Sites(
                "decoder.block.*.layer.0.SelfAttention", 2, "decoder", 4, 8, causal=True,
                reason="relative-position bias on causal logits",
            ),
            Sites("decoder.block.*.layer.1.EncDecAttention", 2, "decoder", 4, 8, kind="cross", projection="o"),
        ),
    ),
    Family(
        "t5_encoder",
        lambda: _biased(hf.T5EncoderModel(hf.T5Config(**parts.T5))),
        lambda: parts.text((50, 37)),
        (Sites("encoder.block.*.layer.0.SelfAttention", 2, "text", 4, 8, projection="o"),),
    ),
    Family(
        "beit",
        lambda: _biased(hf.BeitModel(hf.BeitConfig(**_WIDE, use_relative_position_bias=True))),
        lambda: parts.pixels(2, 64, 64),
        (Sites("layers.*.attention", 2, "vision", 4, 8, projection="o_proj"),),
    ),
    Family(
        "data2vec_vision",
        lambda: _biased(hf.Data2VecVisionModel(hf.Data2VecVisionConfig(**_WIDE, use_relative_position_bias=True))),
        lambda: parts.pixels(2, 64, 64),
        (Sites("encoder.layer.*.attention.attention", 2, "vision", 4, 8, projection="../output.dense"),),
    ),
    Family(
        "sam",
        lambda: _biased(hf.SamVisionModel(hf.SamVisionConfig(
            **_WIDE, mlp_dim=48, output_channels=8, window_size=2, global_attn_indexes=[1], num_pos_feats=4
        ))),
        lambda: parts.pixels(2, 64, 64),
        (
            Sites("vision_encoder.layers.0.attn", 1, "vision", 4, 8, reason="windowed"),
            Sites("vision_encoder.layers.1.attn", 1, "vision", 4, 8, projection="proj"),
        ),
    ),
    Family(
        "wavlm",
        lambda: _biased(hf.WavLMModel(hf.WavLMConfig(**parts.SPEECH, num_buckets=16, max_bucket_distance=20))),
        lambda: {"input_values": parts.wav2vec2_inputs()["input_values"]},  # its own mask makes PyTorch warn
        (Sites("encoder.layers.*.attention", 2, "audio", 4, 8, projection="out_proj"),),
    ),
)  # fmt: skip
"""Those with a bias of relative positions on their logits."""

NOT_CONVERTIBLE: tuple[Family, ...] = (
    Family(
        "swin",
        lambda: hf.SwinModel(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
        ),
        parts.pixels,
        (Sites("encoder.layers.0.blocks.*.attention", 2, "vision", 2, 8, reason="windowed"),),
    ),
    Family(
        "llama_gqa",
        lambda: hf.LlamaModel(hf.LlamaConfig(**parts.GQA)),
        parts.text,
        (Sites("layers.*.self_attn", 2, "text", 4, 8, causal=True, reason="grouped-query"),),
    ),
    Family(
        "qwen2_gqa",
        lambda: hf.Qwen2Model(hf.Qwen2Config(**parts.GQA)),
        parts.text,
        (Sites("layers.*.self_attn", 2, "text", 4, 8, causal=True, reason="grouped-query"),),
    ),
    Family(
        "gemma2",
        lambda: hf.Gemma2Model(
            hf.Gemma2Config(**{**parts.GQA, "num_key_value_heads": 4}, head_dim=8, sliding_window=4)
        ),
        parts.text,
        (
            Sites("layers.0.self_attn", 1, "text", 4, 8, causal=True, reason="windowed"),
            Sites("layers.1.self_attn", 1, "text", 4, 8, causal=True, reason="soft cap"),
        ),
    ),
)

BY_NAME = {family.name: family for family in (*FAMILIES, *BIASED, *NOT_CONVERTIBLE)}


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """The small model of a family, the same for the same name, in eval mode."""
    torch.manual_seed(0)
    model = BY_NAME[name].build().eval()
    if attention != "sdpa":  # the default; convolutional backbones refuse to be told so
        model.set_attn_implementation(attention)
    return model
