"""A call belongs to its own image: computed again under gradient checkpointing, in threads and in replicas.

Images of 8 by 12 and of 12 by 8 patches have as many tokens, so only what travels with a call can tell them apart.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from helpers import eligible
from timm_models import PATCHED, create, sharp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from latte_convert.adapters.host import Host
from latte_convert.errors import CheckpointError
from latte_convert.kernels.near_far.kernel import NearFarKernel

pytestmark = pytest.mark.slow

WIDE, TALL, SMALL = (8, 12), (12, 8), (6, 10)  # in patches


def _dino() -> Any:
    torch.manual_seed(0)
    config = hf.Dinov2Config(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, mlp_ratio=2, image_size=64, patch_size=8
    )
    return hf.Dinov2Model(config)


def _timm() -> Any:
    return create("vit_tiny_patch16_224", **{**PATCHED, "depth": 3}, dynamic_img_size=True)


PATCH = {"transformers": 8, "timm": 14}
BUILD: dict[str, Callable[[], Any]] = {"transformers": _dino, "timm": _timm}


def _converted(name: str) -> Any:
    """A model whose sites see windows of two by two and four clusters: what they compute depends on the grid."""
    model = sharp(BUILD[name]()).train()
    kernels = {
        site.name: NearFarKernel(site.heads, site.head_dim, window=2, halo=0, clusters=4)
        for site in Host.of(model).sites()
    }
    Host.of(model).convert(kernels)
    return model


def _image(name: str, patches: tuple[int, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(patches))
    return torch.randn(1, 3, *(PATCH[name] * side for side in patches), generator=generator)


def _loss(model: nn.Module, image: Tensor) -> Tensor:
    output = model(image)
    features = output if isinstance(output, Tensor) else output.last_hidden_state
    return features.square().mul(torch.linspace(-1, 1, features.shape[-1])).sum()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _apart(model: nn.Module, images: Iterable[Tensor]) -> dict[str, Tensor]:
    """The right gradients: one image after another, nothing computed again."""
    for image in images:
        _loss(model, image).backward()
    return _gradients(model)


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected) != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)


def _enable(model: Any, reentrant: bool) -> None:
    # Transformers has renamed the method since the oldest version that is supported here.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()


def _checkpointed(model: Any, name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch, every: int = 1) -> None:
    """Have a model compute its blocks again in the backward pass, as its library does it."""
    if name == "transformers":
        _enable(model, reentrant)
    else:
        from timm.models import vision_transformer
        from timm.models._manipulate import checkpoint_seq

        def sequence(blocks: Any, x: Tensor) -> Tensor:
            return checkpoint_seq(blocks, x, every=every, use_reentrant=reentrant)

        monkeypatch.setattr(vision_transformer, "checkpoint_seq", sequence)
        model.set_grad_checkpointing()


MODES = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
NAMES = pytest.mark.parametrize("name", BUILD)


@NAMES
def test_the_grid_matters(name: str) -> None:
    """Else the tests below would prove nothing."""
    model = _converted(name).eval()
    image = _image(name, WIDE)
    with torch.no_grad():
        expected = _loss(model, image)
        for module in model.modules():
            seen = module.__dict__.get("latte_map_size")
            if seen is not None:
                module.register_forward_hook(lambda *_, seen=seen: seen.note(TALL))
        assert abs(float(_loss(model, image) / expected) - 1) > 1e-3


@MODES
@NAMES
@pytest.mark.parametrize("shapes", [(WIDE, TALL), (TALL, WIDE), (WIDE, SMALL)], ids=str)
def test_two_shapes_in_one_loss(name: str, reentrant: bool, shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _converted(name)
    images = [_image(name, shape) for shape in shapes]
    expected = _apart(model, images)
    _checkpointed(model, name, reentrant, monkeypatch)
    sum(_loss(model, image) for image in images).backward()  # type: ignore[union-attr]
    _assert_equal(_gradients(model), expected)


@MODES
@NAMES
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_losses_that_go_back_one_by_one(
    name: str, reentrant: bool, order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _converted(name)
    images = [_image(name, shape) for shape in (WIDE, TALL)]
    expected = _apart(model, images)
    _checkpointed(model, name, reentrant, monkeypatch)
    losses = [_loss(model, image) for image in images]
    for index in order:
        losses[index].backward(retain_graph=True)
        losses[index].backward()  # a second time: twice the gradient
    _assert_equal(_gradients(model), {key: 2 * value for key, value in expected.items()})


@MODES
def test_several_blocks_at_once(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block of a segment gets new memory when it is computed again."""
    model = _converted("timm")
    images = [_image("timm", shape) for shape in (WIDE, TALL)]
    expected = _apart(model, images)
    _checkpointed(model, "timm", reentrant, monkeypatch, every=3)
    sum(_loss(model, image) for image in images).backward()  # type: ignore[union-attr]
    _assert_equal(_gradients(model), expected)


@MODES
def test_frozen_embeddings_and_adapters(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual fine-tuning: nothing in front of the blocks has a gradient, and little inside them."""
    model = _converted("transformers")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key.endswith("query.weight") or "mlp.fc2" in key)
    images = [_image("transformers", shape) for shape in (WIDE, TALL)]
    expected = _apart(model, images)
    _checkpointed(model, "transformers", reentrant, monkeypatch)
    sum(_loss(model, image) for image in images).backward()  # type: ignore[union-attr]
    _assert_equal(_gradients(model), expected)


@MODES
def test_a_checkpoint_in_a_checkpoint(reentrant: bool) -> None:
    model = _converted("transformers")
    images = [_image("transformers", shape) for shape in (WIDE, TALL)]
    expected = _apart(model, images)

    def again(module: Any) -> None:
        forward = module.forward

        def run(hidden_states: Tensor, **kwargs: Any) -> Any:
            return checkpoint(partial(forward, **kwargs), hidden_states, use_reentrant=False)

        module.forward = run

    _enable(model, reentrant)
    again(model.encoder)
    sum(_loss(model, image) for image in images).backward()  # type: ignore[union-attr]
    _assert_equal(_gradients(model), expected)


@MODES
def test_the_whole_model_computed_again(reentrant: bool) -> None:
    model = _converted("timm")
    images = [_image("timm", shape).requires_grad_() for shape in (WIDE, TALL)]
    expected = _apart(model, images)
    losses = [
        checkpoint(lambda x: _loss(model, x), image, use_reentrant=reentrant, preserve_rng_state=False)
        for image in images
    ]
    sum(losses).backward()  # type: ignore[union-attr]
    _assert_equal(_gradients(model), expected)


def _shifted(model: Any, image: Tensor) -> Tensor:
    """The loss of a model whose blocks are not what is checkpointed: their inputs are made anew each time."""
    tokens = model.embeddings(image)
    for layer in model.encoder.layer:
        tokens = checkpoint(lambda x, layer=layer: layer(x + 1.0), tokens, use_reentrant=False)
    return tokens.square().mul(torch.linspace(-1, 1, 32)).sum()


def test_what_cannot_be_told_is_an_error() -> None:
    model = _converted("transformers")
    images = [_image("transformers", shape) for shape in (WIDE, TALL)]
    _shifted(model, images[0]).backward()  # one shape so far: there is nothing to tell apart
    actual = _gradients(model)
    expected = copy.deepcopy(model)
    tokens = expected.embeddings(images[0])
    for layer in expected.encoder.layer:
        tokens = layer(tokens + 1.0)
    tokens.square().mul(torch.linspace(-1, 1, 32)).sum().backward()
    _assert_equal(actual, _gradients(expected))
    loss = sum(_shifted(model, image) for image in images)
    with pytest.raises(CheckpointError, match=r"may be an image of \(\d+, \d+\) or of \(\d+, \d+\)"):
        loss.backward()  # type: ignore[union-attr]


def test_inputs_kept_in_other_memory() -> None:
    """Offloaded activations come back as new tensors: one shape is no question, two of as many tokens are."""
    model = _converted("transformers")
    images = [_image("transformers", shape) for shape in (WIDE, SMALL)]
    expected = _apart(model, images)
    _enable(model, reentrant=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = sum(_loss(model, image) for image in images)
    loss.backward()  # type: ignore[union-attr]
    _assert_equal(_gradients(model), expected)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        loss = sum(_loss(model, image) for image in (images[0], _image("transformers", TALL)))
    with pytest.raises(CheckpointError, match="may be an image of"):
        loss.backward()  # type: ignore[union-attr]


def _together(work: Iterable[Callable[[], Any]]) -> list[Any]:
    """What functions return that run in threads of their own."""
    results: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, call=call: results.update({i: call()})) for i, call in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(threads))]


def _meet(module: nn.Module, barrier: threading.Barrier) -> None:
    """Let no thread go on before all are behind a module."""
    module.register_forward_hook(lambda *_: (barrier.wait(timeout=30), None)[1])


@NAMES
def test_threads_that_share_a_model(name: str) -> None:
    model = _converted(name)
    images = [_image(name, shape) for shape in (WIDE, TALL)]
    expected = [_apart(copy.deepcopy(model), [image]) for image in images]
    with torch.no_grad():
        losses = [float(_loss(model, image)) for image in images]
    _meet(model.embeddings if name == "transformers" else model.patch_embed, threading.Barrier(2))

    def call(image: Tensor) -> tuple[float, list[Tensor]]:
        loss = _loss(model, image)
        wanted = [p for p in model.parameters() if p.requires_grad]
        return loss.item(), list(torch.autograd.grad(loss, wanted, allow_unused=True))

    found = _together([lambda image=image: call(image) for image in images])  # type: ignore[misc]
    assert [loss for loss, _ in found] == pytest.approx(losses, rel=1e-5)
    names = [key for key, p in model.named_parameters() if p.requires_grad]
    for (_, gradients), right in zip(found, expected, strict=True):
        _assert_equal({key: g for key, g in zip(names, gradients, strict=True) if g is not None}, right)


@MODES
def test_threads_that_compute_again(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forwards in threads that end, both backwards here: as DataParallel does it."""
    model = _converted("timm")
    images = [_image("timm", shape) for shape in (WIDE, TALL)]
    expected = _apart(model, images)
    _checkpointed(model, "timm", reentrant, monkeypatch)
    _meet(model.patch_embed, threading.Barrier(2))
    losses = _together([lambda image=image: _loss(model, image) for image in images])  # type: ignore[misc]
    sum(losses).backward()
    _assert_equal(_gradients(model), expected)


def _replica(module: nn.Module) -> nn.Module:
    """As ``torch.nn.parallel.replicate`` makes them."""
    twin: Any = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(twin, name, _replica(child))
    for name, parameter in module._parameters.items():
        object.__setattr__(twin, name, parameter)
    return twin  # type: ignore[no-any-return]


@NAMES
@torch.no_grad()
def test_replicas_in_threads(name: str) -> None:
    model = _converted(name).eval()
    images = [_image(name, shape) for shape in (WIDE, TALL)]
    expected = [float(_loss(model, image)) for image in images]
    _meet(model.embeddings if name == "transformers" else model.patch_embed, threading.Barrier(2))
    replicas = [_replica(model) for _ in images]
    work = [lambda r=replica, x=image: _loss(r, x).item() for replica, image in zip(replicas, images, strict=True)]
    assert _together(work) == pytest.approx(expected, rel=1e-6)  # type: ignore[arg-type]


@NAMES
def test_copies_know_what_was_seen(name: str) -> None:
    model = _converted(name)
    image = _image(name, WIDE)
    expected = _apart(model, [image])
    twin = copy.deepcopy(model)
    _assert_equal(_apart(twin, [image]), expected)
    assert len(eligible(twin)) == 3


@MODES
def test_compiled_training(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _converted("timm")
    images = [_image("timm", shape) for shape in (WIDE, TALL)]
    expected = _apart(model, images)
    _checkpointed(model, "timm", reentrant, monkeypatch)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    sum(_loss(compiled, image) for image in images).backward()  # type: ignore[union-attr]
    _assert_equal(_gradients(model), expected)
