"""What the package is made of: version, wheel, extras, and what it says where one is absent."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import latte_convert
from latte_convert.compat import require
from latte_convert.errors import InputError

pytestmark = pytest.mark.slow

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BRINGS = {  # the package on the index that a module comes with
    "open_clip": "open_clip_torch",
    "sklearn": "scikit-learn",
    "resvg_py": "resvg-py",
    "pyarrow": "datasets",
}


def needed() -> set[tuple[str, str]]:
    """Every module and extra that the package asks for with ``require``."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "latte_convert").rglob("*.py")]
    return {found for text in sources for found in re.findall(r'require\("([\w.]+)", "([\w-]+)"\)', text)}


def test_version() -> None:
    assert latte_convert.__version__ == PROJECT["version"]


@pytest.mark.parametrize(("module", "extra"), sorted(needed()))
def test_the_extra_that_a_message_names_has_the_module(module: str, extra: str) -> None:
    library = module.partition(".")[0]
    requirements = [re.split(r"[<>=\[ ]", each)[0] for each in PROJECT["optional-dependencies"][extra]]
    assert BRINGS.get(library, library) in requirements
    assert extra in PROJECT["optional-dependencies"]["all"][0]


@pytest.mark.parametrize(("module", "extra"), sorted(needed()))
def test_an_absent_library_is_named_with_its_extra(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = module.partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError) as caught:
        require(module, extra)
    assert str(caught.value) == f"this needs {library}, which is not installed: pip install 'latte-convert[{extra}]'."


def test_a_library_that_is_broken_is_not_called_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_a_library.py").write_text("import what_it_needs_itself")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"cannot be imported .*No module named 'what_it_needs_itself'"):
        require("half_a_library", "eval")


ABSENT = "timm open_clip datasets soundfile soxr sklearn scipy jiwer pycocotools onnx onnxruntime resvg_py matplotlib"


def test_the_core_converts_without_any_extra(tiny_dino: Path, tmp_path: Path) -> None:
    """A conversion in a process without the optional libraries."""
    program = f"""
import sys
for name in {ABSENT.split()!r}:
    sys.modules[name] = None
import torch
import latte_convert
from transformers import AutoModel
torch.manual_seed(0)
model = AutoModel.from_pretrained({str(tiny_dino)!r})
batches = [dict(pixel_values=torch.randn(1, 3, 56, 56)) for _ in range(4)]
result = latte_convert.convert(model, batches, recipe=latte_convert.Recipe(kernel="latte", k=1))
print(repr(result))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 6 attention sites converted" in done.stdout


def test_a_model_of_an_absent_library_is_refused_with_its_extra(
    latte, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library, model, extra in (("timm", "timm:vit_tiny", "timm"), ("open_clip", "open_clip:A/b", "open-clip")):
        monkeypatch.setitem(sys.modules, library, None)
        code, out, err = latte("convert", model, "--calib", tmp_path, "--out", tmp_path / "o")
        assert (code, out) == (3, "")
        assert f"pip install 'latte-convert[{extra}]'" in err


def test_the_wheel_has_what_the_code_reads(tmp_path: Path) -> None:
    source = tmp_path / "source"  # setuptools leaves its build folder in it
    for name in ("latte_convert", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *options, str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    kept = [path for path in (ROOT / "latte_convert").rglob("*") if path.suffix in (".j2", ".typed", ".py")]
    assert names >= {path.relative_to(ROOT).as_posix() for path in kept}
    assert {f"latte_convert/configs/{path.name}" for path in (ROOT / "configs").iterdir()} <= names


def test_the_container_copies_what_the_wheel_is_made_of_and_runs_latte() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "configs", "latte_convert"}
    assert all((ROOT / name).exists() for name in copied)
    assert lines[-1] == 'ENTRYPOINT ["latte"]'
