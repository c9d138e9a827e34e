"""What becomes of every architecture of transformers, timm and open_clip: its attention found, listed, or refused.

Models are built on PyTorch's meta device, from their default configuration with few layers: no weight takes memory, and
no forward pass runs. So this says what the adapters make of a model's code. With ``--run`` those of at most
``PARAMETERS`` get random weights and plain inputs, and run as they are and with the attention of every site computed
from what its adapter hands over: both must give the same. Run it with a part of a name to look at some:
``sweep_models.py qwen --list``.
"""

from __future__ import annotations

import argparse
import copy
import logging
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from latte_convert.adapters.host import Host
from latte_convert.attention import SiteCall
from latte_convert.errors import LatteError, first_line
from latte_convert.kernels.softmax import softmax_attention
from latte_convert.measuring.outputs import named_outputs

LAYERS = 4
"""Most layers that a model is built with."""
PARAMETERS = 50_000_000
"""Most parameters of a model that is run."""
TOLERANCE = 1e-3
"""Largest difference of outputs, relative to their largest value, that rounding explains."""
_LAYERS = re.compile(r"(^|_)(num_hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth)$")

ACCEPTED, LISTED, NO_ATTENTION = "accepted", "listed with a reason", "no attention"
REFUSED, NOT_BUILT, FAILED = "refused with a sentence", "not built by its library", "TRACEBACK"
SAME, DIFFERENT, NOT_RUN = "runs the same", "DIFFERENT", "not run"


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    Attributes:
        library: Its library.
        name: What the library calls it.
        kind: One of the outcomes above.
        detail: Towers that can be converted, reasons, or what was raised.
        ran: What became of a run, where there was one.
    """

    library: str
    name: str
    kind: str
    detail: str = ""
    ran: str = ""


Builders = Iterator[tuple[str, Callable[[], nn.Module | None]]]


def sweep(pattern: str = "", run: bool = False) -> Iterator[Outcome]:
    """The outcome of every architecture whose name has ``pattern`` in it."""
    for library, builders in LIBRARIES.items():
        for name, build in builders():
            if pattern in name:
                found = outcome(library, name, build)
                yield replace(found, ran=ran(build)) if run and found.kind == ACCEPTED else found


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


@torch.no_grad()
def ran(build: Callable[[], nn.Module | None]) -> str:
    """Whether a model computes the same with the attention of its sites computed from what is handed over."""
    with torch.device("meta"):
        model: Any = build()
    if sum(parameter.numel() for parameter in model.parameters()) > PARAMETERS:
        return f"{NOT_RUN}: more than {PARAMETERS // 10**6} million parameters"
    torch.manual_seed(0)
    try:
        model = build()
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():  # so that attention weighs in the output
                parameter.normal_(0, parameter[0].numel() ** -0.5)
        inputs = _inputs(model.eval())
        expected, again = (dict(named_outputs(model(**inputs))) for _ in range(2))
    except Exception as error:  # whatever plain inputs lack
        return f"{NOT_RUN}: {type(error).__name__}: {first_line(error)}"
    if not expected or not all(torch.equal(expected[name], again[name]) for name in expected):
        return f"{NOT_RUN}: no output that is finite and the same twice"
    return _compared(model, inputs, expected)


def _compared(model: nn.Module, inputs: dict[str, Any], expected: dict[str, torch.Tensor]) -> str:
    """What a model gives with softmax on every call that its adapter hands over, against what it gives by itself."""
    host, called = Host.of(model), set()

    def exact(call: SiteCall) -> torch.Tensor | None:
        if call.obstacle is not None:  # the first real call tells, and the site stays exact
            return None
        called.add(call.module)
        return softmax_attention(call)

    try:
        with host.watch({site.name: exact for site in host.sites() if site.eligible}):
            found = dict(named_outputs(model(**inputs)))
    except Exception:
        return f"{FAILED}: {traceback.format_exc()}"
    if not called:
        return f"{NOT_RUN}: its calls have obstacles, or there are none"
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs().max() / tensor.abs().max()
        if difference > TOLERANCE:
            return f"{DIFFERENT}: {name} by {difference:.1e}"
    return SAME


def _inputs(model: Any) -> dict[str, Any]:
    """Plain inputs for a model: an image, a text, a sound, by what it says it takes."""
    cfg = getattr(model, "pretrained_cfg", None)
    if cfg is not None:
        return {"x": torch.randn(1, *cfg["input_size"])}
    if hasattr(model, "visual"):
        sides = model.visual.image_size
        size = sides if isinstance(sides, tuple | list) else (sides, sides)
        length = getattr(model, "context_length", None) or model.text.context_length
        return {"image": torch.randn(1, 3, *size), "text": torch.randint(1, 99, (1, length))}
    main, config = model.main_input_name, model.config
    if main == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        size = tuple(side) if isinstance(side, tuple | list) else (side, side)
        return {main: torch.randn(1, getattr(config, "num_channels", None) or 3, *size)}
    if main == "input_values":
        return {main: torch.randn(1, 16000)}
    ids = {"input_ids": torch.randint(5, 90, (1, 32))}
    return {**ids, "decoder_input_ids": torch.randint(5, 90, (1, 16))} if config.is_encoder_decoder else ids


def _transformers() -> Builders:
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


def _timm() -> Builders:
    """The first architecture of each family of timm: what a file of it calls alike up to its first digit or size."""
    import timm

    families: dict[tuple[str, str], str] = {}
    for name in timm.list_models():
        family = re.split(r"[\d_]", name)[0]
        families.setdefault((timm.models._registry._model_to_module[name], family), name)
    for name in sorted(families.values()):
        yield name, lambda name=name: timm.create_model(name)  # type: ignore[misc]


def _open_clip() -> Builders:
    """Every architecture of open_clip, its own towers narrow; a text model of the Hub is of its family's defaults."""
    import open_clip

    def build(name: str) -> nn.Module:
        config = copy.deepcopy(open_clip.get_model_config(name))
        for key, part in config.items():
            if isinstance(part, dict) and isinstance(part.get("layers"), int):
                narrow = {"head_width": 16} if key == "vision_cfg" else {"heads": 4}
                part.update({"layers": min(part["layers"], LAYERS), "width": 64, **narrow})
        of_hub = config["text_cfg"].get("hf_model_name")
        custom = config.pop("custom_text", False) or of_hub
        kind: Any = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CLIP
        with TemporaryDirectory() as folder:
            if of_hub:
                config["text_cfg"].update(hf_model_name=folder, hf_model_pretrained=False)
                _defaults(next(family for family in _FAMILIES if family in of_hub)).save_pretrained(folder)
            return (open_clip.CustomTextCLIP if custom and kind is open_clip.CLIP else kind)(**config)  # type: ignore[no-any-return]

    for name in open_clip.list_models():
        yield name, lambda name=name: build(name)  # type: ignore[misc]


_FAMILIES = {"xlm-roberta": "xlm-roberta", "roberta": "roberta", "mt5": "mt5", "nllb": "m2m_100"}


def _defaults(family: str) -> Any:
    """The configuration of a text model, by what the Hub calls its family, with few layers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[_FAMILIES[family]]()
    _shorten(config)
    return config


LIBRARIES: dict[str, Callable[[], Builders]] = {
    "transformers": _transformers,
    "timm": _timm,
    "open_clip": _open_clip,
}


def main(arguments: list[str] | None = None) -> int:
    """Print the counts; 1 where anything but a sentence came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="only architectures with this in their name")
    parser.add_argument("--list", action="store_true", help="a line for each architecture")
    parser.add_argument("--run", action="store_true", help="run what is not too large, too: some minutes")
    options = parser.parse_args(arguments)
    counts: Counter[tuple[str, str]] = Counter()
    for found in sweep(options.pattern, options.run):
        kinds = [found.kind, *filter(None, [found.ran.partition(":")[0]])]
        counts.update((found.library, kind) for kind in kinds)
        if options.list or not {FAILED, DIFFERENT}.isdisjoint(kinds):
            print(f"{found.library:<13} {found.name:<45} {found.kind}: {found.detail} {found.ran}", flush=True)
    for (library, kind), number in sorted(counts.items()):
        print(f"{number:>5}  {library}: {kind}")
    return int(any(kind in (FAILED, DIFFERENT) for _, kind in counts))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.exit(main())
