"""docs/memory.md: what it shows runs, and what it says of the figures is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bitplan.analysis.memory.fit import LADDER
from bitplan.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL) for line in block.splitlines()]


def test_the_example_tells_three_figures_of_which_two_agree(capsys: pytest.CaptureFixture[str]) -> None:
    exec(BLOCKS[0], {})
    plain, packed, measured = map(int, capsys.readouterr().out.splitlines()[-1].split())
    assert packed == pytest.approx(measured, rel=0.02)
    assert plain > 3 * packed


@pytest.mark.parametrize("command", [line for line in COMMANDS if "my" not in line])
def test_the_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command, comments=True)[1:])
    assert not ended.value.code
    assert "peak" in capsys.readouterr().out


def test_the_ladder_is_the_one_that_is_gone_down() -> None:
    shown = re.search(r"\(no plan, (.*?), packed\)", PAGE, flags=re.DOTALL)
    assert shown is not None
    assert tuple(re.findall(r"`([\w-]+)`", shown[1])) == LADDER[1:]
