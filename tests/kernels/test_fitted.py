"""The fitted kernel against its specification, and what its fit finds."""

from __future__ import annotations

import pytest
import torch
from reference.softmax import softmax_reference

from latte_convert.attention import SiteCall, TokenLayout
from latte_convert.errors import UsageError
from latte_convert.kernels.fitting import descent
from latte_convert.kernels.fitting.descent import DescentStage
from latte_convert.kernels.rivals.fitted import FittedKernel

HEADS, DIM = 3, 8


def call(seed: int, *, causal: bool = False, tokens: int = 80) -> SiteCall:
    """Tokens around six centres that all samples share: there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(3, 6, DIM, generator=torch.Generator().manual_seed(7))
    kinds = torch.randint(6, (1, HEADS, tokens), generator=generator)
    noise = 0.3 * torch.randn(3, 1, HEADS, tokens, DIM, generator=generator)
    query, key, value = (centre[kinds] + one for centre, one in zip(centres, noise, strict=True))
    return SiteCall(
        module=torch.nn.Identity(), query=query, key=key, value=value, scale=DIM**-0.5, mask=None, causal=causal,
        layout=TokenLayout(), exact=lambda: softmax_reference(query, key, value, scale=DIM**-0.5, causal=causal),
    )  # fmt: skip


def fit(fitted: FittedKernel, calls: list[SiteCall]) -> None:
    stage = DescentStage(fitted, None, 0, list(fitted.parameters()))
    for one in calls:
        stage.observe(one, one.exact()[0])
    assert stage.end_pass()


def error(fitted: FittedKernel, calls: list[SiteCall]) -> float:
    with torch.no_grad():
        outputs = [(fitted(c), c.exact()) for c in calls]
    return sum(float((a - b).square().sum()) for a, b in outputs) / sum(float(b.square().sum()) for _, b in outputs)


@pytest.mark.parametrize("causal", [False, True])
def test_descent_helps_on_samples_it_has_not_seen(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "STEPS", 60)
    fitted = FittedKernel(HEADS, DIM)
    held_out = [call(seed, causal=causal) for seed in (100, 101)]
    before = error(fitted, held_out)
    fit(fitted, [call(seed, causal=causal) for seed in range(4)])
    assert error(fitted, held_out) < 0.8 * before
    assert all(parameter.grad is None for parameter in fitted.parameters())


def test_descent_is_deterministic_and_keeps_a_bounded_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "STEPS", 5)
    monkeypatch.setattr(descent, "TOKENS", 32)
    calls = [call(seed) for seed in range(descent.SAMPLES + 3)]
    first, second = FittedKernel(HEADS, DIM), FittedKernel(HEADS, DIM)
    stage = DescentStage(first, None, 0, list(first.parameters()))
    for one in calls:
        stage.observe(one, one.exact()[0])
    assert len(stage._kept) == descent.SAMPLES
    assert all(kept.query.shape[2] == kept.key.shape[2] == 32 for kept in stage._kept)
    assert stage.end_pass()
    fit(second, calls)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_features_below_one_are_refused() -> None:
    with pytest.raises(UsageError, match="`features` is 0: set it to a whole number, 1 to 16384"):
        FittedKernel(HEADS, DIM, features=0)
