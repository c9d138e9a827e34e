"""Private parts of libraries: all there in the installed versions, and what happens on the day one is gone."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import open_clip
import pytest
import torch
import transformers as hf
from tiny_models import build
from tiny_parts import whisper_config

from latte_convert import compat
from latte_convert.adapters.hf import HFAdapter
from latte_convert.adapters.host import Host
from latte_convert.attention import CallShape
from latte_convert.bench.measure import _costs
from latte_convert.bench.variants import original
from latte_convert.checkpoints.timm import write_model
from latte_convert.compat import Part
from latte_convert.errors import CheckpointError
from latte_convert.kernels.near_far import fields
from latte_convert.kernels.near_far.kernel import near_far_attention
from latte_convert.kernels.softmax import softmax_flops
from latte_convert.measuring.flops import measured_flops
from latte_convert.selection.replay import Replay

PARTS = [part for part in vars(compat).values() if isinstance(part, Part)] + list(compat.OPEN_CLIP_POOLS)


@pytest.fixture
def gone(monkeypatch):
    """Takes parts away, by the beginning of where they are."""

    def take(*beginnings: str) -> None:
        get = Part.get
        monkeypatch.setattr(Part, "get", lambda part: None if part.where.startswith(beginnings) else get(part))

    return take


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.where)
def test_every_part_is_there(part):
    assert part.get() is not None
    assert part.require() is part.get()
    assert part.without


def test_a_part_that_is_gone():
    part = Part("torch:nn.functional.no_such_thing", "2.14.1", "nothing works")
    assert part.get() is None
    assert Part("torch.no_such_module:thing", "2.14.1", "").get() is None
    assert not isinstance(torch.zeros(1), part.kind())
    expected = r"this version of torch has no torch\.nn\.functional\.no_such_thing .*: nothing works\. .*2\.14\.1"
    with pytest.raises(CheckpointError, match=expected):
        part.require()


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Box:
    inside: Any


def test_containers_are_looked_into_without_pytree(gone):
    tree = {"a": [1, (2, Pair(3, None))], "b": OrderedDict(c=Box([4]))}
    twice = {"a": [2, (4, Pair(6, None))], "b": OrderedDict(c=Box([8]))}

    def double(leaf: Any) -> Any:
        return None if leaf is None else 2 * leaf

    expected = compat.tree_map(double, tree), compat.tree_leaves(tree)
    gone("torch.utils._pytree")
    assert (compat.tree_map(double, tree), compat.tree_leaves(tree)) == expected == (twice, [1, 2, 3, None, 4])


def test_near_far_without_the_fused_attention_of_a_cpu(monkeypatch):
    query, key, value = torch.randn(3, 1, 2, 100, 8)
    options: dict[str, Any] = {"scale": 0.4, "grid": (10, 10), "window": 4, "halo": 1, "clusters": 9, "views": 2}
    with torch.no_grad():
        expected = near_far_attention(query, key, value, **options)
        monkeypatch.setattr(fields, "_FUSED", None)
        torch.testing.assert_close(near_far_attention(query, key, value, **options), expected)


def test_flops_are_counted_without_the_fused_attention_of_a_cpu(gone):
    """One head of 4 queries and 6 keys, 8 and 8 channels: 2·4·6·(8 + 8) = 768, where the operator is known."""
    query, key, value = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)

    def attend() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    with torch.no_grad():
        counted, backend = measured_flops(attend)
        assert (counted, backend) == (768, "flash")
        assert counted == softmax_flops(CallShape(queries=4, keys=6, heads=1, head_dim=8, value_dim=8))
        gone("torch:ops")
        assert measured_flops(attend)[0] in (0, 768)
        assert measured_flops(lambda: query @ key.mT) == (2 * 4 * 6 * 8, "math")


def test_a_bench_says_why_memory_of_a_cpu_cannot_be_metered(gone):
    variant, cpu = original({}), torch.device("cpu")
    gone("torch.utils._python_dispatch")
    costs = _costs(None, variant, {}, cpu)
    assert costs == {"detail": variant.detail, "reason": "memory outside of CUDA cannot be metered"}


def test_nothing_is_played_back_without_versions_of_tensors(monkeypatch):
    """The block is computed again, so that its result is the same and its modules are called."""
    model = build("bert")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    calls: list[str] = []
    first = model.get_submodule("encoder.layer.0")
    first.register_forward_hook(lambda *_: calls.append("first"))
    first.get_submodule("intermediate").register_forward_hook(lambda *_: calls.append("inside"))

    def played() -> int:
        replay = Replay(model, ["encoder.layer.0", "encoder.layer.1"])
        with torch.no_grad(), replay.record():
            expected = model(**inputs).last_hidden_state
        calls.clear()
        with torch.no_grad(), replay.before("encoder.layer.1"):
            assert torch.equal(model(**inputs).last_hidden_state, expected)
        return calls.count("inside")

    assert played() == 0
    monkeypatch.setattr(compat, "version", lambda tensor: None)
    assert played() == 1


def test_tensors_of_inference_mode_have_no_version():
    with torch.inference_mode():
        made = torch.zeros(1)
    assert compat.version(made) is None
    assert compat.version(torch.zeros(1).add_(1)) == 1


def test_modules_of_open_clip_that_are_gone_stay_exact(gone):
    """With the custom attention gone, only PyTorch's own modules are sites; nothing fails."""
    vision = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "head_width": 8, "qk_norm": True}
    text = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 4, "layers": 1}
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text).eval()
    assert {site.tower for site in Host.of(model).sites()} == {"vision", "text"}
    gone("open_clip.")
    sites = Host.of(model).sites()
    assert [(site.name, site.eligible) for site in sites] == [("transformer.resblocks.0.attn", True)]
    with pytest.raises(CheckpointError, match=r"no open_clip\.model\.resize_pos_embed"):
        compat.OPEN_CLIP_RESIZE.require()


def test_a_timm_model_in_memory_cannot_be_written_without_its_configuration(gone, tmp_path):
    gone("timm.models._hub")
    with pytest.raises(CheckpointError, match="a timm model that was given in memory cannot be written"):
        write_model(torch.nn.Linear(1, 1), {}, tmp_path)


def test_gpt2_has_no_known_projection_without_its_linear_layer(gone):
    model = hf.GPT2Model(hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    assert HFAdapter().output_projection(model, "h.0.attn") is not None
    gone("transformers.pytorch_utils")
    assert HFAdapter().output_projection(model, "h.0.attn") is None


def test_an_implementation_is_named_in_one_config_alone():
    config = whisper_config()
    compat.set_attention_implementation(config, "sdpa")
    assert compat.attention_implementation(config) == "sdpa"
    assert compat.attention_implementation(object()) is None
    with pytest.raises(CheckpointError, match=r"object .* has no _attn_implementation_internal any more"):
        compat.set_attention_implementation(object(), "sdpa")


@pytest.mark.parametrize("there", [True, False])
def test_two_directories_are_exchanged_in_one_step_or_not_at_all(tmp_path, monkeypatch, there):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    if not there:
        monkeypatch.setattr(compat.ctypes, "CDLL", lambda *_args, **_kwargs: object())
    done = compat.exchange(tmp_path / "a", tmp_path / "b")
    contents = [(tmp_path / name / "file").read_text() for name in ("a", "b")]
    assert contents == (["b", "a"] if done else ["a", "b"])
    assert there or not done
