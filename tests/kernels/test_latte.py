"""The latte kernel against its specification, and the laws every attention operator obeys."""

from __future__ import annotations

import itertools

import pytest
import torch
from comparing import DIM, HEADS, TOLERANCE, LargestTensor, assert_close, assert_grads_close, attend, some_mask, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import latte_reference
from torch import Tensor

from latte_convert.errors import UsageError
from latte_convert.kernels.latte.kernel import LatteKernel, latte_attention

SHAPES = [(1, 1), (7, 7), (130, 130), (5, 70), (70, 5), (64, 192)]
quick = settings(deadline=None, max_examples=8, derandomize=True)
seeds = st.integers(0, 2**16)


def scalars(groups: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    names = ("delta_q", "delta_k", "beta_q", "beta_k")
    drawn = {name: (torch.rand(groups) + 0.5).to(dtype) for name in names}
    return {"alpha": (torch.rand(groups) * 2 - 1).to(dtype), **drawn}


# --- parity with the specification ---


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("masked", "causal"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_equal_the_reference(
    shape: tuple[int, int], masked: bool, causal: bool, dtype: torch.dtype
) -> None:
    for tte, jpn, groups in itertools.product((True, False), (True, False), (1, HEADS)):
        torch.manual_seed(1)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        inputs = [t.requires_grad_() for t in tokens(*shape, dtype=dtype)]
        settings_ = {name: t.requires_grad_() for name, t in scalars(groups, wide).items()}
        leaves = [*inputs, *(t for name, t in settings_.items() if tte or name != "alpha")]
        call = {
            "scale": 0.3,
            "mask": some_mask(shape[1]) if masked else None,
            "causal": causal,
            "tte": tte,
            "jpn": jpn,
        }
        actual = attend(latte_attention, *inputs, **settings_, **call)
        expected = latte_reference(*inputs, **settings_, **call)
        assert_close(actual, expected, TOLERANCE[dtype])
        assert_grads_close(actual, expected, leaves, TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_without_grad_the_inputs_stay_as_they_are(contiguous: bool, causal: bool) -> None:
    inputs = [t.contiguous() if contiguous else t for t in tokens(9, 9)]
    before = [t.clone() for t in inputs]
    parameters = scalars()
    with torch.no_grad():
        actual = attend(latte_attention, *inputs, **parameters, scale=0.3, causal=causal)
    assert all(torch.equal(one, other) for one, other in zip(inputs, before, strict=True))
    assert_close(actual, latte_reference(*inputs, **parameters, scale=0.3, causal=causal), 2e-5)


def test_one_head_by_hand() -> None:
    """Two keys, one channel: psi(q) = 4, psi(k) = 1, 9, all normalised to 1, so Sim = 2·1 + 0.5 for both."""
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [2.0]]]])
    value = torch.tensor([[[[1.0], [5.0]]]])
    one = torch.ones(1)
    call = {"alpha": 0 * one, "delta_k": one, "beta_q": one, "beta_k": 0.5 * one, "scale": 1.0, "eps": 0.0}
    assert attend(latte_attention, query, key, value, delta_q=2 * one, **call).item() == pytest.approx(3.0)
    # Without normalisation Sim = 2·4·1 + 0.5 = 8.5 and 2·4·9 + 0.5 = 72.5.
    plain = attend(latte_attention, query, key, value, delta_q=2 * one, jpn=False, **call)
    assert plain.item() == pytest.approx((8.5 * 1 + 72.5 * 5) / 81)


# --- laws ---


@given(seed=seeds, count=st.integers(1, 90))
@quick
def test_permuting_the_tokens_permutes_the_output(seed: int, count: int) -> None:
    torch.manual_seed(seed)
    inputs, parameters, order = tokens(count, count), scalars(), torch.randperm(count)
    out = attend(latte_attention, *inputs, **parameters, scale=0.3)
    permuted = attend(latte_attention, *(t[:, :, order] for t in inputs), **parameters, scale=0.3)
    assert_close(permuted, out[:, :, order], 1e-5)


@given(seed=seeds, causal=st.booleans())
@quick
def test_a_batch_is_its_samples(seed: int, causal: bool) -> None:
    torch.manual_seed(seed)
    inputs, parameters, mask = tokens(70, 70, batch=3), scalars(HEADS), torch.rand(3, 70) > 0.3
    batched = attend(latte_attention, *inputs, **parameters, scale=0.3, mask=mask, causal=causal)
    for i in range(3):
        alone = attend(
            latte_attention,
            *(t[i : i + 1] for t in inputs),
            **parameters,
            scale=0.3,
            mask=mask[i : i + 1],
            causal=causal,
        )
        assert_close(batched[i : i + 1], alone, 1e-5)


@given(seed=seeds, keys=st.integers(2, 80))
@quick
def test_masking_a_key_is_removing_it(seed: int, keys: int) -> None:
    torch.manual_seed(seed)
    (query, key, value), parameters = tokens(11, keys), scalars()
    seen = torch.rand(keys) > 0.5
    seen[torch.randint(keys, ())] = True
    masked = attend(latte_attention, query, key, value, **parameters, scale=0.3, mask=seen.expand(2, -1))
    removed = attend(latte_attention, query, key[:, :, seen], value[:, :, seen], **parameters, scale=0.3)
    assert_close(masked, removed, 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_leaves_valid_tokens_alone(causal: bool) -> None:
    """One sentence with 0 and with 20 pads."""
    padded, parameters = tokens(50, 50), scalars()
    mask = (torch.arange(50) < 30).expand(2, -1)
    long = attend(latte_attention, *padded, **parameters, scale=0.3, mask=mask, causal=causal)
    short = attend(latte_attention, *(t[:, :, :30] for t in padded), **parameters, scale=0.3, causal=causal)
    assert_close(long[:, :, :30], short, 1e-5)


@given(seed=seeds, last=st.sampled_from([1, 63, 64, 65, 129]), masked=st.booleans())
@quick
def test_causal_outputs_do_not_depend_on_the_future(seed: int, last: int, masked: bool) -> None:
    torch.manual_seed(seed)
    inputs, parameters = tokens(last + 1, last + 1), scalars()
    mask = torch.rand(2, last + 1) > 0.3 if masked else None
    call = {**parameters, "scale": 0.3, "causal": True, "mask": mask}
    out = attend(latte_attention, *inputs, **call)
    changed = [torch.cat([t[:, :, :last], 1e4 * torch.randn_like(t[:, :, last:])], dim=2) for t in inputs]
    assert torch.equal(attend(latte_attention, *changed, **call)[:, :, :last], out[:, :, :last])


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_without_keys_is_zero(causal: bool) -> None:
    inputs = tokens(9, 9)
    out = attend(latte_attention, *inputs, **scalars(), scale=0.3, mask=some_mask(9), causal=causal)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out[1, :, -1].abs().sum() > 0


def test_causal_queries_before_the_first_key_are_zero() -> None:
    out = attend(latte_attention, *tokens(12, 5), **scalars(), scale=0.3, causal=True)
    assert torch.equal(out[:, :, :7], torch.zeros_like(out[:, :, :7]))
    assert (out[:, :, 7:] != 0).all()


@given(seed=seeds, factor=st.floats(0.05, 20), jpn=st.booleans(), causal=st.booleans())
@quick
def test_only_the_ratio_of_delta_and_beta_matters(seed: int, factor: float, jpn: bool, causal: bool) -> None:
    torch.manual_seed(seed)
    inputs, parameters = tokens(20, 20), scalars()
    scaled = {
        **parameters,
        "delta_q": parameters["delta_q"] * factor,
        "beta_k": parameters["beta_k"] * factor,
    }
    call = {"scale": 0.3, "jpn": jpn, "causal": causal}
    assert_close(
        attend(latte_attention, *inputs, **scaled, **call), attend(latte_attention, *inputs, **parameters, **call), 1e-5
    )


# --- numerics ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("jpn", "causal"), list(itertools.product((True, False), repeat=2)))
def test_large_keys_stay_finite_and_accurate_at_16k_tokens(jpn: bool, causal: bool, dtype: torch.dtype) -> None:
    inputs = [torch.randn(1, 1, 16384, 16).to(dtype) for _ in range(3)]
    inputs[1] = inputs[1] * 50
    call = {**scalars(), "scale": 0.25, "jpn": jpn, "causal": causal}
    out = attend(latte_attention, *inputs, **call)
    exact = attend(latte_attention, *(t.double() for t in inputs), **call)
    assert_close(out, exact.to(dtype), TOLERANCE[dtype])


def test_autocast_keeps_the_sums_in_float32() -> None:
    inputs, parameters = tokens(40, 40), scalars()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(latte_attention, *inputs, **parameters, scale=0.3)
    assert torch.equal(out, attend(latte_attention, *inputs, **parameters, scale=0.3))


@pytest.mark.parametrize("zero", ["delta_q", "beta_k"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_zero_product_stays_finite(zero: str, causal: bool) -> None:
    inputs = [t.requires_grad_() for t in tokens(9, 9)]
    parameters = {**scalars(), zero: torch.zeros(1)}
    out = attend(latte_attention, *inputs, **parameters, scale=0.3, causal=causal)
    assert_close(out, latte_reference(*inputs, **parameters, scale=0.3, causal=causal), 1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


def test_the_gradient_is_finite_at_the_largest_anchor() -> None:
    parameters = {**scalars(), "alpha": torch.ones(1, requires_grad=True)}
    out = attend(latte_attention, *tokens(9, 9), **parameters, scale=0.3)
    out.square().sum().backward()
    assert parameters["alpha"].grad is not None
    assert parameters["alpha"].grad.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_linear_in_the_tokens(masked: bool, causal: bool) -> None:
    count = 65536
    inputs = [torch.randn(1, 1, count, 16) for _ in range(3)]
    mask = torch.ones(1, count, dtype=torch.bool) if masked else None
    with torch.no_grad(), LargestTensor() as largest:
        attend(latte_attention, *inputs, **scalars(), scale=0.25, mask=mask, causal=causal)
    # 64 = CAUSAL_CHUNK: pairs of a token inside its chunk; count² is 1024 times the bound.
    assert count * 16 <= largest.numel <= count * 64


@pytest.mark.parametrize(
    "mask", [torch.zeros(2, 9), torch.ones(2, 8, dtype=torch.bool), torch.ones(2, 1, 9, 9, dtype=torch.bool)]
)
def test_anything_but_a_boolean_key_mask_is_refused(mask: Tensor) -> None:
    with pytest.raises(UsageError, match=r"torch\.bool of shape \(2, 9\)"):
        attend(latte_attention, *tokens(9, 9), **scalars(), scale=0.3, mask=mask)


# --- the module ---


def heads_of(count: int, dim: int = DIM) -> list[Tensor]:
    return [torch.randn(2, HEADS, count, dim) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_sigma_scales_the_output_channels(causal: bool) -> None:
    kernel, plain = LatteKernel(HEADS, DIM, sigma=True), LatteKernel(HEADS, DIM)
    assert kernel.sigma is not None
    assert plain.sigma is None
    with torch.no_grad():
        kernel.sigma.copy_(torch.randn(HEADS * DIM))
    inputs, mask = heads_of(9), some_mask(9)
    call = {"scale": 0.3, "mask": mask, "causal": causal}
    # As a diagonal in front of the output projection: channel h·d + c of the merged heads.
    expected = attend(plain, *inputs, **call).transpose(1, 2).flatten(2) * kernel.sigma
    assert_close(attend(kernel, *inputs, **call).transpose(1, 2).flatten(2), expected, 1e-5)


def test_equal_values_per_head_equal_one_per_layer() -> None:
    layer, head = LatteKernel(HEADS, DIM), LatteKernel(HEADS, DIM, granularity="head")
    values = {"alpha": -0.7, "delta_q": 1.3, "delta_k": 0.8, "beta_q": 0.6, "beta_k": 1.1}
    with torch.no_grad():
        for name, value in values.items():
            assert getattr(layer, name).shape == (1,)
            assert getattr(head, name).shape == (HEADS,)
            getattr(layer, name).fill_(value)
            getattr(head, name).fill_(value)
    inputs = heads_of(9)
    assert_close(attend(head, *inputs, scale=0.3), attend(layer, *inputs, scale=0.3), 1e-6)


def test_without_tte_the_anchor_is_not_read() -> None:
    fixed, zero = LatteKernel(HEADS, DIM, tte=False), LatteKernel(HEADS, DIM)
    with torch.no_grad():
        fixed.alpha.fill_(float("nan"))
    inputs = heads_of(9)
    assert_close(attend(fixed, *inputs, scale=0.3), attend(zero, *inputs, scale=0.3), 1e-6)


def test_every_parameter_can_be_fine_tuned() -> None:
    kernel = LatteKernel(HEADS, DIM, granularity="head", sigma=True)
    attend(kernel, *heads_of(9), scale=0.3).square().sum().backward()
    names = {"alpha", "delta_q", "delta_k", "beta_q", "beta_k", "sigma"}
    assert {n for n, p in kernel.named_parameters() if p.grad is not None and p.grad.any()} == names
    assert all(p.dtype is torch.float32 for p in kernel.parameters())
