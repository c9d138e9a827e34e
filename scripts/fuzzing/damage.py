"""Ways to damage a file, a JSON document, a tensor file or a folder. Each says in words what it did."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

MARKER = "code-has-run"
"""Name of a file that appears in the working folder where code of an input has run."""
PAYLOAD = "<script>alert('code-has-run')</script>"
"""Must not reach a page as it is."""

EVIL_PYTHON = f"open({MARKER!r}, 'w').close()\n"

NUMBERS: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 0.5, -0.5, 1e-30, 1e30, 1e308, 255, 65536, 100_000, 2**31, 2**63, 10**12,
    10**30,
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "", " ", "a", "0", "nan", "../../outside", "/etc/passwd", "/dev/zero", "~nobody/x", PAYLOAD, "x" * 100_000, "\0",
    "\x1b[2J\x1b]0;title\x07", "\u202egnp.exe", "\ud800", "é", "文", "${HOME}", "{}", "%s%n", "transformers",
    "torch.load",
)  # fmt: skip
CONTAINERS: tuple[Any, ...] = ([], {}, [None], [[]], [1, 2], {"a": 1}, {"": ""}, [0] * 10_000, {"type": "cat"})


def choose_value(random: Random) -> Any:
    """A value that is out of place nearly everywhere."""
    return random.choice(random.choice((NUMBERS, TEXTS, CONTAINERS)))


def change_bytes(content: bytes, random: Random) -> tuple[bytes, str]:
    """One change of raw bytes."""
    size = len(content)
    at = int(random.random() * size)
    length = min(random.choice((1, 2, 4, 16, 256, 4096)), max(1, size - at))
    junk = random.randbytes(length)
    flipped = bytes([content[at] ^ (1 << random.randrange(8))]) if size else b"x"
    changes: tuple[tuple[str, bytes], ...] = (
        (f"bit of byte {at} flipped", content[:at] + flipped + content[at + 1 :]),
        (f"{length} bytes at {at} replaced", content[:at] + junk + content[at + length :]),
        (f"{length} bytes at {at} set to 255", content[:at] + b"\xff" * length + content[at + length :]),
        (f"{length} bytes at {at} zeroed", content[:at] + bytes(length) + content[at + length :]),
        (f"cut at {at}", content[:at]),
        (f"{length} bytes put in at {at}", content[:at] + junk + content[at:]),
        (f"{length} bytes at {at} taken out", content[:at] + content[at + length :]),
        ("emptied", b""),
        ("written twice", content + content),
        ("byte-order mark in front", b"\xef\xbb\xbf" + content),
    )  # fmt: skip
    what, changed = random.choice(changes)
    return changed, what


def change_json(content: Any, random: Random) -> tuple[str, str]:
    """One change of a document, as text: a value, a key, or something JSON does not have."""
    document = json.loads(json.dumps(content))
    places = list(_places(document))
    if not places:
        return json.dumps(choose_value(random)), "the document replaced"
    holder, key, path = random.choice(places)
    how = random.randrange(9)
    if how <= 3:
        holder[key] = choose_value(random)
        what = f"{path} = {holder[key]!r:.60}"
    elif how == 4:
        del holder[key]
        what = f"{path} removed"
    elif how == 5 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = holder[key] * random.choice((-1, 0, 2, 1000, 10**9))
        what = f"{path} scaled to {holder[key]!r:.60}"
    elif how == 6 and isinstance(holder, dict):
        name = random.choice(("auto_map", "quantization_config", "__class__", "extra", PAYLOAD, ""))
        holder[name] = (
            {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"} if name == "auto_map" else choose_value(random)
        )
        what = f"{path}: '{name:.20}' added beside it"
    elif how == 7:
        other, at, place = random.choice(places)
        with contextlib.suppress(KeyError, IndexError, TypeError):
            holder[key], other[at] = other[at], holder[key]
        what = f"{path} and {place} exchanged"
    else:
        return _not_json(document, holder, key, path, random)
    try:
        return json.dumps(document), what
    except ValueError:  # a container was put into itself
        return "{}", f"{path}: emptied"


def _not_json(document: Any, holder: Any, key: Any, path: str, random: Random) -> tuple[str, str]:
    """A document with something in it that a parser must refuse, or should survive."""
    holder[key] = "@here@"
    strange = {
        "NaN": "NaN",
        "-Infinity": "-Infinity",
        "a number of 5000 digits": "9" * 5000,
        "nested 100,000 deep": "[" * 100_000 + "]" * 100_000,
        "a key twice": '{"a": 1, "a": 2}',
        "1e999": "1e999",
    }
    what = random.choice(list(strange))
    return json.dumps(document).replace('"@here@"', strange[what]), f"{path} = {what}"


def _places(document: Any, path: str = "") -> list[tuple[Any, Any, str]]:
    """Every value of a document: what holds it, its key, and its path."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    found = []
    for key, value in list(items)[:200]:
        where = f"{path}.{key}" if path else str(key)
        found.append((document, key, where))
        found.extend(_places(value, where))
    return found


def change_tensors(file: Path, random: Random) -> str:
    """One change of a safetensors file that keeps its form: names, shapes, dtypes, values."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    key = random.choice(sorted(tensors))
    tensor = tensors[key]
    how = random.randrange(9)
    if how == 0:
        del tensors[key]
        what = "removed"
    elif how == 1:
        tensors[random.choice((f"{key}.x", "extra", "a.latte.sigma", "\x1b[2J", "x" * 500))] = tensors.pop(key)
        what = "renamed"
    elif how == 2:
        tensors[key] = tensor.reshape(-1)[: max(1, tensor.numel() // 2)].clone()
        what = "halved"
    elif how == 3:
        kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn)
        kind = random.choice(kinds)
        tensors[key] = tensor.to(kind)
        what = f"as {kind}"
    elif how == 4:
        value = random.choice((float("nan"), float("inf"), 1e30, 0.0))
        tensors[key] = torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
        what = f"filled with {value}"
    elif how == 5:
        tensors[key] = tensor.clone() + 1e-4 if tensor.is_floating_point() else tensor
        what = "moved by 1e-4"
    elif how == 6:
        tensors[key] = torch.zeros(0)
        what = "emptied"
    elif how == 7:
        tensors[key] = tensor.reshape(1, *tensor.shape).clone()
        what = "with one dimension more"
    else:
        tensors = {name: value for name, value in tensors.items() if ".latte." in name}
        what = "and all others of the original removed"
    save_file(tensors, file, metadata={"format": "pt"})
    return f"{file.name}: {key} {what}"


def change_header(file: Path, random: Random) -> str:
    """One change of the JSON header of a safetensors file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text, what = change_json(json.loads(content[8 : 8 + length]), random)
    header = text.encode("utf-8", "surrogatepass")
    claimed = random.choice((len(header), len(header), len(header), 2**63, 2**40, 10**8, len(header) - 1, 0))
    file.write_bytes(claimed.to_bytes(8, "little") + header + content[8 + length :])
    return f"header of {file.name}: {what}, length {claimed}"


def change_entry(path: Path, random: Random, others: list[Path]) -> str:
    """One change of what a name in a folder stands for."""
    plain = [each for each in others if each != path and each.is_file() and each.stat().st_size < 1 << 24]
    changes: dict[str, Callable[[], object]] = {
        "removed": lambda: None,
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
        "a link to a folder": lambda: path.symlink_to("."),
        "a link to the memory of the process": lambda: path.symlink_to("/proc/self/mem"),
        "a link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "a link to nothing": lambda: path.symlink_to("nowhere"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a link outside": lambda: path.symlink_to("/etc/passwd"),
        "a hole of 100 GB": lambda: (path.touch(), os.truncate(path, 100 * 10**9)),
        "another file": lambda: shutil.copyfile(random.choice(plain or [Path(os.devnull)]), path),
        "unreadable": lambda: (path.touch(), path.chmod(0)),
    }
    what = random.choice(list(changes))
    path.unlink()
    changes[what]()
    return f"{path.name} is {what}"
