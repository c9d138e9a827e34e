"""Any module: attention is seen in a run, answered in the module's own forward, saved and read back."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, exact_handlers, tensors
from plain_models import KEPT, MODELS, Attention, Forms, Geometry, Twice, build, by_einsum, heads_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import latte_convert
from latte_convert.adapters.find import find_adapter
from latte_convert.adapters.host import Host
from latte_convert.adapters.plain import plain_adapter
from latte_convert.attention import AttentionCall, TokenLayout
from latte_convert.data.feed import Inputs
from latte_convert.errors import CheckpointError, RecipeError
from latte_convert.recipe import Recipe
from latte_convert.task import open_task

pytestmark = pytest.mark.slow


def one(inputs: dict[str, Tensor], number: int = 0) -> dict[str, Tensor]:
    """One sample, another for each number."""

    def change(value: Tensor) -> Tensor:
        if value.is_floating_point():
            return value[:1] + 0.1 * number
        return value[:1].roll(number, -1) if value.dim() > 1 else value[:1] + number

    return {name: value if name.endswith("_ids") else change(value) for name, value in inputs.items()}


def host_of(model: nn.Module, inputs: dict[str, Tensor], recipe: Recipe | None = None) -> Host:
    grid = recipe and recipe.sides
    return Host.of(model, lambda apart: plain_adapter(model, [Inputs(inputs)], apart, grid=grid))


def convert(model: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> Any:
    recipe = Recipe(**{"kernel": "latte", "ratio": 1.0, **settings})
    return latte_convert.convert(model, [one(inputs, i) for i in range(3)], recipe=recipe, progress=False)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_exact_kernel_gives_the_original(name: str) -> None:
    row, model = MODELS[name], build(name)
    inputs = row.inputs()
    before, shown = copy.deepcopy(model.state_dict()), repr(model)
    expected = model(**inputs)
    host = host_of(model, inputs, Recipe(**row.settings))
    handlers = exact_handlers(row.sites)
    with host.watch(handlers):
        assert_same(model(**inputs), expected)
    assert all(handler.calls == 1 for handler in handlers.values())
    assert_same(model(**inputs), expected, tolerance=0)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert "Place" in repr(model) or repr(model) == shown


@pytest.mark.parametrize("name", MODELS)
def test_sites_are_what_the_calls_show(name: str) -> None:
    row, model = MODELS[name], build(name)
    recipe = Recipe(**{"kernel": "latte", **row.settings})
    task = open_task(model, [one(row.inputs(), i) for i in range(3)], recipe)
    assert {site.name for site in task.sites} == set(row.sites)
    assert all(site.eligible and site.causal is row.causal for site in task.sites)
    first = task.sites[0]
    assert (first.heads, first.head_dim, first.layout) == (*row.heads, row.layout)
    found = {site: task.host.output_projection(site) for site in row.sites}
    assert found == {site: layer and model.get_submodule(layer) for site, layer in row.sites.items()}


@pytest.mark.parametrize("name", MODELS)
def test_converted_saved_and_read_back(name: str, tmp_path: Path) -> None:
    row, model = MODELS[name], build(name)
    inputs = one(row.inputs())
    with torch.no_grad():
        original = model(**inputs)
    result = convert(model, row.inputs(), **row.settings)
    assert set(result.report.converted) == set(row.sites)
    out = result.save(tmp_path / "hybrid")
    assert not [path for path in out.rglob("*") if path.suffix in (".py", ".pt", ".bin", ".pkl")]
    again = latte_convert.load(out, model=row.build())
    with torch.no_grad():
        hybrid = model(**inputs)
        assert_same(again(**inputs), hybrid, tolerance=0)
        with pytest.raises(AssertionError):
            assert_same(hybrid, original)
        twin = copy.deepcopy(model)
        assert_same(twin(**inputs), hybrid, tolerance=0)


@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_be_served_is_listed_with_its_reason(name: str) -> None:
    row, model = KEPT[name], build(name)
    with pytest.raises(CheckpointError, match=f"no attention site can be converted: .*{row.kept}"):
        convert(model, row.inputs())


def test_few_sites_are_converted_and_the_others_kept_apart(tmp_path: Path) -> None:
    """A place is counted by the module's own calls, of which some stay exact, and not by those inside of it."""
    model, row = build("several in one module"), MODELS["several in one module"]
    result = convert(model, row.inputs(), include=("call_1",))
    assert result.report.converted == ["call_1"]
    again = latte_convert.load(result.save(tmp_path / "hybrid"), model=Twice())
    inputs = one(row.inputs())
    with torch.no_grad():
        assert_same(again(**inputs), model(**inputs), tolerance=0)


def test_with_few_keys_it_is_the_original() -> None:
    for name in ("nanoGPT written out", "einsum", "VGGT's frame and global attention"):
        model, inputs = build(name), MODELS[name].inputs()
        with torch.no_grad():
            expected = model(**inputs)
            convert(model, inputs, min_tokens=1000)
            assert_same(model(**inputs), expected, tolerance=0)


def test_logits_are_computed_only_where_they_are_read() -> None:
    """A converted site that writes out its attention computes no N² numbers, unless the module returns them."""

    class Weighted(Attention):
        def forward(self, x: Tensor, attn_bias: Any = None) -> Any:
            q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT).softmax(-1)
            return self.proj((weights @ v).transpose(1, 2).flatten(2)), weights

    model = nn.Sequential(nn.Identity(), Weighted()).eval()
    inputs = {"input": torch.randn(2, 9, 32)}
    with torch.no_grad():
        _, expected = model(**inputs)
        convert(model, inputs)
        with torch.profiler.profile() as profile:
            _, weights = model(**inputs)
        assert weights.shape == expected.shape
        assert not [event for event in profile.events() if event.name == "aten::softmax"]
        torch.testing.assert_close(weights + 0, expected)


@pytest.mark.parametrize("name", ["nanoGPT", "several in one module", "DINOv2's MemEffAttention"])
def test_what_a_hybrid_goes_with(name: str) -> None:
    model, inputs = build(name), MODELS[name].inputs()
    convert(model, inputs)
    with torch.no_grad():
        expected = model(**inputs)
        assert_same(torch.compile(model, backend="eager")(**inputs), expected)
        with ThreadPoolExecutor(4) as pool:
            for output in pool.map(lambda _: torch.no_grad()(model)(**inputs), range(4)):
                assert_same(output, expected, tolerance=0)
    again = checkpoint(lambda: model(**inputs), use_reentrant=False)
    assert_same(again, expected)
    next(value for value in tensors(again).values() if value is not None).square().mean().backward()
    assert all(layer.weight.grad is not None for layer in model.modules() if isinstance(layer, nn.Linear))


def test_an_exported_graph_has_calls_and_nothing_that_is_written_out() -> None:
    model, inputs = build("nanoGPT"), MODELS["nanoGPT"].inputs()
    convert(model, inputs)
    exported = torch.export.export(model, (), inputs, strict=False).module()
    with torch.no_grad():
        assert_same(exported(**inputs), model(**inputs))
    model, inputs = build("einsum"), MODELS["einsum"].inputs()
    convert(model, inputs)
    with pytest.raises(
        CheckpointError, match="Layer writes its attention out, and an exported graph can have nothing else"
    ):
        torch.export.export(model, (), inputs, strict=False)


def test_dropout_in_training_is_refused() -> None:
    model = build("nanoGPT")
    convert(model, MODELS["nanoGPT"].inputs())
    with pytest.raises(CheckpointError, match=r"attention dropout of 0\.1 has no meaning"):
        model.train()(**MODELS["nanoGPT"].inputs())


def test_it_goes_with_pytorchs_own_attention_and_with_guests() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.torchs = Attention(), nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(2, (4, 8)).transpose(1, 2)
            x = x + self.own(x) + self.torchs(x, x, x)[0]
            return x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    model, inputs = Mixed().eval(), {"x": torch.randn(2, 9, 32)}
    with torch.no_grad():
        expected = model(**inputs)
        host = host_of(model, inputs)
        handlers = exact_handlers(site.name for site in host.sites())
        assert set(handlers) == {"own", "torchs", "call_0"}
        with host.watch(handlers):
            assert_same(model(**inputs), expected)
    assert all(handler.calls == 1 for handler in handlers.values())


def test_a_pipelines_transformer_is_converted_on_the_latents_of_its_timesteps() -> None:
    import diffusers

    def run(steps: int) -> Any:
        generator = torch.Generator().manual_seed(0)
        return pipe([1], guidance_scale=1.0, num_inference_steps=steps, generator=generator, output_type="np").images

    torch.manual_seed(0)
    sizes = {"norm_num_groups": 4, "sample_size": 16}
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, **sizes
    )
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), latent_channels=4, **sizes)
    pipe = diffusers.DiTPipeline(transformer.eval(), vae.eval(), diffusers.DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    with latte_convert.record_calls(pipe.transformer, every=2) as batches:
        expected = run(8)
    assert [int(batch["timestep"][0]) for batch in batches] == [875, 625, 375, 125]
    assert all(set(batch) >= {"hidden_states", "timestep", "class_labels"} for batch in batches)
    result = latte_convert.convert(
        pipe.transformer, batches, recipe=Recipe(kernel="latte", ratio=1.0, min_tokens=65), progress=False
    )
    assert len(result.report.converted) == 2
    assert (run(8) == expected).all()  # of 64 tokens: exact, bit for bit
    with torch.no_grad():
        assert pipe.transformer(**{**batches[0], "hidden_states": torch.randn(1, 4, 32, 32)})[0].isfinite().all()


# -- Where tokens are ------------------------------------------------------------------------------------------------


class Patched(nn.Module):
    """Patches by a linear layer, behind four tokens: nothing in it tells a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tokens = nn.Linear(48, 32), nn.Parameter(torch.randn(1, 4, 32))
        self.blocks = nn.ModuleList([Attention()])

    def forward(self, x: Tensor) -> Tensor:
        x = F.unfold(x, 4, stride=4).transpose(1, 2)
        x = torch.cat([self.tokens.expand(len(x), -1, -1), self.embed(x)], 1)
        return x + self.blocks[0](x)


PATCHES = {"x": torch.randn(1, 3, 16, 24, generator=torch.Generator().manual_seed(1))}


def test_a_grid_that_the_user_gives(tmp_path: Path) -> None:
    settings = {"kernel": "near_far", "options": {"window": 2, "halo": 0, "clusters": 3}}
    assert convert(Patched().eval(), PATCHES, **settings).task.sites[0].layout.grid is None
    model = Patched().eval()
    result = convert(model, PATCHES, **settings, grid="4x6", prefix=4)
    layout = result.task.sites[0].layout
    assert (layout.prefix, layout.grid) == (4, (4, 6))
    again = latte_convert.load(result.save(tmp_path / "hybrid"), model=Patched())
    with torch.no_grad():
        assert_same(again(**PATCHES), model(**PATCHES), tolerance=0)


@pytest.mark.parametrize("placed", [{"grid": "6x6"}, {"grid": "4x6", "prefix": 3}, {"grid": "2x4x6"}])
def test_a_grid_that_does_not_fit(placed: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=rf"grid {placed['grid']}: no attention site has the \d+ tokens.*gives 28\."):
        convert(Patched().eval(), PATCHES, **placed)


def test_a_grid_is_for_modules_of_no_library(tiny_dino: Path, photos: Path) -> None:
    with pytest.raises(RecipeError, match="grid: transformers knows how the tokens of its models lie"):
        latte_convert.convert(tiny_dino, photos, recipe=Recipe(grid="4x4"), progress=False)
    with pytest.raises(RecipeError, match="grid"):
        Recipe.build({"grid": "4 by 4"})


# -- What is refused -------------------------------------------------------------------------------------------------


def test_a_module_without_attention() -> None:
    with pytest.raises(CheckpointError, match="this Sequential computed no attention on the first sample"):
        convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"input": torch.randn(2, 3, 4)})
    with pytest.raises(CheckpointError, match="loaded and with ready batches, any that computes attention"):
        find_adapter(nn.Linear(2, 2))


def test_attention_that_depends_on_data_in_python() -> None:
    class Moody(Forms):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) if float(x[0, 0, 0]) > 0.05 else super().forward(x)

    x = torch.randn(2, 12, 32)
    x[0, 0, 0] = 0.0
    with pytest.raises(CheckpointError, match=r"this Moody computes attention 2 times on one sample, and 1 times"):
        convert(Moody(by_einsum).eval(), {"x": x})


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_scripted_code() -> None:
    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x @ x.transpose(-2, -1), -1) @ x

    scripted = nn.Sequential(torch.jit.script(Fused()))
    with pytest.raises(CheckpointError, match=r"what is scripted \(0\) is not seen, give the module that it was made"):
        convert(scripted.eval(), {"input": torch.randn(2, 9, 32)})


def test_compiled_code() -> None:
    model = Forms(by_einsum).eval()
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    with pytest.raises(
        CheckpointError, match=r"parts of this Forms are compiled \(layers\.0\).*then compile the hybrid"
    ):
        convert(model, {"x": torch.randn(2, 12, 32)})


def test_two_models_that_share_a_module() -> None:
    shared = Attention()
    one_model, other = nn.Sequential(shared, nn.Linear(32, 4)).eval(), nn.Sequential(nn.Identity(), shared).eval()
    inputs = {"input": torch.randn(2, 9, 32)}
    convert(one_model, inputs)
    with pytest.raises(CheckpointError, match="this Sequential is converted already: give the original"):
        convert(other, inputs)


@pytest.mark.parametrize("given", [{}, {"grid": "3x4x4", "prefix": 1}])
def test_frames_one_after_another_are_a_grid_of_three_dimensions(given: dict[str, Any]) -> None:
    """VGGT's global attention: the camera tokens of all frames stand before the patches, and near_far has windows."""
    model, inputs = build("VGGT's frame and global attention"), MODELS["VGGT's frame and global attention"].inputs()
    options = {"window": 2, "halo": 1, "clusters": 4}
    result = convert(model, inputs, kernel="near_far", options=options, include=("global_blocks.*",), **given)
    layouts = {site.name: site.layout for site in result.report.sites if site.converted}
    assert layouts == {f"global_blocks.{i}.attn": "3 x 4 x 4 + 3 prefix" for i in range(2)}
    attn: Any = model.get_submodule("global_blocks.1.attn")
    x, order = torch.randn(1, 51, 32), torch.tensor([0, 17, 34, *(i for i in range(51) if i % 17)])
    with torch.no_grad():
        model(images=inputs["images"][:1])  # three frames of a sample: what x is then taken for
        q, k, v = heads_of(attn.qkv, x, 4).unbind(0)
        tokens = [each[:, :, order] for each in (attn.q_norm(q), attn.k_norm(k), v)]
        expected = attn.latte(AttentionCall(*tokens, scale=8**-0.5, layout=TokenLayout(3, (3, 4, 4))))
        expected = attn.proj(expected[:, :, order.argsort()].transpose(1, 2).flatten(2))
        torch.testing.assert_close(attn(x), expected, rtol=1e-5, atol=1e-5)
        assert not attn.latte.is_softmax(AttentionCall(*tokens, 1.0, layout=TokenLayout(3, (3, 4, 4))).shape)


def test_frames_of_another_number_and_size() -> None:
    model = build("VGGT's frame and global attention")
    convert(model, MODELS["VGGT's frame and global attention"].inputs())
    assert isinstance(model, Geometry)
    with torch.no_grad():
        assert model(images=torch.randn(1, 2, 3, 40, 48)).shape == (1, 2, 31, 32)
