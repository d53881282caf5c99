"""One direction of imports: a room asks only rooms that lie before it.

What a function imports when it is called is left out: that is how a room hands work to one behind it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "bitplan"
#: In the order of the house. Modules that lie in no room are named by themselves.
ROOMS = (
    *("errors", "tracing", "files", "machine", "randomness", "sizes", "strict_json", "user_code"),
    *("numbers", "schedules", "plan", "metrics", "error_study", "products", "axes", "graphs", "keeping", "sparing"),
    *("seeing", "native", "sites", "explain", "cost", "optimizer_state", "optimizers", "optimizer_steps"),
    *("at_work", "attach", "targets", "placing", "models", "memory"),
    *("measure", "tasks", "planners", "train", "compare", "report", "bench", "cli"),
)


def imported(file: Path) -> Iterator[str]:
    """The rooms, and the modules in none, that a file imports when it is imported itself."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (each.name.split(".")[1] for each in node.names if each.name.startswith("bitplan."))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bitplan":
            _, *rest = str(node.module).split(".")
            yield from rest[:1] or [each.name for each in node.names]


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).with_suffix("").parts[0]


FILES = [file for file in SOURCE.rglob("*.py") if room_of(file) not in ("__init__", "__main__", "_version")]


def test_every_module_has_its_place() -> None:
    assert {room_of(file) for file in FILES} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_asks_only_rooms_before_it(room: str) -> None:
    for file in (file for file in FILES if room_of(file) == room):
        behind = [each for each in imported(file) if each in ROOMS and ROOMS.index(each) > ROOMS.index(room)]
        assert not behind, f"{file.relative_to(SOURCE)} imports {', '.join(behind)}"
