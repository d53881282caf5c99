"""Every command takes every task: ``--set``, and with it the files of tasks that have no data of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from bitplan.cli.app import COMMANDS as TABLE
from bitplan.cli.auto import load_problem

Bitplan = Callable[..., Any]

SMALL = ("features=8", "vocabulary=40", "batch=2", "length=4", "steps=8", "evaluate_every=8")

#: Each command with what it needs besides a target; the target goes in the place of TASK.
COMMANDS: dict[str, tuple[object, ...]] = {
    "sites": ("sites", "TASK"),
    "cost": ("cost", "TASK", "--plan", "int8-minmax"),
    "memory": ("memory", "TASK", "--plan", "int8-minmax"),
    "plan check": ("plan", "check", "int8-minmax", "TASK"),
    "plan explain": ("plan", "explain", "int8-minmax", "TASK"),
    "plan cpt": ("plan", "cpt", "TASK"),
    "assign": ("assign", "TASK", "--ratio", 0.5),
    "assign sensitivity": ("assign", "TASK", "--ratio", 0.5, "--order", "sensitivity"),
    "measure": ("measure", "TASK", "--steps", 2, "-c", "e4m3 tensor"),
    "advise": ("advise", "TASK", "--steps", 2, "--early", "-c", "e4m3 tensor"),
    "range-test": ("range-test", "TASK", "--bits", "7-8", "--window", 4),
    "train": ("train", "TASK", "--out", "run"),
    "compare": ("compare", "TASK", "--plans", "fp32", "--out", "runs"),
}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a small ptb, with files of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for part, lines in (("train", 40), ("valid", 10)):
        text = "".join(f" the {word} of word {word % 7} is here \n" for word in range(lines))
        (tmp_path / "text" / f"ptb.{part}.txt").write_text(text)
    return [word for setting in ("data=text", *SMALL) for word in ("--set", setting)]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_task_with_files_of_the_user(bitplan: Bitplan, words: list[str], name: str) -> None:
    command = ["ptb" if word == "TASK" else word for word in COMMANDS[name]]
    ran = bitplan(*command, *words, "--json")
    assert ran.code == 0, ran.err
    if name == "sites":  # the settings have arrived
        embedding = next(site for site in ran.json if site["parameter"] == "embedding.weight")
        assert embedding["shape"] == [40, 8]


def test_memory_needs_the_files_to_measure(bitplan: Bitplan, words: list[str]) -> None:
    ran = bitplan("memory", "ptb", *words, "--json")
    assert ran.code == 0
    assert ran.json["measured"]["peak"] > 0
    missing = bitplan("memory", "ptb", *words[2:])
    assert missing.code == 2
    assert "set data=" in missing.err


def test_settings_without_a_task_are_refused(bitplan: Bitplan) -> None:
    for command in (
        ("sites", "gpt-tiny"),
        ("cost", "gpt-tiny", "--plan", "int8-minmax"),
        ("memory", "gpt-tiny"),
        ("assign", "gpt-tiny", "--ratio", 0.5),
        ("assign", "resnet18", "--width", 0.1, "--ratio", 0.5),
        ("plan", "check", "int8-minmax", "gpt-tiny"),
        ("plan", "check", "int8-minmax"),
        ("measure", "gpt-tiny"),
    ):
        ran = bitplan(*command, "--set", "steps=3")
        assert ran.code == 2, command
        assert ran.err.count("\n") == 1
        assert "--set" in ran.err


def test_a_task_in_a_file_brings_its_data(bitplan: Bitplan, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text((Path(__file__).parents[1] / "train" / "tiny_task.py").read_text())
    ran = bitplan("assign", f"{file}:Tiny", "--ratio", 0.5, "--order", "sensitivity", "--json")
    assert ran.code == 0
    assert "random data" not in ran.err


def test_a_search_takes_a_task_with_files_of_the_user(words: list[str]) -> None:
    problem = load_problem("ptb", words[1::2], "cpu", None, None, False, None)
    assert problem.data is not None
    assert problem.data(0)[0].shape == (4, 2)


def test_every_command_with_a_target_has_settings() -> None:
    """A new command that takes a target or a task takes --set, too."""
    app = typer.Typer()
    for module in {entry.module for entry in TABLE.values()}:
        import_module(f"bitplan.cli.{module}").register(app)
    groups = [app, *(group.typer_instance for group in app.registered_groups if group.typer_instance)]
    seen = set()
    for command in (command for group in groups for command in group.registered_commands):
        assert command.callback is not None
        parameters = inspect.signature(command.callback).parameters
        if {"target", "task"} & set(parameters):
            assert "settings" in parameters, command.name
            seen.add(command.name)
    assert {"sites", "cost", "memory", "assign", "measure", "advise", "check", "explain", "auto"} <= seen
