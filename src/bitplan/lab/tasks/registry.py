"""The built-in tasks by name, and tasks in a user's own file."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from bitplan.analysis.targets import describe_error, find_callable, import_file, module_sha256, parse_file_name
from bitplan.errors import BitplanError, TaskError, nearest_names
from bitplan.lab.tasks.detection import DigitDetection
from bitplan.lab.tasks.forecast import Forecast
from bitplan.lab.tasks.graph import Graph
from bitplan.lab.tasks.images import Digits
from bitplan.lab.tasks.language import DecoderLanguageModelling
from bitplan.lab.tasks.lstm_lm import LSTMLanguageModelling, PennTreebank, WikiText
from bitplan.lab.tasks.mlm import BertMini, MaskedLanguageModelling
from bitplan.lab.tasks.public_graphs import AmazonPhoto, Citeseer, CoauthorCS, Cora, OgbnArxiv, OgbnProducts
from bitplan.lab.tasks.public_images import Cifar10, Cifar100, FashionMnist, ImageFolder
from bitplan.lab.tasks.rl import ReinforcementLearning
from bitplan.lab.tasks.task import Metric, Settings, Task
from bitplan.lab.tasks.text_classification import Docstrings, Sst2, Xnli
from bitplan.lab.tasks.voc import Voc
from bitplan.plans import preset_names

# --- Settings from the command line: ``--set key=value``


_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def read_settings(settings_class: type[Settings], items: Sequence[str], task: str) -> Settings:
    """The settings of a class from texts ``key=value``, each value converted to its field's type.

    >>> read_settings(Settings, ["steps=200", "lr=0.05"], "digits").lr
    0.05
    """
    types = get_type_hints(settings_class)
    names = [field.name for field in fields(settings_class)]
    chosen: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise TaskError(f"{item!r} sets nothing: write key=value, such as steps=200.")
        if key not in names:
            raise TaskError(f"the task {task} has no setting {key!r}; {nearest_names(key, names)}")
        if key in chosen:
            raise TaskError(f"{key} is set twice: give it once.")
        chosen[key] = _read(key, text, types[key])
    try:
        return settings_class(**chosen)
    except ValueError as error:
        if isinstance(error, TaskError):
            raise
        raise TaskError(f"the task {task} refuses these settings: {error}") from error


def _read(key: str, text: str, value_type: Any) -> Any:
    if value_type is bool:
        if text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
    elif value_type is str:
        return text
    elif value_type in (int, float):
        try:
            # 64_000 and 1e3 are integers, too.
            number = float(text)
            if value_type is float:
                return number
            if number.is_integer():
                return int(text) if text.lstrip("+-").replace("_", "").isdigit() else int(number)
        except ValueError:
            pass
    else:
        raise TaskError(f"{key} cannot be set on the command line: set it in the task's own file.")
    raise TaskError(f"{key}={text}: {key} must be {_TYPE_NAMES[value_type]}.")


# --- Descriptions of the built-in tasks, and the least results of short runs


@dataclass(frozen=True)
class Floor:
    """The result of FP32 in a short run."""

    #: The metric over the trivial predictor's, or the other way round where lower is better.
    times_trivial: float
    #: The settings of the short run, as ``--set`` takes them.
    settings: tuple[str, ...]


def times_trivial(metric: Metric, value: float) -> float:
    """How many times better than the trivial predictor `value` is.

    >>> times_trivial(Metric("accuracy", "higher", 0.1), 0.9)
    9.0
    >>> times_trivial(Metric("perplexity", "lower", 300.0), 100.0)
    3.0
    """
    return value / metric.trivial if metric.better == "higher" else metric.trivial / value


@dataclass(frozen=True)
class Card:
    """The description of a task."""

    model: str
    #: The data that it uses without a download; "" if it needs files.
    embedded: str
    #: The data that it reads from a folder, or downloads.
    public: str
    metric: str
    better: Literal["higher", "lower"]
    floor: Floor | None = None


_LIBRARY = "Python's standard library"

_ANY_TEXT = "any text file, a folder of train and valid"

_DOCSTRINGS = Floor(2.0, ("steps=80", "lr=2e-3", "length=24"))

_BERT = "BERT, tiny to base, or pretrained"

_GRAPH, _NPZ = "GCN, GraphSAGE or GAT", "a graph in an .npz file"

#: The descriptions of the built-in tasks, by name.
CARDS: dict[str, Card] = {
    "digits": Card("resnet8 or other CNNs", "1,797 digits", "", "accuracy", "higher", Floor(8.5, ("steps=60",))),
    "cifar10": Card("resnet20 or other CNNs", "", "CIFAR-10 files, torchvision", "accuracy", "higher"),
    "cifar100": Card("resnet20 or other CNNs", "", "CIFAR-100 files, torchvision", "accuracy", "higher"),
    "fashion-mnist": Card("resnet20 or other CNNs", "", "IDX files, Debian, torchvision", "accuracy", "higher"),
    "images": Card("resnet20 or other CNNs", "", "a folder of images per class", "accuracy", "higher"),
    "detection": Card("RetinaNet, narrow", "digits on a canvas", "", "mAP", "higher", Floor(30.0, ("steps=100",))),
    "voc": Card("RetinaNet, ResNet-18 to -101", "", "VOC's layout, a folder or .tar", "mAP", "higher"),
    "lstm-lm": Card("LSTM, 1 or more layers", _LIBRARY, _ANY_TEXT, "perplexity", "lower", Floor(1.25, ("steps=100",))),
    "ptb": Card("LSTM, 1 layer of 800", "", "Penn Treebank's text files", "perplexity", "lower"),
    "wikitext2": Card("LSTM, 2 layers of 650", "", "WikiText-2's files, datasets", "perplexity", "lower"),
    "lm": Card("GPT-like decoder", _LIBRARY, _ANY_TEXT, "perplexity", "lower", Floor(1.4, ("steps=100",))),
    "mlm": Card("BERT, tiny to base", _LIBRARY, _ANY_TEXT, "perplexity", "lower", Floor(1.08, ("steps=200",))),
    "bert-mini": Card("BERT-mini", _LIBRARY, _ANY_TEXT, "perplexity", "lower"),
    "text-classification": Card(
        _BERT, "docstrings of the library", "train.tsv and dev.tsv", "accuracy", "higher", _DOCSTRINGS
    ),
    "sst2": Card(_BERT, "", "SST-2's .tsv files", "accuracy", "higher"),
    "xnli": Card(_BERT, "", "XNLI's .tsv or .jsonl files", "accuracy", "higher"),
    "graph": Card(_GRAPH, "1,797 digits and their neighbours", _NPZ, "accuracy", "higher", Floor(9.0, ("steps=60",))),
    "cora": Card(_GRAPH, "", "its .npz file, Planetoid's files", "accuracy", "higher"),
    "citeseer": Card(_GRAPH, "", "its .npz file, Planetoid's files", "accuracy", "higher"),
    "amazon-photo": Card(_GRAPH, "", "its .npz file", "accuracy", "higher"),
    "coauthor-cs": Card(_GRAPH, "", "its .npz file", "accuracy", "higher"),
    "ogbn-arxiv": Card(_GRAPH, "", "OGB's files, ogb", "accuracy", "higher"),
    "ogbn-products": Card("GraphSAGE", "", "OGB's files, ogb", "accuracy", "higher"),
    "forecast": Card(
        "DLinear, PatchTST or LSTM",
        "electricity demand, statsmodels",
        "a .csv file",
        "mse",
        "lower",
        Floor(8.0, ("steps=500",)),
    ),
    "rl": Card("actor and critic", "CartPole, Acrobot, gymnasium", "", "return", "higher", Floor(4.0, ("steps=200",))),
}


#: The built-in tasks, in the order of ``bitplan tasks``.
TASKS: tuple[type[Task], ...] = (
    *(Digits, Cifar10, Cifar100, FashionMnist, ImageFolder),
    *(DigitDetection, Voc),
    *(LSTMLanguageModelling, PennTreebank, WikiText),
    DecoderLanguageModelling,
    *(MaskedLanguageModelling, BertMini),
    *(Docstrings, Sst2, Xnli),
    *(Graph, Cora, Citeseer, AmazonPhoto, CoauthorCS, OgbnArxiv, OgbnProducts),
    *(Forecast, ReinforcementLearning),
)


def task_names() -> list[str]:
    """The names of the built-in tasks."""
    return [task.name for task in TASKS]


def task_class(text: str) -> type[Task]:
    """The class of a task: a built-in one, or ``my_task.py:MyTask``, a file that is **executed**."""
    named = parse_file_name(text)
    if named is not None:
        return _class_in_file(*named)[0]
    for task in TASKS:
        if task.name == text:
            return task
    from bitplan.lab.models.built_in import BUILT_IN

    if text in BUILT_IN:
        raise TaskError(f"{text} is a model, not a task: a task has data too, such as {', '.join(task_names())}.")
    if text in preset_names():
        raise TaskError(f"{text} is a plan: name a task first, as in digits --plan {text}.")
    raise TaskError(
        f"there is no task {text!r}; {nearest_names(text, task_names())} "
        f"(A task of your own is named as my_task.py:MyTask.)"
    )


def find_task(text: str, settings: Sequence[str] = (), seed: int = 0) -> Task:
    """The task of that name, ready to train.

    :param text: a built-in task's name, or ``my_task.py:MyTask``. The file is **executed**, so name only files that you
        trust.
    :param settings: changes to the task's recipe, as ``key=value``.
    """
    named = parse_file_name(text)
    if named is not None:
        own_class, sha256 = _class_in_file(*named)
        own = own_task(own_class, named[0], settings, seed)
        own.source_sha256 = sha256
        return own
    task = task_class(text)
    return task(read_settings(task.settings_class, settings, text), seed)


def own_task(task: type[Task], path: Path, settings: Sequence[str] = (), seed: int = 0) -> Task:
    """An object of a class in a user's file; errors there are reported in one sentence."""
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
        raise TaskError(f"{path}:{task.__name__} failed: {describe_error(error, path)}") from error


def _class_in_file(path: Path, name: str) -> tuple[type[Task], str]:
    """The task of that name in a file, and the SHA-256 of the file's contents."""
    if not path.is_file():
        raise TaskError(f"there is no file {path}: a task is {', '.join(task_names())} or my_task.py:MyTask.")
    module = import_file(path, TaskError)
    if name:
        task_class = find_callable(module, path, name, "task", TaskError)
        if not isinstance(task_class, type) or not issubclass(task_class, Task):
            raise TaskError(not_a_task(task_class, path, name))
        return task_class, module_sha256(module)
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        makers = [] if own else [maker for maker in ("train", "make") if callable(vars(module).get(maker))]
        if makers:
            raise TaskError(not_a_task(vars(module)[makers[0]], path, makers[0]))
        names = ", ".join(task.__name__ for task in own) or "none"
        raise TaskError(f"{path} has {len(own)} tasks ({names}): name one of them as {path}:MyTask.")
    return own[0], module_sha256(module)


def is_training_function(function: object) -> bool:
    """Whether a function can be called with a plan and a seed, as ``bitplan compare`` calls ``file.py:train``."""
    try:
        inspect.signature(function).bind(None, 0)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return not isinstance(function, type)


def not_a_task(function: object, path: Path, name: str) -> str:
    """What to add to a file so that it can be trained."""
    if is_training_function(function):
        return (
            f"{path}:{name} is a function of a plan and a seed, which trains under several plans: run it with bitplan "
            f"compare {path}:{name} --plans fp32 int8-all."
        )
    if isinstance(function, type):
        return f"{path}:{name} is not a task: derive it from bitplan.lab.tasks.Task."
    return (
        f"{path}:{name} makes a model, a batch and a loss, and training needs data, an optimizer and a metric: add "
        f"a function train(plan, seed) that returns its metrics, such as {{'accuracy': 0.97}}, for bitplan compare "
        f"{path}:train --plans fp32 int8-all, or a class derived from bitplan.lab.tasks.Task, for bitplan train."
    )
