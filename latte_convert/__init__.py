"""Convert pretrained transformers into linear-attention hybrids without training.

``convert`` makes a hybrid, ``score`` measures how sensitive each attention layer is, ``save`` writes a hybrid as an
artifact, ``load`` reads one back, ``push`` uploads one to the Hub, ``evaluate`` measures one beside its original,
``export`` writes one as ONNX, ``verify`` checks one and ``restore`` takes the exact original out of it. ``is_hybrid``
tells a hybrid from an original; ``record_calls`` collects what a pipeline calls a model with, to convert it on.
Once this package is imported, Transformers' own ``from_pretrained`` and ``save_pretrained`` read and write hybrids.
Names are imported on first use, so that ``import latte_convert`` loads no heavy library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from latte_convert import compat

if TYPE_CHECKING:
    __version__: str

    from latte_convert.adapters.convert import is_hybrid
    from latte_convert.artifact.load import load
    from latte_convert.artifact.push import push
    from latte_convert.artifact.save import save
    from latte_convert.artifact.verify import restore, verify
    from latte_convert.conversion import Result, convert, score
    from latte_convert.data.ready import record_calls
    from latte_convert.errors import LatteError
    from latte_convert.evaluation.evaluate import evaluate
    from latte_convert.exporting.run import export
    from latte_convert.recipe import Recipe

__all__ = [
    "LatteError", "Recipe", "Result", "convert", "evaluate", "export", "is_hybrid", "load", "push",
    "record_calls", "restore", "save", "score", "verify",
]  # fmt: skip

_HOMES = {
    "LatteError": "errors",
    "Recipe": "recipe",
    "Result": "conversion",
    "convert": "conversion",
    "evaluate": "evaluation.evaluate",
    "export": "exporting.run",
    "is_hybrid": "adapters.convert",
    "load": "artifact.load",
    "push": "artifact.push",
    "record_calls": "data.ready",
    "restore": "artifact.verify",
    "save": "artifact.save",
    "score": "conversion",
    "verify": "artifact.verify",
}


# The libraries' own loading and saving know hybrids from here on; nothing is imported for it.
compat.when_imported("transformers.modeling_utils", "latte_convert.artifact.doors:open_doors")
for _savers in ("timm.models._hub", "open_clip.push_to_hf_hub"):
    compat.when_imported(_savers, "latte_convert.artifact.doors:open_savers")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from latte_convert.environment import tool_version

        return tool_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'latte_convert' has no attribute '{name}'")
    return getattr(import_module(f"latte_convert.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
