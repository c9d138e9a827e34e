"""Stages of a fit beside those of the latte kernel: shift, grid, output map and bias."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reference.softmax import softmax_reference
from reference.taylor2 import taylor2_reference
from torch import Tensor, nn

from latte_convert.attention import AttentionSite, SiteCall, TokenLayout
from latte_convert.calibration.fit import SiteFit
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.fitting.grid import GridStage
from latte_convert.kernels.fitting.output import MapStage, OutputStage
from latte_convert.kernels.fitting.shift import ShiftStage
from latte_convert.kernels.rivals.elu import EluKernel
from latte_convert.kernels.rivals.pola import PolaKernel
from latte_convert.kernels.rivals.taylor2 import Taylor2Kernel
from latte_convert.recipe import Candidate

HEADS, DIM, TOKENS = 3, 8, 50


def call(seed: int, *, prefix: int = 0, mask: Tensor | None = None) -> SiteCall:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, HEADS, TOKENS, DIM, generator=generator) for _ in range(3))
    return SiteCall(
        module=nn.Identity(), query=query, key=key + 2, value=value, scale=DIM**-0.5, mask=mask, causal=False,
        layout=TokenLayout(prefix=prefix),
        exact=lambda: softmax_reference(query, key + 2, value, scale=DIM**-0.5, mask=mask),
    )  # fmt: skip


def feed(stage: object, calls: list[SiteCall], targets: list[Tensor]) -> None:
    for one, target in zip(calls, targets, strict=True):
        stage.observe(one, target)  # type: ignore[attr-defined]
    assert stage.end_pass()  # type: ignore[attr-defined]


def output(kernel: Kernel, one: SiteCall) -> Tensor:
    with torch.no_grad():
        return kernel(one)[0]


def test_shift_is_the_mean_visible_key() -> None:
    mask = torch.arange(TOKENS)[None] < 30
    calls = [call(0, mask=mask), call(1)]
    kernel = ExactKernel(HEADS, DIM, key_shift=True)
    feed(ShiftStage(kernel, None, 0), calls, [one.exact()[0] for one in calls])
    expected = torch.cat([calls[0].key[0, :, :30], calls[1].key[0]], dim=1).mean(1)
    torch.testing.assert_close(kernel.shift, nn.Parameter(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("granularity", ["layer", "head"])
def test_grid_finds_the_anchor_that_made_the_target(granularity: str) -> None:
    kernel = Taylor2Kernel(HEADS, DIM, granularity=granularity)
    alphas = torch.tensor([-3.0]) if granularity == "layer" else torch.tensor([-3.0, 0.0, 0.75])
    calls = [call(seed) for seed in range(3)]
    targets = [taylor2_reference(c.query, c.key, c.value, alpha=alphas, scale=c.scale)[0] for c in calls]
    feed(GridStage(kernel, None, 0, kernel.alpha, (0.75, 0.0, -1.0, -3.0)), calls, targets)
    assert kernel.alpha.tolist() == alphas.tolist()


def test_pola_is_fitted_head_by_head() -> None:
    fit = SiteFit(site(), Candidate(kernel="pola"), None)
    truth = PolaKernel(HEADS, DIM)
    with torch.no_grad():
        truth.power.copy_(torch.tensor([1.5, 3.0, 5.0])[:, None].expand(-1, DIM))
    calls = [call(seed) for seed in range(2)]
    for _ in range(fit.passes):
        for one in calls:
            fit.observe(one, output(truth, one)[None])
        fit.end_pass()
    result = fit.result()
    assert isinstance(result.kernel, PolaKernel)
    assert result.kernel.power[:, 0].tolist() == [1.5, 3.0, 5.0]
    assert result.error == pytest.approx(0, abs=1e-6)


def site() -> AttentionSite:
    return AttentionSite("blocks.0.attn", "vision", "self", False, HEADS, DIM)


def test_bias_and_sigma_find_what_made_the_target_and_leave_the_prefix_alone() -> None:
    plain = EluKernel(HEADS, DIM)
    kernel = EluKernel(HEADS, DIM, sigma=True, bias=True, exact_prefix=True)
    sigma, bias = torch.linspace(0.9, 1.1, HEADS * DIM), torch.linspace(-1, 1, HEADS * DIM)
    calls = [call(seed, prefix=4) for seed in range(6)]
    targets = []
    for one in calls:
        target = output(plain, dataclasses.replace(one, layout=TokenLayout()))
        target = target * sigma.reshape(HEADS, 1, DIM) + bias.reshape(HEADS, 1, DIM)
        target[:, :4] = 1e3  # exact rows: nobody's error
        targets.append(target)
    stage = OutputStage(kernel, None, 0)
    feed(stage, calls, targets)
    assert stage.error is not None
    assert stage.error < 1e-3
    assert torch.allclose(kernel.bias, bias, atol=0.05)  # type: ignore[arg-type]
    assert torch.allclose(kernel.sigma, sigma, atol=0.1)  # type: ignore[arg-type]


def test_map_finds_what_made_the_target_and_ignores_noise() -> None:
    plain = ExactKernel(HEADS, DIM)
    torch.manual_seed(0)
    wanted = torch.eye(DIM) + 0.3 * torch.randn(HEADS, DIM, DIM)
    calls = [call(seed) for seed in range(8)]
    kernel = ExactKernel(HEADS, DIM, output_map=True)
    feed(MapStage(kernel, None, 0), calls, [output(plain, one) @ wanted for one in calls])
    assert torch.allclose(kernel.output_map, wanted, atol=0.02)  # type: ignore[arg-type]
    # Nothing to learn but noise: the folds choose the strongest pull to the identity.
    noisy = ExactKernel(HEADS, DIM, output_map=True)
    feed(MapStage(noisy, None, 0), calls, [output(plain, one) + torch.randn(HEADS, TOKENS, DIM) for one in calls])
    assert torch.allclose(noisy.output_map, torch.eye(DIM).expand(HEADS, -1, -1), atol=0.05)  # type: ignore[arg-type]


def test_one_sample_leaves_the_map_at_the_identity() -> None:
    kernel = ExactKernel(HEADS, DIM, output_map=True)
    one = call(0)
    feed(MapStage(kernel, None, 0), [one], [2 * one.exact()[0]])
    assert torch.equal(kernel.output_map, torch.eye(DIM).repeat(HEADS, 1, 1))  # type: ignore[arg-type]
