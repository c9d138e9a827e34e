"""Original and hybrid are compared on the same inputs, also where a model writes into what it gets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.data.feed import BatchFeed
from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.measuring.fidelity import measure


class Block(nn.Module):
    """A residual block that writes into the output of the block before."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(x, x, x, need_weights=False)[0] * 3
        return x


class InPlace(nn.Module):
    """Scales its input, and a list of others, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        x *= 0.5
        more[0] = more[0] * 2
        x = self.first(x) + more[0]
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_that_writes_into_its_inputs_and_between_its_blocks() -> None:
    torch.manual_seed(0)
    model = InPlace().eval()
    batches = [{"x": torch.randn(1, 12, 16), "more": [torch.randn(1, 12, 16)]} for _ in range(2)]
    before = [(batch["x"].clone(), batch["more"][0]) for batch in batches]
    host = Host.of(model)
    measured = measure(host, host.sites(), {"blocks.1.attention": LatteKernel(2, 8)}, BatchFeed(batches))
    assert measured.blocks["blocks.0"].squared_error == 0  # nothing before the second block is converted
    assert measured.blocks["blocks.1"].squared_error > 0
    assert measured.blocks["blocks.1"].squared_error == measured.outputs["output"].squared_error
    for batch, (x, more) in zip(batches, before, strict=True):
        assert torch.equal(batch["x"], x)
        assert batch["more"][0] is more
