"""What all tests share."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

# pytest-xdist sets the width of a terminal for its workers; commands are tested as they print into a pipe.
os.environ.pop("COLUMNS", None)


def pytest_collection_finish() -> None:
    """Collect garbage less often: of a training test's CPU time, 21 % went to it, and 10 % do with these settings.

    Modules and test items live until the end, so that no collection has to visit them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_lives_on() -> Iterator[None]:
    """Modules that a test file imported, and caches, are not visited by the collections of later files either.

    Measuring memory collects garbage each time. After the tests of native execution, the 73 tests of
    memory/test_workspaces.py took 26 s of CPU time instead of 5 s.
    """
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # graphs that would be frozen, too
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """``run.compile()`` runs the graphs of AOTAutograd as they are: Inductor takes seconds for each."""
    from graph_backend import replace_inductor

    replace_inductor(monkeypatch)


@pytest.fixture
def gpu_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton told of a GPU, where there is none: enough to trace kernels, not to run them."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Hopper:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    if not torch.cuda.is_available():
        monkeypatch.setattr(driver, "_active", Hopper())


WriteRun = Callable[..., Path]


@pytest.fixture
def write_run() -> WriteRun:
    """Writes a run folder as training would: reports and comparisons only ever read files."""

    def write(
        folder: Path,
        *,
        plan: str | None = None,
        seed: int = 0,
        value: float | None = 0.9,
        status: str = "finished",
        cost: float = 1.0,
        bits: float = 32.0,
        memory: float = 4000.0,
        losses: Sequence[float] = (2.3, 0.5, 0.1),
        sites: Sequence[dict[str, Any]] = (),
        summary: dict[str, Any] | None = None,
        **facts: Any,
    ) -> Path:
        folder.mkdir(parents=True)
        metric = {"name": "accuracy", "better": "higher", "trivial": 0.1}
        own = {
            "bitplan_run": 1,
            "task": "digits",
            "task_source": "digits",
            "settings": {"steps": 10 * len(losses), "lr": 0.1},
            "plan": plan,
            "plan_source": plan,
            "execution": "emulate",
            "device": "cpu",
            "compile": False,
            "seed": seed,
            "metric": metric,
            "command": f"bitplan train digits{f' --plan {plan}' if plan else ''} --seed {seed}",
            "versions": {"bitplan": "0.1", "torch": "2.13.0"},
            "machine": {"cpu": "a CPU"},
        } | facts
        (folder / "run.json").write_text(json.dumps(own))
        if plan is not None:
            (folder / "plan.yaml").write_text(f"version: 1\nname: {json.dumps(plan)}\nrules: []\n")
        lines: list[dict[str, Any]] = [
            {"step": 10 * number, "loss": loss, "lr": 0.1, "bits": bits, "mean_bits": bits, "cost": cost * number}
            for number, loss in enumerate(losses, 1)
        ]
        step = lines[-1]["step"]
        if value is not None:
            lines.append({"step": step, own["metric"]["name"]: value, "evaluation": True})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "sites.json").write_text(json.dumps(list(sites)))
        if status != "unfinished":
            reported = {
                "status": status,
                "step": step,
                "metrics": {} if value is None else {own["metric"]["name"]: value},
                "best": value,
                "loss": losses[-1],
                "cost": {
                    "bitops": 1e9 * cost,
                    "relative_to_fp32": cost,
                    "relative_to_bf16": 4 * cost,
                    "mean_bits": bits,
                },
                "memory": {"weight": memory / 4, "activation": memory / 2, "grad_activation": memory / 4},
                "peak": 10**8,
                "seconds": 3.5,
                "why": "" if status == "finished" else f"it {status} at step {step}.",
            } | (summary or {})
            (folder / "summary.json").write_text(json.dumps(reported))
        return folder

    return write
