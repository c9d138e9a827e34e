"""The layer-local fit: it finds what generated the data, and predicts what the kernel then does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reference import latte_reference, softmax_reference
from torch import Tensor, nn

from latte_convert.attention import AttentionSite, SiteCall, TokenLayout
from latte_convert.calibration.fit import Fit, SiteFit
from latte_convert.kernels.fitting import output as output_stage
from latte_convert.kernels.latte import fit as latte_fit
from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.recipe import Candidate

HEADS, DIM, TOKENS = 3, 8, 60


def site(*, causal: bool = False) -> AttentionSite:
    return AttentionSite("blocks.0.attn", "vision", "self", causal, HEADS, DIM)


def call(seed: int, *, mask: Tensor | None = None, causal: bool = False, tokens: int = TOKENS) -> SiteCall:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, HEADS, tokens, DIM, generator=generator) * 1.5 for _ in range(3))
    return SiteCall(
        module=nn.Identity(),
        query=query,
        key=key,
        value=value,
        scale=DIM**-0.5,
        mask=mask,
        causal=causal,
        layout=TokenLayout(),
        exact=lambda: softmax_reference(query, key, value, scale=DIM**-0.5, mask=mask, causal=causal),
    )


def latte(**options) -> Candidate:
    """The kernel of the paper, with what a test wants different."""
    return Candidate(kernel="latte", options={"sigma": True, **options})


def site_fit(candidate: Candidate, projection: nn.Linear | None, *, causal: bool = False, seed: int = 0) -> SiteFit:
    return SiteFit(site(causal=causal), candidate, projection, seed)


def run(
    candidate: Candidate, calls: list[SiteCall], projection: nn.Linear | None, *, target=None, seed: int = 0
) -> Fit:
    fit = site_fit(candidate, projection, causal=calls[0].causal, seed=seed)
    for _ in range(fit.passes):
        for one in calls:
            fit.observe(one, target(one) if target else one.exact())
        fit.end_pass()
    return fit.result()


def module_output(kernel: LatteKernel, one: SiteCall, projection: nn.Linear) -> Tensor:
    y = kernel(one)
    return projection(y.transpose(1, 2).flatten(2)) - projection.bias


@torch.no_grad()
def relative_error(kernel: LatteKernel, calls: list[SiteCall], projection: nn.Linear) -> float:
    """Squared error of the module output by definition, from the kernel itself."""
    error = total = 0.0
    for one in calls:
        wanted = projection(one.exact().transpose(1, 2).flatten(2)) - projection.bias
        error += float((module_output(kernel, one, projection) - wanted).square().sum())
        total += float(wanted.square().sum())
    return error / total


@pytest.fixture
def projection() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(HEADS * DIM, 20)


@pytest.mark.parametrize("granularity", ["layer", "head"])
@pytest.mark.parametrize("jpn", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_reported_error_is_that_of_the_fitted_kernel(projection, granularity, jpn, causal):
    calls = [call(seed, causal=causal) for seed in range(3)]
    fit = run(latte(granularity=granularity, jpn=jpn), calls, projection)
    assert fit.error == pytest.approx(relative_error(fit.kernel, calls, projection), rel=1e-4)
    assert fit.kernel.alpha.shape == ((HEADS,) if granularity == "head" else (1,))


def test_without_sigma_the_error_is_that_of_the_fitted_kernel(projection):
    calls = [call(seed) for seed in range(2)]
    fit = run(latte(sigma=False), calls, projection)
    assert fit.kernel.sigma is None
    assert fit.error == pytest.approx(relative_error(fit.kernel, calls, projection), rel=1e-4)


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_finds_the_parameters_that_made_the_target(projection, granularity, monkeypatch):
    monkeypatch.setattr(output_stage, "RIDGE", 1e-6)
    monkeypatch.setattr(latte_fit, "RIDGE", 1e-6)
    sigma = torch.linspace(0.5, 1.5, HEADS * DIM)

    def target(one: SiteCall) -> Tensor:
        y = latte_reference(
            one.query,
            one.key,
            one.value,
            alpha=torch.tensor([1 - 0.5**2]),
            delta_q=torch.tensor([10.0]),
            delta_k=torch.tensor([1.0]),
            beta_q=torch.tensor([1.0]),
            beta_k=torch.tensor([1.0]),
            scale=one.scale,
        )
        return y * sigma.reshape(1, HEADS, 1, DIM)

    fit = run(latte(granularity=granularity), [call(seed) for seed in range(4)], projection, target=target)
    # m = 0.5 and ratio 10 are on the grids, so the fit can be exact up to the ridge that pulls sigma toward 1.
    assert fit.error < 1e-5
    assert fit.kernel.alpha.tolist() == pytest.approx([0.75] * len(fit.kernel.alpha), abs=1e-6)
    ratio = (fit.kernel.delta_q * fit.kernel.delta_k).tolist()
    assert ratio == pytest.approx([10.0] * len(ratio), rel=1e-5)
    assert torch.allclose(fit.kernel.sigma, sigma, atol=1e-3)


def test_sigma_is_least_squares_shrunk_toward_one(projection):
    calls = [call(seed) for seed in range(4)]
    fit = run(latte(), calls, projection)
    kernel = fit.kernel
    with torch.no_grad():
        fitted = kernel.sigma.clone()
        kernel.sigma.fill_(1.0)
    rows, wanted = [], []
    for one in calls:
        with torch.no_grad():
            y = kernel(one).transpose(1, 2).flatten(2)[0]
        # Column c of the design is channel c of y, seen through column c of the projection.
        rows.append(torch.einsum("nc,dc->ndc", y, projection.weight).reshape(-1, HEADS * DIM))
        wanted.append((one.exact().transpose(1, 2).flatten(2)[0] @ projection.weight.T).reshape(-1))
    design, target = torch.cat(rows).double().detach(), torch.cat(wanted).double().detach()
    # Ridge regression toward 1 as plain least squares with extra rows.
    pull = (0.01 * design.square().sum(0).mean()).sqrt()
    design = torch.cat([design, pull * torch.eye(HEADS * DIM, dtype=torch.float64)])
    target = torch.cat([target, pull * torch.ones(HEADS * DIM, dtype=torch.float64)])
    assert torch.allclose(fitted.double(), torch.linalg.lstsq(design, target).solution, atol=1e-4)


def test_each_switch_helps_the_objective_it_is_for(projection):
    calls = [call(seed) for seed in range(4)]
    errors = {
        name: run(latte(**switches), calls, projection).error
        for name, switches in {
            "all": {},
            "no sigma": {"sigma": False},
            "no tte": {"tte": False},
            "heads": {"granularity": "head"},
        }.items()
    }
    assert errors["all"] < errors["no sigma"]
    assert errors["all"] <= errors["no tte"] + 1e-6
    fixed = run(latte(tte=False), calls, projection).kernel
    assert fixed.alpha.tolist() == [0.0]


def test_a_masked_key_is_as_good_as_absent(projection):
    mask = torch.ones(1, TOKENS, dtype=torch.bool)
    mask[:, 50:] = False
    whole = call(0, mask=mask)
    kernel = run(latte(), [whole], projection).kernel
    changed = whole.value.clone()
    changed[:, :, 50:] = 1e3
    other = SiteCall(
        module=whole.module,
        query=whole.query,
        key=whole.key,
        value=changed,
        scale=whole.scale,
        mask=mask,
        causal=False,
        layout=TokenLayout(),
        exact=whole.exact,
    )
    again = run(latte(), [other], projection).kernel
    for name, value in kernel.named_parameters():
        assert torch.equal(value, dict(again.named_parameters())[name]), name


def test_same_seed_same_bits_and_other_seed_other_rows(projection):
    calls = [call(seed, tokens=400) for seed in range(2)]
    first, second = (run(latte(), calls, projection, seed=3).kernel for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    first_rows, other_rows = (site_fit(latte(), projection, seed=s).stages[0].rows(calls[0]) for s in (3, 4))
    assert not torch.equal(first_rows, other_rows)


def test_not_finite_is_a_reason_and_no_kernel(projection):
    one = call(0)
    one.key[0, 0, 0, 0] = float("nan")
    fit = run(latte(), [one], projection)
    assert fit.kernel is None
    assert "not finite" in fit.reason


def test_moments_do_not_grow_with_the_samples(projection):
    def held(samples: int) -> list[int]:
        fit = site_fit(latte(), projection)
        sizes = []
        for _ in range(fit.passes):
            for seed in range(samples):
                fit.observe(call(seed), call(seed).exact())
            sizes.append(sum(m.numel() for stage in fit.stages for m in stage.moments))
            fit.end_pass()
        return sizes

    assert held(2) == held(9)


def test_without_a_projection_the_error_is_that_of_the_attention_output():
    calls = [call(seed) for seed in range(2)]
    identity = nn.Linear(HEADS * DIM, HEADS * DIM)
    nn.init.eye_(identity.weight)
    assert run(latte(), calls, None).error == pytest.approx(run(latte(), calls, identity).error, rel=1e-5)


def test_a_padded_batch_counts_like_its_samples(projection):
    long, short = call(0), call(1, tokens=40)
    pad = TOKENS - 40
    query, key, value = (
        torch.cat([a, torch.nn.functional.pad(b, (0, 0, 0, pad), value=7.0)])
        for a, b in ((long.query, short.query), (long.key, short.key), (long.value, short.value))
    )
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [40]])
    batch = dataclasses.replace(
        long, query=query, key=key, value=value, mask=mask,
        exact=lambda: softmax_reference(query, key, value, scale=DIM**-0.5, mask=mask),
    )  # fmt: skip
    together, apart = run(latte(), [batch], projection), run(latte(), [long, short], projection)
    assert together.error == pytest.approx(apart.error, rel=1e-4)
    for name, value in together.kernel.named_parameters():
        assert torch.allclose(value, dict(apart.kernel.named_parameters())[name], rtol=1e-3, atol=1e-4), name
