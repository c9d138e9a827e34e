"""The side doors of the libraries: their own loading and saving give the hybrid, or say what would be lost.

They open once both packages are imported (see ``latte_convert/__init__.py``). ``from_pretrained`` of an artifact's
directory converts what it has loaded, so that ``AutoModel``, pipelines and sentence-transformers have the hybrid;
``save_pretrained`` of a hybrid, and with it ``Trainer.save_model``, writes an artifact, as ``save_for_hf`` of timm and
of open_clip does. What would upload a hybrid names ``latte_convert.push``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from latte_convert.names import MANIFEST


def open_doors(modeling: Any) -> None:
    """Put our word into the class that all models of Transformers derive from; ``modeling`` is the module it is in."""
    base = modeling.PreTrainedModel
    if not hasattr(base.save_pretrained, "__wrapped__"):
        base.from_pretrained = classmethod(_loading(base.__dict__["from_pretrained"].__func__))
        base.save_pretrained = _saving(base.save_pretrained)
        base.push_to_hub = _pushing(base.push_to_hub)


def open_savers(home: Any) -> None:
    """Put our word into timm's or open_clip's functions that write and upload; ``home`` is the module they are in."""
    for name, replaced in (("save_for_hf", _writing), ("push_to_hf_hub", _pushing)):
        original = getattr(home, name)
        if hasattr(original, "__wrapped__"):
            continue
        own = replaced(original)
        packages = (home.__name__.rsplit(".", depth)[0] for depth in range(home.__name__.count(".") + 1))
        for module in (sys.modules.get(package) for package in packages):
            if getattr(module, name, None) is original:  # it is imported from there, too
                setattr(module, name, own)


def _writing(original: Callable[..., Any]) -> Callable[..., Any]:
    place = list(inspect.signature(original).parameters).index("save_directory")

    @functools.wraps(original)
    def save_for_hf(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_whole_hybrid(model):
            return original(model, *args, **kwargs)
        directory = Path(kwargs["save_directory"] if "save_directory" in kwargs else args[place - 1])
        directory.mkdir(parents=True, exist_ok=True)
        return _save_into(model, directory)

    return save_for_hf


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        from latte_convert.checkpoints.mark import without_warning

        with without_warning():
            loaded = original(cls, pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        path = _artifact_of(model, pretrained_model_name_or_path)
        if path is not None:
            _convert(model, path)
        return loaded

    return from_pretrained


def _artifact_of(model: Any, place: Any) -> Path | None:
    """The artifact that a model was loaded from, if it was: a directory, or a repository of the Hub."""
    from latte_convert.checkpoints.mark import is_marked

    if isinstance(place, str | os.PathLike) and (Path(place) / MANIFEST).is_file():
        return Path(place)
    if not is_marked(model.config):
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(str(place), MANIFEST, revision=getattr(model.config, "_commit_hash", None))).parent
    except (OSError, HfHubHTTPError, HFValidationError):
        logging.getLogger("latte_convert").warning(
            "%s comes from a hybrid, but has no %s: its attention is exact. Load the artifact itself.", place, MANIFEST
        )
        return None


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_pretrained(
        self: Any,
        save_directory: Any,
        is_main_process: bool = True,
        *args: Any,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not _is_whole_hybrid(self):
            return original(self, save_directory, is_main_process, *args, push_to_hub=push_to_hub, **kwargs)
        if push_to_hub:
            _refuse_push(self)
        if is_main_process:
            _save_into(self, Path(save_directory))
        return None

    return save_pretrained


def _pushing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def push(model: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_whole_hybrid(model):
            _refuse_push(model)
        return original(model, *args, **kwargs)

    return push


def _is_whole_hybrid(model: Any) -> bool:
    """Whether all of a hybrid would be saved; with adapters of peft inside, they alone are."""
    from latte_convert.adapters.convert import is_hybrid

    return is_hybrid(model) and not getattr(model, "_hf_peft_config_loaded", False)


def _refuse_push(model: Any) -> None:
    from latte_convert.errors import CheckpointError

    raise CheckpointError(
        f"push_to_hub would put another README beside the artifact of this hybrid {type(model).__name__}: save it with "
        "latte_convert.save(model, directory), and upload that with latte_convert.push(directory, repo)."
    )


def _convert(model: Any, path: Path) -> None:
    """Convert what the library has loaded from an artifact, where it is not converted yet."""
    from latte_convert.adapters.convert import is_hybrid
    from latte_convert.adapters.host import Host
    from latte_convert.adapters.merging import merges_of
    from latte_convert.artifact.check import open_source
    from latte_convert.artifact.load import build_kernels
    from latte_convert.artifact.manifest import read_manifest
    from latte_convert.artifact.record import record_loading
    from latte_convert.checkpoints.mark import remove_mark
    from latte_convert.names import is_ours

    remove_mark(model.config)
    if is_hybrid(model):
        return
    manifest = read_manifest(path)
    source = open_source(path, manifest)
    tensors = source.read_tensors()
    kernels = build_kernels(manifest, {key: tensor for key, tensor in tensors.items() if is_ours(key)})
    same = type(model).__name__ == manifest.source.model_class
    named, merges = _named_in(model, kernels, same), _named_in(model, merges_of(manifest.shares), same)
    applied = Host.of(model).convert({**named, **merges}, min_tokens=manifest.min_tokens)
    if len(named) == len(kernels) and len(merges) == len(manifest.merges):
        renamed = {
            "sites": [
                record.model_copy(update={"name": new}) for record, new in zip(manifest.sites, named, strict=True)
            ],
            "merges": [
                record.model_copy(update={"name": new}) for record, new in zip(manifest.merges, merges, strict=True)
            ],
        }
        record_loading(model, manifest.model_copy(update=renamed), source, applied)


def _named_in(model: Any, changes: dict[str, Any], same: bool) -> dict[str, Any]:
    """What becomes of a model's modules: of another class, it has a head more or less than what was saved."""
    if same:
        return changes
    modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    named: dict[str, Any] = {}
    for name, change in changes.items():
        found = next((n for n in (name, prefix + name, name.removeprefix(prefix)) if n in modules), None)
        if found is not None:
            named[found] = change
    return named


def _save_into(model: Any, directory: Path) -> None:
    """Save a hybrid into a directory that may hold other files already, as a trainer's does."""
    from latte_convert.artifact.save import save_artifact

    if not directory.is_dir() or not any(directory.iterdir()):
        save_artifact(model, directory, overwrite=True)
        return
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.absolute().parent) as beside:
        made = save_artifact(model, Path(beside) / "hybrid")
        files = [path for path in made.rglob("*") if path.is_file()]
        for file in sorted(files, key=lambda path: path.name == MANIFEST):  # the manifest comes last
            target = directory / file.relative_to(made)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(file, target)
