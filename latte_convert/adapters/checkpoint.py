"""Find a checkpoint, and say what it is, before any weight is read."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from latte_convert.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from latte_convert.calibration.data import Modality
    from latte_convert.calibration.feed import Processor

MANIFEST = "latte.json"
INDEX = "model.safetensors.index.json"
# The last pattern is for the modules of sentence-transformers, such as 1_Pooling/config.json.
_SIDECARS = (
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
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


class Checkpoint(ABC):
    """A resolved checkpoint: where it is and what it holds. One subclass a library.

    Attributes:
        library: Name of the library that its class comes from.
        weights_stem: Under which name its library keeps weights, ``<stem>.safetensors``.
        id: What the user called it: a Hub id, or the absolute path.
        path: Its local directory.
        weights: The weight files, safetensors unless a pickle was allowed.
        revision: Commit of the Hub snapshot, or None.
        trust_remote_code: Whether Python code of the checkpoint may run.
    """

    library: ClassVar[str]
    weights_stem: ClassVar[str] = "model"

    def __init__(
        self,
        identifier: str,
        path: Path,
        weights: tuple[Path, ...],
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.id = identifier
        self.path = path
        self.weights = weights
        self.revision = revision
        self.trust_remote_code = trust_remote_code

    @property
    @abstractmethod
    def model_class(self) -> str:
        """Name of the class it loads into.

        Raises:
            CheckpointError: The library does not know it.
        """

    @property
    @abstractmethod
    def modalities(self) -> tuple[Modality, ...]:
        """What kinds of samples the model takes, the main one first."""

    @abstractmethod
    def processor(self, modality: Modality) -> Processor:
        """The checkpoint's own preprocessing.

        Raises:
            CheckpointError: The checkpoint does not say how its inputs are prepared.
        """

    def processor_at(self, modality: Modality, resolution: int | None) -> Processor:
        """The checkpoint's preprocessing, for images of another size than its own where ``resolution`` is given.

        Raises:
            CheckpointError: The samples have no size in pixels, or the model does not run at that size.
        """
        if resolution is None:
            return self.processor(modality)
        if modality != "image":
            raise CheckpointError(f"--resolution is for images; {self.id} takes {modality} here.")
        return self.image_processor(resolution)

    @abstractmethod
    def image_processor(self, resolution: int) -> Processor:
        """The checkpoint's own preprocessing, but for images of ``resolution`` pixels in height and width.

        Raises:
            CheckpointError: The checkpoint does not say how images are prepared, or does not run at that size.
        """

    @abstractmethod
    def instantiate(self, tensors: dict[str, Tensor], resolution: int | None = None) -> tuple[nn.Module, list[str]]:
        """Build the library's own class from tensors, strictly.

        Args:
            tensors: The checkpoint's tensors, under the checkpoint's keys.
            resolution: Height and width of images in pixels, if not the checkpoint's own. Positions are interpolated
                as the library does it; a class that does so in its forward is the same at any resolution.

        Returns:
            The model in eval mode, and the keys it has no place for.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape; it would be random. Or the library cannot run
                the model at that resolution.
        """

    def fill(self, model: nn.Module, tensors: dict[str, Tensor], advice: str) -> list[str]:
        """Copy tensors into a model, strictly.

        Args:
            model: Of this checkpoint's class.
            tensors: Under the model's keys.
            advice: What to do if they do not fit.

        Returns:
            The keys that the model has no place for, sorted.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape.
        """
        expected = model.state_dict()
        shared = expected.keys() & tensors.keys()
        mismatched = [key for key in shared if tensors[key].shape != expected[key].shape]
        self.check_filled(expected.keys() - shared, mismatched, advice)
        model.load_state_dict(tensors, strict=False)
        return sorted(tensors.keys() - shared)

    def check_filled(self, missing: Iterable[str], mismatched: Iterable[str], advice: str) -> None:
        """Refuse a checkpoint that leaves parts of its model random.

        Raises:
            CheckpointError: There are such tensors; the message names them and gives ``advice``.
        """
        faults = [
            f"{len(keys)} tensors {what} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
            for keys, what in ((sorted(missing), "missing"), (sorted(mismatched), "of another shape"))
            if keys
        ]
        if faults:
            raise CheckpointError(
                f"{self.id} does not fill {self.model_class}: {'; '.join(faults)}. They would be random; {advice}."
            )

    @property
    def is_artifact(self) -> bool:
        """Whether the directory was written by this tool."""
        return (self.path / MANIFEST).is_file()

    def sidecars(self) -> list[str]:
        """Small files that belong to the checkpoint, relative to it: configuration, tokenizer, processor, licence."""
        indices = {INDEX, f"{self.weights_stem}.safetensors.index.json", "pytorch_model.bin.index.json"}
        ours = {MANIFEST, *indices, *(["report.json"] if self.is_artifact else [])}
        found = {path for pattern in _SIDECARS for path in self.path.glob(pattern) if path.is_file()}
        return sorted(path.relative_to(self.path).as_posix() for path in found if path.name not in ours)

    def read_tensors(self) -> dict[str, Tensor]:
        """All tensors under their own keys, ours included where it is an artifact; files are memory-mapped.

        Raises:
            CheckpointError: A file is damaged.
        """
        tensors: dict[str, Tensor] = {}
        for file in self.weights:
            tensors.update(_read_file(file))
        strange = [str(t.dtype) for t in tensors.values() if t.is_floating_point() and t.itemsize < 2]
        if strange:
            raise CheckpointError(f"{self.id} holds quantised weights ({strange[0]}); give the unquantised checkpoint.")
        return tensors

    def original_tensors(self) -> dict[str, Tensor]:
        """The source's own tensors: all of them, or without ours where it is an artifact.

        Raises:
            CheckpointError: A file is damaged.
        """
        from latte_convert.artifact.tensors import is_ours

        tensors = self.read_tensors()
        if not self.is_artifact and (taken := next(filter(is_ours, tensors), None)):
            raise CheckpointError(f"{self.id} has a tensor '{taken}': names of this form are for converted sites.")
        return {key: tensor for key, tensor in tensors.items() if not is_ours(key)}


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
        from latte_convert.adapters.timm_checkpoint import resolve_timm

        return resolve_timm(name, allow_pickle=allow_pickle)
    if scheme == "open_clip":
        from latte_convert.adapters.open_clip_checkpoint import resolve_open_clip

        return resolve_open_clip(name, allow_pickle=allow_pickle)
    if _looks_like_path(text):
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        where = f" in {path.parent}" if siblings else ""
        raise CheckpointError(f"there is no model at '{text}' ({nearest(path.name, siblings)}{where}).")
    local = _download(text, revision, allow_pickle)
    return _local(text, local, local.name, allow_pickle, trust_remote_code)


def check_patches(resolution: int, patch: int) -> None:
    """Refuse a resolution that patches do not cover.

    Raises:
        CheckpointError: It is not a multiple of the patch size; the message names the nearest one.
    """
    if resolution % patch:
        near = max(patch, round(resolution / patch) * patch)
        raise CheckpointError(
            f"resolution {resolution} is not a multiple of the model's patch size {patch}; nearest: {near}."
        )


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~", os.sep)) or text.endswith(("/", os.sep, *_WEIGHTS)) or text.count("/") > 1


def _download(repo: str, revision: str | None, allow_pickle: bool, prefix: str = "") -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_SIDECARS, f"{prefix}model*.safetensors"]
    patterns += [f"{prefix}pytorch_model*.bin"] if allow_pickle else []
    try:
        local = snapshot_download(repo, revision=revision, allow_patterns=patterns)
    except HFValidationError:
        raise CheckpointError(f"'{repo}' is neither an existing path nor a Hub id ('owner/name').") from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"'{repo}' is not an existing path, is not in the local Hub cache, and the Hub cannot be reached "
            "(offline?). Give a local directory, or download the model first."
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"'{repo}' cannot be fetched from the Hub: {reason}") from None
    return Path(local)


def _local(
    identifier: str, path: Path, revision: str | None, allow_pickle: bool, trust_remote_code: bool
) -> Checkpoint:
    from latte_convert.adapters.hf_checkpoint import HFCheckpoint

    file = None
    if path.is_file():
        file, path = path, path.parent
    transformers = all((path / name).is_file() for name in ("config.json", "model.safetensors"))
    both = transformers and not any(path.glob("open_clip_*model*"))
    if (path / "open_clip_config.json").is_file() and not both:
        from latte_convert.adapters.open_clip_checkpoint import resolve_open_clip

        return resolve_open_clip(f"local-dir:{path}", allow_pickle=allow_pickle, identifier=identifier)
    config = read_json(path / "config.json")
    if "architecture" in config and "model_type" not in config:
        from latte_convert.adapters.timm_checkpoint import resolve_timm

        return resolve_timm(f"local-dir:{path}", allow_pickle=allow_pickle, identifier=identifier)
    weights = (file,) if file is not None else _weight_files(path, allow_pickle)
    if file is not None and file.suffix != ".safetensors" and not allow_pickle:
        raise CheckpointError(f"{file} is not a safetensors file. Pickles are read only with --allow-pickle.")
    return HFCheckpoint(
        identifier, path, weights, config=config, revision=revision, trust_remote_code=trust_remote_code
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is absent or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: it is not a Transformers checkpoint (save_pretrained writes one)."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.")
    return content


def _weight_files(path: Path, allow_pickle: bool, prefix: str = "") -> tuple[Path, ...]:
    index, whole = path / f"{prefix}{INDEX}", path / f"{prefix}model.safetensors"
    if index.is_file():
        shards = _shards(index)
        missing = [name for name in shards if not (path / name).is_file()]
        if missing or not shards:
            raise CheckpointError(f"{index} names shards that are not there: {', '.join(missing) or 'none'}.")
        return tuple(path / name for name in shards)
    if whole.is_file():
        return (whole,)
    pickles = sorted(path.glob(f"{prefix}pytorch_model*.bin"))
    if pickles and allow_pickle:
        return tuple(pickles)
    if pickles:
        raise CheckpointError(
            f"{path} has only pickled weights ({pickles[0].name}), which can run code when read. Convert them to "
            "safetensors, or pass --allow-pickle to read them with weights-only unpickling."
        )
    others = sorted(p.name for p in path.iterdir() if p.suffix in _WEIGHTS)
    found = f"; it has {', '.join(others[:3])}" if others else ""
    raise CheckpointError(f"{path} has no {whole.name}{found}. Give a directory with weights in it.")


def _shards(index: Path) -> list[str]:
    """The files that an index names; they lie beside it and nowhere else."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files.")
    for name in names.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index} names '{name}', which is not a file beside it.")
    return sorted(set(names.values()))


def _read_file(file: Path) -> dict[str, Tensor]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
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
