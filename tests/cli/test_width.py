"""Tables and text fit the terminal: no line of a command is longer than 80 columns where the terminal has 80."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bitplan.cli.app import whole_group
from bitplan.cli.output import FittedTable
from bitplan.executions.native import crossover

TINY = Path(__file__).parents[1] / "train" / "tiny_task.py"
MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(64, 32), None
"""
COMMANDS: list[list[str]] = [
    ["plan", "list"],
    ["plan", "check", "fp8-linear", "gpt-tiny"],
    ["plan", "explain", "fp8-linear", "gpt-tiny"],
    ["plan", "cpt", "resnet20", "-o", "cpt.yaml"],
    ["models"],
    ["sites", "resnet20"],
    ["sites", "gpt-tiny", "--slots"],
    ["cost", "resnet20", "--plan", "int8-minmax"],
    ["memory", "gpt-tiny", "--estimate-only"],
    ["memory", "gpt-tiny", "--budget", "8MiB"],
    ["measure", "gpt-tiny", "--rows", "4"],
    ["formats"],
    ["error", "--size", "16", "--draws", "1", "--nu", "3", "inf"],
    ["assign", "resnet20", "--ratio", "0.5", "--explain"],
    ["advise", "gpt-tiny", "--rows", "4"],
    ["schedules"],
    ["schedules", "CR"],
    ["tasks"],
    ["tasks", "digits"],
    ["runs"],
    ["train", "digits", "--plan", "int8-all", "--dry-run"],
    ["train", "tiny.py:Tiny", "--plan", "int8-all", "--set", "steps=6"],
    ["range-test", "tiny.py:Tiny", "--set", "steps=24", "--window", "4"],
    ["compare", "tiny.py:Tiny", "--plans", "fp32", "int8-all", "early.yaml", "late.yaml", "--set", "steps=4"],
    ["report", "runs"],
    ["auto", "model.py:make", "--steps", "0", "--memory", "100%", "-o", "auto.yaml"],
    ["crossover"],
    ["env"],
    ["--help"],
]
#: What these print has no width, or they print what the commands above print.
WITHOUT_WIDTH = {("plan", "show"), ("plan", "schema"), ("plan", "export"), ("plan", "import"), ("doctor",), ("demo",)}


def leaves(group: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    return {
        leaf
        for name, command in group.commands.items()
        for leaf in (leaves(command, (*path, name)) if hasattr(command, "commands") else {(*path, name)})
    }


def test_every_command_is_here() -> None:
    shown = {tuple(arguments[:count]) for arguments in COMMANDS for count in (1, 2)}
    assert leaves(whole_group()) - shown == WITHOUT_WIDTH


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_line_is_longer_than_80_columns(
    bitplan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_run: Any, arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(crossover, "SIZES", {"cpu": (8,)})
    monkeypatch.setattr(crossover, "CHANNELS", (16,))
    Path("model.py").write_text(MODEL)
    Path("tiny.py").write_text(TINY.read_text())
    for name in ("early", "late"):
        rule = "{match: '*', weight: int8}"
        Path(f"{name}.yaml").write_text(f"version: 1\nname: {name}, then a full budget for the rest\nrules: [{rule}]\n")
    if arguments[0] in ("runs", "report"):
        write_run(tmp_path / "runs" / "a-run-with-quite-a-long-name-for-a-folder-0001", plan="int8-all", seed=3)
    ran = bitplan(*arguments)
    assert ran.code == 0, ran.err
    # A command that is meant to be copied stays on one line.
    long = [line for line in ran.out.splitlines() if len(line.rstrip()) > 80]
    assert [line for line in long if not line.startswith(("command:", "bitplan report"))] == []


def printed(table: FittedTable, width: int) -> list[str]:
    console = Console(width=width, record=True, color_system=None)
    with console.capture() as capture:
        table.print(console)
    return [line.rstrip() for line in capture.get().splitlines()]


def example() -> FittedTable:
    table = FittedTable()
    table.add_column("site", "name")
    table.add_column("mean bits", "number")
    table.add_column("shape", is_optional=True)
    table.add_column("why", "text")
    table.add_row("encoder.layers.11.attention.output.weight", "8", "1024x1024", "the error is small enough for it")
    return table


def test_a_table_that_fits_is_left_as_it_is() -> None:
    heading, _, row = printed(example(), 120)
    assert heading.split() == ["site", "mean", "bits", "shape", "why"]
    assert "encoder.layers.11.attention.output.weight" in row
    assert row.endswith("the error is small enough for it")


def test_text_wraps_first_then_names_lose_their_front() -> None:
    lines = printed(example(), 80)
    assert "encoder.layers.11.attention.output.weight" in lines[2] + lines[3]
    assert lines[-1].strip() != ""
    narrow = printed(example(), 56)
    assert all(len(line) <= 56 for line in narrow)
    assert any("output.weight" in line and line.startswith("…") for line in narrow)
    assert any("1024x1024" in line for line in narrow)


def test_optional_columns_without_room_follow_below_behind_the_names() -> None:
    lines = printed(example(), 42)
    blank = lines.index("")
    assert not any("1024x1024" in line for line in lines[:blank])
    assert lines[blank + 1].split() == ["site", "shape"]
    assert lines[-1].split()[-1] == "1024x1024"
    assert all(len(line) <= 42 for line in lines)
