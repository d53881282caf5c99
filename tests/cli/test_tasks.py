from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.cli.arguments import complete_task
from bitplan.lab.tasks.registry import task_names

Bitplan = Callable[..., Any]


def test_the_list_names_every_task_with_all_that_is_known(bitplan: Bitplan) -> None:
    ran = bitplan("tasks", "--json")
    assert ran.code == 0
    assert [task["name"] for task in ran.json] == task_names()
    digits = ran.json[0]
    assert digits["metric"] == {"name": "accuracy", "better": "higher"}
    assert digits["embedded"] == "1,797 digits"
    assert digits["public"] is None
    assert digits["settings"]["model"] == "resnet8"
    assert digits["floor"]["times_trivial"] > 5
    assert digits["floor"]["settings"] == ["steps=60"]
    cifar = ran.json[1]
    assert (cifar["embedded"], cifar["floor"], cifar["settings"]["steps"]) == (None, None, 64_000)
    assert all(task["summary"] and task["model"] for task in ran.json)


def test_the_list_for_people(bitplan: Bitplan) -> None:
    ran = bitplan("tasks")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert [name for name in task_names() if not any(line.split()[:1] == [name] for line in lines)] == []
    assert "8.5x trivial" in ran.out


def test_one_task_is_shown_with_its_settings(bitplan: Bitplan) -> None:
    ran = bitplan("tasks", "lstm-lm")
    assert ran.code == 0
    shown = {text[0]: text[1] for line in ran.out.splitlines() if len(text := line.split()) == 2}
    assert shown["divide"] == "4.0"
    assert shown["data"] == "''"
    assert "perplexity, lower is better" in ran.out
    assert bitplan("tasks", "lstm-lm", "--json").json["settings"]["length"] == 35


def test_a_task_of_a_file_is_shown_too(bitplan: Bitplan, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from bitplan.lab.tasks import Task\nclass Own(Task):\n    pass\n")
    record = bitplan("tasks", f"{path}:Own", "--json").json
    assert (record["name"], record["model"], record["floor"]) == ("Own", None, None)
    assert record["settings"]["steps"] == 400
    ran = bitplan("tasks", f"{path}:Own")
    assert ran.code == 0
    assert ran.out.startswith("Own: a task of your own")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("digit", "there is no task 'digit'; did you mean digits"), ("absent.py:Own", "there is no file absent.py")],
)
def test_what_is_no_task_is_one_sentence(bitplan: Bitplan, name: str, sentence: str) -> None:
    ran = bitplan("tasks", name)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith(f"bitplan: {sentence}")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("command", [("sites",), ("plan", "explain", "int8-minmax"), ("cost", "--plan", "int8-minmax")])
def test_tasks_are_targets(bitplan: Bitplan, command: tuple[str, ...]) -> None:
    ran = bitplan(*command, "digits", "--json")
    assert ran.code == 0
    assert ran.json


def test_names_are_completed() -> None:
    from bitplan.cli.arguments import complete_target

    assert complete_task("ls") == ["lstm-lm"]
    assert {"lstm", "lstm-lm"} <= set(complete_target("lst"))
