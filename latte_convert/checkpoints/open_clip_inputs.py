"""From samples to the inputs of an open_clip model, with open_clip's own transform and tokenizer."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from latte_convert import compat
from latte_convert.checkpoints.quiet import quiet_open_clip
from latte_convert.checkpoints.remote_code import ADVICE, remote_code, wants_code
from latte_convert.data.pixels import pixels_by_transforms
from latte_convert.data.processor import Batch, Processor
from latte_convert.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from latte_convert.data.samples import Modality, Sample

CONFIG = "open_clip_config.json"


class OpenClipProcessor(Processor):
    """open_clip's preprocessing for one modality.

    Args:
        identifier: What the user called the checkpoint, for messages.
        path: Its directory, where the tokenizer is, if it is not open_clip's default one.
        config: Contents of its ``open_clip_config.json``.
        modality: What the samples are.
        trust_remote_code: Whether Python code of the checkpoint may run.

    Attributes:
        apply: The transform, from a PIL image to ``(3, height, width)``, or the tokenizer, from texts to
            ``(B, context_length)``.

    Raises:
        CheckpointError: The checkpoint does not say how its inputs are prepared.
    """

    def __init__(
        self,
        identifier: str,
        path: Path,
        config: dict[str, Any],
        modality: Modality,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self.modality = modality
        make = _transform if modality == "image" else _tokenizer
        try:
            with quiet_open_clip(), remote_code(trust_remote_code):
                self.apply = make(path, config, trust_remote_code)
        except Exception as error:  # configuration files can be wrong in many ways
            what = "preprocess_cfg" if modality == "image" else "tokenizer"
            reason = f"it comes as Python code: {ADVICE}" if wants_code(error) else first_line(error)
            raise CheckpointError(
                f"{identifier} has no usable {what}, and guessing its preprocessing would be wrong ({reason})."
            ) from None

    def method(self, _model: nn.Module) -> str:
        """The method of the tower that takes these samples."""
        return f"encode_{self.modality}"

    def towers(self, _model: nn.Module) -> set[str] | None:
        """The tower that takes these samples."""
        return {"vision" if self.modality == "image" else "text"}

    def pixels(self, width: int, height: int) -> float:
        """Pixels of an image once it is resized."""
        return pixels_by_transforms(self.apply, width, height)

    def _prepare(self, sample: Sample, model: nn.Module) -> Batch:
        """The tower's first argument: ``(1, 3, height, width)`` or ``(1, context_length)``."""
        name = next(iter(inspect.signature(getattr(model, self.method(model))).parameters))
        if self.modality == "image":
            return {name: self.apply(sample.value)[None]}
        text = self.text_of(sample)
        if self._length(text) > self.apply.context_length:
            self.truncated.add(sample.id)
        return {name: self.apply([text])}

    def _length(self, text: str) -> int:
        """Tokens of a text, the special ones included."""
        if hasattr(self.apply, "encode"):
            return len(self.apply.encode(text)) + 2
        return len(self.apply.tokenizer(self.apply.clean_fn(text), verbose=False).input_ids)


def _transform(_path: Path, config: dict[str, Any], _trusted: bool) -> Any:
    defaults = compat.OPEN_CLIP_SETTINGS.require()
    given = config.get("preprocess_cfg") or {}
    missing = [key for key in ("mean", "std") if not _is_colour(given.get(key))]
    if missing:
        raise ValueError(f"{CONFIG} has no {' and no '.join(missing)}")
    settings = compat.OPEN_CLIP_MERGE.require()(defaults(), given)
    settings["size"] = config["model_cfg"]["vision_cfg"].get("image_size", settings["size"])
    return compat.OPEN_CLIP_TRANSFORM.require()(defaults(**settings), is_train=False)


def _is_colour(value: Any) -> bool:
    """Whether a value is a number, or three; open_clip takes its own for one that is absent, empty or 0."""
    values = value if isinstance(value, list | tuple) and len(value) == 3 else [value]
    return bool(value) and all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)


def _tokenizer(path: Path, config: dict[str, Any], trusted: bool) -> Any:
    import open_clip

    from latte_convert.checkpoints.hf_inputs import _TOKENIZER_FILES

    text = config["model_cfg"]["text_cfg"]
    named = text.get("hf_tokenizer_name")
    if named and not any(any(path.glob(name)) for name in _TOKENIZER_FILES):
        # Transformers would make an empty tokenizer that maps every word to "unknown".
        raise ValueError(f"{CONFIG} names the tokenizer {named}, whose files are not beside it")
    # Before what tokenizer_kwargs of its configuration say; open_clip's own tokenizer does not know the flag.
    return open_clip.get_tokenizer(f"local-dir:{path}", **({"trust_remote_code": trusted} if named else {}))


def write_tag_config(architecture: str, model: dict[str, Any], settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write the configuration that a pretrained tag implies, with its tokenizer beside it, and return its contents.

    Args:
        architecture: open_clip's name of the model.
        model: Its ``model_cfg``.
        settings: What open_clip knows of the tag. The image size is the model's, not the tag's.
        path: The directory to write to.
    """
    preprocessing = compat.OPEN_CLIP_MERGE.require()(compat.OPEN_CLIP_SETTINGS.require()(), settings)
    del preprocessing["size"]
    config = {"model_cfg": model, "preprocess_cfg": preprocessing}
    (path / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    _save_tokenizer(architecture, model, path)
    return config


def _save_tokenizer(architecture: str, model: dict[str, Any], path: Path) -> None:
    """Put a tokenizer that comes from the Hub beside the configuration; images need none."""
    import open_clip

    if not model["text_cfg"].get("hf_tokenizer_name"):
        return
    try:
        with quiet_open_clip():
            open_clip.get_tokenizer(architecture).save_pretrained(path)
    except (OSError, ValueError) as error:
        logging.getLogger("latte_convert").warning(
            "%s: its tokenizer cannot be fetched: %s", architecture, str(error).splitlines()[0]
        )
