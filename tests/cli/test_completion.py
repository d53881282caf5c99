"""Shell completion answers from a table, without torch, and the table is that of the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files

import pytest

from bitplan.cli.completion import FILE, make_table

#: Completes, and then says on stderr whether torch was imported.
PROGRAM = """
import sys
from bitplan.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def test_the_table_is_that_of_the_commands() -> None:
    stored = json.loads((files("bitplan.cli") / FILE).read_text(encoding="utf-8"))
    assert stored == make_table(), "run python -m bitplan.cli.completion"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bitplan pl", {"plan"}),
        ("bitplan plan ex", {"explain", "export"}),
        ("bitplan plan explain int8", {"int8-all", "int8-linear", "int8-minmax"}),
        ("bitplan cost resnet20 --plan int8", {"int8-all", "int8-linear", "int8-minmax"}),
        ("bitplan sites gpt-t", {"gpt-tiny"}),
        ("bitplan cost resnet20 --st", {"--steps"}),
    ],
)
def test_completion_needs_no_torch(line: str, expected: set[str]) -> None:
    environment = {
        "_BITPLAN_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
        **os.environ,
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert set(ran.stdout.split()) == expected
    assert ran.stderr.splitlines()[-1] == "False"
