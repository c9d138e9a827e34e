"""Find a checkpoint, and say what it is, before any weight is read."""

from __future__ import annotations

import os
from pathlib import Path

from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.weights import SUFFIXES, download, read_config, weight_files
from latte_convert.errors import CheckpointError, nearest


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Find a checkpoint. An existing path always wins over a Hub id.

    Args:
        model: A directory, a ``.safetensors`` file inside one, or a Hub id.
        revision: Branch, tag or commit of a Hub model.
        allow_pickle: Accept ``pytorch_model.bin`` where there is no safetensors file.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Raises:
        CheckpointError: There is no such model, or it has no usable weights or configuration.
    """
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"'{model}' cannot be a path: {error}") from None
    if exists:
        found = path.resolve()
        return _local(str(found), found, None, allow_pickle, trust_remote_code)
    text = str(model)
    scheme, _, name = text.partition(":")
    if scheme == "timm":
        from latte_convert.checkpoints.timm import resolve_timm

        return resolve_timm(name, allow_pickle=allow_pickle)
    if scheme == "open_clip":
        from latte_convert.checkpoints.open_clip import resolve_open_clip

        return resolve_open_clip(name, allow_pickle=allow_pickle)
    if _looks_like_path(text):
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        where = f" in {path.parent}" if siblings else ""
        raise CheckpointError(f"there is no model at '{text}' ({nearest(path.name, siblings)}{where}).")
    local = download(text, revision, allow_pickle)
    return _local(text, local, local.name, allow_pickle, trust_remote_code)


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~", os.sep)) or text.endswith(("/", os.sep, *SUFFIXES)) or text.count("/") > 1


def _local(
    identifier: str, path: Path, revision: str | None, allow_pickle: bool, trust_remote_code: bool
) -> Checkpoint:
    from latte_convert.checkpoints.hf import HFCheckpoint

    file = None
    if path.is_file():
        file, path = path, path.parent
    transformers = all((path / name).is_file() for name in ("config.json", "model.safetensors"))
    both = transformers and not any(path.glob("open_clip_*model*"))
    if (path / "open_clip_config.json").is_file() and not both:
        from latte_convert.checkpoints.open_clip import resolve_open_clip

        return resolve_open_clip(f"local-dir:{path}", allow_pickle=allow_pickle, identifier=identifier)
    config = read_config(path / "config.json")
    if "architecture" in config and "model_type" not in config:
        from latte_convert.checkpoints.timm import resolve_timm

        return resolve_timm(f"local-dir:{path}", allow_pickle=allow_pickle, identifier=identifier)
    weights = (file,) if file is not None else weight_files(path, allow_pickle)
    if file is not None and file.suffix != ".safetensors" and not allow_pickle:
        raise CheckpointError(f"{file} is not a safetensors file. Pickles are read only with --allow-pickle.")
    return HFCheckpoint(
        identifier, path, weights, config=config, revision=revision, trust_remote_code=trust_remote_code
    )
