from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.commands as command

Bench = Callable[..., Any]
TINY = ("--elements", 256, "--samples", 1, "--no-peers")
KEYS = {"benchmark", "machine", "device", "elements", "threads", "copy_ns_per_element", "rows", "torch_ratios"}

ROW = {
    "who": "bitplan",
    "format": "e4m3",
    "rounding": "nearest",
    "mode": "eager",
    "ns_per_element": 0.5,
    "share_of_copy": 0.25,
    "terabytes_per_second": 0.016,
    "rounded": True,
    "target": 1.0,
    "reached": True,
}


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The command without the measurement; what it asked to be measured."""
    requests: list[tuple[Any, ...]] = []

    def measured(*arguments: Any, **more: Any) -> dict[str, Any]:
        requests.append(arguments)
        missed = {**ROW, "mode": "compiled", "ns_per_element": 3.0, "reached": False}
        dropped = {**ROW, "who": "torch cast", "rounded": False, "target": None, "reached": None}
        return {
            "benchmark": "formats",
            "rows": [ROW, missed, dropped],
            "copy_ns_per_element": 0.125,
            "torch_ratios": [{"format": "e4m3", "mode": "eager", "ratio": 0.5, "reached": True}],
        }

    monkeypatch.setattr(command, "bench_formats", measured)
    return requests


def test_json_is_one_document_and_progress_goes_to_stderr(bench: Bench, tmp_path: Path) -> None:
    """The one real measurement here."""
    file = tmp_path / "result.json"
    ran = bench("formats", "-f", "e5m2", *TINY, "--json", "-o", file)
    assert ran.code == 0
    assert ran.json.keys() == {"command", *KEYS}
    assert json.loads(file.read_text()) == ran.json
    assert {row["format"] for row in ran.json["rows"]} == {"e5m2"}
    assert {row["who"] for row in ran.json["rows"]} == {"bitplan"}
    assert all(row["rounded"] for row in ran.json["rows"])
    assert "bitplan, e5m2, nearest, eager: " in ran.err
    assert f"wrote {file}" in ran.err


def test_the_table_shows_times_targets_and_ratios(bench: Bench, canned: list[tuple[Any, ...]]) -> None:
    ran = bench("formats")
    assert ran.code == 0
    cells = [line.split() for line in ran.out.splitlines() if line.split()[:2] == ["bitplan", "e4m3"]]
    assert cells[0] == ["bitplan", "e4m3", "nearest", "eager", "0.500", "25%", "0.02", "1", "reached"]
    assert cells[1][-2:] == ["1", "MISSED"]
    assert "did not round" in ran.out
    assert "A plain copy takes 0.125 ns an element." in ran.out
    assert "Ours over torch's own conversion: e4m3 eager 0.50x." in ran.out


def test_what_is_asked_for_is_measured(bench: Bench, canned: list[tuple[Any, ...]]) -> None:
    bench("formats", "-f", "E8M7", "--format", "e4m3", "--elements", 5, "--samples", 2, "--no-peers")
    bench("formats")
    assert canned[0] == (("bf16", "e4m3"), "cpu", 5, 2, False)
    assert canned[1] == (command.DEFAULT_FORMATS, "cpu", None, 15, True)


def test_the_default_measures_every_named_float() -> None:
    assert {"fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3", "e3m4", "e3m2", "e2m3", "e2m1"} <= set(
        command.DEFAULT_FORMATS
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-f", "e4m4x"], "bitplan: there is no number format 'e4m4x'; did you mean"),
        (["-o", "absent/x.json"], "bitplan: cannot write absent/x.json"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    bench: Bench,
    canned: list[tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = bench("formats", *arguments, "--json")
    assert ran.code == 2
    assert ran.err.startswith(sentence)
    assert ran.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so nothing to complain about")
def test_a_device_that_is_not_there_is_one_sentence(bench: Bench, canned: list[tuple[Any, ...]]) -> None:
    ran = bench("formats", "--device", "cuda")
    assert (ran.code, ran.out, canned) == (2, "", [])
    assert ran.err == "bitplan: this machine has no CUDA device: run with --device cpu.\n"


@pytest.mark.parametrize("arguments", [["--elements", 0], ["--samples", 0], ["--elements", "many"]])
def test_sizes_must_be_positive_numbers(bench: Bench, canned: list[tuple[Any, ...]], arguments: list[Any]) -> None:
    assert bench("formats", *arguments).code == 2
    assert canned == []
