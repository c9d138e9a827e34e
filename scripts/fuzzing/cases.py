"""The kinds of attack: each makes a case, which is a damaged copy of the material and the commands to try on it."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import damage
from fuzzing.material import CALIBRATION, FEW, MODELS
from fuzzing.watching import Run
from latte_convert.reading import sha256_file


@dataclass
class Case:
    """One attack.

    Attributes:
        kind: The kind of it.
        what: What was damaged, in words.
        runs: Commands, one after the other.
        changed: Whether an artifact is certainly not what was saved, so that no ``verify`` may accept it.
        keep: Files that must hold the same bytes afterwards.
    """

    kind: str
    what: str
    runs: list[Run] = field(default_factory=list)
    changed: bool = False
    keep: dict[Path, bytes] = field(default_factory=dict)


Maker = Callable[[Random, Path, Path], Case]
"""Makes a case from the material in the working folder of a place."""


def run(*arguments: Any, **options: Any) -> Run:
    """A command to watch."""
    return Run(tuple(map(str, arguments)), **options)


def plant(folder: Path) -> None:
    """Put code into a checkpoint that leaves a mark if it is run."""
    for name in ("evil.py", "modeling_evil.py", "__init__.py"):
        (folder / name).write_text(damage.EVIL_PYTHON)


def damage_folder(folder: Path, random: Random, names: list[str]) -> str:
    """Damage one file of a folder in a way that fits it."""
    file = folder / random.choice(names)
    if random.random() < 0.1:
        return damage.change_entry(file, random, [path for path in folder.iterdir() if path.is_file()])
    if file.suffix == ".json" and random.random() < 0.75:
        text, what = damage.change_json(json.loads(file.read_text()), random)
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        return f"{file.name}: {what}"
    if file.suffix == ".safetensors" and random.random() < 0.75:
        return random.choice((damage.change_tensors, damage.change_header))(file, random)
    content, what = damage.change_bytes(file.read_bytes(), random)
    file.write_bytes(content)
    return f"{file.name}: {what}"


def artifact(random: Random, material: Path, work: Path) -> Case:
    """A damaged artifact; in half of the cases its manifest vouches for the damage."""
    name = random.choice((*MODELS, "vit", "vit"))
    copy = shutil.copytree(material / "artifacts" / name, work / "hybrid")
    files = (path for path in copy.rglob("*") if path.is_file())
    before = {path.relative_to(copy).as_posix(): path.read_bytes() for path in files}
    names = [each for each in sorted(before) if not each.endswith(".html")]
    weighted = names + [each for each in names if each in ("latte.json", "config.json", "report.json")] * 2
    what = damage_folder(copy, random, weighted)
    touched = [each for each, old in before.items() if _content(copy / each) != old]
    vouched = random.random() < 0.5 and _vouch(copy, touched)
    if random.random() < 0.2:
        plant(copy)
        vouched = True  # nothing is certain any more
    data = material / CALIBRATION[name]
    command = random.choice((
        ("verify", copy), ("verify", copy), ("inspect", copy), ("inspect", copy, "--json"), ("report", copy),
        ("restore", copy, "--out", "original"),
        ("eval", copy, "--task", "fidelity", "--data", data, "--samples", 2, "--out", copy / "eval-new.json"),
    ))  # fmt: skip
    absent = work / "original" if command[0] == "restore" else None
    changed = bool(touched) and not vouched and "latte.json" not in touched
    return Case("artifact", what + (", vouched for" if vouched else ""), [run(*command, absent=absent)], changed)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24 else None


def _vouch(copy: Path, touched: list[str]) -> bool:
    """Write the digests of damaged files into the manifest, where both can be read."""
    if _content(copy / "latte.json") is None:
        return False
    try:
        manifest = json.loads((copy / "latte.json").read_text())
        for name in (name for name in touched if _content(copy / name) is not None):
            part = "files" if name in manifest["files"] else "results"
            manifest[part][name] = sha256_file(copy / name)
        (copy / "latte.json").write_text(json.dumps(manifest))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(touched)


def checkpoint(random: Random, material: Path, work: Path) -> Case:
    """A damaged checkpoint is converted."""
    name = random.choice(MODELS)
    copy = shutil.copytree(material / "models" / name, work / "model")
    what = damage_folder(copy, random, [path.name for path in sorted(copy.iterdir())])
    if random.random() < 0.3:
        plant(copy)
    if random.random() < 0.1:
        what += "; " + _pickle(copy)
    out: tuple[Any, ...] = ("--out", "hybrid") if random.random() < 0.5 else ("--dry-run",)
    extra = ("--kernel", "latte", *random.choice(((), (), ("--allow-pickle",))))
    arguments = ("convert", copy, "--calib", material / CALIBRATION[name], *FEW, *out, *extra)
    return Case("checkpoint", f"{name}: {what}", [run(*arguments, absent=work / "hybrid")])


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (damage.EVIL_PYTHON,)


def _pickle(copy: Path) -> str:
    """Put a pickle that runs code where the weights were."""
    import pickle

    for path in copy.glob("*.safetensors"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps({"x": _Evil()}))
    return "pickled weights with code in them"


def recipe(random: Random, material: Path, work: Path) -> Case:
    """A damaged recipe, or a bad value behind an option."""
    import yaml

    settings: dict[str, Any] = {"kernel": "latte", "samples": 4, "min_samples": 2, "ratio": 0.5}
    from latte_convert.recipe import Recipe

    for key in random.sample(sorted(Recipe.model_fields), random.choice((1, 1, 1, 2))):
        settings[key] = damage.choose_value(random)
    if random.random() < 0.4:
        settings["kernel"] = random.choice(("latte", "near_far", "monarch", "performer", "fitted", "taylor2", "pola"))
        options = (
            "steps",
            "features",
            "window",
            "halo",
            "clusters",
            "views",
            "block",
            "seed",
            "granularity",
            "far",
            "sigma",
        )
        settings["options"] = {
            random.choice(options): damage.choose_value(random) for _ in range(random.choice((1, 1, 2)))
        }
    text = yaml.safe_dump(settings, allow_unicode=False)
    what = repr({key: value for key, value in settings.items() if key not in ("samples", "min_samples")})
    how = random.random()
    if how < 0.25:
        content, said = damage.change_bytes(text.encode(), random)
        what = f"{what}; {said}"
    elif how < 0.35:
        content = random.choice((
            b"a: &a [x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\n",
            b"kernel: !!python/object/apply:os.system ['touch code-has-run']\n", b"{" * 5000, b"- " * 5000 + b"x",
            b"samples: !!int " + b"9" * 5000, b"seed: 2020-99-99", b"? [a]\n: b", b"%YAML 9.9\n---\na: 1",
            b"\xff\xfea\x00",
        ))  # fmt: skip
        what = repr(content[:60])
    else:
        content = text.encode()
    (work / "r.yaml").write_bytes(content)
    arguments = ("score", material / "models" / "vit", "--calib", material / "photos", "--config", "r.yaml", "--json")
    return Case("recipe", what[:300], [run(*arguments)])


def results(random: Random, material: Path, work: Path) -> Case:
    """A damaged report, benchmark or evaluation; in half of the cases the manifest vouches for it."""
    copy = shutil.copytree(material / "artifacts" / "vit", work / "hybrid")
    name = random.choice(("report.json", "report.json", "bench.json", "eval-knn.json", "eval-fidelity.json"))
    text, what = damage.change_json(json.loads((copy / name).read_text()), random)
    if random.random() < 0.1:
        content, what = damage.change_bytes((copy / name).read_bytes(), random)
    else:
        content = text.encode("utf-8", "surrogatepass")
    (copy / name).write_bytes(content)
    vouched = random.random() < 0.6 and _vouch(copy, [name])
    other = shutil.copytree(material / "artifacts" / "other", work / "other")
    command = random.choice((
        ("verify", copy), ("inspect", copy), ("report", copy), ("report", copy, "--plots", "--overwrite"),
        ("report", copy, other, "-o", "page.html"), ("report", copy / "report.json", "-o", "alone.html"),
        ("report", other, copy, "--compare"),
        ("eval", copy, "--task", "knn", "--data", material / "classes", "--out", copy / name, "--overwrite"),
    ))  # fmt: skip
    return Case("results", f"{name}: {what}" + (", vouched for" if vouched else ""), [run(*command)], not vouched)


COPIES = (("vit", "hybrid"), ("adapter", "adapter"))
LASTING = {"convert": 2.5, "restore": 0.6, "merge": 1.0, "export": 4.0, "report": 0.8, "eval": 1.5}
"""Seconds that a command takes."""


def kill(random: Random, material: Path, work: Path) -> Case:
    """A command is killed at some moment; the next one finds nothing broken and leaves nothing behind."""
    how = random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM))
    vit, photos = material / "models" / "vit", material / "photos"
    hybrid, adapter = (shutil.copytree(material / "artifacts" / name, work / new) for name, new in COPIES)
    over = ("--overwrite",)
    commands = {
        ("convert", vit, "--calib", photos, *FEW, "--kernel", "latte", "--out", hybrid, *over): 4,
        ("restore", hybrid, "--out", "original", *over): 4,
        ("merge", adapter, "--out", hybrid, *over): 4,
        ("export", hybrid, "--out", "exported", "--resolution", 56, *over): 1,
        ("report", hybrid, "--plots", *over): 3,
        ("report", hybrid, "--out", "page.html", *over): 2,
        ("eval", hybrid, "--task", "knn", "--data", material / "classes", "--out", hybrid / "eval-knn.json", *over): 3,
    }
    command = random.choices(list(commands), list(commands.values()))[0]
    after = random.uniform(0, LASTING[str(command[0])])
    runs = [
        run(*command, kill=(how, after), codes=(0,)),
        run("verify", hybrid, codes=(0,), clean=False),
        run(*command, codes=(0,)),
        run("verify", hybrid, codes=(0,)),
    ]
    return Case("kill", f"{how.name} after {after:.2f} s of {command[0]}", runs)


def full(random: Random, material: Path, work: Path) -> Case:
    """The disk fills while something is written."""
    hybrid, adapter = (shutil.copytree(material / "artifacts" / name, work / new) for name, new in COPIES)
    convert = ("convert", material / "models" / "vit", "--calib", material / "photos", *FEW, "--kernel", "latte")
    command = random.choice((
        (*convert, "--out", "new"), (*convert, "--out", hybrid, "--overwrite"),
        ("restore", hybrid, "--out", "new"),
        ("merge", adapter, "--out", "new"),
        ("export", hybrid, "--out", "new"),
        ("report", hybrid, "--plots"), ("report", hybrid, "--out", "new.html"),
        ("score", *convert[1:], "--out", "scores.html"),
        ("eval", hybrid, "--task", "knn", "--data", material / "classes", "--out", hybrid / "eval-new.json"),
    ))  # fmt: skip
    size = random.choice((0, 1, 100, 1000, 4096, 20_000, 50_000))
    runs = [
        run(*command, file_bytes=size, absent=work / "new"),
        run("verify", hybrid, codes=(0,)),
    ]
    return Case("full disk", f"no file above {size} bytes, {command[0]}", runs)
