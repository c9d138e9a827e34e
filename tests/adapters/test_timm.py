"""timm models: routed to softmax they compute what they computed before, and what cannot be converted is said."""

from __future__ import annotations

import copy
import io
from collections import Counter
from typing import Any

import pytest
import timm
import torch
from helpers import exact_handlers, latte_kernels
from timm.layers import Attention
from timm_models import MODELS, PATCHED, build, create, gated, images, sharp
from torch import Tensor, nn

from latte_convert.adapters.convert import apply
from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.host import Host
from latte_convert.adapters.timm import TimmAdapter
from latte_convert.attention import AttentionCall, TokenLayout
from latte_convert.errors import CheckpointError
from latte_convert.kernels.near_far.kernel import NearFarKernel

ADAPTER = TimmAdapter()
CONVERTED_FULLY = [name for name in MODELS if name != "hiera"]  # its first stages are windowed

_BIASED = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 64, "num_classes": 5, "patch_size": 8}
# Architecture, keyword arguments, how its tokens lie.
BIASED: dict[str, tuple[str, dict[str, Any], TokenLayout]] = {
    "beit": ("beit_base_patch16_224", _BIASED, TokenLayout(1, (8, 8))),
    "relpos": ("vit_relpos_small_patch16_224", _BIASED, TokenLayout(0, (8, 8))),
}  # fmt: skip


def eligible(model: nn.Module) -> list[str]:
    return [site.name for site in Host.of(model).sites() if site.eligible]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", [*MODELS, "gated"])
def test_exact_kernel_gives_the_original(name: str, fused: bool) -> None:
    model = gated(fused=fused) if name == "gated" else build(name, fused=fused)
    x = images(model)
    handlers = exact_handlers(eligible(model))
    counts: Counter[str] = Counter()
    for site in handlers:
        model.get_submodule(site).register_forward_hook(lambda *_, site=site: counts.update([site]))
    with torch.no_grad():
        expected = model(x)
        counts.clear()
        with Host(model, ADAPTER).watch(handlers):
            actual = model(x)
        with Host(model, ADAPTER).watch(dict.fromkeys(handlers, lambda call: torch.zeros_like(call.query))):
            without = model(x)
    # Sharp attention amplifies rounding: relative to the size of the output.
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert float((without - expected).abs().max()) > 1e-2  # attention weighs in the output
    assert {site: handler.calls for site, handler in handlers.items()} == dict.fromkeys(handlers, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODELS)
def test_sites_are_as_built(name: str) -> None:
    model = build(name)
    seen: dict[str, AttentionCall] = {}

    def note(site: str) -> Any:
        return lambda call: seen.update({site: call})

    sites = {site.name: site for site in Host.of(model).sites() if site.eligible}
    with torch.no_grad(), Host(model, ADAPTER).watch({site: note(site) for site in sites}):
        model(images(model))
    assert set(seen) == set(sites)
    for site, call in seen.items():
        assert (sites[site].heads, sites[site].head_dim) == (call.query.shape[1], call.query.shape[3])
        assert (sites[site].tower, sites[site].kind, sites[site].causal) == ("vision", "self", False)
        assert call.obstacle is None
        assert call.mask is None
        assert call.layout.prefix == MODELS[name][2]
    if name in CONVERTED_FULLY:
        assert len(sites) == len(Host.of(model).sites()) >= 2


def test_the_grid_is_what_is_left_of_the_tokens() -> None:
    model = build("dinov2 with registers")
    seen: list[AttentionCall] = []
    with torch.no_grad(), Host(model, ADAPTER).watch({"blocks.0.attn": seen.append}):
        model(images(model))
    assert seen[0].query.shape[2] == 5 + 16
    assert seen[0].layout.grid == (4, 4)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["vit", "rope", "eva02", "parallel blocks", "visformer"])
def test_undo_is_bitwise(name: str, fused: bool) -> None:
    model = build(name, fused=fused)
    x = images(model)
    before = [dict(module.__dict__) for module in model.modules()]
    with torch.no_grad():
        expected = model(x)
        with apply(model, ADAPTER, latte_kernels(model)):
            assert not torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_unfused_modules_are_put_back_whatever_the_order(order: tuple[int, int]) -> None:
    model: Any = build("vit", fused=False)
    attention = model.blocks[0].attn
    undo = [ADAPTER.route(model, "blocks.0.attn", lambda call: None) for _ in range(2)]
    undo[order[0]]()
    assert attention.fused_attn
    undo[order[1]]()
    undo[order[1]]()
    assert not attention.fused_attn
    assert type(attention) is Attention


@pytest.mark.parametrize("name", ["vit", "eva02", "visformer"])
def test_copies_and_pickles_are_independent(name: str) -> None:
    model = build(name)
    x = images(model)
    applied = apply(model, ADAPTER, latte_kernels(model))
    with torch.no_grad():
        expected = model(x)
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        applied.undo()
        assert not torch.equal(model(x), expected)
        assert torch.equal(twin(x), expected)
        assert torch.equal(loaded(x), expected)
        twin.get_submodule(eligible(twin)[0]).latte.delta_q.fill_(9.0)  # type: ignore[operator, union-attr]
        assert not torch.equal(twin(x), expected)
        assert torch.equal(loaded(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "copied"), [("vit", False), ("eva02", True), ("visformer", False)])
def test_compiled(name: str, copied: bool) -> None:
    model = build(name)
    x = images(model)
    with apply(model, ADAPTER, latte_kernels(model)), torch.no_grad():
        model = copy.deepcopy(model) if copied else model
        expected = model(x)
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vit", "dinov2 with registers", "rope", "eva02"])
def test_bf16_is_finite(name: str) -> None:
    model = build(name).to(torch.bfloat16)
    with apply(model, ADAPTER, latte_kernels(model)), torch.no_grad():
        output = model(images(model).to(torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert bool(output.isfinite().all())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "visformer"])  # it is not fused by default
def test_below_min_tokens_the_original_runs_bit_for_bit(name: str) -> None:
    model = build(name)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        with apply(model, ADAPTER, latte_kernels(model), min_tokens=10_000):
            assert torch.equal(model(x), expected)


def test_a_batch_is_its_images_one_by_one() -> None:
    model = build("dinov2 with registers")
    x = images(model, 3)
    with apply(model, ADAPTER, latte_kernels(model)), torch.no_grad():
        torch.testing.assert_close(model(x), torch.cat([model(x[i : i + 1]) for i in range(3)]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "arguments", "reasons"),
    [
        ("swin_tiny_patch4_window7_224", {}, {"windowed attention"}),
        ("swinv2_tiny_window8_256", {}, {"windowed attention"}),
        ("xcit_nano_12_p16_224", {}, {"attention over channels", "attention pooling"}),
        ("cait_xxs24_224", {}, {"computes attention itself", "attention pooling"}),
        ("nest_tiny", {}, {"windowed attention"}),
        ("vit_dlittle_patch16_reg1_gap_256", {}, {"combines 2 attention maps"}),
        ("resnet50_clip", {}, {"attention pooling"}),
        ("convit_tiny", {}, {"computes attention itself"}),
    ],
)
def test_what_cannot_be_converted_is_said(architecture: str, arguments: dict[str, Any], reasons: set[str]) -> None:
    with torch.device("meta"):
        sites = Host.of(timm.create_model(architecture, **arguments)).sites()
    assert sites
    assert not any(site.eligible for site in sites)
    assert {reason for reason in reasons for site in sites if str(site.reason).startswith(reason)} == reasons
    assert all(str(site.reason).startswith(tuple(reasons)) for site in sites)


def test_pooling_stays_exact_beside_sites_that_convert() -> None:
    model = create("vit_so150m_patch16_reg4_map_256", **PATCHED)
    reasons = {site.name: site.reason for site in Host.of(model).sites()}
    assert reasons == {
        "blocks.0.attn": None, "blocks.1.attn": None, "attn_pool": "attention pooling: a few queries",
    }  # fmt: skip


def test_grouped_queries_are_served() -> None:
    from timm.layers import AttentionRope

    model: Any = create("vit_tiny_patch16_224", **PATCHED)
    model.blocks[0].attn = AttentionRope(48, 4, qkv_fused=False, num_kv_heads=2)
    sharp(model)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        with Host(model, ADAPTER).watch(exact_handlers(["blocks.0.attn", "blocks.1.attn"])):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", BIASED)
def test_a_bias_of_relative_positions_comes_with_the_call(name: str, fused: bool) -> None:
    architecture, arguments, layout = BIASED[name]
    model = sharp(create(architecture, fused=fused, **arguments))
    for parameter_name, parameter in model.named_parameters():
        if "rel_pos" in parameter_name or "relative_position" in parameter_name:
            nn.init.normal_(parameter)
    x, seen = torch.randn(2, 3, 64, 64), list[AttentionCall]()
    sites = Host.of(model).sites()
    assert all(site.biased and site.eligible for site in sites)

    def attend(call: AttentionCall) -> Tensor:
        seen.append(call)
        return exact(call)

    exact = exact_handlers(["one"])["one"]
    kernels = {site.name: NearFarKernel(site.heads, site.head_dim, window=2, halo=0, clusters=4) for site in sites}
    with torch.no_grad():
        expected = model(x)
        with Host(model, ADAPTER).watch({site.name: attend for site in sites}):
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        with apply(model, ADAPTER, kernels):
            assert not torch.allclose(model(x), expected, atol=1e-3)
    assert [call.bias is not None for call in seen] == [True] * len(sites)
    assert seen[0].layout == layout


def test_output_projection() -> None:
    for name, path in (("vit", "blocks.0.attn.proj"), ("parallel blocks", "blocks.0.attn_out_proj")):
        model = build(name)
        assert ADAPTER.output_projection(model, eligible(model)[0]) is model.get_submodule(path)
    for model in (gated(), build("attention norm"), build("visformer")):
        assert ADAPTER.output_projection(model, eligible(model)[0]) is None


def test_key_padding_is_honoured() -> None:
    """Tokens behind a mask change nothing: the kernel gives what it gives without them."""
    model: Any = build("vit")
    x = images(model, 1)
    mask = torch.ones(1, 1, 17, 17, dtype=torch.bool)
    mask[..., 12:] = False
    with apply(model, ADAPTER, latte_kernels(model)), torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(x))
        short = tokens[:, :12]
        for block in model.blocks:
            tokens, short = block(tokens, attn_mask=mask), block(short)
    torch.testing.assert_close(tokens[:, :12], short, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.randn(1, 1, 17, 17), "carries a bias"),
        (torch.ones(1, 1, 17, 17, dtype=torch.bool).tril(2), "is not key padding"),
    ],
)
def test_other_masks_are_refused_by_name(mask: Tensor, message: str) -> None:
    model: Any = build("vit")
    with (
        apply(model, ADAPTER, latte_kernels(model)),
        torch.no_grad(),
        pytest.raises(CheckpointError, match=rf"blocks\.0\.attn: .*{message}.*exclude this site"),
    ):
        model.blocks[0](torch.randn(1, 17, 48), attn_mask=mask)


def test_a_causal_call_is_causal() -> None:
    model: Any = build("vit")
    x = torch.randn(1, 17, 48)
    other = torch.cat([x[:, :9], torch.randn(1, 8, 48)], dim=1)
    with apply(model, ADAPTER, latte_kernels(model)), torch.no_grad():
        first, second = (model.blocks[0](tokens, is_causal=True) for tokens in (x, other))
    torch.testing.assert_close(first[:, :9], second[:, :9])
    assert not torch.allclose(first[:, 9:], second[:, 9:])


def test_padded_naflex_images_equal_themselves_alone() -> None:
    """NaFlex batches images of unequal size, with a mask over the padding."""
    model: Any = build("naflex")
    patches = torch.randn(2, 12, 16 * 16 * 3, generator=torch.Generator().manual_seed(2))
    coord = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).reshape(1, 12, 2)
    coord = coord.repeat(2, 1, 1)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, 8:] = False
    coord[0, 8:] = 0
    with apply(model, ADAPTER, latte_kernels(model)), torch.no_grad():
        both = model(patches, patch_coord=coord, patch_valid=valid)
        alone = model(patches[:1, :8], patch_coord=coord[:1, :8], patch_valid=valid[:1, :8])
    torch.testing.assert_close(both[:1], alone, rtol=1e-4, atol=1e-4)


def test_dropout_while_training_is_refused() -> None:
    model = sharp(create("vit_tiny_patch16_224", **PATCHED, attn_drop_rate=0.1)).train()
    with (
        apply(model, ADAPTER, latte_kernels(model)),
        pytest.raises(CheckpointError, match=r"attention dropout of 0\.1"),
    ):
        model(images(model))


def test_kernels_can_be_trained() -> None:
    model = build("vit").train()
    kernels = latte_kernels(model)
    with apply(model, ADAPTER, kernels):
        model(images(model)).square().mean().backward()
    for kernel in kernels.values():
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in kernel.parameters())


def test_models_of_timm_and_what_derives_from_them_are_taken() -> None:
    class Mine(type(build("vit"))):  # type: ignore[misc]
        pass

    assert isinstance(find_adapter(build("vit")), TimmAdapter)
    assert TimmAdapter.accepts(Mine(depth=1, embed_dim=12, num_heads=1))
    assert not TimmAdapter.accepts(nn.Linear(2, 2))
