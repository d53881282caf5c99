"""What there is to know about each built-in task before it is tried, and what it must reach.

A floor is a promise that a test keeps: with these settings, on the data that come with bitplan, FP32 is at least so
many times better than the trivial predictor. It is a ratio because the text of the standard library, and so its
trivial predictor, differs a little between versions of Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitplan.tasks.task import Metric


@dataclass(frozen=True)
class Floor:
    """What FP32 reaches in a short run."""

    #: The metric over the trivial predictor's, or the other way round where lower is better.
    times_trivial: float
    #: What the short run sets, as ``--set`` takes it.
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
    """A task in words."""

    model: str
    #: What it learns from without a download; "" where it needs files.
    embedded: str
    #: What it reads from a folder, or has fetched.
    public: str
    metric: str
    better: Literal["higher", "lower"]
    floor: Floor | None = None


_LIBRARY = "Python's standard library"
_ANY_TEXT = "any text file, a folder of train and valid"
_DOCSTRINGS = Floor(2.0, ("steps=80", "lr=2e-3", "length=24"))
_BERT = "BERT, tiny to base, or pretrained"
_GRAPH, _NPZ = "GCN or GraphSAGE", "a graph in an .npz file"

#: Every built-in task's card, by its name.
CARDS: dict[str, Card] = {
    "digits": Card("resnet8 or other CNNs", "1,797 digits", "", "accuracy", "higher", Floor(8.5, ("steps=60",))),
    "cifar10": Card("resnet20 or other CNNs", "", "CIFAR-10 files, torchvision", "accuracy", "higher"),
    "cifar100": Card("resnet20 or other CNNs", "", "CIFAR-100 files, torchvision", "accuracy", "higher"),
    "fashion-mnist": Card("resnet20 or other CNNs", "", "IDX files, Debian, torchvision", "accuracy", "higher"),
    "images": Card("resnet20 or other CNNs", "", "a folder of images per class", "accuracy", "higher"),
    "detection": Card("RetinaNet, narrow", "digits on a canvas", "", "mAP", "higher", Floor(30.0, ("steps=100",))),
    "voc": Card("RetinaNet, ResNet-18", "", "VOC's layout, a folder or .tar", "mAP", "higher"),
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
}
