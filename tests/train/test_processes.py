"""Runs in two processes (gloo): the losses of one process, and the same bytes after a process was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import start_processes

from bitplan.analysis.sharding import Sharding
from bitplan.errors import RunError
from bitplan.lab.train import train
from bitplan.lab.train.processes import Processes, joined_processes, sharding_of
from bitplan.plans import Plan

TASK = '''
import os
import time
from pathlib import Path

import torch
from torch import nn

from bitplan.lab.tasks import Metric, Settings, Task

if "PIDS" in os.environ:
    Path(os.environ["PIDS"], os.environ["RANK"]).write_text(str(os.getpid()))


class Own(Task):
    """A regression, with dropout on request, that sleeps for a moment in every step."""

    name = "own"
    settings_class = Settings
    metric = Metric("error", "lower", 1.0)

    def model(self):
        model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, affine=False), nn.ReLU(), nn.Linear(32, 1))
        if not self.settings.scale_window:
            model[1] = nn.Identity()
        model.tp_plan = {"0": "colwise", "3": "rowwise"}
        return model

    def batch(self, step):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        x = torch.randn(self.settings.batch, 8, generator=torch.Generator().manual_seed(1000 * self.seed + step))
        return x, x.sum(1, keepdim=True).sin()

    def loss(self, output, target):
        return (output - target).square().mean()

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.settings.lr)

    def evaluate(self, model):
        x, y = self.batch(10**6)
        return {"error": self.loss(model(x), y).item()}
'''
SETTINGS = ("steps=12", "batch=8", "evaluate_every=2", "lr=0.01")
#: Weights have the same values on every process, so that rounding them is the same in all layouts.
WEIGHTS = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", "w": "e4m3"}]})
#: Name -> (layout, plan, further settings).
LAYOUTS = {
    "ddp": ("ddp=2", None, ()),
    "fsdp": ("fsdp=2", WEIGHTS, ()),
    "tp": ("tp=2", None, ()),
    "clipped": ("fsdp=2", None, ("clip=0.5",)),
}
#: Of the run that is killed: with batch norm, whose running means are the first process's.
KILLED = ("fsdp=2", "fp8-linear", ("scale_window=1",))


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "own_task.py"
    path.write_text(TASK)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of all layouts, made by two processes."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "own_task.py").write_text(TASK)
    (folder / "port").write_text(str(free_port()))
    start_processes(_train_all, (folder,), 2)
    return folder


def _load(path: Path, settings: tuple[str, ...]) -> Any:
    from bitplan.lab.tasks import find_task

    return find_task(f"{path}:Own", [*SETTINGS, *settings], 0)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("error")) for line in lines]


def _train_all(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = (folder / "port").read_text()
    with joined_processes(Sharding(fsdp=2), torch.device("cpu")) as joined:
        for name, (layout, plan, settings) in {**LAYOUTS, "killed": KILLED}.items():
            sharding = Sharding.parse(layout)
            processes = Processes(sharding, rank, sharding.make_mesh("cpu"))
            assert joined.rank == rank
            train(_load(folder / "own_task.py", settings), plan, folder=folder / name, processes=processes)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def test_two_processes_have_the_losses_of_one(task_file: Path, trained: Path, tmp_path: Path) -> None:
    for name, (layout, plan, settings) in LAYOUTS.items():
        alone = tmp_path / f"{name}-alone"
        train(_load(task_file, settings), plan, folder=alone)
        assert losses(trained / name) == pytest.approx(losses(alone), rel=2e-5), name
        assert json.loads((trained / name / "run.json").read_text())["sharding"] == layout
        from safetensors.torch import load_file

        own, other = (load_file(folder / "model.safetensors") for folder in (trained / name, alone))
        assert {key: tensor.shape for key, tensor in own.items()} == {key: t.shape for key, t in other.items()}


def torchrun(task_file: Path, folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command += ["-m", "bitplan", "train", f"{task_file}:Own", "--plan", str(KILLED[1]), "--shard", "fsdp"]
    command += [part for setting in (*SETTINGS, *KILLED[2]) for part in ("--set", setting)]
    return subprocess.Popen(
        [*command, "--out", str(folder)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_a_run_whose_process_was_killed_resumes_to_the_same_bytes(
    task_file: Path, trained: Path, tmp_path: Path
) -> None:
    undisturbed, killed = trained / "killed", tmp_path / "killed"
    pids = tmp_path / "pids"
    pids.mkdir()
    run = torchrun(task_file, killed, PIDS=str(pids), PAUSE="0.2")
    end = time.monotonic() + 240
    while not [*killed.glob("checkpoints/step-*.json")] and run.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(int((pids / "1").read_text()), signal.SIGKILL)
    _, errors = run.communicate(timeout=240)
    assert run.returncode != 0
    assert "bitplan: another of the 2 processes of this run has ended" in errors
    assert "torchrun --nproc-per-node 2 -m bitplan train --resume" in errors
    assert not (killed / "summary.json").exists()
    again = torchrun(task_file, killed)
    _, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors
    names = sorted(path.relative_to(killed) for path in killed.rglob("*") if path.suffix in (".safetensors", ".jsonl"))
    assert Path("model.safetensors") in names
    for name in names:
        if name.name != "times.jsonl":
            assert (killed / name).read_bytes() == (undisturbed / name).read_bytes(), name


def test_a_batch_is_split_by_rows() -> None:
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    second = Processes(Sharding(ddp=2), rank=1)
    assert [tensor.tolist() for tensor in second.part((x, y))] == [[[4.0, 5.0], [6.0, 7.0]], [2, 3]]
    # Processes that split layers have the same part.
    third = Processes(Sharding(fsdp=2, tp=2), rank=2)
    assert (third.data_part, third.data_parts) == (1, 2)
    with pytest.raises(RunError, match="3 rows"):
        second.part(x[:3])
    with pytest.raises(RunError, match="one row a sample"):
        second.part((x, y[:2]))


@pytest.mark.parametrize(
    ("options", "token"),
    [(("pipeline", 1, 2), "'pipeline'"), (("fsdp", 3, 4), "--tensor-parallel 3"), ((None, 2, 4), "--shard fsdp")],
)
def test_processes_that_cannot_share_a_run_are_one_sentence(options: tuple[Any, ...], token: str) -> None:
    with pytest.raises(RunError, match=token):
        sharding_of(*options)


@pytest.mark.parametrize("option", [{"compile": True}, {"measure_every": 2}])
def test_options_of_one_process_are_refused(option: dict[str, Any], task_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="one process only"):
        train(_load(task_file, ()), folder=tmp_path / "run", processes=Processes(Sharding(ddp=2)), **option)
