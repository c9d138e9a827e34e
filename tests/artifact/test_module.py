"""Modules that no library builds: tensors and manifest are saved, code never; what builds them is the caller's."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import latte_convert
from latte_convert.artifact.manifest import read_manifest
from latte_convert.errors import CheckpointError, DataError, IntegrityError, UsageError
from latte_convert.recipe import Recipe

pytestmark = pytest.mark.slow

SOURCE = '''
import torch
from torch import nn

class Scorer(nn.Module):
    """Patches, an encoder of PyTorch's own, and a head."""

    def __init__(self, width=32, classes=5):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        layer = nn.TransformerEncoderLayer(width, 4, 48, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)))

def build():
    calls.append(1)
    return Scorer()

def build_wider():
    return Scorer(64)

def build_nothing():
    return None

def build_badly():
    raise ValueError("no such size")

calls = []
'''


@pytest.fixture
def scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's own module ``scorer_of_mine``, on Python's path."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "scorer_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    sys.modules.pop("scorer_of_mine", None)
    from importlib import import_module

    return import_module("scorer_of_mine")


def images(count: int = 4, size: int = 48) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(1, 3, size, size, generator=generator)} for _ in range(count)]


def convert(model: nn.Module, **options: Any) -> Any:
    return latte_convert.convert(model, images(), recipe=Recipe(kernel="latte", ratio=1.0), progress=False, **options)


@pytest.fixture
def model(scorer: Any) -> Any:
    torch.manual_seed(0)
    return scorer.Scorer().eval()


def test_tensors_and_manifest_and_no_code(model: Any, scorer: Any, tmp_path: Path) -> None:
    before = copy.deepcopy(model.state_dict())
    result = convert(model)
    out = result.save(tmp_path / "hybrid")
    assert {"latte.json", "model.safetensors", "report.json"} <= {path.name for path in out.iterdir()}
    assert not [path for path in out.rglob("*") if path.suffix in (".py", ".pt", ".bin", ".pkl")]
    saved = load_file(out / "model.safetensors")
    assert all(torch.equal(saved[key], before[key]) for key in before)
    record = read_manifest(out).module
    assert (record.kind, record.factory) == ("scorer_of_mine:Scorer", None)

    other = scorer.Scorer()
    loaded = latte_convert.load(out, model=other)
    assert loaded is other
    assert latte_convert.is_hybrid(loaded)
    x = images(1)[0]["x"]
    with torch.no_grad():
        assert torch.equal(loaded(x), result.model(x))
    assert latte_convert.verify(out, model=scorer.Scorer()).probe_difference < 1e-6
    restored = latte_convert.restore(out, tmp_path / "original")
    assert load_file(restored / "model.safetensors").keys() == before.keys()


def test_a_trained_one_is_loaded_and_saved_again(model: Any, scorer: Any, tmp_path: Path) -> None:
    result = convert(model)
    optimizer = torch.optim.SGD(result.model.parameters(), lr=0.1)
    result.model(images(1)[0]["x"]).square().mean().backward()
    optimizer.step()
    first = latte_convert.save(result.model.bfloat16(), tmp_path / "first")
    second = latte_convert.save(latte_convert.load(first, model=scorer.Scorer()), tmp_path / "second")
    again = latte_convert.load(second, model=scorer.Scorer())
    expected = result.model.state_dict()
    assert all(
        tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key])
        for key, tensor in again.state_dict().items()
    )
    assert {tensor.dtype for tensor in again.parameters()} == {torch.bfloat16}


def test_a_factory_is_called_only_with_consent(model: Any, scorer: Any, tmp_path: Path, latte: Any) -> None:
    result = convert(model, model_factory="scorer_of_mine:build")
    out = result.save(tmp_path / "hybrid")
    calls = len(scorer.calls)
    with pytest.raises(CheckpointError, match=r"tensors of a scorer_of_mine:Scorer.*model=…\).*allow_import=True"):
        latte_convert.load(out)
    code, _, err = latte("verify", out)
    assert code == 3
    assert "--allow-import" in err
    assert len(scorer.calls) == calls
    loaded = latte_convert.load(out, allow_import=True)
    assert len(scorer.calls) == calls + 1
    x = images(1)[0]["x"]
    with torch.no_grad():
        assert torch.equal(loaded(x), result.model(x))
    assert latte("verify", out, "--allow-import")[0] == 0
    assert latte("inspect", out)[0] == 0


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        (("eval", "--task", "fidelity", "--data", "batches"), "run it on inputs of yours"),
        (("bench",), "time it on inputs of yours"),
        (("export", "--to", "onnx", "--out", "onnx"), "give it to torch.export or torch.onnx.export yourself"),
    ],
)
def test_what_needs_inputs_of_a_library_says_so(
    model: Any, tmp_path: Path, latte: Any, command: tuple[str, ...], instead: str
) -> None:
    out = convert(model, model_factory="scorer_of_mine:build").save(tmp_path / "hybrid")
    code, _, err = latte(command[0], out, *command[1:])
    assert code == 3
    assert "holds a Scorer that only your code builds and has inputs for: load it with latte_convert.load" in " ".join(
        err.split()
    )
    assert instead in " ".join(err.split())
    assert "Traceback" not in err


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """A folder of ready batches."""
    folder = tmp_path / "batches"
    folder.mkdir()
    for number, batch in enumerate(images()):
        save_file(batch, folder / f"{number}.safetensors")
    return folder


def test_a_factory_on_the_command_line(model: Any, batches: Path, tmp_path: Path, latte: Any) -> None:
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    given = ("--model-factory", "scorer_of_mine:build", "--calib", batches, "--kernel", "latte", "--ratio", "1")
    code, out, err = latte("convert", tmp_path / "weights.safetensors", *given, "--out", tmp_path / "hybrid")
    assert code == 0, err
    saved = load_file(tmp_path / "hybrid" / "model.safetensors")
    assert all(torch.equal(saved[key], tensor) for key, tensor in model.state_dict().items())
    assert latte("verify", tmp_path / "hybrid", "--model-factory", "scorer_of_mine:build")[0] == 0
    assert latte("verify", tmp_path / "hybrid", "--allow-import")[0] == 0
    code, out, err = latte("score", *given)
    assert code == 0, err
    assert out.splitlines() == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]


@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ({"--model-factory": "no_such_home:build"}, 3, "cannot be imported: No module named 'no_such_home'"),
        ({"--model-factory": "scorer_of_mine:build_nothing"}, 3, "returned a NoneType, not a torch module"),
        ({"--model-factory": None}, 2, "give a model, or a model factory that builds one"),
        ({"--calib": "photos"}, 3, "holds no ready batches"),
        ({"--calib": "damaged"}, 3, "cannot be read"),
        ({"MODEL": "nowhere.safetensors"}, 3, "there is no nowhere.safetensors: beside a model factory, MODEL is"),
        ({"MODEL": "other.safetensors"}, 3, "does not fill Scorer"),
        ({"--grid": "7x7"}, 3, "grid 7x7: no attention site has the 49 tokens of it; the first sample gives 36."),
    ],
)
def test_bad_factories_on_the_command_line(
    scorer: Any, batches: Path, photos: Path, tmp_path: Path, latte: Any, monkeypatch: Any, changed: Any, code: int,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photos)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "1.safetensors").write_bytes(b"no")
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    given = {"--model-factory": "scorer_of_mine:build", "--calib": str(batches), "--out": "hybrid"} | changed
    place = [given.pop("MODEL")] if "MODEL" in given else []
    found, _, err = latte("convert", *place, *(word for pair in given.items() if pair[1] for word in pair))
    assert (found, message in " ".join(err.split())) == (code, True), err
    assert "Traceback" not in err
    assert not (tmp_path / "hybrid").exists()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("scorer_of_mine", "is not of the form package.module:function"),
        ("scorer_of_mine:", "is not of the form"),
        ("os.system('x'):y", "is not of the form"),
        ("no_such_home:build", "cannot be imported: No module named 'no_such_home'"),
        ("scorer_of_mine:no_such_name", "cannot be imported: .*no_such_name"),
        ("scorer_of_mine:build_nothing", "returned a NoneType, not a torch module"),
        ("scorer_of_mine:build_badly", "failed: no such size"),
        ("scorer_of_mine:build_wider", r"builds another module: the one given has tensors \d+ of another shape"),
    ],
)
def test_factories_that_do_not_build_it(model: Any, factory: str, message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("latte_convert.conversion.calibrate", lambda *_, **__: pytest.fail("calibrated"))
    with pytest.raises(CheckpointError, match=message):
        convert(model, model_factory=factory)


def test_modules_that_do_not_fit(model: Any, scorer: Any, tmp_path: Path) -> None:
    result = convert(model)
    out = result.save(tmp_path / "hybrid")
    with pytest.raises(CheckpointError, match=r"does not fill Scorer: \d+ tensors of another shape.*as it was saved"):
        latte_convert.load(out, model=scorer.Scorer(64))
    more = scorer.Scorer()
    more.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"2 tensors missing \(extra\.bias, extra\.weight\)"):
        latte_convert.load(out, model=more)
    less = scorer.Scorer()
    del less.head
    with pytest.raises(IntegrityError, match=r"does not know: head\.bias, head\.weight"):
        latte_convert.load(out, model=less)
    with pytest.raises(CheckpointError, match="is a hybrid already"):
        latte_convert.load(out, model=result.model)


def test_a_library_builds_its_own(tiny_dino: Path, photos: Path, model: Any, tmp_path: Path) -> None:
    result = latte_convert.convert(tiny_dino, photos, recipe=Recipe(kernel="latte", samples=4), progress=False)
    with pytest.raises(UsageError, match="leave out `model`"):
        latte_convert.load(result.save(tmp_path / "hybrid"), model=model)
    with pytest.raises(DataError, match="holds no ready batches: a module of a factory has no preprocessing"):
        latte_convert.convert(tiny_dino, photos, model_factory="scorer_of_mine:build")


def test_a_recorded_factory_is_a_path_and_nothing_else(model: Any, tmp_path: Path) -> None:
    import json

    out = convert(model, model_factory="scorer_of_mine:build").save(tmp_path / "hybrid")
    manifest = json.loads((out / "latte.json").read_text())
    manifest["module"]["factory"] = "scorer_of_mine:build()"
    (out / "latte.json").write_text(json.dumps(manifest))
    with pytest.raises(IntegrityError, match=r"module\.factory"):
        latte_convert.load(out, allow_import=True)


def test_state_that_is_no_tensor_is_refused(model: Any) -> None:
    class Counted(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, _state: Any) -> None: ...

    model.head = Counted(32, 5)
    with pytest.raises(CheckpointError, match=r"state that is no tensor \(head\._extra_state\)"):
        convert(model)


def test_a_state_dict_of_a_hybrid_does_not_fit_its_original(scorer: Any, tmp_path: Path) -> None:
    """near_far has no tensors: without a mark, the file would load as the original, without a word."""
    model = scorer.Scorer().eval()
    recipe = Recipe(kernel="near_far", options={"window": 2, "clusters": 4}, ratio=1.0)
    hybrid = latte_convert.convert(model, images(size=128), recipe=recipe, progress=False).model
    torch.save(hybrid.state_dict(), tmp_path / "hybrid.pt")
    state = torch.load(tmp_path / "hybrid.pt", weights_only=True)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*self_attn\.latte"):
        scorer.Scorer().load_state_dict(state)
    copy.deepcopy(hybrid).load_state_dict(state)
    wider = Recipe(kernel="near_far", options={"window": 4, "clusters": 4}, ratio=1.0)
    other = latte_convert.convert(scorer.Scorer().eval(), images(size=128), recipe=wider, progress=False).model
    with pytest.raises(UsageError, match="this state dict is of a site with the kernel"):
        other.load_state_dict(state)


def test_a_timm_model_made_by_hand(tmp_path: Path) -> None:
    import timm

    def build() -> Any:
        return timm.models.VisionTransformer(img_size=56, patch_size=14, embed_dim=48, depth=2, num_heads=3)

    batches = [{"x": torch.randn(1, 3, 56, 56)} for _ in range(3)]
    result = latte_convert.convert(build().eval(), batches, recipe=Recipe(kernel="latte", k=1), progress=False)
    loaded = latte_convert.load(result.save(tmp_path / "hybrid"), model=build())
    with torch.no_grad():
        assert torch.equal(loaded(batches[0]["x"]), result.model(batches[0]["x"]))
