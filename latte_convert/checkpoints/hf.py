"""Transformers checkpoints: loaded strictly into the class that their own configuration names."""

from __future__ import annotations

import copy
import inspect
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from latte_convert import compat
from latte_convert.checkpoints.base import Checkpoint, check_patches
from latte_convert.checkpoints.mark import remove_mark
from latte_convert.checkpoints.quiet import quiet_transformers
from latte_convert.checkpoints.remote_code import ADVICE, remote_code
from latte_convert.errors import CheckpointError, first_line, nearest

if TYPE_CHECKING:
    from latte_convert.checkpoints.hf_inputs import HFProcessor
    from latte_convert.data.samples import Modality


class HFCheckpoint(Checkpoint):
    """A Transformers checkpoint, configured by its ``config.json``."""

    library = "transformers"

    @property
    def model_class(self) -> str:
        """Name of the Transformers class."""
        return str(self._class[0].__name__)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Image, text or audio; image and text for a model with a tower each."""
        from latte_convert.checkpoints.hf_inputs import modalities

        return modalities(self._class[0])

    def processor(self, modality: Modality) -> HFProcessor:
        """The checkpoint's own image processor, tokenizer or feature extractor."""
        from latte_convert.checkpoints.hf_inputs import HFProcessor

        return HFProcessor(self.id, self.path, modality, trust_remote_code=self.trust_remote_code)

    def image_processor(self, resolution: int) -> HFProcessor:
        """The same at another image size: a multiple of the patch size, positions interpolated by the model itself."""
        from latte_convert.checkpoints.hf_inputs import HFProcessor

        config = self._class[1]
        patch = getattr(getattr(config, "vision_config", config), "patch_size", None)
        if isinstance(patch, int):
            check_patches(resolution, patch)
        return HFProcessor(self.id, self.path, "image", resolution, trust_remote_code=self.trust_remote_code)

    @cached_property
    def _class(self) -> tuple[Any, Any]:
        """The model class, by the checkpoint's own ``architectures``, and its configuration; reads no weight."""
        import transformers

        config = self._read_config()
        names = self.config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{self.id}: 'architectures' in its config.json is not a list of class names.")
        if not names:
            try:
                return transformers.MODEL_MAPPING[type(config)], config
            except KeyError:
                raise CheckpointError(f"{self.id}: its config.json names no class in 'architectures'.") from None
        cls = getattr(transformers, names[0], None) or self._remote_class(names[0])
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            classes = [name for name in dir(transformers) if name.endswith(("Model", "ForImageClassification"))]
            raise CheckpointError(
                f"{self.id}: Transformers {transformers.__version__} has no model class '{names[0]}' "
                f"({nearest(names[0], classes)})."
            )
        return cls, config

    def _read_config(self) -> Any:
        import transformers

        kind = self.config.get("model_type")
        if "auto_map" in self.config and not self.trust_remote_code and kind not in transformers.CONFIG_MAPPING:
            raise CheckpointError(f"{self.id} comes with its own Python code: {ADVICE}.")
        try:
            with quiet_transformers(), remote_code(self.trust_remote_code):
                config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # configuration classes check their values in many ways
            if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
                raise CheckpointError(
                    f"{self.id}: Transformers {transformers.__version__} does not know the model type {kind!r} "
                    f"({nearest(str(kind), transformers.CONFIG_MAPPING.keys())})."
                ) from None
            raise CheckpointError(f"{self.id}: its config.json cannot be used: {first_line(error)}") from None
        remove_mark(config)
        if getattr(config, "quantization_config", None) is not None:
            raise CheckpointError(f"{self.id} is quantised; give the unquantised checkpoint.")
        for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
            if part is not None:
                part.return_dict = True  # outputs are told by their names, which a tuple does not have
        # What a config asks for may not be installed here; the library's own default always is.
        compat.set_attention_implementation(config, None)
        return config

    def _remote_class(self, name: str) -> Any:
        """A class that comes with the checkpoint, where its code may run."""
        if not self.trust_remote_code:
            return None
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        references = self.config.get("auto_map")
        found = references.values() if isinstance(references, dict) else ()
        reference = next((ref for ref in found if isinstance(ref, str) and ref.endswith(name)), None)
        try:
            return get_class_from_dynamic_module(reference, self.path) if reference else None
        except Exception as error:  # it runs the checkpoint's own code
            raise CheckpointError(f"{self.id}: its own Python code does not run: {first_line(error)}") from error

    def _skeleton(self) -> nn.Module:
        cls, config = self._class
        try:
            with torch.device("meta"):
                return cast(nn.Module, cls(config))
        except Exception as error:  # a bad value in config.json can fail anywhere in a constructor
            raise CheckpointError(f"{self.id} does not load into {cls.__name__}: {first_line(error)}") from error

    def _instantiate(self, tensors: dict[str, Tensor], resolution: int | None) -> tuple[nn.Module, list[str]]:
        """Build the Transformers class from tensors, strictly; see ``Checkpoint``. It is the same at any resolution."""
        cls, config = self._class
        try:
            with quiet_transformers(), remote_code(self.trust_remote_code):
                model, info = cls.from_pretrained(
                    None,
                    trust_remote_code=self.trust_remote_code,
                    config=config,
                    state_dict=tensors,
                    output_loading_info=True,
                    dtype=main_dtype(tensors),
                    ignore_mismatched_sizes=True,  # they are reported, by name, below
                )
        except Exception as error:  # a bad value in config.json can fail anywhere in a constructor
            raise CheckpointError(f"{self.id} does not load into {cls.__name__}: {first_line(error)}") from error
        mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]]
        self.check_filled(info["missing_keys"], mismatched, "use a checkpoint saved from this class")
        self._add_generation(model)
        return model.eval(), sorted(info["unexpected_keys"])

    def _add_generation(self, model: Any) -> None:
        """Give a model its own generation settings: tokens to suppress, the longest output."""
        import transformers

        if not (model.can_generate() and (self.path / "generation_config.json").is_file()):
            return
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(self.path)
        except Exception as error:  # the file can be wrong in many ways
            raise CheckpointError(
                f"{self.id}: its generation_config.json cannot be used: {first_line(error)}"
            ) from None


def main_dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype of most weights, so that a checkpoint runs in the precision it was saved in."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


def blueprint(model: Any) -> nn.Module | None:
    """What Transformers builds from a model's configuration, on meta; None for a class that is not its own."""
    import transformers

    kind = type(model)
    if not isinstance(model, transformers.PreTrainedModel) or getattr(transformers, kind.__name__, None) is not kind:
        return None
    with torch.device("meta"), quiet_transformers():
        built: nn.Module = kind(copy.deepcopy(model.config))
    return built


def write_model(model: Any, tensors: dict[str, Tensor], directory: Path) -> None:
    """Write a model with the library's own names of files and tensors."""
    save = inspect.unwrap(type(model).save_pretrained)
    with quiet_transformers():
        try:
            save(model, directory, state_dict=tensors)
        except RuntimeError:  # tensors that the caller has tied, and the class does not: each gets its own copy
            save(model, directory, state_dict={key: tensor.clone() for key, tensor in tensors.items()})
