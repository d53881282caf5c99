from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import benchmarks.commands as command

Bench = Callable[..., Any]

ROW = {
    "variant": "bf16",
    "ours": False,
    "recompute": "no",
    "milliseconds": 97.9,
    "ratio": 1.0,
    "peak": 12 * 2**30,
    "fallbacks": 0,
    "graphs": 1,
    "first_seconds": 61.0,
    "loss": 1.5,
    "loss_gap": 0.0,
}
OURS = {**ROW, "variant": "native-fp8-packed", "ours": True, "ratio": 0.68, "peak": 7 * 2**30, "loss_gap": 0.0123}
DOCUMENT = {
    "benchmark": "speed",
    "rows": {"llama-2048": [ROW, OURS]},
    "failed": {"llama-2048": {"a peer": "RuntimeError: does not work here"}},
    "losses": {"llama-2048": {"native_less_emulated": -0.002, "spread": 0.03}},
    "aims": {"llama-2048": {"milliseconds": 67.0, "reached_by": ["native-fp8-packed"]}},
    "switches": [{"to": to, "recompiles": count} for to, count in (("fp8", 1), ("bf16", 1), ("fp8", 0), ("bf16", 0))],
    "crossover": [{"unit": "fp8", "size": 1024, "plain": 0.5, "native": 0.25}],
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The command without the measurement; what it asked to be measured."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "bench_speed", lambda *arguments, **named: seen.append(named) or DOCUMENT)
    return seen


def test_the_table_tells_time_memory_loss_and_the_aim(bench: Bench, asked: list[dict[str, Any]]) -> None:
    ran = bench("speed", "--shape", "llama-2048", "--loss-steps", 5, "--no-peers")
    assert ran.code == 0
    for text in ("native-fp8-packed", "0.680", "7.0 GiB", "+0.0123", "a peer failed: RuntimeError", "-0.0020"):
        assert text in ran.out
    assert "Aim reached by native-fp8-packed." in ran.out
    assert "fp8 1, bf16 1, fp8 0, bf16 0" in ran.out
    assert (asked[0]["loss_steps"], asked[0]["loss_batch"], asked[0]["peers"]) == (5, 1, False)


def test_json_is_the_whole_document(bench: Bench, asked: list[dict[str, Any]]) -> None:
    assert bench("speed", "--json").json == {"command": "python benchmarks/run.py speed", **DOCUMENT}
    assert asked[0]["loss_steps"] is None


def test_the_document_says_what_measures_it_again(bench: Bench, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    text = [
        *("--shape", "llama-2048", "--shape", "gpt-1b", "--plan", "a plan"),
        "--turns",
        "3",
        "--fast-accumulation",
        "--no-peers",
    ]
    assert bench("speed", *text, "-o", out).code == 0
    assert json.loads(out.read_text())["command"] == shlex.join(["python", "benchmarks/run.py", "speed", *text])
