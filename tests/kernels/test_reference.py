"""Every kernel against its executable specification, outputs and gradients; blocks, near_far and monarch apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import DIM, HEADS, TOLERANCE, assert_close, assert_grads_close, attend, some_mask, tokens
from reference.elu import elu_reference
from reference.fitted import fitted_reference
from reference.latte import latte_reference
from reference.performer import performer_reference
from reference.pola import pola_reference
from reference.qt_vit import qt_vit_reference
from reference.relu import relu_reference
from reference.softmax import softmax_reference
from reference.taylor2 import taylor2_reference
from torch import Tensor

from latte_convert.kernels import Kernel, get_kernel, kernel_names

SHAPES = [(1, 1), (7, 7), (130, 130), (5, 70), (70, 5), (64, 192)]
NARROW = (torch.float32, torch.float16, torch.bfloat16)
REFERENCES: dict[str, Callable[..., Tensor]] = {
    "elu": elu_reference,
    "exact": softmax_reference,
    "fitted": fitted_reference,
    "latte": latte_reference,
    "performer": performer_reference,
    "pola": pola_reference,
    "qt_vit": qt_vit_reference,
    "relu": relu_reference,
    "taylor2": taylor2_reference,
}
WITHOUT_SCALE = {"elu", "relu"}
SWITCHES = itertools.product((True, False), (True, False), ("layer", "head"))
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in REFERENCES if name != "latte"),
    *(("latte", {"tte": tte, "jpn": jpn, "granularity": each}) for tte, jpn, each in SWITCHES),
    ("fitted", {"features": 5}),
    ("taylor2", {"granularity": "head"}),
]


def build(name: str, options: dict[str, Any]) -> Kernel:
    """A kernel whose parameters are off their initial values, each head's by something else."""
    kernel = get_kernel(name)(HEADS, DIM, **options)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.sub_(0.7 * torch.rand_like(parameter))
    return kernel


def specified(kernel: Kernel, *qkv: Tensor, **call: Any) -> Tensor:
    """The specification with the tensors of a kernel."""
    call |= {**dict(kernel.named_parameters()), **dict(kernel.named_buffers())}
    call |= {switch: getattr(kernel, switch) for switch in ("tte", "jpn") if hasattr(kernel, switch)}
    if kernel.name in WITHOUT_SCALE:
        del call["scale"]
    return REFERENCES[kernel.name](*qkv, **call)


def test_every_kernel_has_a_specification() -> None:
    assert set(kernel_names()) == {*REFERENCES, "blocks", "near_far", "near_past", "monarch"}


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize(("masked", "causal"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.float64) for shape in SHAPES), *(((67, 67), dtype) for dtype in NARROW)]
)
def test_outputs_and_gradients_equal_the_reference(
    name: str, options: dict[str, Any], shape: tuple[int, int], masked: bool, causal: bool, dtype: torch.dtype
) -> None:
    kernel = build(name, options).to(torch.promote_types(dtype, torch.float32))
    inputs = [t.requires_grad_() for t in tokens(*shape, dtype=dtype)]
    call = {"scale": 0.3, "mask": some_mask(shape[1]) if masked else None, "causal": causal}
    actual, expected = attend(kernel, *inputs, **call), specified(kernel, *inputs, **call)
    assert_close(actual, expected, TOLERANCE[dtype])
    read = [p for label, p in kernel.named_parameters() if label != "alpha" or getattr(kernel, "tte", True)]
    assert_grads_close(actual, expected, [*inputs, *read], TOLERANCE[dtype])
