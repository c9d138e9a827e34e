"""Attacks on samples: damaged images, sounds and tables, names that a file system allows, devices and pipes."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import damage
from fuzzing.cases import Case, run
from fuzzing.material import CALIBRATION, FEW
from fuzzing.surroundings import bind

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
PATHS = (
    "/dev/zero", "/dev/random", "/dev/stdin", "/dev/tty", "/dev/fd/0", "/proc/self/mem", "/proc/self/environ",
    "/proc/kmsg", "../../../etc/passwd", "pipe", "socket", "folder", "loop", "loop/a.png", "outside", "", ".", "..",
    "/", "~", "nowhere.png", "http://127.0.0.1:9/a.png", "file:///etc/passwd", "\x00", "x" * 5000, "a\nb.png",
    "\ud800.png", damage.PAYLOAD,
    None, 5, [], {}, True, {"path": "/dev/zero"}, {"bytes": "x"}, ["0.jpg"],
)  # fmt: skip
"""What a table or a list may name where the file of a sample should be."""
DEEP = ("[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000, "[" * 100_000)


def data(random: Random, material: Path, work: Path) -> Case:
    """Calibration or evaluation with damaged samples."""
    return random.choice((_files, _files, _tables, _listed, _listed, _names, _archives))(random, material, work)


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
        "PSD": b"8BPS\0\1" + bytes(6) + b"\0\3" + size + b"\0\x08\0\3" + bytes(100),
        "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0heicmif1" + bytes(100),
    }  # fmt: skip
    if random.random() < 0.4:
        return _picture(file, random)
    what = random.choice(list(fake))
    file.write_bytes(fake[what])
    return f"{file.name}: {what}"


def _picture(file: Path, random: Random) -> str:
    """A picture of an odd mode, rotation or number of frames, under a suffix that may be another format's."""
    from PIL import Image

    mode = random.choice(("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F", "HSV", "LAB"))
    kind = random.choice(
        ("PNG", "TIFF", "JPEG", "GIF", "WEBP", "BMP", "PPM", "JPEG2000", "ICO", "PCX", "TGA", "PSD", "DDS")
    )
    size = random.choice(((40, 30), (40, 30), (1, 90), (90, 1), (1, 1), (3000, 20)))
    more: dict[str, object] = {}
    if random.random() < 0.4:
        exif = Image.Exif()
        exif[0x0112] = random.choice((0, 3, 6, 8, 99, 70000))
        more["exif"] = exif
    if random.random() < 0.3:
        more |= {"save_all": True, "append_images": [Image.new("RGB", (7, 9), "red")] * random.choice((1, 300))}
    stream = io.BytesIO()
    try:
        Image.new("RGB", size, "blue").convert(mode if mode in ("LAB", "I;16") else "RGB").convert(mode).save(
            stream, kind, **more
        )
    except Exception:  # not every format has every mode
        Image.new("RGB", size).save(stream, "PNG")
    content = stream.getvalue()
    cut = random.random() < 0.3
    file.write_bytes(content[: len(content) * 2 // 3] if cut else content)
    return f"{file.name}: {kind} of mode {mode}, {size}, {sorted(more)}{', cut' if cut else ''}"


def _line(random: Random) -> bytes:
    """A picture of one row or one column: some way of resizing makes it immense."""
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
    if source.endswith("parquet") and random.random() < 0.2:
        content, what = random.choice((
            (gzip.compress(content), "compressed"), (content[4:], "without its beginning"),
            (content[:-8], "without its end"),
            (content[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1", "with a footer of 2 GB"),
        ))  # fmt: skip
    elif source.endswith("parquet") or random.random() < 0.5:
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
    """A table or labels that name something else than a sample, or hold something else than labels."""
    folder = shutil.copytree(material / "tables" / "photos", work / "photos")
    (folder / "metadata.csv").unlink()
    os.mkfifo(folder / "pipe")
    bind(folder / "socket")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "outside").symlink_to("/etc/passwd")
    names: list[object] = sorted(path.name for path in folder.iterdir() if path.suffix)
    named = random.choice(PATHS)
    names[random.randrange(len(names))] = named
    kind = random.choice(list(LISTS))
    suffix, write, task = LISTS[kind]
    file = folder / suffix
    if kind == "parquet":
        _parquet(file, names)
        what = f"{kind} names {named!r:.60}"
    elif random.random() < 0.8:
        file.write_bytes(write(names).encode("utf-8", "surrogatepass"))
        what = f"{kind} names {named!r:.60}"
    else:
        text, what = damage.change_json({"text": write(names)} if task is None else json.loads(write(names)), random)
        text = random.choice((text, text, *DEEP))
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        what = f"{kind}: {what}, or nested"
    if task is None:
        case = _convert("vit", file, material)
    else:
        arguments = (
            "eval",
            material / "artifacts" / "open_clip",
            "--task",
            task,
            "--data",
            file,
            "--data",
            folder,
            "--json",
        )
        case = Case("data", "", [run(*arguments)])
    case.what = what
    return case


def _rows(names: list[object]) -> str:
    return "\n".join(["file_name,text", *(f"{name},a cat" for name in names)])


def _captions(names: list[object]) -> str:
    images = [{"id": i, "file_name": name, "width": 120, "height": 80} for i, name in enumerate(names)]
    captions = [{"id": i, "image_id": i, "caption": "a cat"} for i in range(len(names))]
    return json.dumps({"images": images, "annotations": captions})


def _karpathy(names: list[object]) -> str:
    entries = [{"filename": name, "split": "test", "sentences": [{"raw": "a cat"}]} for name in names]
    return json.dumps({"images": entries})


def _pairs(names: list[object]) -> str:
    entries = [{"filename": name, "caption": "a cat", "negative_caption": "a dog"} for name in names]
    return json.dumps({str(i): entry for i, entry in enumerate(entries)})


LISTS: dict[str, tuple[str, Callable[[list[object]], str], str | None]] = {
    "a table": ("metadata.csv", _rows, None),
    "JSON lines": ("metadata.jsonl", lambda names: "\n".join(json.dumps({"image": name}) for name in names), None),
    "parquet": ("images.parquet", str, None),
    "COCO's captions": ("captions_test.json", _captions, "retrieval"),
    "Karpathy's splits": ("dataset_test.json", _karpathy, "retrieval"),
    "SugarCrepe's pairs": ("add_att.json", _pairs, "compositional"),
}
"""What names images: a file, how it is written, and the task that reads it; None for calibration."""


def _parquet(file: Path, names: list[object]) -> None:
    import pyarrow
    from pyarrow import parquet

    cells = [name.encode("utf-8", "replace").decode() if isinstance(name, str) else None for name in names]
    parquet.write_table(pyarrow.table({"image": cells}), file)


MEMBERS: dict[str, dict[str, Any]] = {
    "a device": {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
    "a pipe": {"type": tarfile.FIFOTYPE},
    "a link outside": {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    "a hard link": {"type": tarfile.LNKTYPE, "linkname": "0.jpg"},
    "sparse": {"type": tarfile.GNUTYPE_SPARSE},
    "outside": {"name": "../../code-has-run.png"},
    "at the root": {"name": "/code-has-run.png"},
    "an archive": {"name": "inner.tar"},
    "deep in folders": {"name": "a/" * 200 + "x.png"},
    "called by escape codes": {"name": "\x1b[2J.png"},
    "immense": {"size": 10**15},
    "of 8 GB": {"size": 8 << 30},
    "a long name of 8 GB": {"type": tarfile.GNUTYPE_LONGNAME, "size": 8 << 30},
    "settings of 8 GB": {"type": tarfile.XHDTYPE, "size": 8 << 30},
}
"""Headers of archives that are no plain file in it."""


def _archives(random: Random, material: Path, work: Path) -> Case:
    """An archive with members that are no files, lead out of it, or claim what they are not."""
    plain = io.BytesIO()
    what = random.choice(list(MEMBERS))
    odd = tarfile.TarInfo("odd.png")
    for name, value in MEMBERS[what].items():
        setattr(odd, name, value)
    with tarfile.open(fileobj=plain, mode="w") as archive:
        files = sorted((material / "photos").iterdir())
        for file in files[: random.choice((2, len(files)))]:
            archive.add(file, file.name)
        archive.fileobj.write(odd.tobuf(tarfile.GNU_FORMAT))  # type: ignore[union-attr]
        archive.offset += 512
    content = plain.getvalue()
    how = random.choice(("plain", "plain", "plain", "gzip", "zip", "cut", "damaged"))
    if how == "gzip":
        content = gzip.compress(content)
    elif how == "zip":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive_:
            archive_.writestr("0.jpg", bytes(1 << 24))
        content = packed.getvalue()
    elif how == "cut":
        content = content[: random.randrange(len(content))]
    elif how == "damaged":
        content, _ = damage.change_bytes(content, random)
    (work / "x.tar").write_bytes(content)
    case = _convert("vit", work / "x.tar", material)
    case.what = f"an archive, {how}, with a member that is {what}"
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
                absent=None if out.name in ("", ".") or out == work else out,
            )
        ]
    else:
        out = work / os.fsdecode((name[:-4] or b"out") + random.choice((b"", b"x" * 300)) + b".html")
        case = _convert("vit", folder, material, "--out", out)
    case.what = f"the name {name!r:.60} of {('a sample', 'the folder', 'the artifact', 'the report')[where]}"
    return case
