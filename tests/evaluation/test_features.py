from __future__ import annotations

from types import SimpleNamespace

import pytest
import timm
import torch
import transformers

from latte_convert.data.feed import Inputs
from latte_convert.evaluation.features import image_features, image_tokens, no_image_features, prefix_tokens

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def inputs(method: str = "forward", name: str = "pixel_values") -> Inputs:
    return Inputs({name: PIXELS}, method)


@torch.no_grad()
def test_a_classifier_gives_its_cls_token_before_the_head():
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=3)
    ).eval()
    tokens = model.vit(PIXELS).last_hidden_state
    assert torch.equal(image_features(model, inputs()), tokens[:, 0])
    found, prefix = image_tokens(model, inputs())
    assert prefix == prefix_tokens(model) == 1
    assert torch.equal(found, tokens)


@torch.no_grad()
def test_without_a_cls_token_the_pooled_output_counts():
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL, image_size=16, patch_size=4)).eval()
    assert torch.equal(image_features(model, inputs()), model(PIXELS).pooler_output)
    assert image_tokens(model, inputs())[1] == 0


@torch.no_grad()
def test_registers_are_no_patches():
    model = transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**{k: v for k, v in SMALL.items() if k != "intermediate_size"},
                                               mlp_ratio=1, image_size=16, patch_size=4, num_register_tokens=3)
    ).eval()  # fmt: skip
    tokens, prefix = image_tokens(model, inputs())
    assert (tokens.shape[1], prefix) == (16 + 4, 4)


@torch.no_grad()
def test_two_towers_give_the_projected_embedding(tiny_clip):
    model = transformers.CLIPModel.from_pretrained(tiny_clip).eval()
    pixels = torch.randn(2, 3, 48, 48)
    given = Inputs({"pixel_values": pixels}, "get_image_features")
    expected = model.visual_projection(model.vision_model(pixels).pooler_output)
    assert torch.allclose(image_features(model, given), expected, atol=1e-6)
    tokens, prefix = image_tokens(model, given)
    assert torch.allclose(tokens, model.vision_model(pixels).last_hidden_state, atol=1e-6)
    assert prefix == 1


@torch.no_grad()
def test_timm():
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3
    ).eval()
    tokens = model.forward_features(PIXELS)
    assert torch.equal(image_features(model, inputs(name="x")), tokens[:, 0])
    assert image_tokens(model, inputs(name="x"))[1] == 1


@pytest.mark.parametrize(
    ("library", "name", "modalities", "reason"),
    [
        ("transformers", "Dinov2Model", ("image",), None),
        ("transformers", "ViTForImageClassification", ("image",), None),
        ("transformers", "SiglipModel", ("image", "text"), None),
        ("timm", "VisionTransformer", ("image",), None),
        ("transformers", "DetrModel", ("image",), "no backbone"),
        ("transformers", "RTDetrForObjectDetection", ("image",), "no backbone"),
        ("transformers", "BertModel", ("text",), "it takes text, not images"),
    ],
)
def test_which_models_have_features_of_images(library, name, modalities, reason):
    source = SimpleNamespace(library=library, model_class=name, modalities=modalities)
    found = no_image_features(source)
    assert found is None if reason is None else reason in found
