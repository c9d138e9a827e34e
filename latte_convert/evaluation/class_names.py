"""Names of the classes of a classifier, and which of them a label means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latte_convert.compat import require
from latte_convert.data.examples import unknown_class
from latte_convert.errors import DataError

if TYPE_CHECKING:
    from latte_convert.checkpoints.base import Checkpoint

_IMAGENET = 1000


class ClassNames:
    """The classes of a head, by index.

    A label means a class by its whole name, by one of the names in it ("tench, Tinca tinca"), by its WordNet id where
    the classes are ImageNet's, or by its index; case and ``_`` for a space do not matter.

    Args:
        names: As the checkpoint calls them.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        synsets = _synsets() if len(names) == _IMAGENET else []
        self._whole: dict[str, set[int]] = {}
        self._parts: dict[str, set[int]] = {}
        for i, name in enumerate(names):
            self._whole.setdefault(_plain(name), set()).add(i)
            for part in (*name.split(","), *synsets[i : i + 1]):
                self._parts.setdefault(_plain(part), set()).add(i)

    def __len__(self) -> int:
        return len(self.names)

    def index(self, label: Any, where: str) -> int:
        """The class that a label means.

        Raises:
            DataError: None, or several.
        """
        plain = _plain(str(label))
        found = self._whole.get(plain) or self._parts.get(plain)
        if found is None and plain.isdecimal() and int(plain) < len(self.names):
            return int(plain)
        if found is None:
            raise DataError(f"{where}: {unknown_class(str(label), self.names)}")
        if len(found) > 1:
            several = "; ".join(f"{i}: {self.names[i]}" for i in sorted(found))
            raise DataError(f"{where}: '{label}' can be several classes ({several}): use the index.")
        return next(iter(found))


def class_names(source: Checkpoint) -> list[str]:
    """What a checkpoint calls the classes of its head; empty where it has none."""
    config: dict[str, Any] = getattr(source, "config", {})
    if source.library == "timm":
        pretrained = config.get("pretrained_cfg") or {}
        count = int(config.get("num_classes", pretrained.get("num_classes", 0)) or 0)
        names = config.get("label_names") or pretrained.get("label_names") or []
        if len(names) == count:
            return [str(name) for name in names]
        return _synsets() if count == _IMAGENET else [f"LABEL_{i}" for i in range(count)]
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return [str(names[key]) for key in sorted(names, key=int)]
    return [f"LABEL_{i}" for i in range(int(config.get("num_labels", 2)))]


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").casefold().split())


def _synsets() -> list[str]:
    """WordNet ids of ImageNet's classes, in the order of all its classifiers."""
    info: Any = require("timm.data.imagenet_info", "timm").ImageNetInfo("imagenet-1k")
    return list(info.label_names())
