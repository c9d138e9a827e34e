"""What becomes of every architecture of transformers and timm: its attention found, listed with a reason, or refused.

Models are built on PyTorch's meta device, from their default configuration with few layers: no weight takes memory, and
no forward pass runs. So this says what the adapters make of a model's code; that what they find computes the same is
for the tests to say, on small models. Run it with a part of a name to look at some: ``sweep_models.py qwen --list``.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from latte_convert.adapters.host import Host
from latte_convert.errors import LatteError, first_line

LAYERS = 4
"""Most layers that a model is built with."""
_LAYERS = re.compile(r"(^|_)(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth)$")

ACCEPTED, LISTED, NO_ATTENTION = "accepted", "listed with a reason", "no attention"
REFUSED, NOT_BUILT, FAILED = "refused with a sentence", "not built by its library", "TRACEBACK"


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    Attributes:
        library: Its library.
        name: What the library calls it.
        kind: One of the outcomes above.
        detail: Towers that can be converted, reasons, or what was raised.
    """

    library: str
    name: str
    kind: str
    detail: str = ""


def sweep(pattern: str = "") -> Iterator[Outcome]:
    """The outcome of every architecture whose name has ``pattern`` in it."""
    for library, builders in (("transformers", _transformers()), ("timm", _timm())):
        for name, build in builders:
            if pattern in name:
                yield outcome(library, name, build)


def outcome(library: str, name: str, build: Callable[[], nn.Module | None]) -> Outcome:
    """Build one model and look for its attention."""
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:  # whatever a default configuration lacks
        return Outcome(library, name, NOT_BUILT, f"{type(error).__name__}: {first_line(error)}")
    if model is None:
        return Outcome(library, name, NOT_BUILT, "no class of its own")
    try:
        sites = Host.of(model).sites()
    except LatteError as error:
        return Outcome(library, name, REFUSED, first_line(error))
    except Exception:
        return Outcome(library, name, FAILED, traceback.format_exc())
    if not sites:
        return Outcome(library, name, NO_ATTENTION)
    free = dict.fromkeys(f"{site.tower} {site.kind}{' (causal)' * site.causal}" for site in sites if site.eligible)
    reasons = dict.fromkeys(str(site.reason) for site in sites if not site.eligible)
    return Outcome(library, name, ACCEPTED if free else LISTED, ", ".join(free) or "; ".join(reasons))


def _transformers() -> Iterator[tuple[str, Callable[[], nn.Module | None]]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    def build(name: str) -> nn.Module | None:
        config: Any = CONFIG_MAPPING[name]()
        _shorten(config)
        if type(config) not in MODEL_MAPPING:
            return None
        kinds: Any = MODEL_MAPPING[type(config)]
        model: nn.Module = (kinds[0] if isinstance(kinds, tuple | list) else kinds)(config)
        return model

    for name in sorted(CONFIG_MAPPING):
        yield name, lambda name=name: build(name)  # type: ignore[misc]


def _shorten(config: Any) -> None:
    """Give a configuration, and those inside it, few layers."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _shorten(value)
        elif _LAYERS.search(key) and isinstance(value, int) and value > LAYERS:
            setattr(config, key, LAYERS)
    kinds = vars(config).get("layer_types")
    if isinstance(kinds, list):
        config.layer_types = kinds[: getattr(config, "num_hidden_layers", None) or len(kinds)]


def _timm() -> Iterator[tuple[str, Callable[[], nn.Module | None]]]:
    """The first architecture of each family of timm: what a file of it calls alike up to its first digit or size."""
    import timm

    families: dict[tuple[str, str], str] = {}
    for name in timm.list_models():
        family = re.split(r"[\d_]", name)[0]
        families.setdefault((timm.models._registry._model_to_module[name], family), name)
    for name in sorted(families.values()):
        yield name, lambda name=name: timm.create_model(name)  # type: ignore[misc]


def main(arguments: list[str] | None = None) -> int:
    """Print the counts; 1 where anything but a sentence came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="only architectures with this in their name")
    parser.add_argument("--list", action="store_true", help="a line for each architecture")
    options = parser.parse_args(arguments)
    counts: Counter[tuple[str, str]] = Counter()
    for found in sweep(options.pattern):
        counts[found.library, found.kind] += 1
        if options.list or found.kind == FAILED:
            print(f"{found.library:<13} {found.name:<45} {found.kind}: {found.detail}")
    for (library, kind), number in sorted(counts.items()):
        print(f"{number:>5}  {library}: {kind}")
    return int(any(kind == FAILED for _, kind in counts))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main())
