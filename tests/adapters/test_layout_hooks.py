"""How the size of feature maps is seen: by hooks that are shared, go away, and survive copies and compilation."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from helpers import eligible, latte_kernels
from timm_models import PATCHED, create
from tiny_models import build
from tiny_parts import TorchDetector, pixels
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from latte_convert.adapters.convert import apply
from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.layout import MapSize
from latte_convert.attention import TokenLayout


def _watched(model: nn.Module) -> dict[str, MapSize]:
    hooks = ((name, module.__dict__.get(MapSize.attribute)) for name, module in model.named_modules())
    return {name: hook for name, hook in hooks if hook is not None}


def test_hooks_are_shared_and_go_with_the_last_route() -> None:
    model = build("detr")
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    names = eligible(model)
    undo = [find_adapter(model).route(model, name, lambda call: None) for name in names[:1] * 2 + names[1:2]]
    assert set(_watched(model)) == convolutions
    for unroute in undo[:2]:
        unroute()
        unroute()
        assert set(_watched(model)) == convolutions
    undo[2]()
    assert not _watched(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(name.startswith("latte") for module in model.modules() for name in vars(module))


def test_text_models_and_text_towers_are_not_watched() -> None:
    model = build("clip")
    find_adapter(model).route(model, "text_model.encoder.layers.0.self_attn", lambda call: None)
    assert not _watched(model)


def test_models_do_not_mix() -> None:
    first, second = build("dinov2"), build("dinov2")
    for model in (first, second):
        apply(model, find_adapter(model), latte_kernels(model))
    first(**pixels(1, 32, 48))
    second(**pixels(1, 48, 32))
    assert [seen.sizes() for model in (first, second) for seen in _watched(model).values()] == [((4, 6),), ((6, 4),)]


def _pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("family", ["dinov2", "table_transformer"])
@torch.no_grad()
def test_copies_watch_themselves(duplicate: Callable[[nn.Module], nn.Module], family: str) -> None:
    model = build(family)
    applied = apply(model, find_adapter(model), latte_kernels(model))
    inputs = pixels(1, 32, 48)
    model(**inputs)
    twin = duplicate(model)
    applied.undo()
    assert not _watched(model)
    found: list[TokenLayout] = []
    name = eligible(twin)[0]
    undo = find_adapter(twin).route(twin, name, lambda call: found.append(call.layout))
    twin(**inputs)
    undo()
    assert [layout.grid for layout in found] == [(4, 6)]
    assert _watched(twin)  # its conversion is still there


def _hybrid(model: nn.Module) -> nn.Module:
    apply(model, find_adapter(model), latte_kernels(model, eligible(model)[::2]))
    return model


COMPILED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformers": lambda: (build("dinov2"), pixels(1, 32, 48)["pixel_values"]),
    "timm": lambda: (
        create("vit_tiny_patch16_224", **PATCHED, dynamic_img_size=True),
        torch.randn(1, 3, 56, 84),
    ),
    "torch": lambda: (TorchDetector().eval(), torch.randn(1, 3, 32, 48)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_one_graph_serves_every_call_of_a_size(name: str) -> None:
    model, x = COMPILED[name]()
    _hybrid(model)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(x)
    assert counter.frame_count == 1
    (seen,) = _watched(model).values()
    assert seen.sizes() == ((4, 6),)
    if name == "timm":
        compiled(x.mT.contiguous())
        assert seen.sizes() == ((6, 4),)  # though no hook ran in Python
        assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dinov2", "detr"])
@torch.no_grad()
def test_export(family: str) -> None:
    model, inputs = _hybrid(build(family)), pixels(1, 64, 96)
    expected = model(**inputs).last_hidden_state
    program = torch.export.export(model, (), inputs)
    actual = program.module()(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_an_export_of_any_size_leaves_a_model_that_can_be_copied() -> None:
    model = _hybrid(create("vit_tiny_patch16_224", **PATCHED, dynamic_img_size=True))
    sides = {axis: 14 * torch.export.Dim(name, min=3, max=9) for axis, name in ((2, "rows"), (3, "columns"))}
    program = torch.export.export(model, (torch.randn(2, 3, 56, 84),), dynamic_shapes=(sides,))
    x = torch.randn(2, 3, 70, 98)
    for twin in (copy.deepcopy(model), _pickled(model), program.module()):
        torch.testing.assert_close(twin(x), model(x), rtol=1e-5, atol=1e-5)
