"""How close two tensors are, streamed over samples: the arithmetic behind scores, fidelity and gates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Kind = Literal["features", "logits", "boxes"]
"""What an output is, which says how a difference in it is weighed."""

RESAMPLES = 1000
"""Bootstrap samples behind an interval."""


def kind_of(name: str, output: Tensor) -> Kind:
    """What an output is, by its name and width."""
    if name.endswith("boxes") and output.shape[-1] == 4:
        return "boxes"
    return "logits" if name.endswith("logits") else "features"


@dataclass
class Agreement:
    """Running sums of a comparison; the last dimension holds features, the others count tokens.

    Attributes:
        kind: What the tensors are.
        cosine_sum: Sum over tokens of the cosine of original and converted.
        tokens: Number of tokens.
        squared_error: Sum of squared differences.
        squared_norm: Sum of squares of the original.
        elements: Number of elements.
        same: Tokens whose largest feature is the same in both (top-1 agreement of logits).
        shared: Sum over tokens of what both agree on: of logits the probability that both give to the same classes,
            ``sum_c min(p_c, q_c)``; of boxes their intersection over union, times the weight of the box.
        weight: Sum of the weights; each token of logits has weight 1.
        divergence: Sum over tokens of ``KL(original || converted)`` of logits, in nats.
        distance: Sum of absolute differences of box coordinates, times the weight of the box.
        samples: ``likeness`` of each pair that was added.
    """

    kind: Kind = "features"
    cosine_sum: float = 0.0
    tokens: int = 0
    squared_error: float = 0.0
    squared_norm: float = 0.0
    elements: int = 0
    same: int = 0
    shared: float = 0.0
    weight: float = 0.0
    divergence: float = 0.0
    distance: float = 0.0
    samples: list[float] = field(default_factory=list)

    def add(self, original: Tensor, converted: Tensor, sure: Tensor | None = None) -> None:
        """Add a pair of equal shape ``(..., D)``, any floating dtype.

        Args:
            original: The original's output.
            converted: The hybrid's.
            sure: Of boxes ``(..., 4)``, how sure the original is of each, ``(...)``, 0 to 1; None weighs them alike.
        """
        # Equal layouts are summed in equal order, and sqrt(x * x) is x: the cosine of equal vectors is 1 to the bit.
        a = original.detach().double().reshape(-1, original.shape[-1]).contiguous()
        b = converted.detach().double().reshape(-1, a.shape[-1]).contiguous()
        aa, bb, ab = a.square().sum(-1), b.square().sum(-1), (a * b).sum(-1)
        norms = (aa * bb).sqrt()
        cosine = torch.where(norms == 0, (aa == bb).double(), (ab / norms).clamp(-1, 1))  # two zero vectors are alike
        self.cosine_sum += float(cosine.sum())
        self.tokens += len(a)
        self.squared_error += float((a - b).square().sum())
        self.squared_norm += float(aa.sum())
        self.elements += a.numel()
        self.same += int((a.argmax(-1) == b.argmax(-1)).sum())
        likeness = float(cosine.mean()) if len(a) else 1.0
        if self.kind != "features":
            weight = torch.ones_like(cosine) if sure is None else sure.double().reshape(-1)
            shared = _common_probability(a, b) if self.kind == "logits" else overlap(a, b)
            self.weight += float(weight.sum())
            self.shared += float((shared * weight).sum())
            if self.kind == "logits":
                divergence = a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))
                self.divergence += float(divergence.nan_to_num().sum().clamp_min(0))
            else:
                self.distance += float(((a - b).abs().sum(-1) * weight).sum())
            likeness = min(likeness, float((shared * weight).sum() / weight.sum().clamp_min(1e-12)))
        self.samples.append(likeness)

    def merge(self, other: Agreement) -> None:
        """Add what another one of its kind has seen."""
        for each in fields(self):
            if each.name != "kind":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def cosine(self) -> float:
        """Mean cosine over tokens."""
        return self.cosine_sum / max(self.tokens, 1)

    @property
    def agreed(self) -> float | None:
        """Mean of what both share (see ``shared``); None for features."""
        return None if self.kind == "features" else self.shared / self.weight if self.weight else 1.0

    @property
    def likeness(self) -> float:
        """What gates look at: the mean cosine, or the worse of it and ``agreed``. 1 is perfect."""
        agreed = self.agreed
        return self.cosine if agreed is None or not agreed < self.cosine else agreed

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the mean likeness of a sample (percentile bootstrap); None for fewer than two samples."""
        values = np.array(self.samples)
        if len(values) < 2 or not np.isfinite(values).all():
            return None
        drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values))).mean(1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        return float(low), float(high)

    @property
    def mse(self) -> float:
        """Mean squared difference per element."""
        return self.squared_error / max(self.elements, 1)

    @property
    def relative_error(self) -> float:
        """``||a - b|| / ||a||``; 0 for equal tensors, infinite where only the original is zero."""
        if self.squared_error == 0:
            return 0.0
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else math.inf

    @property
    def top1(self) -> float:
        """Share of tokens with the same largest feature."""
        return self.same / max(self.tokens, 1)


def _common_probability(a: Tensor, b: Tensor) -> Tensor:
    """``sum_c min(p_c, q_c)`` of the softmax of two rows of logits, ``(n,)``: 1 minus their total variation."""
    return torch.minimum(a.softmax(-1), b.softmax(-1)).sum(-1)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of pairs of boxes ``(n, 4)``, given as centre and size; two empty equal boxes have 1."""
    low = torch.maximum(a[:, :2] - a[:, 2:] / 2, b[:, :2] - b[:, 2:] / 2)
    high = torch.minimum(a[:, :2] + a[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2)
    both = (high - low).clamp_min(0).prod(-1)
    union = a[:, 2:].clamp_min(0).prod(-1) + b[:, 2:].clamp_min(0).prod(-1) - both
    return torch.where((a == b).all(-1), 1.0, both / union.clamp_min(1e-300)).clamp(0, 1)


def sureness(logits: Tensor, classes: int | None) -> Tensor:
    """How sure a detector is of each of its boxes, ``(...)``, from its logits ``(..., C)``.

    A detector with one logit more than it has classes has the last one for "no object" and a softmax over all; one
    without has a sigmoid for each class.
    """
    if classes is not None and logits.shape[-1] == classes + 1:
        return logits.softmax(-1)[..., :-1].amax(-1)
    return logits.sigmoid().amax(-1)


def merge_all(into: dict[str, Agreement], others: Mapping[str, Agreement]) -> None:
    """Add agreements to those of the same names; new names are entered."""
    for name, other in others.items():
        into.setdefault(name, Agreement(other.kind)).merge(other)
