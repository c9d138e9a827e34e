"""Models that would not run what is put into them are refused by one sentence, before any work."""

from __future__ import annotations

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import latte_convert
from latte_convert.adapters.ready import check_ready
from latte_convert.errors import CheckpointError

pytestmark = pytest.mark.slow


def tiny(**settings):
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=4,
        **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.ViTModel(config).eval()


def batches():
    return [{"pixel_values": torch.randn(1, 3, 16, 16)} for _ in range(3)]


RECIPE = latte_convert.Recipe(kernel="latte", ratio=1.0, min_tokens=0)


def compiled(model):
    model.compile(backend="eager")
    return model


def partly_compiled(model):
    model.layers[1].attention.compile(backend="eager")
    return model


def offloaded(model, folder):
    accelerate.disk_offload(model, folder, execution_device="cpu")
    return model


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model, _: torch.compile(model, backend="eager"), r"inside of OptimizedModule: .*model\._orig_mod"),
        (lambda model, _: nn.DataParallel(model), r"inside of DataParallel: .*model\.module"),
        (lambda model, _: compiled(model), r"this ViTModel was compiled in place \(ViTModel\)"),
        (lambda model, _: partly_compiled(model), r"compiled in place \(layers\.1\.attention\)"),
        (lambda model, _: accelerate.cpu_offload(model, "cpu"), "no weights in memory .*cpu_offload"),
        (offloaded, "no weights in memory"),
        (
            lambda model, folder: accelerate.dispatch_model(
                model, {"embeddings": "cpu", "layers": "disk", "layernorm": "cpu", "pooler": "cpu"}, main_device="cpu",
                offload_dir=folder, force_hooks=True,
            ),
            r"no weights in memory \(layers\.0",
        ),
        (lambda model, _: model.to("meta"), "no weights in memory"),
    ],
    ids=["torch.compile", "data parallel", "compile", "compiled part", "cpu_offload", "disk_offload", "map", "meta"],
)  # fmt: skip
def test_refused(spoil, message, tmp_path):
    model = spoil(tiny(), tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        latte_convert.convert(model, batches(), recipe=RECIPE, progress=False)
    assert len(str(caught.value)) < 350
    assert not latte_convert.is_hybrid(model)


def test_a_model_whose_hooks_keep_its_weights_in_memory_is_converted():
    model = tiny()
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    check_ready(model)
    assert len(latte_convert.convert(model, batches(), recipe=RECIPE, progress=False).plan.converted) == 2


@torch.no_grad()
def test_a_hybrid_can_be_offloaded_and_compiled_later():
    hybrid = latte_convert.convert(tiny(), batches(), recipe=RECIPE, progress=False).model
    images = torch.randn(2, 3, 16, 16)
    expected = hybrid(images).last_hidden_state
    torch.testing.assert_close(torch.compile(hybrid, backend="eager")(images).last_hidden_state, expected)
    hybrid.compile(backend="eager")
    torch.testing.assert_close(hybrid(images).last_hidden_state, expected)
    hybrid._compiled_call_impl = None
    accelerate.cpu_offload(hybrid, "cpu")
    assert all(parameter.is_meta for parameter in hybrid.parameters())
    torch.testing.assert_close(hybrid(images).last_hidden_state, expected)


def test_flex_attention_is_refused_before_and_after():
    """Its masks are programs, not tensors; a hybrid gets them after ``set_attn_implementation``."""
    model = tiny()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(CheckpointError, match=r"masks of flex_attention .*set_attn_implementation\('sdpa'\)"):
        latte_convert.convert(model, batches(), recipe=RECIPE, progress=False)
    model.set_attn_implementation("sdpa")
    hybrid = latte_convert.convert(model, batches(), recipe=RECIPE, progress=False).model
    mask = create_block_mask(lambda _batch, _head, query, _key: query >= 0, 1, 1, 17, 17, device="cpu")
    with pytest.raises(CheckpointError, match="ViTAttention: the masks of flex_attention"):
        hybrid.layers[0].attention(torch.zeros(1, 17, 16), attention_mask=mask)
