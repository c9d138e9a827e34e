"""Routes live with whatever else takes hold of modules: copies, replicas, accelerate's hooks."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from helpers import Exact, eligible, latte_kernels
from timm_models import build as build_timm
from timm_models import images
from tiny_models import BY_NAME, build
from tiny_parts import TorchDetector
from torch import Tensor, nn

from latte_convert.adapters.host import Host
from latte_convert.adapters.route import replaced_forward

# A model for each way to take over a forward, and what it is called with.
MODELS: dict[str, Callable[[], tuple[Any, dict[str, Tensor]]]] = {
    "sdpa": lambda: (model := build_timm("vit"), {"x": images(model)}),
    "interface": lambda: (build("dinov2"), BY_NAME["dinov2"].inputs()),
    "torch": lambda: (TorchDetector().eval(), {"image": torch.randn(1, 3, 32, 48)}),
    "explicit": lambda: (build("table_transformer"), BY_NAME["table_transformer"].inputs()),
}


class Halved(ModelHook):
    """A hook of accelerate that changes what a module returns, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.calls += 1
        return output / 2 if isinstance(output, Tensor) else (output[0] / 2, *output[1:])


@torch.no_grad()
def _run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)
    found: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
    return found


def _hooked(model: nn.Module, site: str) -> Halved:
    hook = Halved()
    add_hook_to_module(model.get_submodule(site), hook)
    return hook


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", ["hook", "conversion"])
def test_hooks_of_accelerate_stay(name: str, first: str) -> None:
    """Put on before or after a conversion: both are in force, and each goes alone, whichever goes first."""
    model, inputs = MODELS[name]()
    site = eligible(model)[-1]  # PyTorch's fused encoder layers pass accelerate's hooks by
    original = _run(model, inputs)
    kernels = latte_kernels(model, [site])
    with Host.of(model).convert(kernels):
        converted = _run(model, inputs)
    plain = copy.deepcopy(model)
    _hooked(plain, site)
    hooked = _run(plain, inputs)

    if first == "hook":
        hook = _hooked(model, site)
        applied = Host.of(model).convert(kernels)
    else:
        applied = Host.of(model).convert(kernels)
        hook = _hooked(model, site)
    both = _run(model, inputs)
    assert (hook.calls, applied.handlers[site].calls) == (1, 1)
    assert not any(torch.equal(*pair) for pair in itertools.combinations((original, converted, hooked, both), 2))
    applied.undo()
    assert torch.equal(_run(model, inputs), hooked)
    applied = Host.of(model).convert(kernels)
    assert torch.equal(_run(model, inputs), both)
    remove_hook_from_module(model.get_submodule(site))
    assert torch.equal(_run(model, inputs), converted)
    applied.undo()
    assert torch.equal(_run(model, inputs), original)


def _replica(module: nn.Module) -> nn.Module:
    """As ``torch.nn.parallel.replicate`` makes them, without devices: own parameters, the same other attributes."""
    twin: Any = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(twin, name, _replica(child))
    for name, parameter in module._parameters.items():
        object.__setattr__(twin, name, None if parameter is None else parameter.detach() * 1.5)
    return twin  # type: ignore[no-any-return]


def _scaled(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    return twin


@pytest.mark.parametrize("name", ["sdpa", "interface", "torch"])
@torch.no_grad()
def test_a_replica_computes_with_its_own_parameters(name: str) -> None:
    model, inputs = MODELS[name]()
    Host.of(model).convert(latte_kernels(model))
    before, expected = _run(model, inputs), _run(_scaled(model), inputs)
    site = eligible(model)[0]
    block = site.rpartition(".")[0]
    caught: list[Any] = []
    hook = model.get_submodule(block).register_forward_pre_hook(
        lambda module, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
    )
    _run(model, inputs)
    hook.remove()
    (args, kwargs) = caught[0]

    def first(output: Any) -> Tensor:
        return output if isinstance(output, Tensor) else output[0]

    replica, scaled = _replica(model.get_submodule(block)), _scaled(model).get_submodule(block)
    torch.testing.assert_close(first(replica(*args, **kwargs)), first(scaled(*args, **kwargs)))
    assert torch.equal(_run(model, inputs), before)
    assert not torch.equal(before, expected)


@pytest.mark.parametrize("name", ["sdpa", "torch", "explicit"])
def test_a_routed_module_looks_as_before(name: str) -> None:
    model, _ = MODELS[name]()
    described, shown = Host.of(model).sites(), repr(model)
    modules = {site: model.get_submodule(site) for site in eligible(model)}
    kinds = {site: type(module) for site, module in modules.items()}
    with Host.of(model).watch(dict.fromkeys(modules, Exact())):
        assert Host.of(model).sites() == described
        assert repr(model) == shown
        assert all(isinstance(module, kinds[site]) for site, module in modules.items())
        assert {type(module).__qualname__ for module in modules.values()} == {k.__qualname__ for k in kinds.values()}
    assert {site: type(module) for site, module in modules.items()} == kinds


def test_a_copy_made_inside_a_wrapper_is_not_bound_to_the_first() -> None:
    model, inputs = MODELS["sdpa"]()
    Host.of(model).convert(latte_kernels(model))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    expected = _run(model, inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(_run(twin, inputs), expected)


def test_a_class_changed_later_is_left_alone() -> None:
    """FSDP derives a class of its own from what it finds; taking the route away must not take that away."""
    model, inputs = MODELS["sdpa"]()
    expected = _run(model, inputs)
    applied = Host.of(model).convert(latte_kernels(model))
    module: Any = model.get_submodule(eligible(model)[0])
    wrapper = type("FSDPAttention", (type(module),), {})
    module.__class__ = wrapper
    assert not torch.equal(_run(model, inputs), expected)
    applied.undo()
    assert type(module) is wrapper
    assert torch.equal(_run(model, inputs), expected)


@pytest.mark.parametrize("name", ["sdpa", "torch", "explicit"])
def test_a_forward_that_something_else_replaced_is_said(name: str) -> None:
    model, _ = MODELS[name]()
    site = eligible(model)[0]
    module = model.get_submodule(site)
    module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs)
    found = {site.name: site for site in Host.of(model).sites()}
    assert replaced_forward(module) == "its forward was replaced by something else"
    assert not found[site].eligible
