"""Executable specifications: every pairwise similarity written out, O(N²), for tests and nothing else.

One file per kernel, of the same name.
"""

from __future__ import annotations

from reference.latte import latte_reference
from reference.softmax import softmax_reference

__all__ = ["latte_reference", "softmax_reference"]
