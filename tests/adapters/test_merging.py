"""Token merging as a transform of blocks: what it must not change, and that a result belongs to its inputs."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import open_clip_models
import pytest
import timm_models
import torch
import transformers as hf
from torch import Tensor, nn

from latte_convert.adapters.convert import is_hybrid
from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import GROUP, Groups, Merge, curve, merges_of
from latte_convert.attention import TokenLayout
from latte_convert.data.feed import BatchFeed
from latte_convert.errors import CheckpointError, UsageError
from latte_convert.selection.merging import mergeable, schedule


def _dino(layers: int = 4) -> Any:
    torch.manual_seed(0)
    config = hf.Dinov2Config(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, mlp_ratio=2, image_size=96, patch_size=8
    )
    return timm_models.sharp(hf.Dinov2Model(config).eval())


def _whisper() -> Any:
    torch.manual_seed(0)
    config = hf.WhisperConfig(
        d_model=32, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=100, vocab_size=99,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return timm_models.sharp(hf.WhisperModel(config).eval())


def _bert() -> Any:
    torch.manual_seed(0)
    return hf.BertModel(
        hf.BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, vocab_size=99)
    ).eval()


def _pixels(side: int = 96, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))


Build = Callable[[], tuple[nn.Module, dict[str, Any]]]
MODELS: dict[str, Build] = {
    "transformers": lambda: (_dino(), {"pixel_values": _pixels()}),
    "timm": lambda: (timm_models.build("vit"), {"x": _pixels(56)}),
    "registers": lambda: (timm_models.build("dinov2 with registers"), {"x": _pixels(56)}),
    "open_clip": lambda: (
        open_clip_models.build("clip"),
        {"image": _pixels(32), "text": torch.arange(1, 17)[None]},
    ),
    "whisper": lambda: (
        _whisper(),
        {"input_features": torch.randn(1, 8, 200), "decoder_input_ids": torch.tensor([[1, 5, 7]])},
    ),
}


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return _first(model(**inputs))


def _blocks(model: nn.Module, inputs: dict[str, Any]) -> tuple[str, ...]:
    host = Host.of(model)
    found = mergeable(host, host.sites(), BatchFeed([inputs]))
    assert found.blocks, found.reason
    return found.blocks


def _merged(model: Any, left: float = 0.5) -> Any:
    blocks = _blocks(model, {"pixel_values": _pixels()})
    Host.of(model).convert(merges_of(schedule(blocks, left)))
    return model


@pytest.mark.parametrize("grid", [(1, 7), (8, 8), (5, 12), (37, 37)])
def test_the_curve_visits_every_token_once_and_neighbours_are_near(grid):
    order = curve(*grid)
    assert order.sort().values.tolist() == list(range(grid[0] * grid[1]))
    steps = torch.stack([order // grid[1], order % grid[1]], -1).diff(dim=0).abs().sum(-1)
    assert steps.float().median() == 1


def test_the_most_alike_join():
    # A sequence of a prefix and four tokens: the second and the fourth may join, the third points as the fourth.
    groups = Groups.single(TokenLayout(prefix=1), 1, 5, torch.device("cpu"))
    tokens = torch.tensor([[[9.0], [1.0], [2.0], [4.0], [8.0]]])
    groups = groups.merge(torch.tensor([[[1.0, 1.0], [1.0, 0.0], [-1.0, 0.1], [0.0, 3.0], [0.0, 1.0]]]), 3)
    assert groups.mean(tokens)[0, :, 0].tolist() == [9, 1, 2, 6]
    assert groups.merged.size.tolist() == [[1, 1, 1, 2]]
    assert groups.merged.places[0].tolist() == [[0, 0], [0, 1], [0, 2.5]]
    change = torch.tensor([[[0.5], [1.0], [2.0], [3.0]]])
    assert groups.add(tokens, change)[0, :, 0].tolist() == [9.5, 2, 4, 7, 11]
    # Once more: means weigh what they stand for.
    groups = groups.merge(torch.ones(1, 4, 2), 2)
    size = groups.merged.size
    assert size.tolist() in ([[1, 1, 3]], [[1, 2, 2]])
    assert torch.isclose((groups.mean(tokens)[0, :, 0] * size[0]).sum(), torch.tensor(9.0 + 1 + 2 + 4 + 8))


@pytest.mark.parametrize("count", [3, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP + 7])
@pytest.mark.parametrize("batch", [1, 2])
def test_any_number_of_tokens(count, batch):
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randn(batch, count, 6, generator=generator)
    metric = torch.randn(batch, count, 4, generator=generator)
    groups = Groups.single(TokenLayout(), batch, count, torch.device("cpu"))
    for left in (count - 1, count // 2 + 1, 1):
        groups = groups.merge(metric, left)
        metric = groups.mean(tokens)
        size = groups.merged.size
        assert torch.equal(size.sum(1), torch.full((batch,), float(count)))
        for sample in range(batch):
            members = [tokens[sample, groups.index[sample] == group] for group in range(size.shape[1])]
            assert [len(each) for each in members] == size[sample].tolist()
            assert torch.allclose(torch.stack([each.mean(0) for each in members]), metric[sample], atol=1e-5)


class _InPlace(nn.Module):
    """A block that writes its residuals into what it gets, as some do."""

    def __init__(self, block: nn.Module, returns: str) -> None:
        super().__init__()
        self.block = block
        self.returns = returns

    def forward(self, tokens: Tensor) -> Tensor:
        """The block's output, in the memory of its input too."""
        tokens.copy_(self.block(tokens.clone()))
        return tokens if self.returns == "its input" else tokens.clone()


@pytest.mark.parametrize("returns", ["its input", "new memory"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_block_that_writes_into_its_input(mode, returns):
    pixels = {"x": _pixels(56)}
    model = timm_models.build("vit")
    _, first, *_ = _blocks(model, pixels)
    shares = schedule(_blocks(model, pixels), 0.5)
    with Host.of(model).convert(merges_of(shares)):
        expected = _run(model, pixels)
    holder, _, index = first.rpartition(".")
    model.get_submodule(holder)[int(index)] = _InPlace(model.get_submodule(first), returns)
    with Host.of(model).convert(merges_of(shares)), mode():
        assert torch.allclose(model(**pixels), expected, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_all_tokens_kept_is_the_original_and_undone_too(name):
    model, inputs = MODELS[name]()
    expected = _run(model, inputs)
    with Host.of(model).convert(merges_of(schedule(_blocks(model, inputs), 1.0))):
        assert is_hybrid(model)
        assert torch.allclose(_run(model, inputs), expected, atol=1e-5)
    assert not is_hybrid(model)
    assert torch.equal(_run(model, inputs), expected)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_work_on_fewer_tokens_and_give_all(name):
    model, inputs = MODELS[name]()
    expected = _run(model, inputs)
    with Host.of(model).convert(merges_of(schedule(_blocks(model, inputs), 0.5))) as applied:
        out = _run(model, inputs)
        keys = [shape.keys for shape in applied.shapes.values()]
    assert out.shape == expected.shape
    assert not torch.allclose(out, expected, atol=1e-4)
    assert keys == sorted(keys, reverse=True)
    assert keys[-1] < keys[0]


def test_merging_tokens_that_are_equal_changes_nothing():
    """Proportional attention: a merged token counts as often as it has members."""
    model = _dino()
    model.embeddings.position_embeddings.data[:, 1:] = 0.3
    column = _pixels(8).repeat(1, 1, 12, 1)
    image = torch.cat([column, column.flip(3)], -1).repeat(1, 1, 1, 6)  # patches of two kinds
    expected = _run(model, {"pixel_values": image})
    _merged(model, 0.3)
    assert torch.allclose(_run(model, {"pixel_values": image}), expected, atol=1e-5)


def test_a_sample_alone_and_in_a_batch():
    model = _merged(_dino())
    batch = _pixels(batch=3)
    whole = _run(model, {"pixel_values": batch})
    for index in range(3):
        assert torch.allclose(_run(model, {"pixel_values": batch[index : index + 1]})[0], whole[index], atol=1e-5)


def test_hidden_states_have_all_tokens():
    model = _merged(_dino())
    with torch.no_grad():
        states = model(pixel_values=_pixels(), output_hidden_states=True).hidden_states
    assert [state.shape[1] for state in states] == [145] * 5


def test_threads_have_their_own():
    model = _merged(_dino())
    images = [_pixels(96), _pixels(64, seed=1), _pixels(80, seed=2)]
    expected = [_run(model, {"pixel_values": image}) for image in images]
    found: dict[int, list[Tensor]] = {}

    def work(index: int) -> None:
        found[index] = [_run(model, {"pixel_values": images[index]}) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, expected[index]) for index, outs in found.items() for out in outs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_checkpointing(reentrant):
    def gradient(checkpointing: bool) -> Tensor:
        model = _merged(_dino()).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        image = _pixels().requires_grad_()
        loss = model(pixel_values=image).last_hidden_state.square().sum()
        other = model(pixel_values=_pixels(64, seed=3).requires_grad_()).last_hidden_state.square().sum()
        (loss + other).backward()
        assert image.grad is not None
        return image.grad

    expected = gradient(False)
    assert expected.abs().max() > 0
    assert torch.allclose(gradient(True), expected, rtol=1e-4, atol=1e-5)


def test_copies_and_pickles_merge_too():
    model = _merged(_dino())
    expected = _run(model, {"pixel_values": _pixels()})
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert is_hybrid(copied)
        assert torch.equal(_run(copied, {"pixel_values": _pixels()}), expected)


def test_a_state_dict_fits_the_same_merging_only():
    state = _merged(_dino()).state_dict()
    with pytest.raises(RuntimeError, match="latte"):
        _dino().load_state_dict(state)
    with pytest.raises(UsageError, match="of its tokens"):
        _merged(_dino(), 0.4).load_state_dict(state)
    _merged(_dino()).load_state_dict(state)


def test_low_precision():
    model = _merged(_dino())
    expected = _run(model, {"pixel_values": _pixels()})
    out = _run(model.bfloat16(), {"pixel_values": _pixels().bfloat16()})
    assert out.dtype is torch.bfloat16
    # Of tokens that are about as much alike, others may merge: a row or two differ, not all of them.
    assert torch.nn.functional.cosine_similarity(out.float(), expected, dim=-1).median() > 0.98


def test_a_compiled_model_merges():
    model = _merged(_dino())
    expected = _run(model, {"pixel_values": _pixels()})
    assert torch.allclose(_run(torch.compile(model, backend="eager"), {"pixel_values": _pixels()}), expected, atol=1e-5)


def test_a_call_with_a_mask_keeps_all_tokens():
    model = _bert()
    ids = torch.arange(3, 43)[None]
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    blocks = _blocks(model, {"input_ids": ids})
    expected = _run(model, {"input_ids": ids, "attention_mask": mask})
    with Host.of(model).convert(merges_of(schedule(blocks, 0.5))) as applied:
        assert torch.allclose(_run(model, {"input_ids": ids, "attention_mask": mask}), expected, atol=1e-5)
        assert {shape.keys for shape in applied.shapes.values()} == {40}


REFUSED: dict[str, tuple[Build, str]] = {
    "a mask": (
        lambda: (
            _bert(),
            {"input_ids": torch.arange(3, 43)[None], "attention_mask": torch.tensor([[1] * 30 + [0] * 10])},
        ),
        "has a mask",
    ),
    "rotary positions": (lambda: (timm_models.build("rope"), {"x": _pixels(56)}), "fewer tokens"),
    "stages": (lambda: (timm_models.build("pvt"), {"x": _pixels(64)}), "no two blocks"),
    "few tokens": (lambda: (_dino(), {"pixel_values": _pixels(24)}), "too few"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_has_a_reason(name):
    build, reason = REFUSED[name]
    model, inputs = build()
    host = Host.of(model)
    expected = _run(model, inputs)
    found = mergeable(host, host.sites(), BatchFeed([inputs]))
    assert not found.blocks
    assert reason in found.reason
    assert torch.equal(_run(model, inputs), expected)


def test_bad_shares():
    for share in (0, -1, 1.5, float("nan"), "half"):
        with pytest.raises(UsageError, match="share"):
            Merge(share)  # type: ignore[arg-type]


def test_unknown_blocks():
    with pytest.raises(CheckpointError, match="no attention site or block"):
        Host.of(_dino()).convert({"encoder.layer.9": Merge(0.5)})
