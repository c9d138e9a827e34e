"""``linear-probe``: logistic regression on frozen features."""

from __future__ import annotations

from typing import Any

from latte_convert.evaluation.extra import need
from latte_convert.evaluation.tasks.probe import ProbeTask


class LinearProbeTask(ProbeTask):
    """Multinomial logistic regression (L2, scikit-learn's default strength) on standardised features."""

    name = "linear-probe"

    def classify(self, train: Any, targets: Any, test: Any) -> Any:
        """The most probable class."""
        linear, pipeline = need("sklearn.linear_model"), need("sklearn.pipeline")
        scaler = need("sklearn.preprocessing").StandardScaler()
        probe = pipeline.make_pipeline(scaler, linear.LogisticRegression(max_iter=5000))
        return probe.fit(train, targets).predict(test)
