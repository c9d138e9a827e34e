"""The tensors of an artifact: the source's own, untouched, and ours beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARD_SIZE = "5GB"


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over key, dtype, shape and bytes of tensors, in order of their keys."""
    result = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key]
        result.update(f"{key}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        result.update(_bytes(tensor))
    return result.hexdigest()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes as the same dtype and shape, NaN and signed zeros included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(left, right)


def _bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor, in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def _write_file(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, to the byte as ``safetensors.torch.save_file`` does of tensors that are in memory."""
    kinds = _kinds({tensor.dtype for tensor in shapes.values()})
    order = sorted(shapes, key=lambda key: (list(kinds).index(shapes[key].dtype), key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        shape, start = shapes[key], end
        end += shape.numel() * shape.element_size()
        header[key] = {"dtype": kinds[shape.dtype], "shape": list(shape.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_ALIGNED, "little") + text)
        for key in order:
            file.write(_bytes(tensors[key]))


_ALIGNED = 8
"""Bytes of the length before a header, and what a header is filled up to a multiple of."""


def _kinds(dtypes: Iterable[torch.dtype]) -> dict[torch.dtype, str]:
    """What safetensors calls dtypes, in the order in which it puts them: the library itself writes a file of them."""
    from safetensors.torch import save

    named = {str(dtype): dtype for dtype in dtypes}
    raw = save({name: torch.zeros(1, dtype=dtype) for name, dtype in named.items()})
    header = json.loads(raw[_ALIGNED : _ALIGNED + int.from_bytes(raw[:_ALIGNED], "little")])
    places = sorted(header, key=lambda name: header[name]["data_offsets"])
    return {named[name]: header[name]["dtype"] for name in places}


def write_tensors(tensors: Mapping[str, Tensor], directory: Path, stem: str = "model") -> list[str]:
    """Write ``<stem>.safetensors``, in shards with an index above 5 GB; returns the names of the files.

    One tensor after another: those of a model on disk are never in memory together. Tensors that share memory are
    written in full, each under its own key.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    from latte_convert.artifact.files import write_json

    # Sorted, so that equal tensors give equal bytes wherever they came from.
    shapes = {key: tensors[key].detach().to("meta") for key in sorted(tensors)}
    plan = split_torch_state_dict_into_shards(
        shapes, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=SHARD_SIZE
    )
    for name, keys in plan.filename_to_tensors.items():
        _write_file(directory / name, tensors, {key: shapes[key] for key in keys})
    names = sorted(plan.filename_to_tensors)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
        names.append(f"{stem}.safetensors.index.json")
        write_json(directory / names[-1], index)
    return names
