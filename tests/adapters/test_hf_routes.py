"""Routes come and go without a trace, and survive copies, pickles and new attention implementations."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from helpers import ADAPTER, Exact, assert_same, eligible, exact_handlers, latte_kernels
from tiny_models import BY_NAME, build
from tiny_parts import text
from torch import Tensor, nn

from latte_convert.adapters.convert import apply
from latte_convert.adapters.host import Host
from latte_convert.attention import AttentionCall

SITE = "encoder.layer.0.attention.self"


class _State:
    """Everything a route could leave behind."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attributes = {name: list(module.__dict__) for name, module in model.named_modules()}
        self.configs = {name: id(module.__dict__.get("config")) for name, module in model.named_modules()}
        self.settings = copy.deepcopy(model.config.to_dict())
        self.implementation = model.config._attn_implementation
        self.keys = list(model.state_dict())

    def assert_unchanged(self) -> None:
        now = _State(self.model)
        assert now.attributes == self.attributes
        assert now.configs == self.configs
        assert now.settings == self.settings
        assert now.implementation == self.implementation
        assert now.keys == self.keys


def _double(call: AttentionCall) -> Tensor:
    return 2 * call.exact()


def _zero(call: AttentionCall) -> Tensor:
    return torch.zeros_like(call.exact())


def _run(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Any:
    with torch.no_grad():
        return model(**(inputs or text()))


@pytest.mark.parametrize("name", ["bert", "clip", "whisper", "dinov2"])
def test_undo_restores_everything(name: str) -> None:
    model, inputs = build(name), BY_NAME[name].inputs()
    before, expected = _State(model), _run(model, inputs)
    with Host(model, ADAPTER).watch(exact_handlers(eligible(model))):
        _run(model, inputs)
    before.assert_unchanged()
    assert_same(_run(model, inputs), expected, tolerance=0)


def test_undo_of_a_conversion_restores_everything() -> None:
    model = build("bert")
    before, expected = _State(model), _run(model)
    applied = apply(model, ADAPTER, latte_kernels(model))
    assert not torch.equal(_run(model).last_hidden_state, expected.last_hidden_state)
    assert [key for key in model.state_dict() if ".latte." in key]
    applied.undo()
    applied.undo()
    before.assert_unchanged()
    assert_same(_run(model), expected, tolerance=0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_routes_of_one_site_can_be_undone_in_any_order(order: tuple[int, ...]) -> None:
    """The latest of the routes that are left computes."""
    model = build("bert")
    before = _State(model)
    used: list[int] = []

    def recorder(number: int) -> Any:
        return lambda call: used.append(number)

    undo = [ADAPTER.route(model, SITE, recorder(number)) for number in range(3)]
    left = {0, 1, 2}
    for number in order:
        undo[number]()
        undo[number]()  # a second call does nothing
        left.discard(number)
        used.clear()
        _run(model)
        assert used == ([max(left)] if left else [])
    before.assert_unchanged()


def test_undoing_twice_spares_a_later_route() -> None:
    model = build("bert")
    ADAPTER.route(model, SITE, _double)
    undo = ADAPTER.route(model, SITE, _zero)
    undo()
    later = Exact()
    ADAPTER.route(model, SITE, later)
    undo()
    _run(model)
    assert later.calls == 1


def test_capture_over_a_conversion() -> None:
    """Routing on top of a converted site, and back to the kernel."""
    model = build("bert")
    applied = apply(model, ADAPTER, latte_kernels(model))
    converted = _run(model)
    handler = Exact()
    with Host(model, ADAPTER).watch({SITE: handler}):
        _run(model)
    assert handler.calls == 1
    assert applied.handlers[SITE].calls == 1
    assert_same(_run(model), converted, tolerance=0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_behind(error: type[BaseException]) -> None:
    model = build("bert")
    before, expected = _State(model), _run(model)

    def fail(call: AttentionCall) -> Tensor:
        raise error("stop")

    with pytest.raises(error, match="stop"), Host(model, ADAPTER).watch(dict.fromkeys(eligible(model), fail)):
        _run(model)
    before.assert_unchanged()
    assert_same(_run(model), expected, tolerance=0)


def _pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_copies_of_a_converted_model_work(duplicate: Any, attention: str) -> None:
    model = build("bert", attention)
    original = _run(model)
    applied = apply(model, ADAPTER, latte_kernels(model))
    converted = _run(model)
    twin = duplicate(model)
    assert_same(_run(twin), converted, tolerance=0)
    applied.undo()  # of the first, not of the second
    assert_same(_run(model), original, tolerance=0)
    assert_same(_run(twin), converted, tolerance=0)
    # The copy's exact branch follows the copy's own model.
    module = twin.get_submodule(SITE)
    assert module.latte_route.replaced["config"] is twin.config


def test_a_copy_of_a_routed_model_is_routed() -> None:
    model = build("bert")
    ADAPTER.route(model, SITE, _double)
    expected = _run(model)
    assert_same(_run(copy.deepcopy(model)), expected, tolerance=0)
    assert_same(_run(_pickled(model)), expected, tolerance=0)


@pytest.mark.parametrize(("before", "after"), [("sdpa", "eager"), ("eager", "sdpa")])
def test_a_new_attention_implementation_keeps_the_kernel(before: str, after: str) -> None:
    model = build("clip", before)
    inputs = BY_NAME["clip"].inputs()
    applied = apply(model, ADAPTER, latte_kernels(model))
    expected = _run(model, inputs)
    model.set_attn_implementation(after)
    assert_same(_run(model, inputs), expected, inputs["attention_mask"])
    assert applied.handlers["text_model.encoder.layers.0.self_attn"].calls == 2
    assert applied.unused() == []
    applied.undo()
    reference = build("clip", after)
    assert_same(_run(model, inputs), _run(reference, inputs), tolerance=0)


def test_the_exact_branch_follows_the_new_implementation() -> None:
    """Weights come with the eager function, and only with it."""
    model = build("bert", "sdpa")
    with Host(model, ADAPTER).watch({name: lambda call: None for name in eligible(model)}):
        model.set_attn_implementation("eager")
        output = model(**text(), output_attentions=True)
    assert [weights.shape for weights in output.attentions] == [(2, 4, 12, 12)] * 2


def test_saving_a_converted_model_writes_its_own_config(tmp_path: Any) -> None:
    model = build("bert")
    apply(model, ADAPTER, latte_kernels(model))
    model.config.save_pretrained(tmp_path)
    assert '"latte' not in (tmp_path / "config.json").read_text()
