"""Hybrids of DINOv2-S together with 8-bit weights: what each brings alone, what both do, and what they cost.

Rows: the original, with 8-bit weights by PyTorch's dynamic quantisation and by torchao; token merging to half, and
near_far in two thirds of the sites (unfitted, the middle ones stay exact), each as it is and with both. Images, timing
and table are those of ``compare_speed.py``.

    python scripts/composition.py --model ~/.cache/latte_convert/models/dinov2-small-saliency --sizes 518 1036 \
        --photos PHOTOS --json scripts/results/composition.json --markdown scripts/results/composition.md
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compare_speed import Way, int8, main
from torch import nn

from latte_convert.adapters.host import Host
from latte_convert.adapters.merging import merges_of
from latte_convert.kernels.registry import get_kernel
from latte_convert.selection.merging import schedule


def ways_of(model: nn.Module, _photos: Sequence[Path], _side: int, _options: Namespace) -> Iterator[Way]:
    """All rows."""
    quantised: dict[str, Callable[[nn.Module], nn.Module]] = {
        "": lambda module: module,
        ", 8-bit dynamic": int8,
        ", 8-bit weights (torchao)": torchao_int8,
    }
    for suffix, quantise in quantised.items():
        made = quantise(model)
        for name, changes in changes_of(model).items():
            yield Way(name + suffix, made, partial(Host.of(made).convert, changes), metered=not suffix)


def changes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By name: what becomes of the sites and blocks of the original."""
    host = Host.of(model)
    sites = host.sites()
    third = len(sites) // 3
    outer = sites[:third] + sites[-third:]
    return {
        "original": {},
        "merge to 50%": dict(merges_of(schedule(list(dict.fromkeys(host.block(site.name) for site in sites)), 0.5))),
        f"near_far on {len(outer)} sites": {
            site.name: get_kernel("near_far")(site.heads, site.head_dim) for site in outer
        },
    }


def torchao_int8(model: nn.Module) -> nn.Module:
    """Weights of linear layers in 8 bits, activations in float32."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    made = copy.deepcopy(model)
    quantize_(made, Int8WeightOnlyConfig())
    return made


if __name__ == "__main__":
    main(ways_of, "DINOv2-S with a hybrid, 8-bit weights, and both", __doc__, "composition.py")
