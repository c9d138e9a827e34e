"""``sts``: semantic textual similarity, rank correlation of cosines with human scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from latte_convert.checkpoints.weights import read_config
from latte_convert.compat import require
from latte_convert.data.choice import choose
from latte_convert.data.columns import cell, find_column, text_cell
from latte_convert.data.examples import Example, text_loader
from latte_convert.data.feed import Inputs, run
from latte_convert.data.tables import open_table
from latte_convert.errors import CheckpointError, DataError
from latte_convert.evaluation.tasks.base import Metric, Task, require_two

if TYPE_CHECKING:
    from torch import nn

    from latte_convert.checkpoints.base import Checkpoint

_FIRST = ("s1", "sentence1", "sentence_1", "text1")
_SECOND = ("s2", "sentence2", "sentence_2", "text2")
_SCORE = ("score", "label", "similarity", "similarity_score")
ROUNDING = 1e-6
"""Cosines that differ by less are the same: embeddings are float32."""

_POOLING = "1_Pooling/config.json"
_BENCHMARK = ("genre", "file", "year", "id", "score", "s1", "s2")
"""Columns of the STS benchmark's own files, which have no header; sources of the sentences may follow."""


class StsTask(Task):
    """Embeds every sentence once, as sentence-transformers does: the pooling its ``1_Pooling`` names, or the mean.

    Data: a ``.csv``, ``.tsv``, ``.jsonl`` or ``.parquet`` file with columns ``s1``, ``s2`` and ``score``; a csv of
    these three without a header; or a file of the STS benchmark (tabs, seven columns or more, no header).
    """

    name = "sts"
    metrics = (Metric("spearman"), Metric("pearson"))

    @staticmethod
    def fits(source: Checkpoint) -> str | None:
        """It must turn texts into vectors."""
        if "text" not in source.modalities:
            return f"it takes {' and '.join(source.modalities)}, not text"
        name = source.model_class
        if len(source.modalities) == 1 and not name.endswith(("Model", "ForMaskedLM", "ModelWithProjection")):
            return "it is no encoder of sentences"
        return None

    def open(self) -> list[Example]:
        """One example a sentence, however many pairs it is in."""
        pairs = list(_pairs(self.setting.place))
        self._pairs = choose(pairs, self.setting.samples, self.setting.seed, lambda pair: pair[0])
        require_two(len(self._pairs), str(self.setting.place))
        self._pooling = _pooling(self.setting.source)
        sentences: dict[str, str] = {}
        for where, first, second, _ in self._pairs:
            sentences.setdefault(first, where)
            sentences.setdefault(second, where)
        # By length, so that more of them share a batch without padding.
        ordered = sorted(sentences.items(), key=lambda item: len(item[0].split()))
        return [Example(where, "text", text_loader(text), text) for text, where in ordered]

    def predict(self, model: nn.Module, inputs: Inputs, examples: Sequence[Example]) -> list[Any]:
        """Sentence embeddings of length 1, ``(D,)`` each."""
        if inputs.method != "forward":
            output = run(model, inputs)
            pooled: Tensor = output if isinstance(output, Tensor) else output.pooler_output
        else:
            encoder = getattr(model, "base_model", model)
            taken = signature(encoder.forward).parameters
            tokens = run(encoder, Inputs({k: v for k, v in inputs.kwargs.items() if k in taken})).last_hidden_state
            # No padding: only texts of equal length share a batch.
            pooled = tokens[:, 0] if self._pooling == "cls" else tokens.float().mean(1)
        pooled = pooled.float()
        return list((pooled / pooled.norm(dim=-1, keepdim=True).clamp_min(1e-12)).cpu().numpy())

    def records(self, examples: Sequence[Example], predictions: Sequence[Any]) -> Any:
        """Cosine and human score of every pair, ``(pairs, 2)``."""
        vectors = {example.target: vector for example, vector in zip(examples, predictions, strict=True)}
        return np.array([(vectors[a] @ vectors[b], score) for _, a, b, score in self._pairs], dtype=np.float64)

    def score(self, records: Sequence[Any]) -> dict[str, float]:
        """Spearman and Pearson correlation; NaN where one side is constant."""
        cosines, scores = np.asarray(records).T
        if np.ptp(cosines) < ROUNDING or np.ptp(scores) == 0:
            return {"spearman": math.nan, "pearson": math.nan}
        stats = require("scipy.stats", "eval")
        return {
            "spearman": float(stats.spearmanr(cosines, scores).statistic),
            "pearson": float(np.corrcoef(cosines, scores)[0, 1]),
        }


def _pooling(source: Checkpoint) -> str:
    """``mean`` or ``cls``, as the checkpoint says.

    Raises:
        CheckpointError: It pools in another way.
    """
    path = source.path / _POOLING
    if not path.is_file():
        return "mean"
    config = read_config(path)
    modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if on is True and "pooling_mode_" in key]
    mode = {"mean_tokens": "mean", "cls_token": "cls"}.get(" and ".join(modes))
    if mode is None:
        raise CheckpointError(
            f"{path}: pooling {' and '.join(modes) or 'of no kind'} is not supported: mean or cls is."
        )
    return mode


def _pairs(path: Path) -> Iterator[tuple[str, str, str, float]]:
    """``FILE:LINE``, the two sentences and the score of every row."""
    for where, row in open_table(path, headless=_headless, marks="\t").rows():
        first, second = (text_cell(row, names, where) for names in (_FIRST, _SECOND))
        value = cell(row, _SCORE, where)
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            score = math.nan
        if not math.isfinite(score):
            raise DataError(f"{where}: the score {value!r} is not a number.")
        yield where, first, second, score


def _headless(first: list[str]) -> list[str] | None:
    """Names of the columns of a file without a header; None where the first row is one."""
    if find_column(first, _FIRST) is not None and find_column(first, _SECOND) is not None:
        return None
    known = {3: ["s1", "s2", "score"], len(_BENCHMARK): list(_BENCHMARK)}
    return known.get(min(len(first), len(_BENCHMARK)))
