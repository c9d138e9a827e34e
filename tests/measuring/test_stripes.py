from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionSite, Handler, SiteCall, TokenLayout
from latte_convert.data.feed import BatchFeed, JoinedFeed
from latte_convert.measuring.stripes import HeadStripes, Stripes, StripeToken, correlation, stripe_analysis

SITE = AttentionSite("attention", "encoder", "self", causal=False, heads=1, head_dim=1)
GRID = TokenLayout(prefix=1, grid=(1, 5))


def make_call(query: Tensor, key: Tensor, **options: Any) -> SiteCall:
    """A call with logits ``query @ key.T``."""
    given = {"scale": 1.0, "mask": None, "causal": False, "layout": GRID, **options}
    return SiteCall(
        module=nn.Identity(), query=query, key=key, value=key, exact=lambda: torch.zeros_like(query), **given
    )


def with_matrix(matrix: Tensor, **options: Any) -> SiteCall:
    """A call whose softmax is ``(H, Nq, Nk)``: its logarithms are the queries, unit vectors the keys."""
    keys = torch.eye(matrix.shape[-1]).expand(len(matrix), -1, -1)
    return make_call(matrix.clamp(min=1e-30).log()[None], keys[None], **options)


class Replay(nn.Module):
    """Has one attention site, and makes the call it is given there."""

    def __init__(self) -> None:
        super().__init__()
        self.handlers: list[Handler] = []

    def forward(self, call: SiteCall) -> Tensor:
        output = self.handlers[-1](call)
        return call.exact() if output is None else output


class ReplayAdapter:
    name = "replay"

    def sites(self, model: nn.Module) -> list[AttentionSite]:
        return [SITE]

    def route(self, model: nn.Module, site: str, handler: Handler) -> Callable[[], None]:
        assert isinstance(model, Replay)
        assert site == SITE.name
        model.handlers.append(handler)
        return model.handlers.clear

    def output_projection(self, model: nn.Module, site: str) -> nn.Linear | None:
        return None


def analyse(*calls: SiteCall, **options: Any) -> dict[str, Stripes]:
    feed = BatchFeed({"call": call} for call in calls)
    return stripe_analysis(Host(Replay(), ReplayAdapter()), [SITE], feed, **options)


def only_head(call: SiteCall) -> HeadStripes:
    (head,) = analyse(call)[SITE.name].heads
    return head


class TestKnownMatrices:
    def test_a_column_stripe(self) -> None:
        profile = torch.tensor([0.5, 0.05, 0.02, 0.03, 0.35, 0.05])
        head = only_head(with_matrix(profile.expand(1, 6, 6)))
        flat = 1 / (6 * float(profile.square().sum()))
        assert head.row_strength == pytest.approx(flat)
        assert head.column_strength == pytest.approx(1 - flat), "all rows alike: nothing else is left"
        assert [key.index for key in head.keys] == [0], "0.35 is less than three times an even share"
        assert head.keys[0].share == pytest.approx(0.5)
        assert head.keys[0].name == "prefix 0"
        assert head.queries == ()

    def test_one_key_gets_everything(self) -> None:
        head = only_head(with_matrix(torch.eye(6)[4].expand(1, 6, 6)))
        assert head.column_strength == pytest.approx(5 / 6)
        assert head.row_strength == pytest.approx(1 / 6)
        assert head.keys == (StripeToken(4, 1.0),)
        assert head.keys[0].name == "4"

    def test_queries_attend_everywhere(self) -> None:
        head = only_head(with_matrix(torch.full((1, 6, 6), 1 / 6)))
        assert head.row_strength == pytest.approx(1)
        assert head.column_strength == pytest.approx(0, abs=1e-6)
        assert head.keys == ()
        assert sorted(query.index for query in head.queries) == [0, 1, 2, 3, 4]
        assert all(query.share == pytest.approx(1) for query in head.queries)

    def test_every_query_attends_to_itself(self) -> None:
        head = only_head(with_matrix(torch.eye(6)[None]))
        assert head.row_strength == pytest.approx(1 / 6)
        assert head.column_strength == pytest.approx(0, abs=1e-6)
        assert head.keys == head.queries == ()

    def test_one_row_stripe_among_peaked_rows(self) -> None:
        matrix = torch.eye(6)
        matrix[3] = 1 / 6
        head = only_head(with_matrix(matrix[None]))
        assert head.row_strength == pytest.approx((1 + 5 / 6) / 6)
        assert head.queries == (StripeToken(3, pytest.approx(1.0)),)

    def test_heads_are_apart(self) -> None:
        stripes = analyse(with_matrix(torch.stack([torch.full((6, 6), 1 / 6), torch.eye(6)])))[SITE.name]
        assert [head.row_strength for head in stripes.heads] == pytest.approx([1, 1 / 6])
        assert stripes.row_strength == pytest.approx(7 / 12)
        assert stripes.strength == pytest.approx(7 / 12, abs=1e-6)


def random_call(queries: int, keys: int, **options: Any) -> SiteCall:
    generator = torch.Generator().manual_seed(queries + keys)
    query, key = (torch.randn(1, 1, n, 4, generator=generator) for n in (queries, keys))
    return make_call(query, key + 1.0, layout=TokenLayout(aligned=queries == keys), **options)


def softmax_of(call: SiteCall) -> Tensor:
    return (call.query[0, 0] @ call.key[0, 0].T).softmax(-1)


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (7, 12), (300, 20)])
def test_the_shares_are_those_of_the_least_squares_fit(queries: int, keys: int) -> None:
    call = random_call(queries, keys)
    matrix = softmax_of(call).double()
    unit = matrix / matrix.norm(dim=-1, keepdim=True)
    rows = torch.eye(queries).repeat_interleave(keys, 0).double()
    columns = torch.eye(keys).repeat(queries, 1).double()
    explained = [
        (design @ torch.linalg.lstsq(design, unit.reshape(-1, 1), driver="gelsd").solution).square().sum() / queries
        for design in (rows, torch.cat([rows, columns], 1))
    ]
    head = only_head(call)
    assert head.row_strength == pytest.approx(float(explained[0]), rel=1e-4)
    assert head.column_strength == pytest.approx(float(explained[1] - explained[0]), rel=1e-4)


def test_a_causal_site_is_fitted_on_what_queries_see() -> None:
    call = random_call(8, 8, causal=True)
    logits = call.query[0, 0] @ call.key[0, 0].T
    left: dict[tuple[int, int], float] = {}
    rows = []
    for i in range(8):
        weights = logits[i, : i + 1].softmax(-1)
        unit = weights / weights.norm()
        rows.append((i + 1) * float(unit.mean()) ** 2)
        left |= {(i, j): float(unit[j] - unit.mean()) for j in range(i + 1)}
    columns = [[left[i, j] for i in range(j, 8)] for j in range(8)]
    explained = sum(len(column) * (sum(column) / len(column)) ** 2 for column in columns)
    head = only_head(call)
    assert head.row_strength == pytest.approx(sum(rows) / 8, rel=1e-4)
    assert head.column_strength == pytest.approx(explained / 8, rel=1e-4)


def test_an_even_causal_spread_has_no_column_stripe() -> None:
    zeros = torch.zeros(1, 1, 40, 2)
    head = only_head(make_call(zeros, zeros, causal=True, layout=TokenLayout()))
    assert head.keys == (), "the first keys get more only because more queries see them"
    assert head.row_strength == pytest.approx(1)
    assert 0 not in {query.index for query in head.queries}, "it sees one key of 40, so it does not attend everywhere"


class TestMasks:
    def test_padding_changes_nothing(self) -> None:
        call = random_call(9, 9)
        padding = torch.full((1, 1, 5, 4), 7.0)
        padded = make_call(
            torch.cat([call.query, padding], 2),
            torch.cat([call.key, padding], 2),
            mask=torch.tensor([[True] * 9 + [False] * 5]),
            layout=call.layout,
        )
        alone, among = only_head(call), only_head(padded)
        assert among.row_strength == pytest.approx(alone.row_strength)
        assert among.column_strength == pytest.approx(alone.column_strength)
        for side in ("keys", "queries"):
            pairs = [(token.index, pytest.approx(token.share)) for token in getattr(alone, side)]
            assert [(token.index, token.share) for token in getattr(among, side)] == pairs

    def test_queries_of_cross_attention_are_no_padding(self) -> None:
        mask = torch.tensor([[True] * 3 + [False] * 3])
        cross = TokenLayout(grid=(2, 3), aligned=False)
        head = only_head(with_matrix(torch.full((1, 6, 6), 1 / 6), mask=mask, layout=cross))
        assert len(head.queries) == 5
        assert head.row_strength == pytest.approx(1)

    def test_a_call_without_keys_does_not_count(self) -> None:
        empty = with_matrix(torch.eye(6)[None], mask=torch.zeros(1, 6, dtype=torch.bool))
        assert analyse(empty) == {}
        assert analyse(with_matrix(torch.eye(6)[None]), empty)[SITE.name].samples == 1

    def test_samples_of_a_batch_are_apart(self) -> None:
        profile = torch.eye(6)[4].expand(6, 6)
        both = torch.stack([torch.full((6, 6), 1 / 6), profile])
        batch = make_call(both.clamp(min=1e-30).log()[:, None], torch.eye(6).expand(2, 1, 6, 6))
        stripes = analyse(batch)[SITE.name]
        assert stripes.samples == 2
        assert stripes.column_strength == pytest.approx(5 / 12)


def test_the_last_token_of_texts_of_different_lengths() -> None:
    calls = [
        with_matrix(torch.eye(length)[-1].expand(1, length, length), layout=TokenLayout()) for length in (5, 8, 12)
    ]
    (head,) = analyse(*calls)[SITE.name].heads
    assert [(key.index, key.name) for key in head.keys] == [(-1, "last")]
    assert head.keys[0].share == pytest.approx(1)


def test_a_token_that_few_samples_have_is_weighed_by_all_of_them() -> None:
    calls = [with_matrix(torch.eye(n)[6 if n == 9 else 0].expand(1, n, n), layout=TokenLayout()) for n in (5, 5, 5, 9)]
    (head,) = analyse(*calls)[SITE.name].heads
    assert head.keys == (StripeToken(0, pytest.approx(0.75)), StripeToken(6, pytest.approx(0.25)))


def test_what_the_softmax_does_not_tell_is_left_out() -> None:
    assert analyse(with_matrix(torch.eye(6)[None], obstacle="adds a bias to the logits")) == {}


def test_a_few_samples_of_each_tower() -> None:
    flat, own = with_matrix(torch.full((1, 6, 6), 1 / 6)), with_matrix(torch.eye(6)[None])
    feed = JoinedFeed([BatchFeed([{"call": flat}] * 5), BatchFeed([{"call": own}] * 5)])
    steps: list[Any] = []

    def progress(title: str, total: int) -> Callable[[], None]:
        steps.append(total)
        return lambda: steps.append("step")

    stripes = stripe_analysis(Host(Replay(), ReplayAdapter()), [SITE], feed, samples=2, progress=progress)[SITE.name]
    assert stripes.samples == 4
    assert stripes.row_strength == pytest.approx((1 + 1 / 6) / 2)
    assert steps == [4, *["step"] * 4]


class _Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_of_all_queries_and_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 3, 1000, 4, generator=generator) for _ in range(2))
    with _Largest() as largest:
        assert analyse(make_call(query, key, layout=TokenLayout()))
    assert 3 * 1000 * 4 < largest.elements < 3 * 1000 * 1000 / 5


class TestCorrelation:
    @staticmethod
    def made(**strengths: tuple[float, float]) -> dict[str, Stripes]:
        return {name: Stripes((HeadStripes(*pair, (), ()),), 1) for name, pair in strengths.items()}

    def test_ranks(self) -> None:
        stripes = self.made(a=(0.1, 0.4), b=(0.2, 0.2), c=(0.3, 0.1), d=(0.9, 0.0))
        scores = {"a": 1.0, "b": 3.0, "c": 2.0, "d": 50.0}
        # 1 - 6 sum d² / (n (n² - 1)): columns rank 1 2 3 4 and rows 4 3 2 1, against 1 3 2 4
        assert correlation(stripes, scores, "column_strength") == pytest.approx(1 - 6 * 2 / 60)
        assert correlation(stripes, scores, "row_strength") == pytest.approx(1 - 6 * (9 + 0 + 0 + 9) / 60)
        # the sums are 0.5, 0.4, 0.4, 0.9, with ranks 3 1.5 1.5 4: the covariance with 1 3 2 4 over the deviations
        assert correlation(stripes, scores) == pytest.approx(1.5 / (4.5 * 5) ** 0.5)

    def test_sites_without_a_finite_score_do_not_count(self) -> None:
        stripes = self.made(a=(0.1, 0), b=(0.2, 0), c=(0.3, 0), d=(0.0, 0), e=(0.0, 0))
        scores = {"a": 1.0, "b": 2.0, "c": 3.0, "d": float("inf"), "e": None, "unseen": 0.5}
        assert correlation(stripes, scores) == pytest.approx(1)

    @pytest.mark.parametrize("scores", [{"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {}], ids=str)
    def test_too_little_to_tell(self, scores: dict[str, float | None]) -> None:
        assert correlation(self.made(a=(0.1, 0), b=(0.2, 0), c=(0.3, 0)), scores) is None


SENTENCES = ("A man is playing a guitar.", "Two dogs are running over the wet grass near the river.")


def test_minilm_attends_to_its_special_tokens(models_dir: Path) -> None:
    path = models_dir / "minilm-l6"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    batches = [dict(tokenizer(text, return_tensors="pt")) for text in SENTENCES]
    with torch.no_grad():
        matrices = [model(**batch, output_attentions=True).attentions for batch in batches]
        before = model(**batches[0]).last_hidden_state
    host = Host.of(model)
    sites = host.sites()
    stripes = stripe_analysis(host, sites, BatchFeed(batches))
    assert list(stripes) == [site.name for site in sites]
    special = 0
    for layer, site in enumerate(stripes.values()):
        assert site.samples == len(SENTENCES)
        for h, head in enumerate(site.heads):
            each = [sample[layer][0, h] for sample in matrices]
            rows = [1 / (len(matrix) * matrix.square().sum(-1)) for matrix in each]
            assert head.row_strength == pytest.approx(float(sum(row.mean() for row in rows)) / 2, rel=1e-3)
            assert head.column_strength + head.row_strength <= 1
            for key in head.keys:
                got = [float(matrix[:, key.index].mean()) if key.index < len(matrix) - 1 else 0.0 for matrix in each]
                assert key.share == pytest.approx(sum(got) / 2, rel=1e-3)
            special += bool(head.keys) and head.keys[0].index in (0, -1)
    assert special > 36, "more than half of the 72 heads"
    with torch.no_grad():
        torch.testing.assert_close(model(**batches[0]).last_hidden_state, before)


def test_detr_with_a_padded_image() -> None:
    path = Path(__file__).resolve().parents[1] / "models" / "tiny-detr"
    model = transformers.AutoModelForObjectDetection.from_pretrained(path, attn_implementation="eager").eval()
    pixels = torch.rand(1, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 96, 128, dtype=torch.long)
    mask[:, :, 96:] = 0
    batch = {"pixel_values": pixels, "pixel_mask": mask}
    with torch.no_grad():
        output = copy.deepcopy(model)(**batch, output_attentions=True)
    host = Host.of(model)
    sites = host.sites()
    stripes = stripe_analysis(host, sites, BatchFeed([batch]))
    cross = [site.name for site in sites if site.kind == "cross"]
    assert len(cross) == len(output.cross_attentions)
    for name, matrices in zip(cross, output.cross_attentions, strict=True):
        visible = int((matrices[0, 0, 0] > 0).sum())
        assert visible < matrices.shape[-1], "some keys are padding"
        for head, matrix in zip(stripes[name].heads, matrices[0], strict=True):
            assert head.row_strength == pytest.approx(float((1 / (visible * matrix.square().sum(-1))).mean()), rel=1e-3)
