"""The one signature that every attention kernel has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from latte_convert.errors import UsageError

if TYPE_CHECKING:
    from latte_convert.adapters.base import TokenLayout


class Kernel(nn.Module, ABC):
    """An attention operator on the heads of one site, after projection, QK-norm and rotary embedding.

    Attributes:
        name: What recipes and manifests call it.
        causal_form: Whether ``causal=True`` is supported.
        heads: Number of heads.
        head_dim: Channels per head of query and key.
        options: Keyword arguments that build an equal kernel, as manifests record them (JSON values).

    Args:
        heads: Number of heads.
        head_dim: Channels per head.
    """

    name: ClassVar[str]
    causal_form: ClassVar[bool]

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.options: dict[str, Any] = {}

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: Tensor | None = None,
        causal: bool = False,
        layout: TokenLayout | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``(B, H, Nq, d)``.
            key: ``(B, H, Nk, d)``.
            value: ``(B, H, Nk, dv)``.
            scale: The module's own scaling of the logits, often ``d**-0.5``.
            mask: bool ``(B, Nk)``, True where a key may be attended to.
            causal: Query ``i`` sees only the keys ``j <= i + Nk - Nq``.
            layout: How the tokens are arranged, for the kernels that use it.

        Returns:
            ``(B, H, Nq, dv)`` in the dtype of ``query``; zeros where a query sees no key.
        """


def check_mask(mask: Tensor | None, key: Tensor) -> None:
    """Refuse anything but a boolean key mask: an additive float mask would be silently misread.

    Raises:
        UsageError: Where ``mask`` is neither None nor bool of shape ``(B, Nk)``.
    """
    if mask is None:
        return
    expected = (key.shape[0], key.shape[2])
    if mask.dtype is not torch.bool or tuple(mask.shape) != expected:
        raise UsageError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; a kernel takes torch.bool of shape "
            f"{expected} (batch, keys), True = attend: turn an additive mask into `mask == 0` first"
        )
