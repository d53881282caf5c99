"""`bitplan.compare` and `bitplan compare file.py:train`: a training function of one's own under several plans."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Ran, runner

import bitplan as bp
from bitplan.cli import main
from bitplan.errors import RunError, TaskError
from bitplan.lab.compare.functions import FunctionSetting, function_source, names_function
from bitplan.lab.compare.workers import Job
from bitplan.lab.train import RunFolder

Bitplan = Callable[..., Ran]

TRAIN = """
import os, signal, torch, bitplan as bp
from torch import nn

def make():
    return nn.Linear(8, 4), torch.randn(2, 8), None

def train(plan, seed):
    torch.manual_seed(seed)
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = bp.attach(model, plan, optimizer=optimizer, example=x)
    for step in range(12):
        if step == int(os.environ.get("DIES_AT", -1)) and plan.all_rules:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"score": 1 - loss.item(), "loss": loss.item()}

def recorded(plan, seed):
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bp.record("ignored", model, plan, optimizer=optimizer, example=x, metric="final loss", log_every=2) as run:
        for step in range(4):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    return loss.item()

def nothing(plan, seed):
    return None

def text(plan, seed):
    return {"final loss": "low"}

def wrong(plan, seed):
    raise KeyError("no such column")
"""


@pytest.fixture
def bitplan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bitplan:
    return runner(main, capsys, monkeypatch)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TRAIN)
    return Path("own.py")


def test_a_comparison_that_was_killed_keeps_what_has_ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES_AT", "5")
    with pytest.raises(RunError, match="int8-all, seed 0 was killed"):
        bp.compare("own.py", ["fp32", "int8-all"])
    folder = Path("runs/compare-own-fp32-int8-all")
    assert RunFolder(folder / "fp32-s0").status() == "finished"
    assert RunFolder(folder / "int8-all-s0").status() == "unfinished"
    before = (folder / "fp32-s0" / "summary.json").stat().st_mtime_ns
    monkeypatch.delenv("DIES_AT")
    updates: list[Any] = []
    report = bp.compare("own.py", ["fp32", "int8-all"], on_update=updates.append)
    assert (folder / "fp32-s0" / "summary.json").stat().st_mtime_ns == before
    assert [update.job.label for update in updates if update.summary is not None] == ["fp32", "int8-all"]
    (experiment,) = report.experiments
    assert (experiment.metric.name, experiment.metric.better) == ("score", "higher")
    verdicts = [(plan.label, plan.verdict) for plan in experiment.plans]
    assert verdicts == [("fp32", "reference"), ("int8-all", "undecided")]
    assert experiment.plans[1].cost is not None
    assert 0.05 < experiment.plans[1].cost < 0.5
    assert experiment.plans[0].runs[0].value != experiment.plans[1].runs[0].value
    assert "NaN" not in report.answer
    file.write_text(f"{TRAIN}\n# another version")
    with pytest.raises(RunError, match="SHA-256"):
        bp.compare("own.py", ["fp32", "int8-all"])


def test_a_comparison_says_once_that_its_plans_are_emulated(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bp.compare("own.py", ["fp32", "int8-all", "int4-all"])
    assert capfd.readouterr().err.count("saves neither memory nor time") == 1


def one_run(source: str, folder: Path, plan: str | None = None) -> RunFolder:
    """A run of a training function in this process."""
    job = Job("label", None if plan is None else bp.Plan.preset(plan), plan, 3, folder / "run")
    with torch.random.fork_rng():
        FunctionSetting(source, "0" * 64, folder).trainer().run(job, lambda progress: None, lambda: False)
    return RunFolder(job.folder)


def test_a_function_that_records_its_loop_fills_the_folder_of_the_comparison(file: Path, tmp_path: Path) -> None:
    run = one_run("own.py:recorded", tmp_path, "int8-all")
    config = run.config()
    assert (config.task, config.seed, config.plan, config.log_every) == ("own:recorded", 3, "int8-all", 2)
    assert (config.metric["name"], config.metric["better"]) == ("final loss", "lower")
    assert [line["step"] for line in run.metrics() if "lr" in line] == [1, 2, 4]
    summary = run.summary()
    assert summary is not None
    assert summary.metrics["final loss"] == summary.loss
    assert not Path("ignored").exists()
    assert run.statistics_file.exists()


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("nothing", "NoneType"),
        ("text", "final loss is str, and a run records numbers"),
        ("wrong", "no such column'"),
        ("none", "did you mean"),
    ],
)
def test_errors_of_the_function_are_one_sentence(file: Path, tmp_path: Path, name: str, token: str) -> None:
    with pytest.raises(TaskError, match=token) as error:
        one_run(f"own.py:{name}", tmp_path)
    assert "\n" not in str(error.value)
    assert "own.py" in str(error.value)


def test_functions_are_found_by_name(file: Path) -> None:
    assert names_function("own.py")
    assert names_function("own.py:recorded")
    assert not names_function("own.py:Task")
    assert not names_function("digits")
    assert function_source(one_run) == f"{os.path.relpath(__file__)}:one_run"
    with pytest.raises(RunError, match="top of a file"):
        bp.compare(lambda plan, seed: 1.0, ["fp32"])
    with pytest.raises(RunError, match="names no function"):
        bp.compare("elsewhere.py:train", ["fp32"])


@pytest.mark.parametrize(
    ("command", "tokens"),
    [
        (("train", "own.py:make"), ("own.py:make", "train(plan, seed)", "bitplan compare own.py:train")),
        (("train", "own.py:train"), ("bitplan compare own.py:train",)),
        (("train", "own.py"), ("bitplan compare own.py:train",)),
        (("compare", "own.py:make", "--plans", "fp32"), ("own.py:make", "train(plan, seed)")),
        (("compare", "own.py:train", "--plans", "fp32", "--set", "steps=3"), ("own.py:train", "--set")),
        (("compare", "own.py:train", "--suite", "cpt"), ("cpt", "--plans")),
        (("compare", "digits", "--plans", "fp32", "--metric", "loss"), ("digits", "--metric")),
        (("compare", "own.py:train", "--plans", "fp32", "--better", "lower"), ("--metric",)),
    ],
)
def test_commands_say_what_to_add(
    bitplan: Bitplan, file: Path, command: tuple[str, ...], tokens: tuple[str, ...]
) -> None:
    ran = bitplan(*command)
    assert ran.code == 2
    for token in tokens:
        assert token in ran.err
    assert not Path("runs").exists()


def test_advice_suggests_only_what_works(bitplan: Bitplan, file: Path) -> None:
    ran = bitplan("advise", "own.py:make", "-o", "advice.yaml", "--rows", "2")
    assert ran.code == 0
    assert "bitplan train" not in ran.err
    assert "bitplan.attach(model, 'advice.yaml'" in ran.err


def test_a_recorded_run_is_not_resumed_by_bitplan_train(bitplan: Bitplan, tmp_path: Path) -> None:
    with bp.record(tmp_path / "run") as run:
        run.log(loss=1.0)
    ran = bitplan("train", "--resume", tmp_path / "run")
    assert ran.code == 2
    assert "recorded" in ran.err
    assert "Traceback" not in ran.err
