"""timm checkpoints: a ``config.json`` with an architecture and timm's own weights, local or from the Hub."""

from __future__ import annotations

import inspect
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from latte_convert import compat
from latte_convert.checkpoints.base import Checkpoint, check_patches
from latte_convert.checkpoints.hf import main_dtype
from latte_convert.checkpoints.weights import Place, download, is_hollow, read_config, weight_files
from latte_convert.compat import require
from latte_convert.data.pixels import pixels_by_transforms
from latte_convert.data.processor import Batch, Processor
from latte_convert.errors import CheckpointError, first_line, nearest

if TYPE_CHECKING:
    from latte_convert.data.samples import Modality, Sample

_DATA_CONFIG = ("input_size", "interpolation", "mean", "std", "crop_pct")
"""What timm's evaluation transform is made from; timm would fill gaps with ImageNet's values."""


PREFIX = ""
"""What timm puts before the names of its weight files."""


def open_folder(place: Place) -> TimmCheckpoint:
    """The timm checkpoint of a directory.

    Raises:
        CheckpointError: It has no usable weights or configuration.
        InputError: timm is not installed.
    """
    require("timm", "timm")
    return TimmCheckpoint(place, weight_files(place), read_config(place.path / "config.json"))


def open_named(name: str, revision: str | None, wanted: Place) -> TimmCheckpoint:
    """A model of timm, with or without a pretrained tag, such as ``vit_small_patch14_dinov2.lvd142m``, from the Hub.

    Raises:
        CheckpointError: timm has no such model or weights, or they cannot be fetched.
        InputError: timm is not installed.
    """
    require("timm", "timm")
    repo = _hub_id(name)
    try:
        path = download(repo, revision, wanted.allow_pickle)
    except CheckpointError as error:
        raise CheckpointError(
            f"{wanted.id}: {error} A folder written by timm.models.save_for_hf is read as timm:local-dir:PATH."
        ) from None
    return open_folder(wanted.at(path, wanted.id, revision=path.name))


def _hub_id(name: str) -> str:
    """The Hub repository of a model of timm."""
    import timm

    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        beginning = timm.list_models(f"{architecture}*")  # an unfinished name
        raise CheckpointError(
            f"timm {timm.__version__} has no model '{name}' ({nearest(name, beginning or timm.list_models())})."
        )
    tagged = timm.list_models(f"{architecture}.*", pretrained=True)
    if tag and name not in tagged:
        raise CheckpointError(f"timm {timm.__version__} has no weights '{name}' ({nearest(name, tagged)}).")
    repo = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
    if not repo:
        raise CheckpointError(
            f"timm has no weights on the Hub for '{name}' ({nearest(name, tagged)}). Give a folder written by "
            "timm.models.save_for_hf as timm:local-dir:PATH."
        )
    return str(repo)


class TimmCheckpoint(Checkpoint):
    """A timm checkpoint, configured by its ``config.json``."""

    library = "timm"

    @cached_property
    def model_class(self) -> str:
        """Name of the class that timm builds."""
        return type(self._skeleton()).__name__

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Images."""
        return ("image",)

    def processor(self, modality: Modality) -> TimmProcessor:
        """The library's own evaluation transform, made from the checkpoint's data configuration."""
        if modality != "image":
            raise CheckpointError(f"{self.id} is a timm model: it takes images, no {modality}.")
        return TimmProcessor(self.id, self._data_config())

    def image_processor(self, resolution: int) -> TimmProcessor:
        """The same transform for images of another size."""
        return TimmProcessor(self.id, self._data_config(), resolution)

    def _data_config(self) -> dict[str, Any]:
        # Old exports have one flat dictionary.
        given: dict[str, Any] = self.config.get("pretrained_cfg", self.config)
        missing = [key for key in _DATA_CONFIG if not isinstance(given, dict) or given.get(key) is None]
        if missing:
            raise CheckpointError(
                f"{self.id} has no usable data configuration, and guessing its preprocessing would be wrong: add "
                f"{', '.join(missing)} to pretrained_cfg in its config.json."
            )
        return given

    def _instantiate(self, tensors: dict[str, Tensor], resolution: int | None) -> tuple[nn.Module, list[str]]:
        """Build the timm class from tensors, strictly; see ``Checkpoint``.

        Tensors in another layout than timm's (DINOv2's or CLIP's own release) go through the architecture's own
        ``checkpoint_filter_fn``, as in ``timm.create_model``. Another resolution is set with ``resize_timm``.
        """
        model = self._start(tensors)
        if resolution is not None and not _fit(tensors, model.state_dict()):
            resize_timm(self.id, model, resolution)
            if _fit(tensors, model.state_dict()):
                resolution = None  # they were saved at that resolution
            else:
                model = self._start(tensors)
        if not _fit(tensors, model.state_dict()):
            tensors = self._filtered(tensors, model)
        unexpected = self.fill(model, tensors, "use a checkpoint saved from this architecture")
        if resolution is not None:
            resize_timm(self.id, model, resolution)
        return model.eval(), unexpected

    def _start(self, tensors: dict[str, Tensor]) -> nn.Module:
        """A model to fill: with random weights, or without any where the tensors are hollow."""
        if not any(map(is_hollow, tensors.values())):
            return self._create().to(main_dtype(tensors))
        with require("accelerate", "offload").init_empty_weights():  # buffers of no state dict keep their values
            return self._create().to(main_dtype(tensors))

    def _skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return self._create()

    def _create(self) -> nn.Module:
        """The timm model with random weights."""
        import timm

        architecture = self.config.get("architecture")
        if not isinstance(architecture, str) or not timm.is_model(architecture):
            raise CheckpointError(
                f"{self.id}: timm {timm.__version__} does not know the architecture {architecture!r} "
                f"({nearest(str(architecture), timm.list_models())})."
            )
        try:
            model: nn.Module = timm.create_model(f"local-dir:{self.path}", pretrained=False)
        except Exception as error:  # a bad value in config.json can fail anywhere in a constructor
            reason = first_line(error)
            raise CheckpointError(
                f"{self.id}: timm cannot build {architecture} from its config.json: {reason}"
            ) from None
        return model

    def _filtered(self, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        filter_fn = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if filter_fn is None:
            return tensors
        arguments = (dict(tensors), model)[: len(inspect.signature(filter_fn).parameters)]
        try:
            return dict(filter_fn(*arguments))
        except (KeyError, RuntimeError, ValueError, AttributeError):
            return tensors  # foreign tensors: their names are reported as they are


def resize_timm(identifier: str, model: nn.Module, resolution: int) -> None:
    """Make a timm model take images of another size, with timm's own interpolation of its positions.

    Args:
        identifier: What the user called the checkpoint, for messages.
        model: Filled with its tensors, at the resolution it was built for.
        resolution: Height and width of images in pixels.

    Raises:
        CheckpointError: timm has no way of running the architecture at that size.
    """
    network: Any = model
    if not hasattr(network, "set_input_size"):
        if network.default_cfg.get("fixed_input_size"):
            raise CheckpointError(
                f"{identifier}: timm runs {type(model).__name__} at its own resolution "
                f"{network.default_cfg['input_size'][-1]} only; leave out --resolution."
            )
        return  # any size goes through its forward
    patches: Any = getattr(network, "patch_embed", None)
    if hasattr(patches, "feat_ratio") and not getattr(patches, "dynamic_img_pad", False):
        check_patches(resolution, patches.feat_ratio())
    try:
        network.set_input_size(img_size=(resolution, resolution))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{identifier}: timm cannot set the resolution of {type(model).__name__} to {resolution}: {error}"
        ) from None


def blueprint(model: nn.Module) -> nn.Module | None:
    """What timm builds from a model's configuration, on meta; None for one that it did not make."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            return _configured(model, Path(directory))._skeleton()
        except (AttributeError, KeyError, TypeError, ValueError, CheckpointError):
            return None


def write_model(model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
    """Write a model as a checkpoint that ``resolve`` reads, with timm's own configuration."""
    from safetensors.torch import save_file

    _configured(model, directory)
    owned = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    save_file(owned, directory / "model.safetensors")


def _configured(model: nn.Module, directory: Path) -> TimmCheckpoint:
    """A checkpoint without weights that has the configuration of a model."""
    compat.TIMM_CONFIG.require()(model, str(directory / "config.json"))
    return TimmCheckpoint(Place("it", directory), (), read_config(directory / "config.json"))


def _fit(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(key in tensors and tensors[key].shape == tensor.shape for key, tensor in expected.items())


class TimmProcessor(Processor):
    """timm's evaluation transform.

    Args:
        identifier: What the user called the checkpoint, for messages.
        config: Its ``pretrained_cfg``.
        resolution: Height and width of images in pixels, instead of the checkpoint's own.

    Raises:
        CheckpointError: The model takes neither grey nor colour images, or timm refuses the configuration.
    """

    modality: Modality = "image"

    def __init__(self, identifier: str, config: dict[str, Any], resolution: int | None = None) -> None:
        from timm import data

        timm_data: Any = data
        super().__init__()
        try:
            settings = timm_data.resolve_data_config(pretrained_cfg=config)
            channels = int(settings["input_size"][0])
            if resolution is not None:
                settings["input_size"] = (channels, resolution, resolution)
            self.apply = timm_data.create_transform(**settings, is_training=False)
        except Exception as error:  # a bad value can fail anywhere in a transform
            raise CheckpointError(f"{identifier}: timm cannot use its data configuration: {error!r}") from None
        if channels not in (1, 3):
            raise CheckpointError(f"{identifier} takes images of {channels} channels; only grey and colour are read.")
        self._mode = "RGB" if channels == 3 else "L"

    def pixels(self, width: int, height: int) -> float:
        """Pixels of an image once it is resized."""
        return pixels_by_transforms(self.apply, width, height)

    def _prepare(self, sample: Sample, model: nn.Module) -> Batch:
        """The model's first argument, ``(1, channels, height, width)``."""
        image: Any = sample.value
        name = next(iter(inspect.signature(model.forward).parameters))
        return {name: self.apply(image.convert(self._mode)).unsqueeze(0)}
