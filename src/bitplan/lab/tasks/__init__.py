"""The built-in tasks by name, and the base classes for tasks of your own."""

from typing import TYPE_CHECKING, Any

from bitplan.lab.tasks.task import Metric, Settings, Task

if TYPE_CHECKING:
    from bitplan.lab.tasks.registry import find_task, task_class, task_names

__all__ = ["Metric", "Settings", "Task", "find_task", "task_class", "task_names"]


def __getattr__(name: str) -> Any:
    """Import the registry at its first use: it imports every task, and these the readers that import this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bitplan.lab.tasks import registry

    return getattr(registry, name)
