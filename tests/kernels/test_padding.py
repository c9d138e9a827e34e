"""A result belongs to its sample: padding, and what else is in the batch, changes nothing, whatever the kernel."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall, TokenLayout
from latte_convert.kernels import get_kernel, kernel_names

HEADS, DIM = 2, 16
SMALL = {"blocks": {"window": 16, "region": 32, "blocks": 8}, "near_far": {"window": 2, "halo": 1, "clusters": 16}}


def kernel_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return get_kernel(name)(HEADS, DIM, **SMALL.get(name, {}))


def attend(kernel: torch.nn.Module, tokens: list[Tensor], mask: Tensor | None, layout: TokenLayout) -> Tensor:
    return kernel(AttentionCall(*tokens, scale=0.25, mask=mask, layout=layout))


@pytest.mark.parametrize("name", [name for name in kernel_names() if name != "taylor2"])
@pytest.mark.parametrize("length", [37, 107, 200])
@pytest.mark.parametrize(("before", "behind"), [(0, 1), (0, 80), (7, 30)])
def test_a_padded_text_gives_what_it_gives_alone(name: str, length: int, before: int, behind: int) -> None:
    kernel, layout = kernel_of(name), TokenLayout()
    generator = torch.Generator().manual_seed(length)
    alone = [torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(3)]
    padded = [torch.full((2, HEADS, before + length + behind, DIM), 3.0) for _ in range(3)]
    mask = torch.zeros(2, before + length + behind, dtype=torch.bool)
    mask[0, before : before + length] = True
    mask[1] = True  # a longer text beside it
    for whole, own in zip(padded, alone, strict=True):
        whole[0, :, before : before + length] = own[0]
        whole[1] = torch.randn(whole[1].shape, generator=generator)
    expected = attend(kernel, alone, None, layout)
    got = attend(kernel, padded, mask, layout)[:1, :, before : before + length]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    beside = attend(kernel, [x[1:] for x in padded], None, layout)
    torch.testing.assert_close(attend(kernel, padded, mask, layout)[1:], beside, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in kernel_names() if name != "taylor2"])
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("small", [(9, 14), (16, 5), (16, 14)])
def test_a_small_image_in_a_batch_gives_what_it_gives_alone(name: str, prefix: int, small: tuple[int, int]) -> None:
    large = (16, 14)
    kernel = kernel_of(name)
    generator = torch.Generator().manual_seed(1)
    alone = [torch.randn(1, HEADS, prefix + small[0] * small[1], DIM, generator=generator) for _ in range(3)]
    place = (torch.arange(small[0])[:, None] * large[1] + torch.arange(small[1])).flatten() + prefix
    place = torch.cat([torch.arange(prefix), place])
    padded = [torch.full((1, HEADS, prefix + large[0] * large[1], DIM), -2.0) for _ in range(3)]
    for whole, own in zip(padded, alone, strict=True):
        whole[:, :, place] = own
    mask = torch.zeros(1, prefix + large[0] * large[1], dtype=torch.bool)
    mask[:, place] = True
    expected = attend(kernel, alone, None, TokenLayout(prefix, small))
    got = attend(kernel, padded, mask, TokenLayout(prefix, large))[:, :, place]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["blocks", "near_far", "monarch"])
@pytest.mark.parametrize(("length", "pads"), [(200, 20), (160, 40), (107, 80), (150, 1)])
@torch.no_grad()
def test_a_padded_text_in_a_bert(name: str, length: int, pads: int) -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=50, hidden_size=HEADS * DIM, num_hidden_layers=2, num_attention_heads=HEADS,
            intermediate_size=32, max_position_embeddings=256,
        )
    ).eval()  # fmt: skip
    host = Host.of(model)
    ids = torch.randint(5, 50, (1, length))
    padded = torch.nn.functional.pad(ids, (0, pads))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, pads))
    kernels = {site.name: get_kernel(name)(HEADS, DIM) for site in host.sites()}
    with host.convert(kernels):
        alone = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        got = model(input_ids=padded, attention_mask=mask).last_hidden_state[:, :length]
    torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)


def small_bert() -> transformers.BertModel:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=HEADS * DIM, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=32,
        max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def two_texts(short: int, long: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Token ids of two texts, and both in one batch."""
    ids = [torch.randint(5, 50, (1, length)) for length in (short, long)]
    rows = [torch.nn.functional.pad(row, (0, long - row.shape[1])) for row in ids]
    mask = torch.arange(long) < torch.tensor([[short], [long]])
    return ids, {"input_ids": torch.cat(rows), "attention_mask": mask.long()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["near_far", "monarch", "latte"])
@torch.no_grad()
def test_a_padded_text_in_a_compiled_bert(name: str) -> None:
    """What ``torch.compile`` cannot know when it makes a graph is decided when the graph is called."""
    model = small_bert()
    host = Host.of(model)
    kernels = {site.name: get_kernel(name)(HEADS, DIM, **SMALL.get(name, {})) for site in host.sites()}
    with host.convert(kernels, min_tokens=64):
        compiled = torch.compile(model, backend="eager")
        for short, long in ((107, 187), (150, 151), (40, 160)):  # the last is short for linear attention
            ids, batch = two_texts(short, long)
            got = compiled(**batch).last_hidden_state
            for own, row in zip(ids, got, strict=True):
                alone = model(input_ids=own).last_hidden_state[0]
                torch.testing.assert_close(row[: len(alone)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["near_far", "latte"])
@torch.no_grad()
def test_min_tokens_counts_the_tokens_of_each_text(name: str) -> None:
    model = small_bert()
    host = Host.of(model)
    ids, batch = two_texts(100, 200)
    exact = [model(input_ids=own).last_hidden_state[0] for own in ids]
    kernels = {site.name: get_kernel(name)(HEADS, DIM, **SMALL.get(name, {})) for site in host.sites()}
    for least, same in ((101, [True, False]), (100, [False, False]), (201, [True, True])):
        with host.convert(kernels, min_tokens=least) as applied:
            rows = model(**batch).last_hidden_state
            fallen = {(handler.calls, handler.exact_calls) for handler in applied.handlers.values()}
            alone = [model(input_ids=own).last_hidden_state[0] for own in ids]
        assert fallen == {(1, int(all(same)))}
        for row, own, original, is_exact in zip(rows, alone, exact, same, strict=True):
            torch.testing.assert_close(row[: len(own)], own, rtol=1e-4, atol=1e-5)
            assert torch.allclose(own, original, rtol=1e-4, atol=1e-5) == is_exact
