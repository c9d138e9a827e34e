"""The files of a checkpoint: which they are, how they are fetched, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte_convert.errors import CheckpointError, first_line, is_shortage, nearest
from latte_convert.reading import is_utf8, read_json
from latte_convert.wording import some

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
# The last pattern is for the modules of sentence-transformers, such as 1_Pooling/config.json.
SIDECARS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.codes",
    "*.bpe",
    "*.vocab",
    "*.jinja",
    "*.py",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "[0-9]*_*/*",
)
_CLASSES, _MOST_CLASSES = ("num_labels", "num_classes"), 1_000_000
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, and what may be done with it.

    Attributes:
        id: What the user called it: a Hub id, or the absolute path.
        path: Its local directory.
        file: The one weight file that the user named, or None.
        revision: Commit of the Hub snapshot, or None.
        allow_pickle: Whether pickled weights may be read.
        trust_remote_code: Whether Python code of the checkpoint may run.
    """

    id: str
    path: Path
    file: Path | None = None
    revision: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False

    def at(self, path: Path, identifier: str, *, file: Path | None = None, revision: str | None = None) -> Place:
        """Another place, trusted as far."""
        return replace(self, id=identifier, path=path, file=file, revision=revision)


def download(
    repo: str, revision: str | None = None, allow_pickle: bool = False, prefix: str = "", patterns: Sequence[str] = ()
) -> Path:
    """Snapshot of a Hub repository, named by its commit: weights and small files; from the local cache where offline.

    Args:
        repo: ``owner/name``.
        revision: Branch, tag or commit.
        allow_pickle: Fetch ``pytorch_model*.bin`` as well.
        prefix: What the library puts before the names of its weight files.
        patterns: Of the files to fetch instead.

    Raises:
        CheckpointError: There is no such repository, or it cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    at = f" at revision '{revision}'" if revision else ""
    wanted = [*SIDECARS, f"{prefix}model*.safetensors"]
    wanted += [f"{prefix}pytorch_model*.bin"] if allow_pickle else []
    try:
        local = snapshot_download(repo, revision=revision, allow_patterns=list(patterns) or wanted)
    except HFValidationError:
        raise CheckpointError(f"'{repo}' is neither an existing path nor a Hub id ('owner/name').") from None
    except Exception as error:  # the errors of the client's HTTP library share no base with its own
        if is_shortage(error):
            raise
        reason = _refusal(error, repo)
        if reason is None:
            raise CheckpointError(
                f"'{repo}'{at} is not an existing path, is not in the local Hub cache, and the Hub cannot be reached "
                "(offline?). Give a local directory, or download the model first."
            ) from None
        raise CheckpointError(f"'{repo}'{at} cannot be fetched from the Hub: {reason}.") from None
    return Path(local)


def _refusal(error: BaseException, repo: str) -> str | None:
    """Why the Hub does not give a repository, and what to do; None where it cannot be reached."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page, login = f"{constants.ENDPOINT}/{repo}", "log in with 'hf auth login', or set HF_TOKEN"
    if isinstance(error, LocalEntryNotFoundError):  # what is not in the cache either
        return None if error.__cause__ is None else _refusal(error.__cause__, repo)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        return f"its owner lets in those who ask: do so at {page}, then {login} of that account"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is none of that name, or it is private: check it at {page}, and for a private one {login}"
    if isinstance(error, RevisionNotFoundError):
        return f"it has no such revision: see {page}, or leave --revision out"
    if status in (401, 403):
        return f"the Hub does not accept the token ({status}): {login} that may read it"
    if status == 429:
        return f"it has had too many requests from here: wait some minutes, or {login}, which allows more"
    if status is not None and status >= 500:
        return f"the Hub has a fault of its own ({status}): try again later"
    if isinstance(error, ConnectionError) or type(error).__name__ in ("ConnectError", "ConnectTimeout"):
        return None
    if status is None and not isinstance(error, OSError):
        return f"the connection broke again and again ({first_line(error)}): try again, finished files are kept"
    return first_line(error).rstrip(".")


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a file of a checkpoint is a link out of it, to what its owner may not have meant to publish."""
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":  # in the Hub's cache files are links to its blobs
        inside.append(folder.parent.parent.resolve() / "blobs")
    return not any(path.resolve().is_relative_to(place) for place in inside)


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint.

    Raises:
        CheckpointError: The file is absent, leads out of its folder or does not hold a JSON object.
    """
    if leads_out(path, path.parent):
        raise CheckpointError(
            f"{path} links to {path.resolve()}, outside its folder, and could not be part of an artifact: copy the "
            "folder with 'cp -rL', and give the copy."
        )
    content = read_json(
        path,
        CheckpointError,
        absent=f"{path.parent} has no {path.name}: it is not a checkpoint (save_pretrained writes one).",
        lenient=True,  # the libraries read it, too
    )
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.")
    for name in _CLASSES:  # Transformers writes a name for each, before it looks at anything else
        if isinstance(count := content.get(name), int) and count > _MOST_CLASSES:
            raise CheckpointError(f"{path}: '{name}' is {count:,}, and at most {_MOST_CLASSES:,} classes are read.")
    return content


def weight_files(place: Place, prefix: str = "") -> tuple[Path, ...]:
    """The weight files of a checkpoint: the one the user named, or those of its directory, shards in order.

    Args:
        place: The checkpoint.
        prefix: What the library puts before the names of its weight files.

    Raises:
        CheckpointError: There are none, shards are missing, one is a pickle and pickles are not allowed, or their
            folder is not UTF-8.
    """
    if not is_utf8(place.path):
        raise CheckpointError(f"{str(place.path)!a} is not UTF-8, so safetensors cannot read files there: rename it.")
    files = (place.file,) if place.file is not None else _found(place.path, prefix)
    pickle = next((file for file in files if file.suffix != ".safetensors"), None)
    if pickle is not None and not place.allow_pickle:
        raise CheckpointError(
            f"{pickle} is no safetensors file but a pickle, which can run code when read. Convert it to safetensors, "
            "or pass --allow-pickle to read it with weights-only unpickling."
        )
    return files


def _found(path: Path, prefix: str) -> tuple[Path, ...]:
    index, whole = path / f"{prefix}{INDEX}", path / f"{prefix}model.safetensors"
    if index.is_file():
        shards = _shards(index)
        missing = [name for name in shards if not (path / name).is_file()]
        if missing or not shards:
            raise CheckpointError(f"{index} names shards that are not there: {some(missing) or 'none'}.")
        return tuple(path / name for name in shards)
    if whole.is_file():
        return (whole,)
    if pickles := sorted(path.glob(f"{prefix}pytorch_model*.bin")):
        return tuple(pickles)
    others = sorted(p.name for p in path.iterdir() if p.suffix in SUFFIXES)
    found = f"; it has {some(others)}" if others else ""
    raise CheckpointError(f"{path} has no {whole.name}{found}. Give a directory with weights in it.")


def _shards(index: Path) -> list[str]:
    """The files that an index names; they lie beside it and nowhere else."""
    names = read_config(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files.")
    for name in names.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index} names '{name}', which is not a file beside it.")
    return sorted(set(names.values()))


def check_header(file: Path) -> None:
    """Refuse a safetensors file that is not as long as it says, before a hole of many gigabytes is hashed.

    Raises:
        CheckpointError: It is not.
    """
    from safetensors import SafetensorError, safe_open

    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(file, framework="numpy", backend="pread"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or is not a weight file: {error}") from None


def read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a weight file, read into memory: a mapped file that is cut short kills whoever looks at it.

    Pickles are read with weights-only unpickling.

    Raises:
        CheckpointError: The file is damaged, or holds something else.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file, backend="pread")
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or is not a weight file: {error}") from None
    except Exception as error:  # unpickling errors share no base class
        raise CheckpointError(f"{file} cannot be read with weights-only unpickling: {error}") from None
    if isinstance(tensors, dict) and isinstance(tensors.get("state_dict"), dict):
        tensors = tensors["state_dict"]  # a training checkpoint, as open_clip writes it
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise CheckpointError(f"{file} does not hold a plain dictionary of tensors; save model.state_dict() instead.")
    return tensors


class OnDisk(Mapping[str, "Tensor"]):
    """The tensors of safetensors files, each read from its file when it is asked for.

    The files stay open: they can be removed meanwhile.

    Args:
        files: The files.

    Raises:
        CheckpointError: One of them is damaged.
    """

    def __init__(self, files: Iterable[Path] = ()) -> None:
        from safetensors import SafetensorError, safe_open

        self._places: dict[str, tuple[Any, str]] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt", backend="pread")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is damaged or is not a weight file: {error}") from None
            self._places.update({key: (opened, key) for key in opened.keys()})  # noqa: SIM118 (it is no dict)

    def __getitem__(self, key: str) -> Tensor:
        opened, name = self._places[key]
        tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def under(self, names: Mapping[str, str]) -> OnDisk:
        """Some of them under other keys, by these."""
        found = OnDisk()
        found._places = {name: self._places[key] for name, key in names.items()}
        return found

    def hollow(self) -> dict[str, Tensor]:
        """What a library can build a model of: tensors of their shapes and dtypes, with one number each, a NaN."""
        import torch

        def one(opened: Any, name: str) -> Tensor:
            part = opened.get_slice(name)
            shape = part.get_shape()
            dtype = (part[:0] if shape else opened.get_tensor(name)).dtype
            value = float("nan") if dtype.is_floating_point else 0
            return torch.full([1] * len(shape), value, dtype=dtype).expand(shape)

        return {key: one(*place) for key, place in self._places.items()}


def is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor is one of ``OnDisk.hollow``: one number behind all of its shape."""
    return tensor.numel() > 1 and not any(tensor.stride())


def local_directory(name: str, library: str) -> Path:
    """The directory that ``local-dir:NAME`` stands for, as an absolute path.

    Raises:
        CheckpointError: There is none.
    """
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise CheckpointError(f"there is no {library} model at '{name}' ({nearest(path.name, siblings)}).")
    return path
