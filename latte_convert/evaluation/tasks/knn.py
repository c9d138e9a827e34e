"""``knn``: weighted nearest neighbours on frozen features."""

from __future__ import annotations

from typing import Any

import numpy as np

from latte_convert.compat import require
from latte_convert.evaluation.tasks.probe import ProbeTask

NEIGHBOURS, TEMPERATURE = 20, 0.07


class KnnTask(ProbeTask):
    """DINO's protocol (Caron et al., ICCV 2021): 20 neighbours by cosine, with votes of ``exp(cosine / 0.07)``."""

    name = "knn"

    def classify(self, train: Any, targets: Any, test: Any) -> Any:
        """The class with most votes."""
        neighbors = require("sklearn.neighbors", "eval")
        classifier = neighbors.KNeighborsClassifier(min(NEIGHBOURS, len(train)), metric="cosine", weights=_votes)
        return classifier.fit(train, targets).predict(test)


def _votes(distances: Any) -> Any:
    """``exp((cosine - 1) / T)``, which is in proportion to ``exp(cosine / T)``."""
    return np.exp(-np.asarray(distances) / TEMPERATURE)
