"""Ready experiments: tasks by name, and what a task of your own derives from."""

from bitplan.lab.tasks.registry import find_task, task_class, task_names
from bitplan.lab.tasks.task import Metric, Settings, Task

__all__ = ["Metric", "Settings", "Task", "find_task", "task_class", "task_names"]
