"""The built-in tasks by name, and the base classes for tasks of your own."""

from bitplan.lab.tasks.registry import find_task, task_class, task_names
from bitplan.lab.tasks.task import Metric, Settings, Task

__all__ = ["Metric", "Settings", "Task", "find_task", "task_class", "task_names"]
