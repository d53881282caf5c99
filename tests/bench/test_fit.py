"""The benchmark of a full training step within a limit of memory, with a small model on a CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_processes import be_killed, hang_after_a_step
from torch import nn

from benchmarks import fit
from benchmarks.fit import SHAPES, SPARE, TOKENS_PER_SECOND, WAYS, Measured, Outcome, bench_fit, measure

pytest.importorskip("transformers")

TINY = SHAPES["tiny"]
LARGEST = TINY.vocabulary * TINY.width
OURS = [name for name, way in WAYS.items() if way.plan is not None]


def outcome(way: str, steps: int = 4) -> tuple[Measured, str | None, list[str]]:
    """What measuring a way in this process sends: results, failure and news."""
    sent: list[tuple[str, Any]] = []
    measure(way, lambda kind, value: sent.append((kind, value)), TINY, "cpu", 1, steps, None, False)
    measured = [value for kind, value in sent if kind == "measured"][-1]
    failed = [value for kind, value in sent if kind == "failed"]
    assert sent[-1][0] in ("failed", "done")
    return measured, failed[0] if failed else None, [value for kind, value in sent if kind == "news"]


def optimizer_bytes(way: str, parameters: int) -> tuple[float, float]:
    """The least and the most bytes that the optimizer's state should take."""
    if WAYS[way].plan is None:
        exact = 2 * parameters * (4 if WAYS[way].autocast else 2)
        return exact, exact
    low_bits = 2 if WAYS[way].rounding == "float32" else 0
    least = (2 + low_bits) * parameters
    # Scales of blocks; torchao's moments of weights with less than 4,096 values, which are in 16 bits.
    small = 2 * TINY.layers * (TINY.width * TINY.width // 2 * 2) if way == "fp8-torchao" else 0
    return least, least + 2 * 4 * parameters / 256 * 1.01 + 2 * small


@pytest.mark.parametrize("way", WAYS)
def test_a_way_trains_all_parameters_with_the_state_that_it_names(way: str) -> None:
    if way == "fp8-torchao":
        pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
        measured, failed, news = outcome(way)
    assert failed is None
    assert measured.losses == sorted(measured.losses, reverse=True)
    assert 0.02 < measured.losses[0] - measured.losses[-1] < 0.5
    assert measured.weights == measured.parameters * (4 if WAYS[way].autocast else 2)
    least, most = optimizer_bytes(way, measured.parameters)
    assert least <= measured.optimizer <= most
    # Gradients are consumed one by one, or all are alive at the end.
    expected = (2 * LARGEST, 0) if way in OURS else (measured.weights, measured.weights)
    assert (measured.gradients, measured.gradients_after) == expected
    assert measured.optimizer_note is None
    assert "step 4" in news[-1]


def test_the_table_and_the_file_have_a_row_for_every_way(bench: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "fit.json"
    ran = bench("fit", "--shape", "tiny", "--no-compile", "--steps", 3, "--way", "bf16", "--tokens", 32, "-o", out)
    assert ran.code == 0
    assert "bf16" in ran.out
    document = json.loads(out.read_text())
    assert document["shape"] == {"name": "tiny", **SHAPES["tiny"].__dict__, "tokens": 32}
    assert document["command"].startswith("python benchmarks/run.py fit --way bf16 --shape tiny")
    (row,) = document["rows"]
    assert (row["way"], row["failed"], row["fits"], row["batch_tokens"]) == ("bf16", None, None, 32)
    assert len(row["step_seconds"]) == 3
    assert row["tokens_per_second"] == pytest.approx(32 / row["step_seconds"][2])


def test_a_way_without_memory_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*arguments: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with monkeypatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", run_out)
        _, failed, _ = outcome("bf16")
    assert failed == "out of memory (forward pass of step 1)"
    monkeypatch.setattr(torch.optim.AdamW, "step", run_out)
    measured, failed, _ = outcome("bf16")
    assert failed == "out of memory (optimizer's step 1)"
    assert measured.gradients == measured.weights > 0


def test_a_way_is_ended_in_time_and_keeps_what_it_measured() -> None:
    begin = time.monotonic()
    ended = fit.measure_in_process("fp8", (), 8.0, lambda news: None, hang_after_a_step)
    assert time.monotonic() - begin < 40
    assert ended.failed == "ended after 8 s; last: step 1"
    assert ended.measured.step_seconds == [1.5]
    killed = fit.measure_in_process("fp8", (), 60.0, lambda news: None, be_killed)
    assert killed.failed == "its process ended with exit code -9; last: model made"


@pytest.mark.parametrize(
    ("reserved", "seconds", "failed", "expected"),
    [
        (fit.LIMIT - SPARE, 1.0, None, True),
        (fit.LIMIT - SPARE + 1, 1.0, None, False),
        (fit.LIMIT - SPARE, 1.1, None, False),
        (fit.LIMIT - SPARE, 1.0, "out of memory", False),
    ],
)
def test_the_aim_is_memory_to_spare_and_speed(
    reserved: int, seconds: float, failed: str | None, expected: bool
) -> None:
    measured = Measured(reserved=reserved, step_seconds=[60.0, 5.0, seconds, seconds])
    row = Outcome("fp8", measured, failed).to_dict(TOKENS_PER_SECOND, fit.LIMIT)
    assert row["aim_reached"] is expected
    assert row["fits"] is (failed is None)
    assert row["spare"] == fit.LIMIT - reserved


def test_unknown_names_are_refused() -> None:
    for arguments in ({"ways": ["fp9"]}, {"shape": "llama"}):
        with pytest.raises(fit.BitplanError, match="there is no"):
            bench_fit(**arguments)  # type: ignore[arg-type]
