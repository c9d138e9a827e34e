"""Find a checkpoint, and say what it is, before any weight is read."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from latte_convert.checkpoints.base import Checkpoint
from latte_convert.checkpoints.weights import SUFFIXES, Place, download, local_directory, read_config, weight_files
from latte_convert.errors import CheckpointError, nearest
from latte_convert.names import MANIFEST


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Find a checkpoint. An existing path always wins over a Hub id.

    Args:
        model: A directory, a ``.safetensors`` file inside one, a Hub id, ``timm:NAME`` or ``open_clip:ARCH/TAG``; the
            last two also as ``timm:hf-hub:OWNER/NAME[@REVISION]`` and ``timm:local-dir:PATH``.
        revision: Branch, tag or commit of a Hub model.
        allow_pickle: Accept ``pytorch_model.bin`` where there is no safetensors file.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Raises:
        CheckpointError: There is no such model, or it has no usable weights or configuration.
    """
    text = str(model)
    wanted = Place(text, Path(), allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"'{model}' cannot be a path: {error}") from None
    scheme, _, name = text.partition(":")
    if exists:
        _no_revision(revision, text)
        found = path.resolve()
        file = found if found.is_file() else None
        return _open(wanted.at(found.parent if file else found, str(found), file=file))
    if scheme in ("timm", "open_clip"):
        return _of_library(scheme, name, revision, wanted)
    if _looks_like_path(text):
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        where = f" in {path.parent}" if siblings else ""
        raise CheckpointError(f"there is no model at '{text}' ({nearest(path.name, siblings)}{where}).")
    local = download(text, revision, allow_pickle)
    if (local / "open_clip_config.json").is_file() and not any(local.glob("*.safetensors")):
        local = download(text, revision, allow_pickle, "open_clip_")
    return _open(wanted.at(local, text, revision=local.name))


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~", os.sep)) or text.endswith(("/", os.sep, *SUFFIXES)) or text.count("/") > 1


def _no_revision(revision: str | None, model: str) -> None:
    if revision is not None:
        raise CheckpointError(f"--revision is for models of the Hub, and '{model}' is on this disk: leave it out.")


def _of_library(scheme: str, name: str, revision: str | None, wanted: Place) -> Checkpoint:
    """A checkpoint of timm or open_clip: ``local-dir:PATH``, ``hf-hub:OWNER/NAME[@REVISION]``, or the library's own."""
    library: Any = import_module(f"latte_convert.checkpoints.{scheme}")
    source, _, rest = name.partition(":")
    found: Checkpoint
    if source == "local-dir":
        _no_revision(revision, name)
        path = local_directory(rest, scheme)
        found = library.open_folder(wanted.at(path, str(path)))
    elif source in ("hf-hub", "hf_hub"):
        repo, _, own = rest.partition("@")
        if own and revision not in (None, own):
            raise CheckpointError(f"'{wanted.id}' and --revision {revision} name two revisions: give one of them.")
        path = download(repo, own or revision, wanted.allow_pickle, library.PREFIX)
        found = library.open_folder(wanted.at(path, wanted.id, revision=path.name))
    else:
        found = library.open_named(name, revision, wanted)
    return found


def _open(place: Place) -> Checkpoint:
    """The checkpoint of a directory, by the files in it."""
    from latte_convert.checkpoints.hf import HFCheckpoint

    transformers = all((place.path / name).is_file() for name in ("config.json", "model.safetensors"))
    both = transformers and not any(place.path.glob("open_clip_*model*"))
    if (place.path / "open_clip_config.json").is_file() and not both:
        from latte_convert.checkpoints.open_clip import open_folder as open_clip_folder

        return open_clip_folder(place)
    if (place.path / MANIFEST).is_file() and not (place.path / "config.json").is_file():
        raise CheckpointError(
            f"{place.path} is an adapter or holds a plain module, and no whole checkpoint: make one of an adapter with "
            f"'latte merge {place.path} --out DIR'."
        )
    config = read_config(place.path / "config.json")
    if "architecture" in config and "model_type" not in config:
        from latte_convert.checkpoints.timm import open_folder as timm_folder

        return timm_folder(place)
    return HFCheckpoint(place, weight_files(place), config)
