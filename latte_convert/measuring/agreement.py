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
