from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.attention import SiteCall, TokenLayout
from latte_convert.data.feed import Inputs, run
from latte_convert.kernels.base import Kernel
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.measuring.map_result import AttentionMap
from latte_convert.measuring.maps import _Cells, _stripes, attention_maps, exact_map, kernel_map

HEADS, DIM = 2, 6


def make_call(queries: int = 10, keys: int = 10, *, mask: Tensor | None = None, causal: bool = False) -> SiteCall:
    generator = torch.Generator().manual_seed(3)

    def random(tokens: int) -> Tensor:
        return 2 * torch.randn(1, HEADS, tokens, DIM, generator=generator)

    return SiteCall(
        module=nn.Identity(),
        query=random(queries),
        key=random(keys),
        value=random(keys),
        scale=0.4,
        mask=mask,
        causal=causal,
        layout=TokenLayout(prefix=1, aligned=queries == keys),
        exact=lambda: torch.empty(0),
    )


def softmax_matrix(call: SiteCall) -> Tensor:
    """By a loop over pairs that may see each other."""
    count, total = call.query.shape[2], call.key.shape[2]
    out = torch.zeros(HEADS, count, total)
    for h in range(HEADS):
        for i in range(count):
            seen = [
                j
                for j in range(total)
                if (call.mask is None or bool(call.mask[0, j])) and (not call.causal or j <= i + total - count)
            ]
            if seen:
                logits = torch.stack([call.scale * call.query[0, h, i] @ call.key[0, h, j] for j in seen])
                out[h, i, seen] = logits.exp() / logits.exp().sum()
    return out


MASK = torch.tensor([[True] * 6 + [False] * 4])
CALLS = {
    "plain": make_call(),
    "masked": make_call(mask=MASK),
    "nothing to see": make_call(mask=torch.zeros(1, 10, dtype=torch.bool)),
    "causal": make_call(causal=True),
    "cross": make_call(7, 10),
}


@pytest.mark.parametrize("name", CALLS)
class TestMatrices:
    def test_exact(self, name: str) -> None:
        call = CALLS[name]
        matrix = exact_map(call, torch.eye(call.query.shape[2]), torch.eye(call.key.shape[2]))
        torch.testing.assert_close(matrix, softmax_matrix(call))

    def test_kernel_that_is_softmax(self, name: str) -> None:
        call = CALLS[name]
        kernel = ExactKernel(HEADS, DIM)
        matrix = kernel_map(kernel, call, torch.eye(call.query.shape[2]), torch.eye(call.key.shape[2]))
        torch.testing.assert_close(matrix, softmax_matrix(call))


def latte(**options: bool) -> LatteKernel:
    kernel = LatteKernel(HEADS, DIM, granularity="head", **options)
    with torch.no_grad():
        kernel.delta_k.copy_(torch.tensor([3.0, 5.0]))
        for parameter in (kernel.sigma, kernel.bias, kernel.shift):
            if parameter is not None:
                parameter.copy_(torch.linspace(-1, 2, parameter.numel()).view_as(parameter))
    return kernel


@pytest.mark.parametrize("options", [{}, {"exact_prefix": True, "key_shift": True}], ids=["plain", "extras"])
def test_the_map_of_a_kernel_gives_its_output(options: dict[str, bool]) -> None:
    call, kernel = make_call(), latte(**options)
    matrix = kernel_map(kernel, call, torch.eye(10), torch.eye(10))
    out = kernel(call)
    torch.testing.assert_close(matrix @ call.value[0], out[0])


def test_what_follows_the_attention_is_left_out() -> None:
    call = make_call()
    plain, adjusted = latte(), latte(sigma=True, bias=True)
    before = {name: value.clone() for name, value in adjusted.state_dict().items()}
    maps = [kernel_map(kernel, call, torch.eye(10), torch.eye(10)) for kernel in (plain, adjusted)]
    torch.testing.assert_close(*maps)
    for name, value in adjusted.state_dict().items():
        assert torch.equal(value, before[name]), "the kernel itself keeps its parameters"


def test_cells_sum_keys_and_average_queries() -> None:
    call = make_call()
    queries, keys = (torch.zeros(10, 2), torch.zeros(10, 3))
    queries[:4, 0] = queries[4:, 1] = 1
    keys[:1, 0] = keys[1:5, 1] = keys[5:, 2] = 1
    full = softmax_matrix(call)
    parts = [[full[:, r][:, :, c].sum(-1).mean(-1) for c in COLUMNS] for r in (slice(0, 4), slice(4, 10))]
    expected = torch.stack([torch.stack(row, -1) for row in parts], -2)
    torch.testing.assert_close(exact_map(call, queries, keys), expected)


COLUMNS = (slice(0, 1), slice(1, 5), slice(5, 10))


@pytest.mark.parametrize(
    ("tokens", "prefix", "count", "largest"), [(1370, 1, 64, 22), (10, 1, 10, 1), (64, 0, 64, 1), (201, 5, 64, 4)]
)
def test_every_token_has_a_cell_and_the_prefix_its_own(tokens: int, prefix: int, count: int, largest: int) -> None:
    cells = _Cells.over(tokens, prefix, torch.device("cpu"))
    assert cells.count == count
    assert int(cells.sizes.sum()) == tokens
    assert cells.sizes[:prefix].tolist() == [1] * prefix
    assert int(cells.sizes.max()) == largest
    assert int(cells.sizes[prefix:].max() - cells.sizes[prefix:].min()) <= 1


def test_stripes() -> None:
    # Row 0 attends everywhere; the others give half of their attention to column 2 and the rest to themselves.
    cells = torch.zeros(8, 8)
    cells[0] = 1 / 8
    cells[1:, 2] = 0.5
    cells[range(1, 8), range(1, 8)] += 0.5
    even = torch.full((8,), 1 / 8)
    found = _stripes(cells, even, even)
    assert (found.columns, found.rows) == ([2], [0])
    assert found.column_share == pytest.approx((1 / 8 + 6 * 0.5 + 1.0) / 8)
    assert found.row_share == pytest.approx(1 / 8)


def levels(map_: AttentionMap, side: str) -> list[int]:
    return list(base64.b64decode(getattr(map_, side).levels))


@pytest.fixture(scope="module")
def model(tiny_dino: Path) -> nn.Module:
    return transformers.Dinov2Model.from_pretrained(tiny_dino, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return Inputs({"pixel_values": torch.rand(1, 3, 112, 112, generator=torch.Generator().manual_seed(0))})


def kernels_of(model: nn.Module, kind: type[Kernel]) -> dict[str, Kernel]:
    return {site.name: kind(site.heads, site.head_dim) for site in Host.of(model).sites()}


class TestModel:
    def test_softmax_moves_nothing(self, model: nn.Module, inputs: Inputs) -> None:
        kernels = kernels_of(model, ExactKernel)
        maps = attention_maps(Host.of(model), kernels, inputs)
        names = list(kernels)
        assert [map_.site for map_ in maps] == [names[0], names[2], names[5]]
        for map_ in maps:
            assert (map_.queries, map_.keys, map_.prefix, map_.shape) == (65, 65, 1, (64, 64))
            assert len(map_.heads) == 3
            assert max(head.moved for head in map_.heads) < 1e-5
            steps = [abs(a - b) for a, b in zip(levels(map_, "exact"), levels(map_, "converted"), strict=True)]
            assert max(steps) <= 1  # of 255: rounding
            assert max(levels(map_, "exact")) == 255

    def test_the_head_that_moved_most_is_drawn(self, model: nn.Module, inputs: Inputs) -> None:
        (map_,) = attention_maps(Host.of(model), kernels_of(model, LatteKernel), inputs, sites=1)
        moved = [head.moved for head in map_.heads]
        assert moved[map_.head] == max(moved) > 0.05
        assert levels(map_, "exact") != levels(map_, "converted")
        assert map_.kernel == "latte"

    def test_the_model_is_left_as_it_was(self, model: nn.Module, inputs: Inputs) -> None:
        before = run(model, inputs).last_hidden_state
        attention_maps(Host.of(model), kernels_of(model, LatteKernel), inputs)
        assert torch.equal(run(model, inputs).last_hidden_state, before)

    def test_sites_that_run_exact_attention_have_no_map(self, model: nn.Module, inputs: Inputs) -> None:
        kernels = kernels_of(model, LatteKernel)
        assert attention_maps(Host.of(model), kernels, inputs, min_tokens=66) == []
        assert attention_maps(Host.of(model), {}, inputs) == []


def test_only_sites_that_the_sample_reaches(tiny_clip: Path) -> None:
    model = transformers.CLIPModel.from_pretrained(tiny_clip, attn_implementation="sdpa").eval()
    kernels = kernels_of(model, LatteKernel)
    vision = [name for name in kernels if name.startswith("vision_model")]
    inputs = Inputs({"pixel_values": torch.rand(1, 3, 48, 48)}, method="get_image_features", tower="vision")
    maps = attention_maps(Host.of(model), kernels, inputs)
    assert len(kernels) == 6
    assert [map_.site for map_ in maps] == vision
