"""open_clip checkpoints: ``open_clip_config.json`` with weights beside it, local or on the Hub, or a pretrained tag."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from latte_convert import compat
from latte_convert.checkpoints.base import Checkpoint, check_patches
from latte_convert.checkpoints.open_clip_inputs import CONFIG, OpenClipProcessor, write_tag_config
from latte_convert.checkpoints.quiet import quiet_open_clip
from latte_convert.checkpoints.remote_code import ADVICE, remote_code, wants_code
from latte_convert.checkpoints.timm import resize_timm
from latte_convert.checkpoints.weights import OnDisk, Place, read_config, weight_files
from latte_convert.compat import require
from latte_convert.errors import CheckpointError, first_line, nearest

if TYPE_CHECKING:
    from latte_convert.data.samples import Modality

PREFIX = "open_clip_"
"""What open_clip puts before the names of its weight files."""
_POSITIONS = "visual.positional_embedding"
_SECTIONS = ("embed_dim", "vision_cfg", "text_cfg")


def open_folder(place: Place) -> OpenClipCheckpoint:
    """The open_clip checkpoint of a directory.

    Raises:
        CheckpointError: It has no usable weights or configuration.
        InputError: open_clip is not installed.
    """
    require("open_clip", "open-clip")
    path = place.path
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} has no {CONFIG}: it is not an open_clip checkpoint (push_to_hf_hub writes one).")
    config = read_config(path / CONFIG)
    model = config.get("model_cfg")
    if not isinstance(model, dict) or (missing := [key for key in _SECTIONS if key not in model]):
        named = ", ".join(missing if isinstance(model, dict) else _SECTIONS)
        raise CheckpointError(f"{path / CONFIG} says nothing of {named} in its model_cfg.")
    sections = {**{key: model[key] for key in _SECTIONS[1:]}, "preprocess_cfg": config.get("preprocess_cfg", {})}
    if odd := next((key for key, value in sections.items() if not isinstance(value, dict)), None):
        raise CheckpointError(f"{path / CONFIG}: {odd} is {sections[odd]!r:.50}, where a JSON object should be.")
    own = [*path.glob(f"{PREFIX}model*.safetensors"), *path.glob(f"{PREFIX}pytorch_model*.bin")]
    prefix = "" if not own and (path / "model.safetensors").is_file() else PREFIX
    return OpenClipCheckpoint(place, weight_files(place, prefix), config)


def open_named(name: str, revision: str | None, wanted: Place) -> OpenClipCheckpoint:
    """A pretrained tag, ``ARCH/TAG`` as in ``open_clip.list_pretrained()``, such as ``ViT-B-32/laion2b_s34b_b79k``.

    Its configuration, which comes from the library, lies in a temporary directory meanwhile.

    Raises:
        CheckpointError: open_clip has no such model or weights, or they cannot be fetched.
        InputError: open_clip is not installed.
    """
    require("open_clip", "open-clip")
    import open_clip
    from open_clip import pretrained

    architecture, _, tag = name.partition("/")
    model = open_clip.get_model_config(architecture) if ":" not in architecture else None
    if model is None:
        raise CheckpointError(
            f"open_clip {open_clip.__version__} has no model '{architecture}' "
            f"({nearest(architecture, open_clip.list_models())}). Give open_clip:ARCH/TAG, open_clip:hf-hub:OWNER/NAME "
            "or open_clip:local-dir:PATH."
        )
    tags = open_clip.list_pretrained_tags_by_model(architecture)
    settings = pretrained.get_pretrained_cfg(architecture, tag)
    if not settings:
        raise CheckpointError(f"open_clip has no weights '{tag}' for {architecture}; its tags: {', '.join(tags)}.")
    if revision is not None:
        repo = str(settings.get("hf_hub") or "OWNER/NAME").rstrip("/")
        raise CheckpointError(
            f"open_clip says itself where the weights of {wanted.id} are, so --revision has no meaning for it: give "
            f"open_clip:hf-hub:{repo}@{revision}."
        )
    try:
        with quiet_open_clip():
            file = Path(pretrained.download_pretrained(settings))
    except Exception as error:  # urllib's, the Hub client's and open_clip's own errors share no base class
        reason = first_line(error)
        raise CheckpointError(
            f"the weights of {wanted.id} are not in the local cache and cannot be fetched (offline?): {reason} "
            f"Tags of {architecture}: {', '.join(tags)}. A folder with {CONFIG} is read as open_clip:local-dir:PATH."
        ) from None
    if settings.get("quick_gelu"):
        model["quick_gelu"] = True  # the tag was trained with it; open_clip only warns
    path = Path(tempfile.mkdtemp(prefix="open_clip-"))
    commit = file.parent.name if file.parent.parent.name == "snapshots" else None  # in the Hub's cache
    place = wanted.at(path, wanted.id, file=file, revision=commit)
    try:
        checkpoint = OpenClipCheckpoint(
            place, weight_files(place), write_tag_config(architecture, model, settings, path)
        )
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    weakref.finalize(checkpoint, shutil.rmtree, path, ignore_errors=True)
    return checkpoint


class OpenClipCheckpoint(Checkpoint):
    """An open_clip checkpoint, configured by its ``open_clip_config.json``.

    ``processor("image").apply`` is open_clip's evaluation transform, ``processor("text").apply`` its tokenizer, also
    those of an artifact: ``resolve(directory).processor("image").apply``.
    """

    library = "open_clip"
    weights_stem = f"{PREFIX}model"

    @property
    def model_class(self) -> str:
        """Name of the class that open_clip builds for the configuration."""
        model = self.config["model_cfg"]
        if not (model.get("custom_text") or "hf_model_name" in model["text_cfg"]):
            return "CLIP"
        return "CoCa" if "multimodal_cfg" in model else "CustomTextCLIP"

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Images and texts."""
        return ("image", "text")

    def processor(self, modality: Modality) -> OpenClipProcessor:
        """open_clip's own evaluation transform or tokenizer, by the checkpoint's configuration."""
        if modality not in self.modalities:
            raise CheckpointError(f"{self.id} is an open_clip model: it takes images and texts, no {modality}.")
        return OpenClipProcessor(self.id, self.path, self.config, modality, self.trust_remote_code)

    def image_processor(self, resolution: int) -> OpenClipProcessor:
        """open_clip's own evaluation transform for images of another size."""
        model = self.config["model_cfg"]
        vision = {**model["vision_cfg"], "image_size": resolution}
        config = {**self.config, "model_cfg": {**model, "vision_cfg": vision}}
        return OpenClipProcessor(self.id, self.path, config, "image")

    def on_disk(self) -> OnDisk:
        """Refused: open_clip builds its models in memory."""
        raise CheckpointError(f"{self.id}: open_clip builds its models in memory; leave out --offload.")

    def _instantiate(self, tensors: dict[str, Tensor], resolution: int | None) -> tuple[nn.Module, list[str]]:
        """Build the open_clip class from tensors, strictly; see ``Checkpoint``.

        One dtype throughout is kept; mixed ones become float32, in which open_clip loads by default.
        """
        from open_clip import set_model_preprocess_cfg

        model = self._create().to(_dtype(tensors))
        tensors = _fit(tensors, model.state_dict())
        if resolution is not None and not _same_shapes(tensors, model.state_dict()):
            model, resolution = self._resized(model, resolution), None  # they were saved at that resolution
        unexpected = self.fill(model, tensors, f"use weights that {CONFIG} describes")
        if resolution is not None:
            model = self._resized(model, resolution)
        given = {**self.config.get("preprocess_cfg", {}), "size": model.visual.image_size}
        set_model_preprocess_cfg(model, {**model.visual.preprocess_cfg, **given})
        return model.eval(), unexpected

    def _skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return cast(nn.Module, self._create(device="meta"))

    def _create(self, resolution: int | None = None, device: str = "cpu") -> Any:
        """The open_clip model with random weights."""
        import open_clip

        try:
            with quiet_open_clip(), remote_code(self.trust_remote_code):
                return open_clip.create_model(
                    f"local-dir:{self.path}",
                    load_weights=False,
                    pretrained_text=False,
                    force_image_size=resolution,
                    device=device,
                )
        except Exception as error:  # a bad value in its configuration can fail anywhere in a constructor
            reason = f"it comes as Python code: {ADVICE}" if wants_code(error) else first_line(error)
            raise CheckpointError(f"{self.id}: open_clip cannot build {self.model_class}: {reason}") from None

    def _resized(self, model: Any, resolution: int) -> Any:
        """A model for images of another size, with the libraries' own interpolation of its positions."""
        if isinstance(model.visual, compat.OPEN_CLIP_TIMM.kind()):
            resize_timm(self.id, model.visual.trunk, resolution)
            model.visual.image_size = (resolution, resolution)
            return model
        state = model.state_dict()
        if _POSITIONS not in state:
            raise CheckpointError(
                f"{self.id}: open_clip runs {type(model.visual).__name__} at its own resolution "
                f"{model.visual.image_size} only; leave out --resolution."
            )
        check_patches(resolution, max(model.visual.patch_size))
        resized = self._create(resolution).to(state[_POSITIONS].dtype)
        state[_POSITIONS] = state[_POSITIONS].float()  # there is no bicubic kernel for float16 on CPUs
        with quiet_open_clip():
            compat.OPEN_CLIP_RESIZE.require()(state, resized)
        resized.load_state_dict(state)
        return resized


def _fit(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under today's keys: older checkpoints keep a custom text tower flat, and scalars in vectors."""
    if "positional_embedding" not in expected:
        tensors = compat.OPEN_CLIP_OLD_KEYS.require()(tensors)
    return {
        key: tensor.reshape(expected[key].shape)
        if key in expected and tensor.numel() == expected[key].numel() == 1
        else tensor
        for key, tensor in tensors.items()
    }


def _same_shapes(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(tensors[key].shape == expected[key].shape for key in tensors.keys() & expected.keys())


def _dtype(tensors: dict[str, Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
