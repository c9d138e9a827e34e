"""Steps of a layer-local fit: each streams the calibration samples and then sets some parameters of a kernel."""

from __future__ import annotations

from latte_convert.kernels.fitting.descent import DescentStage
from latte_convert.kernels.fitting.grid import GridStage
from latte_convert.kernels.fitting.output import MapStage, OutputStage
from latte_convert.kernels.fitting.shift import ShiftStage
from latte_convert.kernels.fitting.stage import Stage

__all__ = ["DescentStage", "GridStage", "MapStage", "OutputStage", "ShiftStage", "Stage"]
