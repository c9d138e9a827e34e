"""Work that is kept: taken up again bit for bit, never used for anything else, and damage is named and done anew."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

import latte_convert
from latte_convert import task as tasks
from latte_convert.errors import OutputError, UsageError
from latte_convert.recipe import Recipe
from latte_convert.work import RECORD, Store, Work, digest

FITTED = Recipe(kernel="latte", samples=6)


@dataclass
class Sums:
    total: torch.Tensor
    seen: set[str]
    by_place: dict[tuple[str, int], float]


SUMS = Sums(torch.tensor([1 / 3, float("nan")], dtype=torch.float64), {"a", "b"}, {("x", 1): 1e-320, ("y", 2): -0.1})


def test_a_piece_reads_back_to_the_bit(tmp_path):
    store = Store(tmp_path / "work")
    pieces = [[SUMS, None, (True, 3)], {"bf16": torch.tensor([1.5]).bfloat16(), "scalar": torch.tensor(2)}, "word"]
    for number, piece in enumerate(pieces):
        store.put("things", str(number), piece)
    back = [store.get("things", str(number), [Sums]) for number in range(3)]
    assert list(map(digest, back)) == list(map(digest, pieces))
    assert isinstance(back[0][0], Sums)
    assert back[0][2] == (True, 3)
    assert store.get("things", "3", [Sums]) is None


def test_each_makes_what_is_missing(tmp_path):
    made: list[int] = []

    def make(missing):
        for index in missing:
            made.append(index)
            yield index * 10

    def run(about: str, count: int = 4) -> tuple[list[int], list[int]]:
        made.clear()
        work = Work(Store(tmp_path), {"about": about})
        work.store.begin({"about": about})
        found = work.each("numbers", count, make, lambda index: index)
        return found, list(made)

    assert run("this", 2) == ([0, 10], [0, 1])
    assert run("this") == ([0, 10, 20, 30], [2, 3])
    assert run("this") == ([0, 10, 20, 30], [])
    assert run("that") == ([0, 10, 20, 30], [0, 1, 2, 3])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "swapped", "a folder"])
def test_a_damaged_piece_is_named_and_not_used(tmp_path, caplog, damage):
    store = Store(tmp_path)
    for name in ("one", "two"):
        store.put("things", name, [SUMS, name])
    path = tmp_path / "things" / "one.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        other = path.with_name("two.safetensors").read_bytes()
        path.write_bytes({"cut": raw[:-3], "flipped": raw, "empty": b"", "swapped": other}[damage])
    assert store.get("things", "one", [Sums]) is None
    assert f"{path} is damaged" in caplog.text
    assert store.get("things", "two", [Sums])[1] == "two"


@pytest.mark.slow
def test_directories_that_are_none_of_ours(tmp_path, latte, tiny_dino, photos):
    (tmp_path / "file").write_text("")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / RECORD).write_text("{")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / RECORD).write_text("[]")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for name, message in (
        ("file", "is not a directory"),
        ("theirs", "holds other files (thesis.tex)"),
        ("damaged", "remove it, and the pieces beside it are found again"),
        ("foreign", "is no record of work"),
        ("loop", "is not a directory"),
        ("file/inside", "Not a directory"),
    ):
        out = tmp_path / "out"
        code, stdout, stderr = latte(
            "convert", tiny_dino, "--calib", photos, "--out", out, "--work", tmp_path / name, "--kernel", "latte"
        )
        assert (code, stdout) == (3, ""), stderr
        assert message in stderr
        assert not out.exists()
    assert (tmp_path / "theirs" / "thesis.tex").exists()


def test_a_loaded_model_has_no_work_to_keep(tiny_dino, tmp_path):
    model = transformers.Dinov2Model.from_pretrained(tiny_dino)
    with pytest.raises(UsageError, match="work is kept for a checkpoint"):
        latte_convert.convert(model, [{}], work=tmp_path)


def saved(result, out: Path) -> dict[str, bytes]:
    """What an artifact holds, without the times and the day in its report."""
    result.save(out)
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = json.loads(files["latte.json"])
    report = json.loads(files["report.json"])
    del manifest["results"], report["created"], report["attention"], report["cost"], report["warnings"]
    kept = {name: raw for name, raw in files.items() if name not in ("latte.json", "report.json", "report.html")}
    kept.pop("README.md")
    return {**kept, "manifest": json.dumps(manifest).encode(), "report": json.dumps(report).encode()}


class Ended(Exception):
    """What ends a run in the tests."""


def stops_after(steps: int):
    """A progress that ends the run after some steps, and one that counts them."""
    count = 0

    def progress(_title: str, _total: int):
        def advance() -> None:
            nonlocal count
            count += 1
            if count == steps:
                raise Ended

        return advance

    return progress


def counting(counts: Counter[str]):
    def progress(title: str, _total: int):
        def advance() -> None:
            counts[title] += 1

        return advance

    return progress


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        FITTED,
        FITTED.model_copy(update={"scorer": "greedy"}),
        FITTED.model_copy(update={"scorer": "paper"}),
        FITTED.model_copy(update={"propagate_error": True, "ratio": 0.5}),
        Recipe(kernel="latte", samples=6, options={"output_map": True, "key_shift": True, "bias": True}),
        Recipe(kernel="auto", samples=6, candidates=({"kernel": "elu"}, {"kernel": "latte"}), min_fidelity=0.3),
    ],
    ids=["isolated", "greedy", "paper", "propagated", "stages", "auto"],
)
def test_a_run_that_ended_is_taken_up_and_gives_the_same(tiny_dino, photos, tmp_path, recipe):
    """A run without work, one that is ended twice on the way, and one that finds all there."""
    expected = saved(latte_convert.convert(tiny_dino, photos, recipe=recipe, progress=False), tmp_path / "plain")
    work = tmp_path / "work"
    for steps in (9, 23):
        with pytest.raises(Ended):
            latte_convert.convert(tiny_dino, photos, recipe=recipe, work=work, progress=stops_after(steps))
    result = latte_convert.convert(tiny_dino, photos, recipe=recipe, work=work, progress=False)
    assert result.task.work.found.total() > 0
    assert saved(result, tmp_path / "resumed") == expected
    counts: Counter[str] = Counter()
    again = latte_convert.convert(tiny_dino, photos, recipe=recipe, work=work, progress=counting(counts))
    assert again.task.work.done.total() == 0
    assert set(counts) <= {"Choosing greedily"}
    assert saved(again, tmp_path / "again") == expected


@pytest.mark.slow
def test_another_recipe_uses_what_is_the_same_in_it(tiny_dino, photos, tmp_path, caplog):
    def run(recipe: Recipe, model: Path = tiny_dino, data: Path = photos) -> tuple[Work, str]:
        caplog.clear()
        report = latte_convert.score(model, data, recipe=recipe, work=tmp_path / "work", progress=False)
        assert report.converted
        return seen.pop(), caplog.text

    seen: list[Work] = []
    opened = tasks.Work

    def noting(*arguments):
        seen.append(opened(*arguments))
        return seen[-1]

    tasks.Work = noting
    try:
        first, said = run(FITTED)
        assert first.found.total() == 0
        assert "another run" not in said
        fewer, said = run(FITTED.model_copy(update={"k": 2}))
        assert (fewer.found["fits"], fewer.found["trials"]) == (6, 4)
        assert "holds work of another run: another ratio, another k" in said
        kernel, said = run(FITTED.model_copy(update={"kernel": "elu", "k": 2}))
        assert "another kernel." in said
        assert "fits" not in +kernel.found
        options, _ = run(FITTED.model_copy(update={"options": {"tte": False}, "k": 2}))
        assert "fits" not in +options.found
        samples, said = run(FITTED.model_copy(update={"seed": 3, "k": 2}))
        assert "another choice of samples, another seed" in said or "another seed" in said
        assert "fits" not in +samples.found
        model = shutil.copytree(tiny_dino, tmp_path / "model")
        changed = transformers.Dinov2Model.from_pretrained(model)
        changed.encoder.layer[0].norm1.weight.data[0] += 0.5
        changed.save_pretrained(model)
        other, said = run(FITTED, model)
        assert other.found.total() == 0
        assert "another checkpoint" in said
        back, _ = run(FITTED)
        assert back.done.total() == 0
    finally:
        tasks.Work = opened


@pytest.mark.slow
def test_a_damaged_fit_is_done_anew(tiny_dino, photos, tmp_path, caplog):
    work = tmp_path / "work"
    first = latte_convert.convert(tiny_dino, photos, recipe=FITTED, work=work, progress=False)
    fits = sorted((work / "fits").iterdir())
    assert len(fits) == 6
    raw = bytearray(fits[2].read_bytes())
    raw[-5] ^= 64
    fits[2].write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        second = latte_convert.convert(tiny_dino, photos, recipe=FITTED, work=work, progress=False)
    assert f"{fits[2]} is damaged" in caplog.text
    assert +second.task.work.done == {"fits": 1}
    assert saved(second, tmp_path / "b") == saved(first, tmp_path / "a")


def test_a_full_or_read_only_disk_is_said(tiny_dino, photos, tmp_path, monkeypatch):
    import os

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="was not written: No space left on device"):
        latte_convert.convert(tiny_dino, photos, recipe=FITTED, work=tmp_path / "work", progress=False)
    assert not list((tmp_path / "work").rglob("*.tmp"))
