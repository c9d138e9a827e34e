"""Names that are part of the artifact format."""

from __future__ import annotations

import fnmatch

MANIFEST = "latte.json"
"""File of an artifact that says what it is."""

ATTRIBUTE = "latte"
"""Name under which a kernel sits in its attention module, hence ``<site>.latte.*`` in checkpoints."""


RECORD = "latte_record"
"""Name under which a hybrid carries what its manifest will say."""


OFFLOADED = "latte_offloaded"
"""Name under which a model whose weights are on disk carries how to read them."""


FACTORY = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""Pattern of ``package.module:function``, which builds a module of your own."""


def is_ours(key: str) -> bool:
    """Whether a key names a tensor of a kernel: ``<site>.latte.<parameter>``."""
    parts = key.split(".")
    return len(parts) >= 3 and parts[-2] == ATTRIBUTE


def is_mark(key: str) -> bool:
    """Whether a key of a state dict names the mark by which a kernel tells what it is; no artifact holds it."""
    return is_ours(key) and key.endswith("._extra_state")


REPORT, BENCH, EVALUATIONS = "report.json", "bench.json", "eval*.json"
"""What we measured, beside the checkpoint in an artifact: no part of it. ``latte eval --out DIR/eval-TASK.json`` writes
the last."""


HUB_ID = r"[\w.-]+/[\w.-]+"
"""Pattern of a repository of the Hub: ``owner/name``."""

CARD = "README.md"
"""The model card, in an artifact."""

ORIGINAL = "original"
"""Folder of an artifact: the files of the source that the artifact has another version of, byte for byte."""


PAGE = "report.html"
"""The report as a page, in an artifact."""


def is_report(name: str) -> bool:
    """Whether a file of an artifact holds what was measured."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in (REPORT, BENCH, EVALUATIONS))
