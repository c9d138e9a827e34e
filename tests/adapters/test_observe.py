"""What the first real call of a site corrects, and what it rules out, before anything is fitted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import BY_NAME, build
from torch import Tensor, nn
from torch.nn import functional as F

import latte_convert
from latte_convert.adapters.host import Host
from latte_convert.adapters.observe import UNREAD, observed
from latte_convert.attention import AttentionSite, TokenLayout
from latte_convert.data.feed import Inputs
from latte_convert.measuring.outputs import final_outputs
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

CROSS = "decoder.layers.1.encoder_attn"


def seen(model: nn.Module, **batch: Tensor) -> dict[str, AttentionSite]:
    """Sites by name, as a call with one batch shows them."""
    host = Host.of(model)
    return {site.name: site for site in observed(host, host.sites(), [Inputs(batch)], final_outputs)}


class Attention(nn.Module):
    """One ``nn.MultiheadAttention`` over tokens, or from learned queries to them."""

    def __init__(self, queries: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, dropout=dropout, batch_first=True)
        self.queries = nn.Parameter(torch.randn(1, queries, 16)) if queries else None

    def forward(self, x: Tensor) -> Tensor:
        query = x if self.queries is None else self.queries.expand(len(x), -1, -1)
        return self.attn(query, x, x, need_weights=False)[0]


class Model(nn.Module):
    """Attention in several places, of which the output depends on some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(4))
        self.pool = Attention(queries=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.layers[0](x)
        index = self.layers[1](first).sum(-1).topk(3, dim=1).indices  # read, though no gradient goes that way
        with torch.no_grad():
            second = self.layers[2](first)
        chosen = first.gather(1, index[..., None].expand(-1, -1, 16))
        return {"logits": chosen + second[:, :3] + self.pool(first), "aux": self.layers[3](first)}


def test_sites_that_nothing_reads() -> None:
    torch.manual_seed(0)
    sites = seen(Model().eval(), x=torch.randn(1, 6, 16))
    assert {name: site.reason for name, site in sites.items()} == {
        "layers.0.attn": None, "layers.1.attn": None, "layers.2.attn": None, "layers.3.attn": UNREAD.format("logits"),
        "pool.attn": "attention pooling: one query",
    }  # fmt: skip


def test_watching_leaves_nothing_behind() -> None:
    model = Model().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen(model, x=torch.randn(1, 6, 16))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Written(nn.Module):
    """Writes into a parameter, which a pass with gradients does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention()
        self.count = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.layer(x)


def test_a_model_that_runs_without_gradients_only() -> None:
    assert seen(Written().eval(), x=torch.randn(1, 6, 16))["layer.attn"].eligible


class Always(nn.Module):
    """Drops attention weights in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Attention(dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.attn.training = True
        return self.layer(x)


def test_dropout_in_eval_mode_is_a_reason() -> None:
    site = seen(Always().eval(), x=torch.randn(1, 6, 16))["layer.attn"]
    assert site.reason == "attention dropout of 0.5 in eval mode"


class Causal(nn.Module):
    """Nothing but the mask of a call says that it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return F.layer_norm(self.layer(x, src_mask=mask), (16,))


def test_the_call_says_what_is_causal_and_what_is_cross_attention() -> None:
    assert seen(Causal().eval(), x=torch.randn(1, 6, 16))["layer.self_attn"].causal
    pooling = seen(nn.Sequential(Attention(queries=3)).eval(), input=torch.randn(1, 6, 16))["0.attn"]
    assert (pooling.kind, pooling.layout) == ("cross", TokenLayout(aligned=False))


def test_conditional_detr_looks_up_twice_the_channels_it_reads() -> None:
    """Content and position are concatenated in query and key."""
    sites = seen(build("conditional_detr"), **BY_NAME["conditional_detr"].inputs())
    assert (sites[CROSS].heads, sites[CROSS].head_dim, sites[CROSS].value_dim) == (2, 32, 16)
    other = sites["decoder.layers.1.self_attn"]
    assert (other.heads, other.head_dim, other.value_dim) == (2, 16, None)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("fitted", {"output_map": True, "key_shift": True}), ("performer", {}), ("pola", {}), ("near_far", {}),
        ("latte", {"exact_prefix": True, "key_shift": True, "input_map": True, "output_map": True, "bias": True}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("refitted", [False, True])
def test_every_kernel_takes_a_value_that_is_narrower(
    kernel: str, options: dict[str, object], refitted: bool, tmp_path: Path
) -> None:
    model = build("conditional_detr")
    inputs = BY_NAME["conditional_detr"].inputs()
    batches = [{**inputs, "pixel_values": inputs["pixel_values"] + i} for i in range(3)]
    recipe = Recipe(
        kernel=kernel, options=options, include=["encoder_attn"], scorer="paper", k=2, samples=3,
        propagate_error=refitted,
    )  # fmt: skip
    result = latte_convert.convert(model, batches, recipe=recipe, progress=False)
    again = latte_convert.load(result.save(tmp_path / "hybrid"))
    with torch.no_grad():
        actual, expected = again(**inputs).last_hidden_state, model(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert len(result.report.converted) == 2
