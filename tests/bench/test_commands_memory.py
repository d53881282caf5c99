from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import benchmarks.commands as command

Bench = Callable[..., Any]

ROW = {
    "variant": "bf16",
    "ours": False,
    "peak": 10 * 2**30,
    "kept": 2**30,
    "memory": {},
    "milliseconds": 12.5,
    "samples_per_second": 800.0,
    "first_seconds": 61.0,
    "loss": 0.5,
    "loss_gap": 0.0,
}
HEADLINE = {
    "ours": "packed",
    "smallest": "bf16",
    "times_smaller": 2.0,
    "times_as_fast_as_smallest": 0.9,
    "fastest": "bf16",
    "times_smaller_than_fastest": 2.0,
    "times_as_fast": 0.9,
}


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The command without the measurement; what it asked to be measured."""
    requests: list[tuple[Any, ...]] = []

    def measured(*arguments: Any, **more: Any) -> dict[str, Any]:
        requests.append(arguments)
        packed = {**ROW, "variant": "packed", "ours": True, "peak": 5 * 2**30, "loss": None, "loss_gap": None}
        return {
            "rows": [ROW, packed],
            "failed": {"bf16-checkpointed": "RuntimeError: no"},
            "headline": HEADLINE,
            "loss_data": "digits",
            "loss_steps": 1000,
            "loss_batch": 64,
            "aim": {"peak": 1, "reached_by": []},
        }

    monkeypatch.setattr(command, "bench_memory", measured)
    return requests


def test_the_table_shows_memory_speed_and_the_headline(bench: Bench, canned: list[tuple[Any, ...]]) -> None:
    ran = bench("memory")
    cells = [line.split() for line in ran.out.splitlines()]
    assert cells[2] == ["bf16", "10.0", "GiB", "1.0", "GiB", "12.50", "800.0", "61.0", "0.5000", "+0.0000"]
    assert cells[3][:3] == ["packed", "5.0", "GiB"]
    assert "packed is 2.00 times smaller than bf16, the smallest of the others, at 0.90 times its speed" in ran.out
    assert "bf16-checkpointed failed: RuntimeError: no" in ran.out
    assert "Losses after 1000 steps of 64 on digits." in ran.out
    assert "Aim MISSED." in ran.out


def test_what_is_asked_for_is_measured(bench: Bench, canned: list[tuple[Any, ...]], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    options = ("--model", "resnet50", "--variant", "bf16", "--variant", "packed", "--batch", 256, "--loss-steps", 7)
    options += ("--loss-batch", 3, "--loss-jobs", 2)
    ran = bench("memory", *options, "--json", "-o", file)
    assert canned == [("resnet50", ["bf16", "packed"], None, "cpu", 256, None, True, 5, 7, 3, 2)]
    assert json.loads(file.read_text()) == ran.json


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--variant", "fp8"], "there is no variant 'fp8'"),
        (["--model", "absent"], "there is no built-in model or task 'absent'"),
        (["--plan", "absent"], "there is no "),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(bench: Bench, arguments: list[str], sentence: str) -> None:
    ran = bench("memory", *arguments, "--json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"bitplan: {sentence}")
