"""Frozen features of a vision backbone, of whichever library: one vector an image, or its tokens on their grid."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from latte_convert.data.feed import Inputs, run
from latte_convert.errors import CheckpointError

if TYPE_CHECKING:
    from latte_convert.checkpoints.base import Checkpoint

_BACKBONES = ("Model", "ModelWithProjection", "ForImageClassification", "ForImageClassificationWithTeacher", "Backbone")
_DETECTORS = ("Detr", "DFine", "Yolos")


def no_image_features(source: Checkpoint) -> str | None:
    """Why a model has no vector that stands for an image, or None."""
    if "image" not in source.modalities:
        return f"it takes {' and '.join(source.modalities)}, not images"
    name = source.model_class
    if source.library == "transformers" and (not name.endswith(_BACKBONES) or any(d in name for d in _DETECTORS)):
        return "it is no backbone with features of whole images"
    return None


def image_features(model: nn.Module, inputs: Inputs) -> Tensor:
    """One vector an image, ``(B, D)`` in float32 on the CPU: what a probe is trained on.

    The projected embedding of a two-tower model; timm's features before the head; else the CLS token after the last
    norm, the pooled output where there is none, and the mean of all tokens where there is no pooling either.
    """
    if inputs.method != "forward":
        output = run(model, inputs)
        return _host(output if isinstance(output, Tensor) else output.pooler_output)
    if _is_timm(model):
        with torch.no_grad():
            timm_model: Any = model
            tokens = timm_model.forward_features(*inputs.kwargs.values())
            return _host(timm_model.forward_head(tokens, pre_logits=True))
    output = _backbone_output(model, inputs)
    tokens = output.last_hidden_state
    if prefix_tokens(model) and tokens.dim() == 3:
        return _host(tokens[:, 0])
    pooled = getattr(output, "pooler_output", None)
    if isinstance(pooled, Tensor):
        return _host(pooled.flatten(1))
    return _host(tokens.mean(1) if tokens.dim() == 3 else tokens.flatten(2).mean(2))


def image_tokens(model: nn.Module, inputs: Inputs) -> tuple[Tensor, int]:
    """All tokens after the last norm, ``(B, N, D)`` in float32 on the CPU, and how many of them are no patches.

    Raises:
        CheckpointError: The backbone's last output is no sequence of tokens.
    """
    if _is_timm(model):
        timm_model: Any = model
        with torch.no_grad():
            tokens = timm_model.forward_features(*inputs.kwargs.values())
    elif inputs.method != "forward":
        vision = getattr(model, "vision_model", None)
        if vision is None:
            raise CheckpointError(f"{type(model).__name__} does not return the patch tokens of its vision tower.")
        tokens = run(vision, Inputs(_taken(vision, inputs))).last_hidden_state
    else:
        tokens = _backbone_output(model, inputs).last_hidden_state
    if tokens.dim() != 3:
        raise CheckpointError(f"{type(model).__name__} gives features of shape {tuple(tokens.shape)}, no tokens.")
    return _host(tokens), prefix_tokens(model)


def prefix_tokens(model: nn.Module) -> int:
    """CLS and register tokens before the patches of a model's vision tower; 0 where there are none."""
    if _is_timm(model):
        return int(getattr(model, "num_prefix_tokens", 0))
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return 0
    from latte_convert.adapters import hf_roles, hf_sites

    # Described one by one: the first vision site will do.
    sites = (hf_sites.describe(model, name, module) for name, module in hf_sites.attention_modules(model))
    prefixes = (hf_roles.image_tokens(model, site)[1] for site in sites if site.tower == "vision")
    return next((prefix for prefix in prefixes if prefix is not None), 0)


def _backbone_output(model: nn.Module, inputs: Inputs) -> Any:
    """Output of a Transformers model without its head."""
    backbone = getattr(model, "base_model", model)
    return run(backbone, Inputs(_taken(backbone, inputs)))


def _taken(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    parameters = signature(model.forward).parameters
    return {key: value for key, value in inputs.kwargs.items() if key in parameters}


def _is_timm(model: nn.Module) -> bool:
    return type(model).__module__.startswith("timm.")


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()
