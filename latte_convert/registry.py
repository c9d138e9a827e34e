"""Classes by name: those of this package, those that were registered, and those that installed packages offer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from latte_convert.errors import LatteError, UsageError, first_line, nearest


class Registry:
    """Classes of one kind by their ``name``; a class's module is imported when it is asked for.

    Args:
        kind: What they are, in a word.
        base: ``module:Class`` that all of them are subclasses of.
        group: Entry points of other packages: the name, and ``module:Class``.
        ours: Where the class of each name of this package is, ``module:Class``.
        error: What is raised where there is no class of a name.
        advice: What to do then.
    """

    def __init__(
        self, kind: str, base: str, group: str, ours: Mapping[str, str], error: type[LatteError], advice: str
    ) -> None:
        self.kind, self.group, self.ours = kind, group, ours
        self.registered: dict[str, Any] = {}
        self._base, self._error, self._advice = base, error, advice

    def register(self, cls: Any) -> None:
        """Make a class known under its ``name`` in this process; one of the same module and name takes its place.

        Raises:
            UsageError: It is of another kind, has no name, or its name is taken.
        """
        name = getattr(cls, "name", None)
        if not (self._fits(cls) and isinstance(name, str) and name):
            base = self._base.partition(":")[2]
            raise UsageError(f"{cls!r} cannot be registered: give a subclass of {base} with a `name`")
        known = self.registered.get(name)
        again = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
        if name in self.ours or name in self._offered() or (known is not None and not again):
            raise UsageError(f"there is a {self.kind} named '{name}' already: give {cls.__qualname__} another `name`")
        self.registered[name] = cls

    def names(self) -> tuple[str, ...]:
        """Names that ``get`` accepts, sorted."""
        return tuple(sorted({*self.ours, *self.registered, *self._offered()}))

    def get(self, name: str) -> Any:
        """The class of a name.

        Raises:
            LatteError: There is none, or the package that offers it cannot be used.
        """
        if name in self.ours:
            return _resolve(self.ours[name])
        if name in self.registered:
            return self.registered[name]
        if (point := self._offered().get(name)) is not None:
            return self._load(point)
        raise self._error(f"unknown {self.kind} {name!r} ({nearest(name, self.names())}): {self._advice}")

    def _offered(self) -> dict[str, EntryPoint]:
        """What installed packages offer, by name; a name of ours is ours."""
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self.ours}

    def _load(self, point: EntryPoint) -> Any:
        package = point.dist.name if point.dist is not None else point.value
        try:
            cls = point.load()
        except Exception as error:  # code of others: whatever it raises
            raise self._error(
                f"{self.kind} '{point.name}' of package {package} cannot be imported: {first_line(error)}. Repair or "
                "remove it."
            ) from error
        if not self._fits(cls) or cls.name != point.name:
            raise self._error(
                f"{point.value} of package {package} is no {self.kind} named '{point.name}': repair or remove it."
            )
        return cls

    def _fits(self, cls: Any) -> bool:
        return isinstance(cls, type) and issubclass(cls, _resolve(self._base))


def _resolve(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
