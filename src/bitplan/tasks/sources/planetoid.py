"""Planetoid's own files (Yang et al. 2016, arXiv 1603.08861): ``ind.cora.allx``, ``ind.cora.graph`` and so on.

They are pickles of SciPy's matrices. Their numbers are read out of them without unpickling, and without SciPy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bitplan.errors import TaskError
from bitplan.tasks.graph_data import GraphData
from bitplan.tasks.sources.pickled import Call, NotPlainData, any_array, plain_data
from bitplan.tasks.sources.places import read_bytes, read_text

#: Nodes behind those that are learnt from.
VALIDATION = 500


def read_planetoid(folder: Path, name: str) -> GraphData | None:
    """The graph that files in the folder, or in its ``raw``, call `name` (``cora``, say); None where there are none."""
    for place in (folder, folder / "raw"):
        if (place / f"ind.{name}.allx").is_file():
            return _read(place / f"ind.{name}")
    return None


def _read(stem: Path) -> GraphData:
    known, tested = _matrix(_file(stem, "allx")), _matrix(_file(stem, "tx"))
    classes, tested_classes = _dense(_file(stem, "ally")), _dense(_file(stem, "ty"))
    told = len(_dense(_file(stem, "y")))
    # Test nodes stand in the files in another order than in the graph, and some of the graph's are missing: these have
    # no features and no class, and judge nothing.
    places = np.array([int(line) for line in read_text(_file(stem, "test.index")).split()])
    nodes = max(len(known), int(places.max(initial=-1)) + 1)
    if len(places) != len(tested) or len(tested) != len(tested_classes) or len(known) != len(classes):
        raise _damaged(_file(stem, "test.index"), "its files are of different lengths")
    features = np.zeros((nodes, known.shape[1]), np.float32)
    labels = np.zeros(nodes, np.int64)
    features[: len(known)], labels[: len(known)] = known, classes.argmax(1)
    features[places], labels[places] = tested, tested_classes.argmax(1)
    parts = (np.arange(told), np.arange(told, told + VALIDATION), np.sort(places))
    return GraphData(
        *(torch.from_numpy(each) for each in (features, _edges(_file(stem, "graph")), labels)),
        *(torch.from_numpy(each.astype(np.int64)) for each in parts),
    )


def _file(stem: Path, part: str) -> Path:
    return stem.with_name(f"{stem.name}.{part}")


def _damaged(path: Path, why: str) -> TaskError:
    return TaskError(f"{path} is damaged or something else ({why}): get Planetoid's files again.")


def _plain(path: Path) -> Any:
    try:
        return plain_data(read_bytes(path))
    except NotPlainData as error:
        raise _damaged(path, str(error)) from error


def _dense(path: Path) -> NDArray[Any]:
    try:
        return any_array(_plain(path))
    except NotPlainData as error:
        raise _damaged(path, str(error)) from error


def _matrix(path: Path) -> NDArray[np.float32]:
    """A matrix of SciPy's in rows, dense."""
    held = _plain(path)
    state = held.state if isinstance(held, Call) else None
    try:
        if not isinstance(state, dict):
            raise NotPlainData("no matrix")
        parts = {key.decode() if isinstance(key, bytes) else str(key): state[key] for key in state}
        values, columns, ends = (any_array(parts[part]) for part in ("data", "indices", "indptr"))
        rows, width = (int(size) for size in parts["_shape"])
        dense = np.zeros((rows, width), np.float32)
        np.add.at(dense, (np.repeat(np.arange(rows), np.diff(ends)), columns), values.astype(np.float32))
    except (NotPlainData, KeyError, ValueError, TypeError, IndexError) as error:
        raise _damaged(path, str(error)) from error
    return dense


def _edges(path: Path) -> NDArray[np.int64]:
    """From every node to each in its list."""
    held = _plain(path)
    try:
        pairs = [(int(node), int(other)) for node, others in held.items() for other in others]
    except (AttributeError, ValueError, TypeError) as error:
        raise _damaged(path, "no dictionary of neighbours") from error
    return np.ascontiguousarray(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
