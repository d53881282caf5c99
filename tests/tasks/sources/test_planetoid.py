"""Planetoid's files, written here as SciPy's matrices pickle themselves, and read without SciPy or a single call."""

from __future__ import annotations

import pickle
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitplan.errors import TaskError
from bitplan.lab.sources import graphs as planetoid
from bitplan.lab.sources.graphs import read_planetoid
from bitplan.lab.tasks import public_graphs
from bitplan.lab.tasks.registry import find_task

#: Eight nodes: 0 and 1 are learnt from, 2 is for validation, 3 is there unasked; test nodes are 4, 5 and 7, and 6 is
#: missing, as in Citeseer.
FEATURES = np.arange(24, dtype=np.float32).reshape(8, 3)
LABELS = np.array([0, 1, 1, 0, 1, 0, 0, 1])
ORDER = [7, 4, 5]
GRAPH = {0: [1, 2], 1: [0], 2: [0], 3: [], 4: [5], 5: [4], 7: [0]}


@pytest.fixture
def matrices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SciPy's class as a pickle names it, with the attributes that its state has."""
    module = types.ModuleType("scipy.sparse.csr")
    kind = type("csr_matrix", (), {"__module__": "scipy.sparse.csr"})
    module.csr_matrix = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scipy", types.ModuleType("scipy"))
    monkeypatch.setitem(sys.modules, "scipy.sparse", types.ModuleType("scipy.sparse"))
    monkeypatch.setitem(sys.modules, "scipy.sparse.csr", module)

    def made(rows: Any) -> Any:
        places = [np.flatnonzero(row) for row in rows]
        matrix = kind()
        matrix.__dict__.update(
            _shape=rows.shape,
            data=np.concatenate([row[place] for row, place in zip(rows, places, strict=True)]),
            indices=np.concatenate(places).astype(np.int32),
            indptr=np.cumsum([0, *map(len, places)]).astype(np.int32),
            maxprint=50,
        )
        return matrix

    return made


def write(folder: Path, matrices: Any, **changed: Any) -> None:
    one_hot = np.eye(2, dtype=np.int32)[LABELS]
    parts = {
        "allx": matrices(FEATURES[:4]),
        "tx": matrices(FEATURES[ORDER]),
        "x": matrices(FEATURES[:2]),
        "ally": one_hot[:4],
        "ty": one_hot[ORDER],
        "y": one_hot[:2],
        "graph": defaultdict(list, GRAPH),
        **changed,
    }
    folder.mkdir(exist_ok=True)
    for part, value in parts.items():
        (folder / f"ind.cora.{part}").write_bytes(pickle.dumps(value, 2))
    (folder / "ind.cora.test.index").write_text("".join(f"{node}\n" for node in ORDER))


@pytest.fixture(autouse=True)
def one_for_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planetoid, "VALIDATION", 1)


@pytest.mark.parametrize("below", [".", "raw"])
def test_nodes_stand_where_the_graph_has_them(tmp_path: Path, matrices: Any, below: str) -> None:
    write(tmp_path / below, matrices)
    graph = read_planetoid(tmp_path, "cora")
    assert graph is not None
    expected = torch.from_numpy(FEATURES.copy())
    expected[6] = 0  # nobody knows it
    assert torch.equal(graph.features, expected)
    assert graph.labels.tolist() == LABELS.tolist()
    assert sorted(graph.edges.T.tolist()) == [[0, 1], [0, 2], [1, 0], [2, 0], [4, 5], [5, 4], [7, 0]]
    assert [part.tolist() for part in (graph.training, graph.validation, graph.test)] == [[0, 1], [2], [4, 5, 7]]


def test_the_task_finds_them(tmp_path: Path, matrices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, matrices)
    monkeypatch.setattr(public_graphs.Cora, "sizes", (8, 3, 2, 8))
    inputs, requests = find_task("cora", [f"data={tmp_path}"]).batch(0)
    assert inputs[0].shape == (8, 3)
    assert requests.tolist() == [0, 1, *[-100] * 6]


def test_others_are_not_taken_for_it(tmp_path: Path, matrices: Any) -> None:
    write(tmp_path, matrices)
    assert read_planetoid(tmp_path, "citeseer") is None


def test_damaged_files_are_told_of(tmp_path: Path, matrices: Any) -> None:
    for part, value, why in (
        ("allx", [1, 2], r"ind\.cora\.allx is damaged or something else \(no matrix\)"),
        ("ally", {"a": 1}, r"ind\.cora\.ally is damaged or something else \(no array of numbers\)"),
        ("graph", [3], r"ind\.cora\.graph is damaged or something else \(no dictionary of neighbours\)"),
        ("ty", np.eye(2, dtype=np.int32), r"its files are of different lengths"),
    ):
        write(tmp_path, matrices, **{part: value})
        with pytest.raises(TaskError, match=why):
            read_planetoid(tmp_path, "cora")
    write(tmp_path, matrices)
    (tmp_path / "ind.cora.tx").write_bytes(b"nothing")
    with pytest.raises(TaskError, match=r"ind\.cora\.tx is damaged"):
        read_planetoid(tmp_path, "cora")
    (tmp_path / "ind.cora.tx").unlink()
    with pytest.raises(TaskError, match=r"there is no file .*ind\.cora\.tx, which belongs to the set"):
        read_planetoid(tmp_path, "cora")
