"""Names that are part of the artifact format."""

from __future__ import annotations

MANIFEST = "latte.json"
"""File of an artifact that says what it is."""

ATTRIBUTE = "latte"
"""Name under which a kernel sits in its attention module, hence ``<site>.latte.*`` in checkpoints."""


def is_ours(key: str) -> bool:
    """Whether a key names a tensor of a kernel: ``<site>.latte.<parameter>``."""
    parts = key.split(".")
    return len(parts) >= 3 and parts[-2] == ATTRIBUTE
