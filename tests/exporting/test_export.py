from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import latte_convert

pytestmark = pytest.mark.slow

_STRANGER = """
import sys
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
pixels = np.load(sys.argv[2])
np.savez(sys.argv[3], **dict(zip([o.name for o in session.get_outputs()], session.run(None, {"pixel_values": pixels}))))
assert not {"torch", "transformers", "latte_convert"} & set(sys.modules)
"""

_STRANGER_WITH_TORCH = """
import sys
sys.modules["latte_convert"] = sys.modules["transformers"] = None
import numpy as np
import torch

model = torch.jit.load(sys.argv[1])
out = model(pixel_values=torch.from_numpy(np.load(sys.argv[2])))
np.savez(sys.argv[3], last_hidden_state=out[0].numpy(), pooler_output=out[1].numpy())
"""


def _as_a_stranger(program: str, file: Path, pixels: torch.Tensor, folder: Path) -> dict[str, np.ndarray]:
    """What a process that has none of our modules makes of a file."""
    np.save(folder / "pixels.npy", pixels.numpy())
    command = [sys.executable, "-c", program, str(file), str(folder / "pixels.npy"), str(folder / "out.npz")]
    subprocess.run(command, check=True, cwd=folder)
    return dict(np.load(folder / "out.npz"))


@pytest.mark.parametrize(
    ("form", "file", "program"), [("onnx", "model.onnx", _STRANGER), ("torchscript", "model.pt", _STRANGER_WITH_TORCH)]
)
def test_a_stranger_runs_the_file_at_any_size(
    form: str, file: str, program: str, latte, hybrid: Path, tmp_path: Path
) -> None:
    code, out, err = latte("export", hybrid, "--to", form, "--out", tmp_path / "o", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["worst"]["value"] < 1e-4
    assert {(each["batch"], each["size"]) for each in document["differences"]} == {
        (1, "56x56"), (3, "56x56"), (1, "42x28"), (3, "42x28")
    }  # fmt: skip
    model = latte_convert.load(hybrid)
    for shape in ((1, 3, 56, 56), (2, 3, 70, 28)):
        pixels = torch.randn(shape)
        with torch.no_grad():
            expected = model(pixels)
        found = _as_a_stranger(program, tmp_path / "o" / file, pixels, tmp_path)
        assert list(found) == ["last_hidden_state", "pooler_output"]
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name].numpy(), rtol=1e-4, atol=1e-4)


def test_the_directory_has_the_processor_and_a_card(hybrid: Path, dino: Path, tmp_path: Path) -> None:
    exported = latte_convert.export(hybrid, tmp_path / "o", resolution=56, progress=False)
    assert exported.files == (tmp_path / "o" / "model.onnx",)
    assert (tmp_path / "o" / "preprocessor_config.json").read_bytes() == (
        dino / "preprocessor_config.json"
    ).read_bytes()
    card = (tmp_path / "o" / "README.md").read_text()
    assert "1 attention layers run latte" in card
    assert "`pixel_values`" in card
    assert "`last_hidden_state`, `pooler_output`" in card
    again = latte_convert.export(
        hybrid, tmp_path / "o", resolution=56, overwrite=True, to="torch-export", progress=False
    )
    assert [file.name for file in again.files] == ["model.pt2"]
    assert not (tmp_path / "o" / "model.onnx").exists()


def test_nothing_is_left_behind_where_the_tolerance_is_missed(latte, hybrid: Path, tmp_path: Path) -> None:
    code, out, err = latte("export", hybrid, "--resolution", 56, "--tolerance", 0, "--out", tmp_path / "o")
    assert (code, out) == (4, "")
    assert "what was exported differs from PyTorch by" in err
    assert "--tolerance" in err
    assert list(tmp_path.iterdir()) == []


def test_bad_input(latte, hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for arguments, code, says in (
        (("--opset", 12), 2, "--opset 12 cannot be written: give 18 to"),
        (("--tower", "text"), 2, "it has no towers: leave out --tower"),
        (("--to", "torch-export", "--opset", 18), 2, "--opset is for ONNX"),
        (("--resolution", 50), 3, "not a multiple of the model's patch size 14; nearest: 56"),
        (("--overwrite", "--out", tmp_path / "full"), 3, "was not written by latte"),
        (("--out", tmp_path / "full"), 3, "exists already. Choose another --out, or pass --overwrite"),
    ):
        found, out, err = latte("export", hybrid, "--out", tmp_path / "o", *arguments)
        assert (found, out) == (code, ""), err
        assert says in err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found, _, err = latte("export", hybrid, "--out", tmp_path / "o")
    assert found == 3
    assert "pip install 'latte-convert[export]'" in err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
