"""Transformers checkpoints: loaded strictly into the class that their own configuration names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from latte_convert.adapters.checkpoint import Checkpoint
from latte_convert.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from latte_convert.adapters.hf_inputs import HFProcessor
    from latte_convert.calibration.data import Modality


class HFCheckpoint(Checkpoint):
    """A Transformers checkpoint; ``config`` holds the contents of its ``config.json``."""

    library = "transformers"

    def __init__(
        self, identifier: str, path: Path, weights: tuple[Path, ...], *, config: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(identifier, path, weights, **options)
        self.config = config

    @property
    def model_class(self) -> str:
        """Name of the Transformers class."""
        return str(self._class[0].__name__)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Image, text or audio; image and text for a model with a tower each."""
        from latte_convert.adapters.hf_inputs import modalities

        return modalities(self._class[0])

    def processor(self, modality: Modality) -> HFProcessor:
        """The checkpoint's own image processor, tokenizer or feature extractor."""
        from latte_convert.adapters.hf_inputs import HFProcessor

        return HFProcessor(self.id, self.path, modality)

    def processor_at(self, modality: Modality, resolution: int | None) -> HFProcessor:
        """The same at another image size: a multiple of the patch size, positions interpolated by the model itself."""
        from latte_convert.adapters.hf_inputs import HFProcessor

        if resolution is not None:
            config = self._class[1]
            patch = getattr(getattr(config, "vision_config", config), "patch_size", None)
            if modality != "image":
                raise CheckpointError(f"--resolution is for images; {self.id} takes {modality} here.")
            if isinstance(patch, int) and resolution % patch:
                near = max(patch, round(resolution / patch) * patch)
                raise CheckpointError(
                    f"resolution {resolution} is not a multiple of the model's patch size {patch}; nearest: {near}."
                )
        return HFProcessor(self.id, self.path, modality, resolution)

    @cached_property
    def _class(self) -> tuple[Any, Any]:
        """The model class, by the checkpoint's own ``architectures``, and its configuration; reads no weight."""
        import transformers

        if "auto_map" in self.config and not self.trust_remote_code:
            known = self.config.get("model_type") in transformers.CONFIG_MAPPING
            if not known:
                raise CheckpointError(
                    f"{self.id} needs its own Python code to run. Read that code, then pass --trust-remote-code."
                )
        try:
            with quiet_transformers():
                config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except (ValueError, KeyError, OSError) as error:
            kind = self.config.get("model_type")
            if kind is None or kind not in transformers.CONFIG_MAPPING:
                raise CheckpointError(
                    f"{self.id}: Transformers {transformers.__version__} does not know the model type {kind!r} "
                    f"({nearest(str(kind), transformers.CONFIG_MAPPING.keys())})."
                ) from None
            raise CheckpointError(f"{self.id}: its configuration cannot be read: {error}") from None
        names = self.config.get("architectures") or []
        cls = getattr(transformers, names[0], None) if names else None
        if cls is None and self.trust_remote_code and names:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            reference = next((ref for ref in self.config["auto_map"].values() if ref.endswith(names[0])), None)
            cls = get_class_from_dynamic_module(reference, self.path) if reference else None
        if cls is None:
            try:
                cls = transformers.MODEL_MAPPING[type(config)]
            except KeyError:
                raise CheckpointError(f"{self.id}: Transformers has no model class for {names}.") from None
        return cls, config

    def instantiate(self, tensors: dict[str, Tensor]) -> tuple[nn.Module, list[str]]:
        """Build the Transformers class from tensors, strictly; see ``Checkpoint``."""
        cls, config = self._class
        try:
            with quiet_transformers():
                model, info = cls.from_pretrained(
                    None,
                    config=config,
                    state_dict=tensors,
                    output_loading_info=True,
                    dtype=_dtype(tensors),
                    ignore_mismatched_sizes=True,  # they are reported, by name, below
                )
        except (RuntimeError, ValueError, OSError) as error:
            raise CheckpointError(f"{self.id} does not load into {cls.__name__}: {error}") from None
        missing = sorted(info["missing_keys"])
        mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
        if missing or mismatched:
            raise CheckpointError(
                f"{self.id} does not fill {cls.__name__}: "
                + "; ".join(f"{len(keys)} tensors {what} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
                            for keys, what in ((missing, "missing"), (mismatched, "of another shape")) if keys)
                + ". They would be random; use a checkpoint saved from this class."
            )  # fmt: skip
        return model.eval(), sorted(info["unexpected_keys"])


def _dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype of most weights, so that a checkpoint runs in the precision it was saved in."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep Transformers' own bars and load reports off the screen: ours says what matters."""
    from transformers.utils import logging

    hf_logging: Any = logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
