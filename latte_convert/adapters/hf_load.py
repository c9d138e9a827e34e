"""Load a Transformers checkpoint strictly, and prepare its inputs the way the checkpoint itself says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from latte_convert.adapters.source import Source
from latte_convert.errors import CheckpointError, nearest


def model_class(source: Source, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The class of a checkpoint, by its own ``architectures``, and its configuration.

    Returns:
        ``(class, config)``; no weight is read.

    Raises:
        CheckpointError: The type is unknown, or needs remote code that was not allowed.
    """
    import transformers

    if "auto_map" in source.config and not trust_remote_code:
        known = source.config.get("model_type") in transformers.CONFIG_MAPPING
        if not known:
            raise CheckpointError(
                f"{source.id} needs its own Python code to run. Read that code, then pass --trust-remote-code."
            )
    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError) as error:
        kind = source.config.get("model_type")
        if kind is None or kind not in transformers.CONFIG_MAPPING:
            raise CheckpointError(
                f"{source.id}: Transformers {transformers.__version__} does not know the model type {kind!r} "
                f"({nearest(str(kind), transformers.CONFIG_MAPPING.keys())})."
            ) from None
        raise CheckpointError(f"{source.id}: its configuration cannot be read: {error}") from None
    names = source.config.get("architectures") or []
    cls = getattr(transformers, names[0], None) if names else None
    if cls is None and trust_remote_code and names:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        reference = next((ref for ref in source.config["auto_map"].values() if ref.endswith(names[0])), None)
        cls = get_class_from_dynamic_module(reference, source.path) if reference else None
    if cls is None:
        try:
            cls = transformers.MODEL_MAPPING[type(config)]
        except KeyError:
            raise CheckpointError(f"{source.id}: Transformers has no model class for {names}.") from None
    return cls, config


def read_tensors(source: Source) -> dict[str, Tensor]:
    """All tensors of a checkpoint under their own keys; safetensors files are memory-mapped.

    Raises:
        CheckpointError: A file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for file in source.weights:
        tensors.update(_read_file(file))
    return tensors


def _read_file(file: Any) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or is not a weight file: {error}") from None
    except Exception as error:  # unpickling errors share no base class
        raise CheckpointError(f"{file} cannot be read with weights-only unpickling: {error}") from None


def instantiate(cls: Any, config: Any, tensors: dict[str, Tensor], *, origin: str) -> tuple[nn.Module, list[str]]:
    """Build the library's own class from tensors, strictly.

    Args:
        cls: A ``PreTrainedModel`` subclass.
        config: Its configuration.
        tensors: The checkpoint's tensors, under the checkpoint's keys.
        origin: Name of the checkpoint, for messages.

    Returns:
        The model in eval mode, and the keys it has no place for.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape; it would be random.
    """
    try:
        with quiet_transformers():
            model, info = cls.from_pretrained(
                None, config=config, state_dict=tensors, output_loading_info=True, dtype=_dtype(tensors),
                ignore_mismatched_sizes=True,  # they are reported, by name, below
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{origin} does not load into {cls.__name__}: {error}") from None
    missing = sorted(info["missing_keys"])
    mismatched = sorted(str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"])
    if missing or mismatched:
        raise CheckpointError(
            f"{origin} does not fill {cls.__name__}: "
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
