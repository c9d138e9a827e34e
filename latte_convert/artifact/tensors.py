"""The tensors of an artifact: the source's own, untouched, and ours beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

SHARD_SIZE = "5GB"


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over key, dtype, shape and bytes of tensors, in order of their keys."""
    result = hashlib.sha256()
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        result.update(f"{key}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        result.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return result.hexdigest()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes as the same dtype and shape, NaN and signed zeros included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(left, right)


def write_tensors(tensors: Mapping[str, Tensor], directory: Path, stem: str = "model") -> list[str]:
    """Write ``<stem>.safetensors``, in shards with an index above 5 GB; returns the names of the files.

    Tensors that share memory are written in full, each under its own key.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    from latte_convert.artifact.files import write_json

    # Sorted, so that equal tensors give equal bytes wherever they came from.
    owned = {key: tensors[key].detach().cpu().contiguous() for key in sorted(tensors)}
    pointers: set[int] = set()
    for key, tensor in owned.items():
        if tensor.numel() and tensor.data_ptr() in pointers:
            owned[key] = tensor.clone()
        pointers.add(tensor.data_ptr())
    plan = split_torch_state_dict_into_shards(
        owned, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=SHARD_SIZE
    )
    for name, keys in plan.filename_to_tensors.items():
        save_file({key: owned[key] for key in keys}, directory / name, metadata={"format": "pt"})
        (directory / name).chmod(0o666 & directory.stat().st_mode)  # safetensors writes files for the owner only
    names = sorted(plan.filename_to_tensors)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
        names.append(f"{stem}.safetensors.index.json")
        write_json(directory / names[-1], index)
    return names
