"""What may be missing: optional libraries, and parts of a library that it does not promise to keep.

Such a part may go with any release. Each says in which release it was last seen and what happens without it. It is
looked up when it is used, so that importing this module imports no library.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte_convert.errors import CheckpointError, InputError, first_line

if TYPE_CHECKING:
    from torch import Tensor, nn


def require(module: str, extra: str) -> Any:
    """Import a module that only an optional extra of this package brings.

    Args:
        module: Its name, such as ``pycocotools.coco``.
        extra: The extra in ``pyproject.toml`` that has it.

    Raises:
        InputError: It is not installed, or cannot be imported; the message says how to get it.
    """
    library = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == library
        reason = "is not installed" if absent else f"cannot be imported ({first_line(error)})"
        raise InputError(f"this needs {library}, which {reason}: pip install 'latte-convert[{extra}]'.") from None


class Absent:
    """Stands in for a class that is gone: nothing is an instance of it."""


@dataclass(frozen=True)
class Part:
    """Something that a library does not promise to keep.

    Attributes:
        where: Module and dotted path in it, ``module:path``.
        checked: Release of the library in which it was last seen.
        without: What happens where it is gone.
    """

    where: str
    checked: str
    without: str

    def get(self) -> Any:
        """The part, or None where it is gone."""
        module, _, path = self.where.partition(":")
        try:
            found: Any = import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            return None
        return found

    def kind(self) -> Any:
        """The part, a class, for ``isinstance``."""
        return self.get() or Absent

    def require(self) -> Any:
        """The part.

        Raises:
            CheckpointError: It is gone.
        """
        found = self.get()
        if found is None:
            library = self.where.partition(":")[0].partition(".")[0]
            raise CheckpointError(
                f"this version of {library} has no {self.where.replace(':', '.')} any more: {self.without}. "
                f"Install the version of {library} that this was last checked with, {self.checked}."
            )
        return found


_TORCH, _TRANSFORMERS, _TIMM, _OPEN_CLIP = "2.14.1", "5.24.0", "1.0.31", "3.3.0"
_STAYS_EXACT = "such modules are not found and stay exact"

CPU_ATTENTION = Part(
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu", _TORCH,
    "near_far multiplies and normalises logits itself; a count of FLOPs leaves out the fused attention of a CPU",
)  # fmt: skip
TREE_MAP = Part("torch.utils._pytree:tree_map", _TORCH, "only lists, tuples and dictionaries are looked into")
DISPATCH_MODE = Part(
    "torch.utils._python_dispatch:TorchDispatchMode", _TORCH, "memory outside of CUDA cannot be metered"
)
DISPATCH_MODES = Part(
    "torch:_C._len_torch_dispatch_stack", _TORCH, "a count of FLOPs leaves out what runs in Triton on a GPU"
)
EXPORTING = Part(
    "torch.compiler:is_exporting",
    _TORCH,
    "exported loops over samples and blocks fit no other sizes than the example's",
)  # since 2.7
GRAPH_TASK = Part(
    "torch:_C._current_graph_task_id", _TORCH,
    "a recomputation under gradient checkpointing takes the size of the latest image for its own",
)  # fmt: skip

MASKS_OF_SDPA = Part("transformers.masking_utils:sdpa_mask", _TRANSFORMERS, "Transformers models cannot be converted")
GPT2_LINEAR = Part(
    "transformers.pytorch_utils:Conv1D", _TRANSFORMERS, "the output projection of GPT-2 and its kind is not found"
)
OUTPUTS_ASKED_FOR = Part(
    "transformers.utils.output_capturing:_active_collector", _TRANSFORMERS,
    "attention weights are computed only where a call passes output_attentions on to its layers",
)  # fmt: skip
MASK_LEFT_OUT = Part(
    "transformers.masking_utils:_ignore_bidirectional_mask_sdpa", _TRANSFORMERS,
    "an exported graph adds a mask that hides nothing to N² logits of every exact layer",
)  # fmt: skip
NORMALIZER = "transformers.models.whisper.english_normalizer"
ENGLISH = Part(f"{NORMALIZER}:EnglishTextNormalizer", _TRANSFORMERS, "word error rates cannot be computed")
OTHER_LANGUAGES = Part(f"{NORMALIZER}:BasicTextNormalizer", _TRANSFORMERS, "word error rates cannot be computed")

TIMM_CONFIG = Part(
    "timm.models._hub:save_config_for_hf", _TIMM, "a timm model that was given in memory cannot be written"
)
OPEN_CLIP_ATTENTION = Part("open_clip.transformer:Attention", _OPEN_CLIP, _STAYS_EXACT)
OPEN_CLIP_POOLER = Part("open_clip.transformer:AttentionalPooler", _OPEN_CLIP, _STAYS_EXACT)
OPEN_CLIP_DECODER = Part("open_clip.transformer:MultimodalTransformer", _OPEN_CLIP, _STAYS_EXACT)
OPEN_CLIP_TIMM = Part("open_clip.timm_model:TimmModel", _OPEN_CLIP, _STAYS_EXACT)
OPEN_CLIP_TEXT = Part("open_clip.hf_model:HFTextEncoder", _OPEN_CLIP, _STAYS_EXACT)
OPEN_CLIP_POOLS = tuple(
    Part(where, _OPEN_CLIP, _STAYS_EXACT)
    for where in (
        "open_clip.modified_resnet:AttentionPool2d",
        "open_clip.timm_model:AbsAttentionPool2d",
        "open_clip.timm_model:RotAttentionPool2d",
    )
)
OPEN_CLIP_RESIZE = Part("open_clip.model:resize_pos_embed", _OPEN_CLIP, "a tower runs at its own resolution only")
OPEN_CLIP_OLD_KEYS = Part(
    "open_clip.model:convert_to_custom_text_state_dict", _OPEN_CLIP, "checkpoints with a flat text tower do not load"
)
OPEN_CLIP_TRANSFORM = Part("open_clip.transform:image_transform_v2", _OPEN_CLIP, "images cannot be preprocessed")
OPEN_CLIP_SETTINGS = Part("open_clip.transform:PreprocessCfg", _OPEN_CLIP, "images cannot be preprocessed")
OPEN_CLIP_MERGE = Part("open_clip.transform:merge_preprocess_dict", _OPEN_CLIP, "images cannot be preprocessed")


def tree_map(function: Any, tree: Any) -> Any:
    """A copy of nested containers, dataclasses among them, with ``function`` applied to what they hold."""

    def visit(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return function(leaf)
        copied = copy.copy(leaf)
        for each in fields(leaf):
            object.__setattr__(copied, each.name, tree_map(function, getattr(leaf, each.name)))
        return copied

    mapping = TREE_MAP.get()
    if mapping is not None:
        return mapping(visit, tree)
    if isinstance(tree, Mapping):
        return type(tree)({key: tree_map(function, value) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, list | tuple):
        items = [tree_map(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return visit(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """What nested containers hold."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


def version(tensor: Tensor) -> int | None:
    """PyTorch's count of in-place changes of a tensor, ``Tensor._version``; None where it is not told.

    Checked in torch 2.14.1. Without it nothing is played back: ``selection.replay`` computes all blocks again; and the
    means of merged tokens are computed twice.
    """
    return None if tensor.is_inference() else getattr(tensor, "_version", None)


def compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` has been called.

    Checked in torch 2.14.1. Without it, sites in a compiled model count as never called.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


_IMPLEMENTATION = "_attn_implementation_internal"


def attention_implementation(config: Any) -> str | None:
    """The attention implementation that a Transformers config names.

    Checked in transformers 5.24.0. Without it, "eager" is what it is taken for.
    """
    found: str | None = getattr(config, _IMPLEMENTATION, None)
    return found


def set_attention_implementation(config: Any, name: str | None) -> None:
    """Name another implementation in this config alone: the public setter writes through to shared sub-configs.

    Raises:
        CheckpointError: The attribute is gone, so that nothing would read the name.
    """
    if not hasattr(config, _IMPLEMENTATION):
        raise CheckpointError(
            f"{type(config).__name__} of this version of transformers has no {_IMPLEMENTATION} any more: its models "
            f"cannot be converted. Install the version of transformers that this was last checked with, "
            f"{_TRANSFORMERS}."
        )
    setattr(config, _IMPLEMENTATION, name)


WRAPPED_FORWARD = "_old_forward"
"""Where the hooks of accelerate keep the forward that they wrap; checked in accelerate 1.15.0.

Without it, a module with such a hook has a forward that something else has replaced, and stays exact.
"""


def exchange(a: Path, b: Path) -> bool:
    """Exchange two paths in one step, by ``renameat2`` of the C library; False where that cannot be done.

    glibc has it since 2.28. Without it, ``artifact.files`` renames twice.
    """
    at_fdcwd, exchanged = -100, 2
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(rename(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), exchanged) == 0)


class _Watch(MetaPathFinder):
    """Finds one module like all others do, and calls a function of ours once it has been executed."""

    def __init__(self, name: str, then: str) -> None:
        self.name = name
        self.then = then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, with a loader that calls back."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _call(self.then, module)

            loader.exec_module = exec_module
        return spec


def when_imported(name: str, then: str) -> None:
    """Call a function with a module of another package: now if it is imported already, or once it is.

    Args:
        name: The module.
        then: ``module:function`` of ours, imported when it is called.
    """
    if name in sys.modules:
        _call(then, sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, then))


def _call(then: str, module: Any) -> None:
    """Call back; a library that has changed must not fail to import because of us."""
    home, _, function = then.partition(":")
    try:
        getattr(import_module(home), function)(module)
    except (ImportError, AttributeError, KeyError) as error:
        logging.getLogger("latte_convert").warning(
            "%s has changed, so that its own loading and saving do not know hybrids (%s): use latte_convert.load and "
            "latte_convert.save",
            module.__name__,
            error,
        )
