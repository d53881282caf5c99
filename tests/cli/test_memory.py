from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bitplan.cli.model as command

Bitplan = Callable[..., Any]
CLASSES = {"weights", "gradients", "activations", "optimizer", "other", "peak"}

PLAN = """
version: 1
rules:
- {match: "*", activation: e4m3, grad_activation: e5m2}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    file = tmp_path / "eight.yaml"
    file.write_text(PLAN)
    return file


def test_a_task_is_estimated_and_measured_by_class(bitplan: Bitplan, plan: Path) -> None:
    ran = bitplan("memory", "digits", "--plan", plan, "--execution", "packed", "--json")
    assert ran.code == 0
    result = ran.json
    assert (result["target"], result["plan"], result["execution"]) == ("digits", str(plan), "packed")
    assert (result["batch"], result["optimizer"], result["budget"]) == (128, "sgd", None)
    estimated, measured = result["estimated"], result["measured"]
    assert estimated.keys() == measured.keys() == CLASSES
    assert estimated["peak"] == pytest.approx(measured["peak"], rel=0.1)
    assert estimated["activations"] == pytest.approx(measured["activations"], rel=0.1)
    plain = bitplan("memory", "digits", "--estimate-only", "--json").json
    assert plain["measured"] is None
    assert measured["activations"] < plain["estimated"]["activations"] / 3.5


def test_the_table_has_both_figures_of_every_class_and_a_verdict(bitplan: Bitplan) -> None:
    ran = bitplan("memory", "gpt-tiny", "--optimizer", "adamw")
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines() if line.strip()}
    assert rows["no"][:4] == ["no", "plan", "estimated", "measured"]
    assert set(rows) >= CLASSES
    assert rows["weights"][1:5] == ["471.0", "KiB", "471.0", "KiB"]
    assert "The step fits: " in ran.out
    assert "bitplan: no plan: a peak of " in ran.err


def test_a_budget_is_answered_without_running(bitplan: Bitplan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_memory", lambda *arguments, **more: pytest.fail("it was run"))
    result = bitplan("memory", "gpt-tiny", "--budget", "100GiB", "--json").json
    assert (result["plan"], result["fits"], result["measured"]) == (None, True, None)
    assert len(result["choices"]) == 1  # what fits as it is needs no plan
    assert "It fits into 100.0 GiB as it is" in bitplan("memory", "gpt-tiny", "--budget", "100GiB").out


def test_the_plainest_plan_that_fits_is_found(bitplan: Bitplan) -> None:
    plain, packed = (
        bitplan("memory", "resnet20", "--batch", 8, "--estimate-only", *more, "--json").json["estimated"]["peak"]
        for more in ([], ["--plan", "bf16-all", "--execution", "packed"])
    )
    assert packed < plain
    ran = bitplan("memory", "resnet20", "--batch", 8, "--budget", packed)
    assert "The plainest of these that fits into" in ran.out
    assert "bf16-all, packed" in ran.out.splitlines()[-1]
    rows = [line.split() for line in ran.out.splitlines() if line.rstrip().endswith((" yes", " no"))]
    assert [row[-1] for row in rows] == ["no", "yes"]


def test_where_nothing_fits_the_least_is_named_and_what_to_do(bitplan: Bitplan) -> None:
    ran = bitplan("memory", "gpt-tiny", "--plan", "bf16-all", "--plan", "fp8-linear", "--budget", "1KiB")
    assert ran.code == 0
    last = ran.out.splitlines()[-1]
    assert last.startswith("Nothing here fits into 1.0 KiB: the least is ")
    assert "takes less" in last


def test_several_plans_are_compared(bitplan: Bitplan) -> None:
    ran = bitplan("memory", "gpt-tiny", "-p", "bf16-all", "-p", "fp8-linear", "--execution", "packed")
    heading = next(line for line in ran.out.splitlines() if "kept, measured" in line)
    assert heading.split() == ["plan", "kept", "peak", "kept,", "measured", "peak,", "measured"]
    assert {"bf16-all,", "fp8-linear,"} <= {line.split()[0] for line in ran.out.splitlines() if line.strip()}


def test_the_batch_and_the_optimizer_count(bitplan: Bitplan) -> None:
    def estimated(*more: object) -> dict[str, int]:
        result: dict[str, int] = bitplan("memory", "gpt-tiny", "--estimate-only", "--json", *more).json["estimated"]
        return result

    once, twice = estimated("--batch", 8), estimated("--batch", 16)
    assert twice["activations"] == pytest.approx(2 * once["activations"], rel=0.01)
    assert twice["weights"] == once["weights"]
    assert estimated("--optimizer", "none")["optimizer"] == 0
    assert estimated("--optimizer", "adamw")["optimizer"] > 1.9 * estimated("--optimizer", "sgd")["optimizer"]
    assert estimated("--autocast")["activations"] < once["activations"]


def test_what_would_hardly_fit_is_not_run(bitplan: Bitplan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "free_memory", lambda device: 2**20)
    monkeypatch.setattr(command, "measure_memory", lambda *arguments, **more: pytest.fail("it was run"))
    ran = bitplan("memory", "gpt-tiny")
    assert "not measured: " in ran.err
    assert "The step does not fit into the 1.0 MiB that are free: `bitplan memory gpt-tiny --budget 1.0MiB`" in ran.out


def test_a_file_of_ones_own_is_asked(bitplan: Bitplan, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(8, 2)\n"
        "    return model, (torch.randn(4, 8), torch.randint(2, (4,))), torch.nn.functional.cross_entropy\n"
    )
    result = bitplan("memory", f"{file}:make", "--json").json
    assert result["estimated"]["weights"] == result["measured"]["weights"] == 4 * 18


SHARDED = ["memory", "resnet20", "--batch", 2, "--shard", "fsdp=8"]


def test_one_process_of_many_is_predicted_with_its_traffic(bitplan: Bitplan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_memory", lambda *arguments, **more: pytest.fail("it was run"))
    result = bitplan(*SHARDED, "--bandwidth", "fsdp=1GB", "--json").json
    whole = bitplan("memory", "resnet20", "--batch", 2, "--estimate-only", "--json").json
    assert (result["shard"], result["processes"]) == ({"ddp": 1, "fsdp": 8, "tp": 1}, 8)
    # Buffers of batch norms are on every process, and a few rows do not divide by 8.
    assert whole["estimated"]["weights"] / 8 < result["estimated"]["weights"] < whole["estimated"]["weights"] / 6
    traffic = result["traffic"]
    assert {part["collective"] for part in traffic["collectives"]} == {"all-gather", "reduce-scatter"}
    assert traffic["bytes"] == sum(part["bytes"] for part in traffic["collectives"]) > 0
    assert traffic["seconds"] == pytest.approx(traffic["bytes"] / 1e9)
    assert bitplan(*SHARDED, "--json").json["traffic"]["seconds"] is None


def test_the_table_of_one_process_has_its_collectives(bitplan: Bitplan) -> None:
    lines = bitplan(*SHARDED, "--param-dtype", "bf16", "--bandwidth", "1GB").out.splitlines()
    assert any(line.startswith("gathered") for line in lines)
    assert any("reduce-scatter" in line for line in lines)
    assert "8 processes (fsdp=8)" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent"], "there is no built-in model or task 'absent'"),
        (["gpt-tiny", "--plan", "absent"], "there is no "),
        (["gpt-tiny", "--execution", "packed"], "packed execution saves the tensors that a plan rounds"),
        (["gpt-tiny", "--execution", "pocket", "--plan", "bf16-all"], "there is no execution 'pocket'"),
        (["gpt-tiny", "--budget", "much"], "'much' is no number of bytes"),
        (["gpt-tiny", "--optimizer", "adam"], "there is no optimizer 'adam' here; did you mean adamw?"),
        (["gpt-tiny", "--shard", "rows=2"], "there is no axis 'rows'"),
        (["gpt-tiny", "--shard", "tp=2"], "GPT does not say which layers tensor parallelism splits"),
        (["gpt-tiny", "--shard", "fsdp=2", "--compile"], "a split model is estimated uncompiled"),
        (["gpt-tiny", "--shard", "fsdp=2", "--param-dtype", "half"], "there is no dtype 'half' here"),
        (["gpt-tiny", "--bandwidth", "1GB"], "--bandwidth, --param-dtype and --reduce-dtype describe"),
        (["gpt-tiny", "--device", "tpu9"], "there is no device 'tpu9'"),
        (["gpt-tiny", "--device", "meta"], "memory is estimated and measured on cpu and cuda, not on meta"),
        (["gcn", "--batch", "8"], "a batch with a sparse tensor cannot be resized"),
        (["graph", "--batch", "8"], "a batch whose tensors have 1797 and 21655 rows cannot be resized"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(bitplan: Bitplan, arguments: list[str], sentence: str) -> None:
    ran = bitplan("memory", *arguments, "--json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith(f"bitplan: {sentence}")  # after what was announced
    assert "Traceback" not in ran.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so nothing to complain about")
def test_a_device_that_is_not_there_is_one_sentence(bitplan: Bitplan) -> None:
    ran = bitplan("memory", "gpt-tiny", "--device", "cuda")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("bitplan: this machine has no CUDA device")
