from __future__ import annotations

import gzip
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitplan.errors import TaskError
from bitplan.lab.sources.graphs import read_npz, read_ogb
from bitplan.lab.tasks import public_graphs
from bitplan.lab.tasks.registry import find_task

FEATURES = np.array([[0, 2, 0], [1, 0, 3], [0, 0, 0], [4, 0, 0]], np.float32)
#: 0 - 1 - 2, in one direction only.
ADJACENCY = {"adj_indptr": np.array([0, 1, 2, 2, 2]), "adj_indices": np.array([1, 2])}
LABELS = np.array([0, 1, 1, 0])
SPLIT = {"idx_train": np.array([0, 1]), "idx_val": np.array([2]), "idx_test": np.array([3])}


def rows(prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}_data": np.array([2, 1, 3, 4], np.float32),
        f"{prefix}_indices": np.array([1, 0, 2, 0], np.int32),
        f"{prefix}_indptr": np.array([0, 1, 3, 3, 4], np.int32),
        f"{prefix}_shape": np.array([4, 3]),
    }


def written(folder: Path, name: str = "graph.npz", **arrays: Any) -> Path:
    np.savez(folder / name, **arrays)
    return folder / name


@pytest.mark.parametrize(
    "arrays",
    [
        {**rows("x"), **ADJACENCY, "y": LABELS},
        {**rows("attr"), **ADJACENCY, "labels": LABELS},
        {"x": FEATURES, "edge_index": np.array([[0, 1], [1, 2]]), "y": LABELS},
    ],
)
def test_layouts(tmp_path: Path, arrays: dict[str, Any]) -> None:
    graph = read_npz(written(tmp_path, **arrays, **SPLIT))
    assert torch.equal(graph.features, torch.from_numpy(FEATURES))
    assert graph.edges.tolist() == [[0, 1], [1, 2]]
    assert graph.labels.tolist() == LABELS.tolist()
    assert [part.tolist() for part in (graph.training, graph.validation, graph.test)] == [[0, 1], [2], [3]]


def test_a_graph_of_yours_is_trained_on(tmp_path: Path) -> None:
    path = written(tmp_path, **rows("x"), **ADJACENCY, y=LABELS, **SPLIT)
    task = find_task("graph", [f"data={path}", "normalise=true"])
    (x, sources, targets, _), requests = task.batch(0)
    assert x.sum(1).tolist() == [1, 1, 0, 1]  # a node without features stays so
    assert sorted(zip(sources.tolist(), targets.tolist(), strict=True))[:2] == [(0, 0), (0, 1)]  # it goes both ways
    assert requests.tolist() == [0, 1, -100, -100]
    assert task.loss(task.model()(x, sources, targets, _), requests).isfinite()


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return print, ("unpickled",)

    path = written(tmp_path, **{**rows("x"), **ADJACENCY}, y=np.array([Runs(), 1, 2, 3], dtype=object))
    with pytest.raises(TaskError, match=r"is not a graph that can be read \(no .npz file, or one of pickled objects"):
        read_npz(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"y": None}, r"lacks y or labels"),
        ({"x_data": None}, r"lacks x_data or attr_data"),
        ({"adj_indptr": None}, r"lacks adj_indptr"),
        ({"adj_indices": np.array([1])}, r"adj_indptr promises 2 edges and adj_indices has 1"),
        ({"adj_indptr": np.array([0, 2, 1, 2, 2])}, r"begin at places that are out of order"),
        ({"adj_indices": np.array([1, 9])}, r"an edge names node 9, and the graph has 4"),
        ({"x_indices": np.array([1, 0, 7, 0])}, r"is not a graph that can be read"),
        ({"idx_val": None}, r"has idx_train and no idx_val"),
        ({"idx_val": np.array([], np.int64)}, r"the validation set of this graph has no node"),
        ({"y": np.array([0, 1])}, r"and 2 labels do not make a graph"),
        ({"y": np.array([0, 1, -1, 0])}, r"every node of a graph needs a class"),
    ],
)
def test_damaged_files_are_told_of(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    arrays = {**rows("x"), **ADJACENCY, "y": LABELS, **SPLIT, **change}
    path = written(tmp_path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(TaskError, match=sentence) as raised:
        read_npz(path)
    assert "\n" not in str(raised.value)


def test_what_is_no_npz_file_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "graph.npz").write_bytes(b"something else")
    with pytest.raises(TaskError, match=r"graph\.npz is not a graph that can be read"):
        read_npz(tmp_path / "graph.npz")
    with pytest.raises(TaskError, match=r"there is no file absent\.npz: set data= to a graph in an \.npz file\."):
        find_task("graph", ["data=absent.npz"]).batch(0)


# --- public ones ---


def test_a_public_graph_is_found_by_its_name_and_must_be_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "planetoid_cora.npz", **rows("x"), **ADJACENCY, y=LABELS, **SPLIT)
    with pytest.raises(TaskError, match=r"this is not cora, which has 2708 nodes, .* not 4, 3 and 2: read it with"):
        find_task("cora", [f"data={tmp_path}"]).batch(0)
    monkeypatch.setattr(public_graphs.Cora, "sizes", (4, 3, 2, 4))
    for data in (path, tmp_path):
        task = find_task("cora", [f"data={data}"])
        real, example = task.batch(0), task.example()
        assert [part.shape for part in real[0]] == [part.shape for part in example[0]]
        assert [part.dtype for part in real[0]] == [part.dtype for part in example[0]]
        assert real[1].shape == example[1].shape


def test_what_is_not_there_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"cora is not here: set data= to its file, planetoid_cora\.npz or cora\.npz"):
        find_task("cora").batch(0)
    with pytest.raises(TaskError, match=r"absent holds no citeseer"):
        find_task("citeseer", ["data=absent"]).batch(0)
    with pytest.raises(TaskError, match=r"ogbn-arxiv is not here: unpack the archive .* or set download=true"):
        find_task("ogbn-arxiv").batch(0)


def test_example_of_samples_has_their_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(public_graphs.Cora, "sizes", (4, 3, 2, 4))
    path = written(tmp_path, **rows("x"), **ADJACENCY, y=LABELS, **SPLIT)
    task = find_task("cora", [f"data={path}", "model=sage", "fanout=3,2", "batch=2"])
    real, example = task.batch(0), task.example()
    assert [part.shape for part in real[0]] == [part.shape for part in example[0]]


def ogb(folder: Path, edges: str = "0,1\n1,2\n", name: str = "ogbn_arxiv") -> None:
    tables = {
        "raw/edge": edges,
        "raw/node-feat": "0.0,2.0,0.0\n1,0,3\n0,0,0\n4,0,0\n",
        "raw/node-label": "0\n1\n1\n0\n",
        "split/time/train": "0\n1\n",
        "split/time/valid": "2\n",
        "split/time/test": "3\n",
    }
    for table, text in tables.items():
        path = folder / name / f"{table}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))


@pytest.mark.parametrize("below", [".", "ogbn_arxiv"])
def test_ogb_s_files_of_text_are_read(tmp_path: Path, below: str) -> None:
    ogb(tmp_path)
    graph = read_ogb(tmp_path / below, "ogbn_arxiv")
    assert graph is not None
    assert torch.equal(graph.features, torch.from_numpy(FEATURES))
    assert graph.edges.tolist() == [[0, 1], [1, 2]]
    assert (graph.labels.tolist(), graph.test.tolist()) == (LABELS.tolist(), [3])


@pytest.mark.parametrize(
    ("edges", "sentence"),
    [
        ("0,1\n1,b\n", r"edge\.csv\.gz is damaged"),
        ("0\n1\n", r"has 1 columns, and 2 are wanted"),
        ("0,1\n2\n", "damaged"),
    ],
)
def test_damaged_text_is_told_of(tmp_path: Path, edges: str, sentence: str) -> None:
    ogb(tmp_path, edges)
    with pytest.raises(TaskError, match=sentence):
        read_ogb(tmp_path, "ogbn_arxiv")


def test_the_archive_as_it_unpacks_is_read(tmp_path: Path) -> None:
    ogb(tmp_path, name="arxiv")
    assert read_ogb(tmp_path, "ogbn_arxiv") is not None


@pytest.mark.parametrize("fails", [False, True])
def test_ogb_s_package_fetches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool) -> None:
    """What it makes of the files afterwards does not matter: only they are read."""

    def fetch(name: str, root: str) -> None:
        assert name == "ogbn-arxiv"
        ogb(Path(root))
        if fails:
            raise RuntimeError("its own file cannot be loaded")

    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = fetch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    monkeypatch.setattr(public_graphs.OgbnArxiv, "sizes", (4, 3, 2, 4))
    task = find_task("ogbn-arxiv", ["download=true", f"data={tmp_path / 'new'}"])
    assert task.batch(0)[1].tolist() == [0, 1, -100, -100]


def test_what_ogb_could_not_fetch_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(name: str, root: str) -> None:
        raise OSError("no network.")

    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    with pytest.raises(TaskError, match=r"ogb could not fetch ogbn-arxiv into .* \(no network\): unpack its archive"):
        find_task("ogbn-arxiv", ["download=true", f"data={tmp_path}"]).batch(0)


def test_without_ogb_the_user_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(TaskError, match=r"needs the package ogb, which is not installed: run 'pip install ogb'"):
        find_task("ogbn-arxiv", ["download=true"]).batch(0)


def test_the_graph_of_products_trains_and_evaluates_on_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_graphs.OgbnProducts, "sizes", (4, 3, 2, 4))
    ogb(tmp_path, name="products")
    options = [f"data={tmp_path}", "features=8", "batch=2", "fanout=3,2", "dropout=0"]
    task = find_task("ogbn-products", options)
    real, example = task.batch(0), task.example()
    assert [part.shape for part in real[0]] == [part.shape for part in example[0]]
    torch.manual_seed(0)
    model = task.model()
    task.loss(model(*real[0]), real[1]).backward()
    with torch.no_grad():
        figures = task.evaluate(model.eval())
        assert figures == task.evaluate(model)  # the same samples each time
    assert set(figures) == {"accuracy", "validation_accuracy", "validation_loss"}
    assert 0 <= figures["accuracy"] <= 1
    assert figures["validation_loss"] > 0
    # The recipe of Wolfe & Kyrillidis: 80 epochs over OGB's 196,615 training nodes.
    recipe = find_task("ogbn-products").settings
    assert recipe.steps == 80 * -(-196_615 // recipe.batch)
    sizes = [tuple(parameter.shape) for parameter in find_task("ogbn-products").model().parameters()]
    assert (512, 3) in sizes


def test_products_that_are_not_there_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"ogbn-products is not here: unpack the archive products\.zip"):
        find_task("ogbn-products").batch(0)
    with pytest.raises(TaskError, match="evaluation is -1"):
        find_task("ogbn-products", ["evaluation=-1"])
