"""Playing back a pass changes nothing in what a model computes, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers
from adapters import timm_models, tiny_models
from torch import nn

from latte_convert.adapters.host import Host
from latte_convert.conversion import convert
from latte_convert.data.feed import BatchFeed, Inputs, run
from latte_convert.kernels.exact import ExactKernel
from latte_convert.kernels.latte.kernel import LatteKernel
from latte_convert.measuring.outputs import named_outputs
from latte_convert.recipe import Recipe
from latte_convert.selection.isolated import isolated_scores
from latte_convert.selection.replay import Replay

ROOT = Path(__file__).resolve().parents[2]


def own_forwards(model: nn.Module) -> dict[str, object]:
    return {name: module.__dict__.get("forward") for name, module in model.named_modules()}


def assert_replay_is_exact(model: nn.Module, inputs: Inputs, only: str = "") -> None:
    """Each site converted alone: bit for bit the same with and without playing back, and not the original."""
    host = Host.of(model)
    sites = [site for site in host.sites() if site.eligible and only in site.name]
    before = own_forwards(model)
    replay = Replay(model, [host.block(site.name) for site in sites])
    with replay.record():
        original = dict(named_outputs(host.run(inputs)))
    reached = [site for site in sites if replay.reached(host.block(site.name))]
    assert reached
    changed = 0
    for site in reached:
        with host.convert({site.name: LatteKernel(site.heads, site.head_dim)}):
            plain = dict(named_outputs(host.run(inputs)))
            with replay.before(host.block(site.name)):
                replayed = dict(named_outputs(host.run(inputs)))
        assert list(plain) == list(replayed)
        assert all(torch.equal(plain[name], replayed[name]) for name in plain), site.name
        changed += any(not torch.equal(plain[name], original[name]) for name in plain)
    assert changed >= len(reached) - 1  # the queries of DETR's first decoder layer attend to zeros
    assert own_forwards(model) == before


FAMILIES = ["dinov2", "bert", "modernbert", "clip", "siglip2", "whisper_generation", "bart", "wav2vec2",
            "detr_object_detection", "rt_detr", "deformable_detr"]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family):
    assert_replay_is_exact(tiny_models.build(family), Inputs(tiny_models.BY_NAME[family].inputs()))


@pytest.mark.parametrize("name", ["vit", "eva02", "pvt"])
def test_timm(name):
    model = timm_models.build(name)
    assert_replay_is_exact(model, Inputs({"x": timm_models.images(model)}))


def test_torch_and_open_clip():
    torch.manual_seed(0)
    seq2seq = nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval()
    assert_replay_is_exact(seq2seq, Inputs({"src": torch.randn(2, 9, 32), "tgt": torch.randn(2, 5, 32)}))
    clip = open_clip.CLIP(
        embed_dim=16,
        vision_cfg={"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32},
        text_cfg={"context_length": 12, "vocab_size": 60, "width": 32, "heads": 4, "layers": 2},
    ).eval()
    batch = {"image": torch.randn(2, 3, 32, 32), "text": torch.randint(4, 60, (2, 12))}
    assert_replay_is_exact(clip, Inputs(batch))


def test_trained_detr_and_clip():
    sys.path.insert(0, str(ROOT / "scripts"))
    import train_tiny_clip
    import train_tiny_detr
    from scenes import render

    image = render("train", 0).image
    detr, processor = train_tiny_detr.load(ROOT / "tests" / "models" / "tiny-detr")
    assert_replay_is_exact(detr, Inputs(dict(processor(images=image, return_tensors="pt"))))
    parts = train_tiny_clip.load(ROOT / "tests" / "models" / "tiny-clip")
    batch = train_tiny_clip.encode(parts, [image], ["a digit"])
    assert_replay_is_exact(parts.model, Inputs({"pixel_values": batch["pixel_values"]}, "get_image_features", "vision"))
    assert_replay_is_exact(parts.model, Inputs(dict(batch)))


def test_minilm_and_whisper(models_dir):
    minilm = transformers.AutoModel.from_pretrained(models_dir / "minilm-l6").eval()
    assert_replay_is_exact(minilm, Inputs({"input_ids": torch.arange(2000, 2024)[None]}))
    whisper = transformers.WhisperForConditionalGeneration.from_pretrained(models_dir / "whisper-tiny.en").eval()
    features = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0))
    inputs = Inputs({"input_features": features, "decoder_input_ids": torch.tensor([[50257, 50362, 383]])})
    assert_replay_is_exact(whisper, inputs, only=".layers.2.")


class Block(nn.Module):
    """Counts its calls; ``x + 1``, or whatever it is told to return."""

    def __init__(self, returns=lambda x: x + 1):
        super().__init__()
        self.returns = returns
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.returns(x)


class Chain(nn.Module):
    """Blocks one after another, with something in between."""

    def __init__(self, *blocks, between=lambda x: x):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.between = between

    def forward(self, x):
        for block in self.blocks:
            x = self.between(block(x))
        return x

    def calls_behind(self, index: int) -> list[int]:
        """Calls of each block in a pass that plays back what comes before block ``index``."""
        replay = Replay(self, [f"blocks.{i}" for i in range(len(self.blocks))])
        inputs = Inputs({"x": torch.ones(2, 3)})
        with replay.record():
            original = run(self, inputs)
        for block in self.blocks:
            block.calls = 0
        with replay.before(f"blocks.{index}"):
            replayed = run(self, inputs)
        assert torch.equal(replayed, original)
        return [block.calls for block in self.blocks]


def test_only_what_comes_before_is_played_back():
    assert Chain(*(Block() for _ in range(4))).calls_behind(2) == [0, 0, 1, 1]


def test_a_block_that_is_called_twice_is_computed():
    shared = Block()
    assert Chain(Block(), shared, shared, Block()).calls_behind(3) == [0, 2, 2, 1]
    assert Chain(Block(), shared, Block(), shared).calls_behind(1) == [0, 2, 1, 2]


def test_an_output_that_was_written_into_is_computed():
    assert Chain(Block(), Block(), Block(), between=lambda x: x.mul_(2)).calls_behind(2) == [1, 1, 1]
    in_place = Block(lambda x: x.add_(1))  # its input is the output of the block before
    assert Chain(Block(), in_place, Block()).calls_behind(2) == [1, 1, 1]


@dataclasses.dataclass
class Pyramid:
    levels: Any
    size: int = 3


CONTAINERS = {
    "list": lambda x: [x + 1, x],
    "dictionary": lambda x: {0: x + 1, 1: x},
    "model output": lambda x: transformers.modeling_outputs.BackboneOutput(feature_maps=[x + 1, x]),
    "dataclass": lambda x: Pyramid([x + 1, x]),
    "nested": lambda x: (3, {"maps": Pyramid(([x + 1, x],))}),
}


def levels_of(output):
    """The list or dictionary inside of whatever a block returned."""
    if isinstance(output, tuple):
        return output[1]["maps"].levels[0]
    return getattr(output, "feature_maps", getattr(output, "levels", output))


def shrink(output):
    """Write into a container that a block returned, as SAM 2 does; the tensors in it stay as they are."""
    levels = levels_of(output)
    levels[0] = levels[0] * 0.5
    if isinstance(levels, list):
        levels.append(levels[1])
    if isinstance(output, Pyramid):
        output.size += 1
    return output


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_caller_may_write_into_a_container_that_a_block_returned(name):
    model = Chain(
        Block(),
        Block(lambda x: CONTAINERS[name](levels_of(x)[0] if not isinstance(x, torch.Tensor) else x)),
        Block(lambda x: levels_of(x)[0] + 2),
        Block(),
        between=lambda x: x if isinstance(x, torch.Tensor) else shrink(x),
    )
    assert model.calls_behind(3) == [0, 0, 0, 1]
    replay = Replay(model, ["blocks.2", "blocks.3"])
    inputs = Inputs({"x": torch.ones(2, 3)})
    with replay.record():
        original = run(model, inputs)
    for _ in range(2):  # the second one would see what the first wrote
        with replay.before("blocks.2"):
            assert torch.equal(run(model, inputs), original)


def test_a_block_that_does_more_than_return_is_computed():
    """It writes into a list that it was given, or keeps a tensor that another one reads."""

    class Collecting(Chain):
        def forward(self, x):
            notes = []
            for block in self.blocks:
                x, notes = block((x, notes))[0], notes
            return x + sum(notes)

    def collect(given):
        given[1].append(given[0] * 10)
        return given[0] + 1, 0

    assert Collecting(*(Block(collect) for _ in range(3))).calls_behind(2) == [1, 1, 1]
    keeper = Block()
    keeper.returns = lambda x: setattr(keeper, "kept", x * 5) or x + 1
    reader = Block(lambda x: x + keeper.kept)
    assert Chain(Block(), keeper, Block(), reader).calls_behind(3) == [0, 1, 0, 1]


def tiny_sam2() -> nn.Module:
    """SAM 2: its callers write into the list of feature maps that the vision encoder returned."""
    torch.manual_seed(0)
    backbone = transformers.Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, image_size=[64, 64], blocks_per_stage=[1, 1, 3, 1],
        embed_dim_per_stage=[16, 32, 64, 128], num_attention_heads_per_stage=[1, 2, 4, 8],
        global_attention_blocks=[3, 4], window_size_per_stage=[4, 2, 4, 2],
        window_positional_embedding_background_size=[4, 4],
    )  # fmt: skip
    vision = transformers.Sam2VisionConfig(
        backbone_config=backbone, backbone_channel_list=[128, 64, 32, 16], fpn_hidden_size=32,
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
    )  # fmt: skip
    prompts = transformers.Sam2PromptEncoderConfig(hidden_size=32, image_size=64, patch_size=16, mask_input_channels=4)
    masks = transformers.Sam2MaskDecoderConfig(
        hidden_size=32, mlp_dim=32, num_attention_heads=2, iou_head_hidden_dim=32
    )
    config = transformers.Sam2Config(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks)
    return transformers.Sam2Model(config).eval()


def test_sam2_is_scored_and_an_exact_kernel_has_no_drift():
    model = tiny_sam2()
    batches = [
        {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.randint(0, 64, (1, 1, 1, 2)).float()}
        for _ in range(2)
    ]
    host = Host.of(model)
    sites = [site for site in host.sites() if site.eligible]
    assert {site.name.partition(".")[0] for site in sites} == {"vision_encoder", "mask_decoder"}
    kernels = {site.name: [ExactKernel(site.heads, site.head_dim)] for site in sites}
    scores = isolated_scores(host, sites, kernels, BatchFeed(batches))
    assert {site: each[0].value for site, each in scores.items()} == dict.fromkeys(kernels, 0.0)
    recipe = Recipe(kernel="latte", scorer="greedy", k=1, include=["blocks.3", "mask_decoder.transformer.layers.0"])
    assert len(convert(model, batches, recipe=recipe, progress=False).plan.converted) == 1


def test_an_output_that_is_no_tensor_is_computed():
    class Box:
        def __init__(self, x):
            self.x = x

    boxed = Chain(Block(), Block(Box), Block(lambda box: box.x * 3), Block())
    assert boxed.calls_behind(3) == [0, 1, 0, 1]


def test_the_latest_recording_counts_and_blocks_may_not_be_reached():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block(lambda x: x * 2)])

        def forward(self, x, second):
            return self.blocks[int(second)](x)

    model = Branch()
    replay = Replay(model, ["blocks.0", "blocks.1"])
    assert not replay.reached("blocks.0")
    for second in (False, True):
        with replay.record():
            run(model, Inputs({"x": torch.ones(1, 1), "second": second}))
        assert [replay.reached(f"blocks.{i}") for i in range(2)] == [not second, second]


@pytest.mark.parametrize("context", ["record", "before"])
def test_an_exception_leaves_the_model_as_it_was(context):
    model = Chain(Block(), Block(), Block())
    model.blocks[0].forward = lambda x: x - 1  # an instance's own, which must come back
    before = own_forwards(model)
    replay = Replay(model, ["blocks.0", "blocks.1", "blocks.2"])
    with replay.record():
        model(torch.ones(1))

    def interrupted() -> None:
        with replay.record() if context == "record" else replay.before("blocks.2"):
            assert own_forwards(model) != before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert own_forwards(model) == before
    assert float(model(torch.ones(1))) == 2
