"""Tasks by name, one a file; see ``Registry``. ``docs/your_own_task.md`` is a complete example."""

from __future__ import annotations

from typing import TypeVar

from latte_convert.errors import UsageError
from latte_convert.evaluation.tasks.base import Task
from latte_convert.registry import Registry

_OURS = {
    "asr": "asr:AsrTask",
    "classification": "classification:ClassificationTask",
    "compositional": "compositional:CompositionalTask",
    "detection": "detection:DetectionTask",
    "fidelity": "fidelity:FidelityTask",
    "knn": "knn:KnnTask",
    "linear-probe": "linear_probe:LinearProbeTask",
    "retrieval": "retrieval:RetrievalTask",
    "saliency": "saliency:SaliencyTask",
    "sts": "sts:StsTask",
    "zero-shot": "zero_shot:ZeroShotTask",
}

TASKS = Registry(
    "task",
    "latte_convert.evaluation.tasks.base:Task",
    "latte_convert.tasks",
    {name: f"latte_convert.evaluation.tasks.{where}" for name, where in _OURS.items()},
    UsageError,
    "give one that exists, install the package that offers it, or import the module that registers it",
)

T = TypeVar("T", bound=type[Task])


def register_task(task: T) -> T:
    """Make a task known under its ``name`` in this process; a decorator of its class.

    Registering a class of the same module and name again replaces the earlier one, as a notebook does.

    Raises:
        UsageError: It is no task, has no name, or its name is taken.
    """
    TASKS.register(task)
    return task


def task_names() -> tuple[str, ...]:
    """Names that ``get_task`` accepts, sorted."""
    return TASKS.names()


def get_task(name: str) -> type[Task]:
    """Task class called ``name``.

    Raises:
        UsageError: There is no such task, or the package that offers it cannot be used.
    """
    task: type[Task] = TASKS.get(name)
    return task
