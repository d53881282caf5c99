"""Training with optimizer state in a plan's bits: smaller checkpoints, of plain tensors, that go on bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bitplan.errors import PlanError
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import RunFolder, train
from bitplan.lab.train.checkpoint import checkpoints_in
from bitplan.plans import Plan

pytest.importorskip("torchao")
PLAN = Plan.from_dict({"version": 1, "optimizer": {"state": "int8"}, "rules": [{"match": "*", "weight": "bf16"}]})
SETTINGS = ("steps=6", "evaluate_every=3", "layers=1", "features=64", "batch=2", "length=16", "evaluation=1")


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, fingerprint: Any) -> None:
    whole, parts, full = tmp_path / "whole", tmp_path / "parts", tmp_path / "full"
    train(find_task("lm", SETTINGS), PLAN, folder=whole)
    for last in (2, 4):
        seen: list[int] = []
        options: dict[str, Any] = {
            "on_progress": lambda now, seen=seen: seen.append(now.step),
            "stop": lambda seen=seen, last=last: bool(seen) and seen[-1] >= last,
        }
        assert train(find_task("lm", SETTINGS), PLAN, folder=parts, **options).status == "stopped"
    assert train(find_task("lm", SETTINGS), PLAN, folder=parts).status == "finished"
    assert fingerprint(parts) == fingerprint(whole)

    train(find_task("lm", SETTINGS), folder=full)
    sizes = {}
    for folder in (whole, full):
        tensors = load_file(checkpoints_in(folder / "checkpoints")[0].tensors_file)
        held = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer.state.")}
        sizes[folder] = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
        assert any(name.endswith(".exp_avg.codes") for name in held) is (folder == whole)
    assert 0.25 < sizes[whole] / sizes[full] < 0.4
    rates = [[line["lr"] for line in RunFolder(folder).metrics() if "lr" in line] for folder in (whole, full)]
    assert rates[0] == rates[1]


def test_a_task_that_trains_by_sgd_says_so(tmp_path: Path, tiny: Any) -> None:
    with pytest.raises(PlanError, match=r"SGD has no version with state in int8"):
        train(tiny(), PLAN, folder=tmp_path / "run")
