"""``torch.jit.trace`` of a hybrid: every kernel, with parameters that can be trained, in each way of taking over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.kernels import get_kernel, kernel_names

pytestmark = [
    pytest.mark.slow,
    # The library's own checks of shapes, and what PyTorch says of torch.jit itself.
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
OPTIONS: dict[str, dict[str, Any]] = {"near_far": {"clusters": 4, "window": 2, "halo": 0}}
EXTRAS = {"exact_prefix": True, "input_map": True, "output_map": True, "bias": True, "key_shift": True}


class Images(nn.Module):
    """A model of Transformers that takes and returns one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.model(pixel_values=images).last_hidden_state
        return output


def dinov2() -> tuple[nn.Module, nn.Module, Tensor]:
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=36, patch_size=4
    )
    model = transformers.Dinov2Model(config).eval()
    return model, Images(model), torch.randn(1, 3, 36, 36)


def vit() -> tuple[nn.Module, nn.Module, Tensor]:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=36, patch_size=4, embed_dim=32, depth=1, num_heads=2, num_classes=3
    ).eval()
    return model, model, torch.randn(1, 3, 36, 36)


def encoder() -> tuple[nn.Module, nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1)).eval()
    return model, model, torch.randn(1, 82, 32)


@pytest.mark.parametrize(
    ("make", "name"),
    [(dinov2, n) for n in kernel_names()]
    + [(vit, "near_far"), (vit, "latte"), (encoder, "near_far"), (encoder, "latte")],
)
def test_a_traced_hybrid_computes_what_it_computes_untraced(
    make: Callable[[], tuple[nn.Module, nn.Module, Tensor]], name: str
) -> None:
    """Traced with gradients: PyTorch then checks the trace by another one without."""
    torch.manual_seed(0)
    model, called, example = make()
    host = Host.of(model)
    options = OPTIONS.get(name, {}) | (EXTRAS if name == "latte" else {})
    host.convert({site.name: get_kernel(name)(site.heads, site.head_dim, **options) for site in host.sites()})
    traced = torch.jit.trace(called, example)
    with torch.no_grad():
        for inputs in (example, torch.randn(example.shape)):
            torch.testing.assert_close(traced(inputs), called(inputs), rtol=1e-4, atol=1e-5)
