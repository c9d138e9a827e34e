"""How close two tensors are, streamed over samples: the arithmetic behind scores and fidelity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Agreement:
    """Running sums of a comparison; the last dimension holds features, the others count tokens.

    Attributes:
        cosine_sum: Sum over tokens of the cosine of original and converted.
        tokens: Number of tokens.
        squared_error: Sum of squared differences.
        squared_norm: Sum of squares of the original.
        elements: Number of elements.
        same: Tokens whose largest feature is the same in both (top-1 agreement of logits).
    """

    cosine_sum: float = 0.0
    tokens: int = 0
    squared_error: float = 0.0
    squared_norm: float = 0.0
    elements: int = 0
    same: int = 0

    def add(self, original: Tensor, converted: Tensor) -> None:
        """Add a pair of equal shape ``(..., D)``, any floating dtype."""
        a = original.detach().float().reshape(-1, original.shape[-1])
        b = converted.detach().float().reshape(-1, a.shape[-1])
        # cosine_similarity clamps norms: two zero vectors would count as unlike.
        cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
        both_zero = (a == 0).all(-1) & (b == 0).all(-1)
        self.cosine_sum += float(torch.where(both_zero, 1.0, cosine).double().sum())
        self.tokens += len(a)
        self.squared_error += float((a - b).double().square().sum())
        self.squared_norm += float(a.double().square().sum())
        self.elements += a.numel()
        self.same += int((a.argmax(-1) == b.argmax(-1)).sum())

    @property
    def cosine(self) -> float:
        """Mean cosine over tokens."""
        return self.cosine_sum / max(self.tokens, 1)

    @property
    def mse(self) -> float:
        """Mean squared difference per element."""
        return self.squared_error / max(self.elements, 1)

    @property
    def relative_error(self) -> float:
        """``||a - b|| / ||a||``; 0 for equal tensors, infinite where only the original is zero."""
        if self.squared_error == 0:
            return 0.0
        return (self.squared_error / self.squared_norm) ** 0.5 if self.squared_norm else float("inf")

    @property
    def top1(self) -> float:
        """Share of tokens with the same largest feature."""
        return self.same / max(self.tokens, 1)
