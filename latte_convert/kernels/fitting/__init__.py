"""Steps of a layer-local fit: each streams the calibration samples and then sets some parameters of a kernel."""

from __future__ import annotations

from latte_convert.kernels.fitting.stage import Stage

__all__ = ["Stage"]
