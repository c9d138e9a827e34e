"""Which attention modules a model has, and what they are, against tables worked out by hand."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tiny_models import BIASED, FAMILIES, NOT_CONVERTIBLE, Family, build
from torch import Tensor, nn

from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.hf import HFAdapter
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall
from latte_convert.errors import CheckpointError

ADAPTER = HFAdapter()


def _ids(family: Family) -> str:
    return family.name


@pytest.mark.parametrize("family", [*FAMILIES, *BIASED, *NOT_CONVERTIBLE], ids=_ids)
def test_sites_are_the_ones_of_the_configuration(family: Family) -> None:
    found = {
        site.name: (site.tower, site.kind, site.causal, site.heads, site.head_dim, site.eligible)
        for site in Host.of(build(family.name)).sites()
    }
    expected = {
        name: (sites.tower, sites.kind, sites.causal, sites.heads, sites.head_dim, sites.reason is None)
        for sites in family.sites
        for name in sites.expand()
    }
    assert found == expected


@pytest.mark.parametrize("family", [*FAMILIES, *BIASED, *NOT_CONVERTIBLE], ids=_ids)
def test_a_site_that_cannot_be_converted_says_why(family: Family) -> None:
    reasons = {site.name: site.reason for site in Host.of(build(family.name)).sites()}
    for sites in family.sites:
        for name in sites.expand():
            if sites.reason is None:
                assert reasons[name] is None
            else:
                assert sites.reason in (reasons[name] or ""), name


@pytest.mark.parametrize("family", [*FAMILIES, *BIASED], ids=_ids)
def test_output_projection_reads_what_attention_puts_out(family: Family) -> None:
    """Found by name, and proved by its input: the flattened output of the attention call."""
    model = build(family.name)
    for sites in family.sites:
        for name in sites.expand() if sites.reason is None else ():
            base = name if not (sites.projection or "").startswith("../") else name.rpartition(".")[0]
            expected = model.get_submodule(f"{base}.{(sites.projection or '').removeprefix('../')}")
            projection = ADAPTER.output_projection(model, name)
            assert projection is expected
            _assert_reads_attention(model, name, expected, family)


def _assert_reads_attention(model: nn.Module, name: str, projection: nn.Module, family: Family) -> None:
    seen: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(call: AttentionCall) -> Tensor:
        outputs.append(call.exact())
        return outputs[-1]

    hook = projection.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    try:
        with Host(model, ADAPTER).watch({name: record}), torch.no_grad():
            model(**family.inputs())
    finally:
        hook.remove()
    assert len(outputs) == len(seen) == 1
    torch.testing.assert_close(seen[0].flatten(1, -2), outputs[0].transpose(1, 2).flatten(2), rtol=0, atol=0)


@pytest.mark.parametrize("family", [*FAMILIES, *BIASED], ids=_ids)
def test_heads_and_head_dim_are_those_of_the_calls(family: Family) -> None:
    model = build(family.name)
    sites = {site.name: site for site in Host.of(model).sites() if site.eligible}
    shapes: dict[str, tuple[int, int]] = {}

    def recorder(name: str):  # type: ignore[no-untyped-def]
        def record(call: AttentionCall) -> None:
            shapes[name] = (call.query.shape[1], call.value.shape[3])

        return record

    with Host(model, ADAPTER).watch({name: recorder(name) for name in sites}), torch.no_grad():
        model(**family.inputs())
    assert shapes == {name: (site.heads, site.head_dim) for name, site in sites.items()}


@pytest.mark.parametrize("family", [*FAMILIES, *BIASED], ids=_ids)
def test_what_is_biased_is_told_by_the_configuration_and_by_the_calls(family: Family) -> None:
    model = build(family.name)
    biases: list[bool] = []
    sites = [site for site in Host.of(model).sites() if site.eligible]
    notes = {site.name: lambda call: biases.append(call.bias is not None) for site in sites}
    with Host(model, ADAPTER).watch(notes), torch.no_grad():
        model(**family.inputs())
    assert biases == [site.biased for site in sites] == [family in BIASED] * len(sites)


def test_an_unwindowed_rf_detr_has_no_windowed_layer() -> None:
    backbone = hf.RfDetrDinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, image_size=32, patch_size=8,
        num_windows=1, out_indices=[1, 2],
    )  # fmt: skip
    sites = Host.of(hf.RfDetrDinov2Backbone(backbone)).sites()
    assert [(site.tower, site.eligible) for site in sites] == [("vision", True)] * 2


def test_plain_torch_attention_is_listed() -> None:
    model = build("bert")
    model.extra = nn.MultiheadAttention(32, 4, add_zero_attn=True)
    model.multihead_attn = nn.MultiheadAttention(32, 4)
    extra, plain = Host.of(model).sites()[-2:]
    assert (extra.name, extra.eligible, extra.reason) == (
        "extra", False, "an extra key and value of zeros (add_zero_attn)",
    )  # fmt: skip
    assert (plain.name, plain.kind, plain.eligible) == ("multihead_attn", "cross", True)


def test_gpt2_holds_its_output_projection_transposed() -> None:
    config = hf.GPT2Config(
        n_embd=32, n_layer=1, n_head=4, vocab_size=60, n_positions=16, bos_token_id=2, eos_token_id=3
    )
    model = hf.GPT2Model(config).eval()
    projection = ADAPTER.output_projection(model, "h.0.attn")
    assert projection is not None
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(projection(x), model.h[0].attn.c_proj(x), rtol=0, atol=0)


def test_bert_decoder_has_causal_self_and_plain_cross_attention() -> None:
    config = hf.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=60,
        is_decoder=True,
        add_cross_attention=True,
    )
    sites = {site.name: (site.kind, site.causal, site.eligible) for site in Host.of(hf.BertModel(config)).sites()}
    assert sites == {
        "encoder.layer.0.attention.self": ("self", True, True),
        "encoder.layer.0.crossattention.self": ("cross", False, True),
    }


@pytest.mark.parametrize(
    ("family", "site", "block"),
    [
        ("dinov2", "encoder.layer.1.attention", "encoder.layer.1"),
        ("bert", "encoder.layer.1.attention.self", "encoder.layer.1"),
        ("whisper", "decoder.layers.0.encoder_attn", "decoder.layers.0"),
    ],
)
def test_enclosing_block(family: str, site: str, block: str) -> None:
    assert Host.of(build(family)).block(site) == block


def test_other_models_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear"):
        find_adapter(nn.Linear(2, 2))
