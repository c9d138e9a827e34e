"""``linear-probe``: logistic regression on frozen features."""

from __future__ import annotations

from typing import Any

from latte_convert.compat import require
from latte_convert.evaluation.tasks.probe import ProbeTask


class LinearProbeTask(ProbeTask):
    """Multinomial logistic regression (L2, scikit-learn's default strength) on standardised features."""

    name = "linear-probe"

    def classify(self, train: Any, targets: Any, test: Any) -> Any:
        """The most probable class."""
        linear, pipeline = require("sklearn.linear_model", "eval"), require("sklearn.pipeline", "eval")
        scaler = require("sklearn.preprocessing", "eval").StandardScaler()
        probe = pipeline.make_pipeline(scaler, linear.LogisticRegression(max_iter=5000))
        return probe.fit(train, targets).predict(test)
