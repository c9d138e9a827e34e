"""Tasks by name, one a file; a task's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from latte_convert.errors import UsageError, nearest
from latte_convert.evaluation.tasks.base import Task

_TASKS = {
    "asr": "AsrTask",
    "classification": "ClassificationTask",
    "compositional": "CompositionalTask",
    "detection": "DetectionTask",
    "fidelity": "FidelityTask",
    "knn": "KnnTask",
    "linear-probe": "LinearProbeTask",
    "retrieval": "RetrievalTask",
    "saliency": "SaliencyTask",
    "sts": "StsTask",
    "zero-shot": "ZeroShotTask",
}
"""Class of each task, in the module of the task's name."""


def task_names() -> tuple[str, ...]:
    """Names that ``get_task`` accepts, sorted."""
    return tuple(sorted(_TASKS))


def get_task(name: str) -> type[Task]:
    """Task class called ``name``.

    Raises:
        UsageError: Where there is no such task.
    """
    if name not in _TASKS:
        raise UsageError(f"unknown task {name!r} ({nearest(name, task_names(), limit=len(_TASKS))}).")
    module = import_module(f"latte_convert.evaluation.tasks.{name.replace('-', '_')}")
    task: type[Task] = getattr(module, _TASKS[name])
    return task
