"""Attacks on samples: damaged images, sounds and tables, names that a file system allows, devices and pipes."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from pathlib import Path
from random import Random

from fuzzing import damage
from fuzzing.cases import Case, run
from fuzzing.material import CALIBRATION, FEW

NAMES = (
    b"caf\xe9.png", b"\x1b[2Jred.png", b"a" * 251 + b".png", b"new\nline.png", b"-rf.png", b"..png", b".png",
    b"$(x).png", "\u202egnp.png".encode(), b"<script>alert('code-has-run')</script>.png".replace(b"/", b"_"),
    b"'; drop.png", b"%00.png", b"CON.png", b" .png", "é\u0301.png".encode(),
)  # fmt: skip
LINES = (
    "", " ", "\x00", "\ufeff", "a " * 200_000, "x" * 3_000_000, "\ud800", '{"text": 5}', '{"text": null}', "{",
    '{"text": ["a"]}', '"text"',
    '{"tekst": "a"}', '{"text": "' + "a" * 1_000_000 + '"}', "[" * 50_000, "NaN", 'a,b\n"c', "\r", "=1+1", "…",
)  # fmt: skip
PATHS = ("/dev/zero", "/dev/random", "../../../etc/passwd", "pipe", "", ".", "~", "nowhere.png", "http://127.0.0.1:9/a.png",
         "file:///etc/passwd", "\x00", "x" * 5000, damage.PAYLOAD)  # fmt: skip


def data(random: Random, material: Path, work: Path) -> Case:
    """Calibration or evaluation with damaged samples."""
    return random.choice((_files, _files, _tables, _listed, _names))(random, material, work)


def _convert(model: str, calib: object, material: Path, *extra: object) -> Case:
    arguments = ("score", material / "models" / model, "--calib", calib, *FEW, "--kernel", "latte", "--json", *extra)
    return Case("data", "", [run(*arguments)])


def _files(random: Random, material: Path, work: Path) -> Case:
    """One to three damaged files among good ones."""
    model = random.choice(("vit", "timm", "open_clip", "speech", "speech"))
    folder = shutil.copytree(material / CALIBRATION[model], work / "samples")
    files = sorted(folder.iterdir())
    said = []
    for file in random.sample(files, random.choice((1, 1, 2, 3))):
        if random.random() < 0.15:
            said.append(damage.change_entry(file, random, files[:1]))
        elif random.random() < 0.5:
            said.append(_header(file, random))
        else:
            content, what = damage.change_bytes(file.read_bytes(), random)
            file.write_bytes(content)
            said.append(f"{file.name}: {what}")
    case = _convert(model, folder, material, *random.choice(((), (), ("--strict",))))
    case.what = f"{model}: " + "; ".join(said)
    return case


def _header(file: Path, random: Random) -> str:
    """A format that claims what it is not: sizes, rates, and programs that are called pictures."""
    content = bytearray(file.read_bytes())
    number = random.choice((0, 1, 2, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**32 - 1))
    if file.suffix == ".wav":
        places = {
            "rate": 24,
            "size": 40,
            "riff size": 4,
            "byte rate": 28,
            "data": random.randrange(44, len(content) - 4),
        }
        what = random.choice([*places, "channels", "values"])
        if what == "channels":
            struct.pack_into("<H", content, 22, number & 0xFFFF)
        elif what == "values":
            value = random.choice((1e30, float("inf"), float("nan"), 3e38))
            with contextlib.suppress(struct.error):
                struct.pack_into("<16f", content, 200, *[value] * 16)
        else:
            struct.pack_into("<I", content, places[what], number)
        file.write_bytes(bytes(content))
        return f"{file.name}: {what} {number}"
    size = struct.pack(">II", 2**31 - 1, 2**31 - 1)
    bitmap = struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    fake = {
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(code-has-run) (w) file closefile\n",
        "a PNG of 2 billion pixels": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + size + b"\x08\x02\0\0\0" + bytes(4),
        "a BMP of 60,000 pixels' width": b"BM" + bitmap,
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg' onload=\"alert(1)\"/>",
        "a line of pixels": _line(random),
        "text": b"no picture",
        "ZIP": b"PK\x03\x04" + bytes(100),
    }  # fmt: skip
    what = random.choice(list(fake))
    file.write_bytes(fake[what])
    return f"{file.name}: {what}"


def _line(random: Random) -> bytes:
    """A picture of one row or one column: some way of resizing makes it immense."""
    import io

    from PIL import Image

    stream = io.BytesIO()
    size = random.choice(((1, 3000), (3000, 1), (8, 200_000), (60_000, 1), (1, 1)))
    Image.new("RGB", size).save(stream, "PNG")
    return stream.getvalue()


def _tables(random: Random, material: Path, work: Path) -> Case:
    """Text in lines, JSON lines, CSV or Parquet with a bad row, or damaged as bytes."""
    source = random.choice(
        ("texts/lines.txt", "texts/lines.jsonl", "tables/texts.csv", "tables/texts.parquet", "tables/pairs.csv")
    )
    file = work / Path(source).name
    content = (material / source).read_bytes()
    if source.endswith("parquet") or random.random() < 0.5:
        content, what = damage.change_bytes(content, random)
    else:
        rows = content.split(b"\n")
        line = random.choice(LINES)
        rows.insert(random.randrange(len(rows)), line.encode("utf-8", "surrogatepass"))
        content, what = b"\n".join(rows), f"a line {line!r:.50}"
    file.write_bytes(content)
    if source.endswith("pairs.csv"):
        evaluate = ("eval", material / "artifacts" / "bert", "--task", "sts", "--data", file, "--json")
        return Case("data", f"{file.name}: {what}", [run(*evaluate)])
    case = _convert("bert", file, material)
    case.what = f"{file.name}: {what}"
    return case


def _listed(random: Random, material: Path, work: Path) -> Case:
    """A table that names something else than a sample."""
    folder = shutil.copytree(material / "tables" / "photos", work / "photos")
    os.mkfifo(folder / "pipe")
    table = folder / "metadata.csv"
    rows = table.read_text().splitlines()
    path = random.choice(PATHS)
    rows[random.randrange(1, len(rows))] = f"{path},a cat"
    table.write_bytes("\n".join(rows).encode("utf-8", "surrogatepass"))
    case = _convert("vit", random.choice((folder, table)), material)
    case.what = f"metadata.csv names {path!r:.60}"
    return case


def _names(random: Random, material: Path, work: Path) -> Case:
    """A name that is not plain: of a sample, of the folder, of the output."""
    name = random.choice(NAMES)
    folder = shutil.copytree(material / "photos", work / "photos")
    where = random.randrange(4)
    if where == 0:
        (folder / "0.jpg").rename(folder / os.fsdecode(name))
        case = _convert("vit", folder, material)
        case.runs = [
            run(
                "convert",
                material / "models" / "vit",
                "--calib",
                folder,
                *FEW,
                "--out",
                "hybrid",
                absent=work / "hybrid",
            )
        ]
    elif where == 1:
        folder = folder.rename(work / os.fsdecode(name))
        case = _convert("vit", folder, material)
    elif where == 2:
        out = work / os.fsdecode((name[:-4] or b"out") + b"x" * random.choice((0, 0, 300)))
        case = _convert("vit", folder, material)
        case.runs = [
            run(
                "convert",
                material / "models" / "vit",
                "--calib",
                folder,
                *FEW,
                "--kernel",
                "latte",
                "--out",
                out,
                absent=out,
            )
        ]
    else:
        out = work / os.fsdecode((name[:-4] or b"out") + random.choice((b"", b"x" * 300)) + b".html")
        case = _convert("vit", folder, material, "--out", out)
    case.what = f"the name {name!r:.60} of {('a sample', 'the folder', 'the artifact', 'the report')[where]}"
    return case
