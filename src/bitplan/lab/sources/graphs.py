"""Graphs in NumPy's .npz files, and OGB's in its text files. No file is unpickled.

An .npz file holds features and edges as the three arrays of a CSR matrix, or as dense arrays:

============  ================================================================================================
features      ``x_data x_indices x_indptr x_shape``, or ``attr_...`` as in the files of Shchur et al., or ``x``
edges         ``adj_indptr adj_indices``, or ``edge_index`` of shape (2, edges); they are made to go both ways
classes       ``y`` or ``labels``, a number per node
split         ``idx_train idx_val idx_test``, indices of nodes; without them the usual split is made
============  ================================================================================================
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitplan.errors import TaskError
from bitplan.lab.sources.files import read_bytes, read_text
from bitplan.lab.sources.pickled import Call, NotPlainData, any_array, plain_data
from bitplan.lab.tasks.graph_data import GraphData, usual_split

_SPLIT = ("idx_train", "idx_val", "idx_test")


def read_graph(data: str) -> GraphData:
    """The graph in that .npz file."""
    path = Path(data).expanduser()
    if not path.is_file():
        raise TaskError(f"there is no file {data}: set data= to a graph in an .npz file.")
    return read_npz(path)


def read_npz(path: Path) -> GraphData:
    """See the module's docstring."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return _graph(path, file)
    except MemoryError as error:
        raise TaskError(
            f"{path} holds arrays that do not fit into memory: make it smaller, or get it again."
        ) from error
    except (
        *(OSError, ValueError, KeyError, IndexError, TypeError, EOFError, OverflowError),
        *(NotImplementedError, zipfile.BadZipFile, zlib.error),
    ) as error:
        if isinstance(error, TaskError):
            raise
        # numpy's message would suggest unpickling it, which executes code.
        is_pickled = "pickle" in str(error)
        message = (
            "no .npz file, or one of pickled objects"
            if is_pickled
            else " ".join(str(error).split()) or type(error).__name__
        )
        raise TaskError(
            f"{path} is not a graph that can be read ({message}): it wants "
            f"x_data, x_indices, x_indptr, x_shape, adj_indptr, adj_indices and y."
        ) from error


def _graph(path: Path, file: Mapping[str, NDArray[Any]]) -> GraphData:
    labels = torch.from_numpy(_first(path, file, "y", "labels").astype(np.int64).reshape(-1))
    parts = [name for name in _SPLIT if name in file]
    if parts and len(parts) < len(_SPLIT):
        missing = next(name for name in _SPLIT if name not in parts)
        raise TaskError(f"{path} has {parts[0]} and no {missing}: add it, or take the split out.")
    split = [torch.from_numpy(file[name].astype(np.int64)) for name in _SPLIT] if parts else usual_split(labels)
    return GraphData(_features(path, file), _edges(path, file), labels, *split)


def _first(path: Path, file: Mapping[str, NDArray[Any]], *names: str) -> NDArray[Any]:
    for name in names:
        if name in file:
            return file[name]
    raise TaskError(f"{path} lacks {' or '.join(names)}: it is not a graph whose nodes have features and classes.")


def _features(path: Path, file: Mapping[str, NDArray[Any]]) -> Tensor:
    if "x" in file:
        return torch.from_numpy(file["x"].astype(np.float32))
    parts = ("data", "indices", "indptr", "shape")
    values, columns, ends, shape = (_first(path, file, f"x_{part}", f"attr_{part}") for part in parts)
    sizes = tuple(int(size) for size in shape)
    if sizes and sizes[0] != len(ends) - 1:  # before the memory of a matrix of any size is asked for
        raise TaskError(f"{path} is damaged: the shape of x has {sizes[0]} rows, and {len(ends) - 1} begin somewhere.")
    dense = np.zeros(sizes, np.float32)
    np.add.at(dense, (_rows(path, ends, len(dense)), columns.astype(np.int64)), values.astype(np.float32))
    return torch.from_numpy(dense)


def _edges(path: Path, file: Mapping[str, NDArray[Any]]) -> Tensor:
    if "edge_index" in file:
        return torch.from_numpy(file["edge_index"].astype(np.int64))
    ends, columns = _first(path, file, "adj_indptr"), _first(path, file, "adj_indices")
    rows = _rows(path, ends, len(ends) - 1)
    if len(rows) != len(columns):
        raise TaskError(f"{path} is damaged: adj_indptr promises {len(rows)} edges and adj_indices has {len(columns)}.")
    return torch.from_numpy(np.stack([rows, columns.astype(np.int64)]))


def _rows(path: Path, ends: NDArray[Any], count: int) -> NDArray[np.int64]:
    """The row of every value of a CSR matrix."""
    lengths: NDArray[np.int64] = np.diff(ends).astype(np.int64)
    if len(lengths) != count or (lengths < 0).any():
        raise TaskError(f"{path} is damaged: the rows of a matrix begin at places that are out of order.")
    return np.repeat(np.arange(count), lengths)


def read_ogb(folder: Path, name: str) -> GraphData | None:
    """A node property graph of OGB from the text files of its archive; None if they are missing.

    :param name: as the package ogb calls the folder: ``ogbn_arxiv``. The archive itself calls it ``arxiv``.
    """
    for place in (folder / name, folder / name.removeprefix("ogbn_"), folder):
        raw = place / "raw"
        if (raw / "edge.csv.gz").is_file():
            splits = sorted(path for path in (place / "split").glob("*") if path.is_dir())
            if len(splits) != 1:
                raise TaskError(
                    f"{place / 'split'} has {len(splits)} splits, and one is wanted: unpack the archive again."
                )
            edges = _numbers(raw / "edge.csv.gz", np.int64, 2).T
            features = _numbers(raw / "node-feat.csv.gz", np.float32)
            labels = _numbers(raw / "node-label.csv.gz", np.int64, 1)[:, 0]
            parts = [_numbers(splits[0] / f"{part}.csv.gz", np.int64, 1)[:, 0] for part in ("train", "valid", "test")]
            return GraphData(
                *(torch.from_numpy(np.ascontiguousarray(array)) for array in (features, edges, labels, *parts))
            )
    return None


def _numbers(path: Path, kind: type[np.generic], columns: int | None = None) -> NDArray[Any]:
    """A comma-separated table of numbers without a heading."""
    content = read_bytes(path)
    try:
        # Integers may be written as 4.0.
        as_read = np.float64 if issubclass(kind, np.integer) else kind
        table = np.loadtxt(io.BytesIO(content), as_read, delimiter=",", comments=None, ndmin=2).astype(kind)
    except ValueError as error:
        raise TaskError(f"{path} is damaged ({error}): get it again.") from error
    width = table.shape[1]
    if columns not in (None, width):
        raise TaskError(f"{path} has {width} columns, and {columns} are wanted: it is another file.")
    return table


def with_ogb(name: str, folder: Path) -> None:
    """Download the graph that OGB's package calls `name` into `folder`."""
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ModuleNotFoundError as error:
        raise TaskError(
            "download=true needs the package ogb, which is not installed: run 'pip install ogb', "
            "or unpack its archive yourself and set data= to that folder."
        ) from error
    try:
        NodePropPredDataset(name, root=str(folder))
    except Exception as error:  # no network, a full disk; or a file of its own that a newer torch does not load
        if (folder / name.replace("-", "_") / "raw").is_dir():
            return  # the archive is unpacked, and only its text files are read here
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TaskError(
            f"ogb could not fetch {name} into {folder} ({first.removesuffix('.')}): "
            f"unpack its archive yourself and set data= to that folder."
        ) from error


# --- Planetoid's own files (Yang et al. 2016, arXiv 1603.08861): ``ind.cora.allx``, ``ind.cora.graph`` and so on


#: Validation nodes, after the training nodes.
VALIDATION = 500


def read_planetoid(folder: Path, name: str) -> GraphData | None:
    """The graph `name` (``cora``, say) in the folder or in its ``raw``; None if there is none."""
    for place in (folder, folder / "raw"):
        if (place / f"ind.{name}.allx").is_file():
            return _read(place / f"ind.{name}")
    return None


def _read(stem: Path) -> GraphData:
    training, tested = _matrix(_file(stem, "allx")), _matrix(_file(stem, "tx"))
    classes, tested_classes = _dense(_file(stem, "ally")), _dense(_file(stem, "ty"))
    labelled = len(_dense(_file(stem, "y")))
    # The files list test nodes in another order than the graph, and some of the graph's nodes are missing: these have
    # no features and no class, and are in no split.
    places = np.array([int(line) for line in read_text(_file(stem, "test.index")).split()])
    nodes = max(len(training), int(places.max(initial=-1)) + 1)
    if len(places) != len(tested) or len(tested) != len(tested_classes) or len(training) != len(classes):
        raise _damaged(_file(stem, "test.index"), "its files are of different lengths")
    features = np.zeros((nodes, training.shape[1]), np.float32)
    labels = np.zeros(nodes, np.int64)
    features[: len(training)], labels[: len(training)] = training, classes.argmax(1)
    features[places], labels[places] = tested, tested_classes.argmax(1)
    parts = (np.arange(labelled), np.arange(labelled, labelled + VALIDATION), np.sort(places))
    return GraphData(
        *(torch.from_numpy(array) for array in (features, _planetoid_edges(_file(stem, "graph")), labels)),
        *(torch.from_numpy(array.astype(np.int64)) for array in parts),
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
    """A SciPy CSR matrix as a dense tensor."""
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


def _planetoid_edges(path: Path) -> NDArray[np.int64]:
    """The edges from every node to each node in its list."""
    held = _plain(path)
    try:
        pairs = [(int(node), int(other)) for node, others in held.items() for other in others]
    except (AttributeError, ValueError, TypeError) as error:
        raise _damaged(path, "no dictionary of neighbours") from error
    return np.ascontiguousarray(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
