"""The tasks by name, and those in a user's own file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bitplan.errors import BitplanError, TaskError, nearest_names
from bitplan.tasks.choices import read_settings
from bitplan.tasks.detection import DigitDetection
from bitplan.tasks.graph import Graph
from bitplan.tasks.images import Digits
from bitplan.tasks.lm import DecoderLanguageModelling
from bitplan.tasks.lstm_lm import LSTMLanguageModelling, PennTreebank, WikiText
from bitplan.tasks.mlm import BertMini, MaskedLanguageModelling
from bitplan.tasks.public_graphs import AmazonPhoto, Citeseer, CoauthorCS, Cora, OgbnArxiv
from bitplan.tasks.public_images import Cifar10, Cifar100, FashionMnist, ImageFolder
from bitplan.tasks.public_texts import Sst2, Xnli
from bitplan.tasks.task import Task
from bitplan.tasks.text_classification import Docstrings
from bitplan.tasks.voc import Voc
from bitplan.user_code import in_words, module_sha256, named_file, public_name, run_file

#: The built-in tasks, in the order ``bitplan tasks`` shows them.
TASKS: tuple[type[Task], ...] = (
    *(Digits, Cifar10, Cifar100, FashionMnist, ImageFolder),
    *(DigitDetection, Voc),
    *(LSTMLanguageModelling, PennTreebank, WikiText),
    DecoderLanguageModelling,
    *(MaskedLanguageModelling, BertMini),
    *(Docstrings, Sst2, Xnli),
    *(Graph, Cora, Citeseer, AmazonPhoto, CoauthorCS, OgbnArxiv),
)


def task_names() -> list[str]:
    """The names of the built-in tasks."""
    return [task.name for task in TASKS]


def task_class(text: str) -> type[Task]:
    """The class of the task that `text` names: a built-in one, or ``my_task.py:MyTask``, a file that is **run**."""
    named = named_file(text)
    if named is not None:
        return _class_in_file(*named)[0]
    for task in TASKS:
        if task.name == text:
            return task
    from bitplan.models.built_in import BUILT_IN

    if text in BUILT_IN:
        raise TaskError(f"{text} is a model, not a task: a task has data too, such as {', '.join(task_names())}.")
    raise TaskError(
        f"there is no task {text!r}; {nearest_names(text, task_names())} "
        f"(A task of your own is named as my_task.py:MyTask.)"
    )


def find_task(text: str, settings: Sequence[str] = (), seed: int = 0) -> Task:
    """The task that `text` names, ready to train.

    :param text: a built-in task's name, or ``my_task.py:MyTask``. The file is code and is **run**, so name only files
        that you trust.
    :param settings: what differs from the task's recipe, as ``key=value``.
    """
    named = named_file(text)
    if named is not None:
        own_class, sha256 = _class_in_file(*named)
        own = own_task(own_class, named[0], settings, seed)
        own.source_sha256 = sha256
        return own
    task = task_class(text)
    return task(read_settings(task.settings_class, settings, text), seed)


def own_task(task: type[Task], path: Path, settings: Sequence[str] = (), seed: int = 0) -> Task:
    """An object of a class in a user's file; what goes wrong there is one sentence."""
    missing = sorted(task.__abstractmethods__)
    if missing:
        raise TaskError(f"{path}:{task.__name__} lacks what every task has: write its {', '.join(missing)}.")
    if not hasattr(task, "name"):
        task.name = task.__name__.lower()
    try:
        return task(read_settings(task.settings_class, settings, task.name), seed)
    except BitplanError:
        raise
    except Exception as error:
        raise TaskError(f"{path}:{task.__name__} failed: {in_words(error, path)}") from error


def _class_in_file(path: Path, name: str) -> tuple[type[Task], str]:
    """The task of that name in a file, and the SHA-256 of the file's contents."""
    if not path.is_file():
        raise TaskError(f"there is no file {path}: a task is {', '.join(task_names())} or my_task.py:MyTask.")
    module = run_file(path, TaskError)
    if name:
        found = public_name(module, path, name, "task", TaskError)
        if not isinstance(found, type) or not issubclass(found, Task):
            raise TaskError(f"{path}:{name} is not a task: derive it from bitplan.tasks.Task.")
        return found, module_sha256(module)
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        names = ", ".join(task.__name__ for task in own) or "none"
        raise TaskError(f"{path} has {len(own)} tasks ({names}): name one of them as {path}:MyTask.")
    return own[0], module_sha256(module)
