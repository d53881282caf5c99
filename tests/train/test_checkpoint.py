"""Checkpoints hold every kind of state, load without bitplan, and never execute anything."""

from __future__ import annotations

import json
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bitplan.errors import RunError
from bitplan.lab.train import train
from bitplan.lab.train.checkpoint import Checkpoint, checkpoints_in, newest_whole, remove_older, save_tensors
from bitplan.plans import Plan

TENSORS = {
    "floats": torch.randn(3, 4),
    "transposed": torch.randn(3, 4).t(),
    "cut": torch.randn(10)[::3],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.ones(1).expand(4),
    "scalar": torch.tensor(2.5),
    "bf16": torch.randn(5).bfloat16(),
    "fp16": torch.randn(5).half(),
    "e4m3": torch.randn(5).to(torch.float8_e4m3fn),
    "double": torch.randn(2).double(),
    "long": torch.tensor([2**60, -1]),
    "bytes": torch.tensor([0, 255], dtype=torch.uint8),
    "bools": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "not finite": torch.tensor([torch.inf, -torch.inf, torch.nan]),
    "a parameter": nn.Parameter(torch.randn(2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_comes_back(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    Checkpoint(tmp_path, 3).save({"part": {"x": tensor}})
    back = Checkpoint(tmp_path, 3).load()["part"]["x"]
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    assert torch.equal(back.to(wide).nan_to_num(), tensor.detach().to(wide).nan_to_num())


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "numbers": [1, -2.5, float("inf"), 2**70, True, None, "text"],
        "tuples": (1, (2, [3, ()])),
        "by number": {0: {"step": 4}, 1: {}, (1, "a"): 5},
        "like a mark": {"$tensor": "no", "$float": 1},
        "ordered": OrderedDict(b=1, a=2),
    }
    Checkpoint(tmp_path, 0).save(state)
    back = Checkpoint(tmp_path, 0).load()
    assert back == state
    assert list(back["ordered"]) == ["b", "a"]
    nan = {"x": float("nan")}
    Checkpoint(tmp_path, 1).save(nan)
    assert str(Checkpoint(tmp_path, 1).load()) == str(nan)


def test_tensors_whose_names_would_meet_stay_apart(tmp_path: Path) -> None:
    Checkpoint(tmp_path, 0).save({"part": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}})
    back = Checkpoint(tmp_path, 0).load()["part"]
    assert (back["a.b"].item(), back["a"]["b"].item()) == (1.0, 0.0)


def test_what_is_loaded_may_be_changed_and_the_file_is_not(tmp_path: Path) -> None:
    Checkpoint(tmp_path, 0).save({"part": {"x": torch.ones(3)}})
    Checkpoint(tmp_path, 0).load()["part"]["x"].zero_()
    assert Checkpoint(tmp_path, 0).load()["part"]["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "part.x, a object"),
        (b"bytes", "part.x, a bytes"),
        (torch.ones(2, 2).to_sparse(), "layout torch.sparse"),
    ],
)
def test_what_it_cannot_hold_is_said(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        Checkpoint(tmp_path, 0).save({"part": {"x": value}})
    assert not checkpoints_in(tmp_path)


def test_tied_weights_are_there_under_each_of_their_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    Checkpoint(tmp_path, 0).save({"model": model.state_dict()})
    back = Checkpoint(tmp_path, 0).load()["model"]
    other = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    other["head"].weight = other["embed"].weight
    other.load_state_dict(back)
    assert torch.equal(other["head"].weight, model["embed"].weight)
    assert other["head"].weight is other["embed"].weight


def test_others_may_read_the_files_as_the_users_umask_says(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a.safetensors", {"x": torch.ones(2)})
    (tmp_path / "b").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.safetensors", "b")}
    assert len(modes) == 1


def test_the_newest_ones_are_kept(tmp_path: Path) -> None:
    for step in (2, 10, 100, 400):
        Checkpoint(tmp_path, step).save({"part": step})
    remove_older(tmp_path, 100)  # 400 is another attempt's
    assert [item.step for item in checkpoints_in(tmp_path)] == [400, 100, 10]
    assert newest_whole(tmp_path) == (400, {"part": 400})
    assert len(list(tmp_path.iterdir())) == 6


def test_files_that_are_none_of_ours_are_left_alone(tmp_path: Path) -> None:
    for name in ("step-abc.json", "step-00000001.safetensors", "notes.txt", "step-.json"):
        (tmp_path / name).write_text("mine")
    assert checkpoints_in(tmp_path) == []
    assert newest_whole(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "3", '{"bitplan_checkpoint": 2}', '{"bitplan_checkpoint": 1, "step": 9}']
)
def test_json_that_is_no_checkpoint_is_not_loaded(tmp_path: Path, text: str) -> None:
    Checkpoint(tmp_path, 0).save({"part": 1})
    Checkpoint(tmp_path, 0).json_file.write_text(text)
    with pytest.raises(RunError):
        Checkpoint(tmp_path, 0).load()


# --- without bitplan ---


def test_a_run_leaves_weights_that_load_anywhere(tmp_path: Path, tiny: Any, noisy: Plan) -> None:
    task = tiny()
    train(task, noisy, folder=tmp_path / "run")
    plain = task.model()
    missing, unexpected = plain.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert not missing
    assert not unexpected
    newest = checkpoints_in(tmp_path / "run" / "checkpoints")[0]
    kept = {
        name.removeprefix("model."): t
        for name, t in load_file(newest.tensors_file).items()
        if name.startswith("model.")
    }
    assert set(kept) == set(plain.state_dict())
    assert all(torch.equal(kept[name], value) for name, value in plain.state_dict().items())
    with torch.no_grad():
        assert task.evaluate(plain.eval())["accuracy"] > 0.8  # they were trained


def test_the_run_folder_holds_text_and_safetensors_only(tmp_path: Path, tiny: Any, noisy: Plan) -> None:
    """Nothing that executes when it is loaded."""
    train(tiny(), noisy, folder=tmp_path / "run")
    kept = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.parent.name != "tensorboard"]
    assert {path.suffix for path in kept} == {"", ".json", ".jsonl", ".safetensors", ".yaml"}
    for path in kept:
        if path.suffix != ".safetensors":
            path.read_text(encoding="utf-8")
        if path.suffix == ".safetensors":
            length = int.from_bytes(path.read_bytes()[:8], "little")
            json.loads(path.read_bytes()[8 : 8 + length])
