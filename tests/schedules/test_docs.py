"""What docs/schedules.md shows works as it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bitplan.cli import main
from bitplan.lab.compare import find_suite
from bitplan.planners.range_test import THRESHOLD, WINDOW
from bitplan.plans import Plan
from bitplan.plans.schedules import SCHEDULE_NAMES, TEN, schedule

TEXT = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
COMMANDS, COMPARISONS = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "bitplan"
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        assert not ended.value.code, line
    shown = capsys.readouterr().out
    assert '"relative_cost": 0.399' in shown
    assert "int CR 3-8 x8 channel minmax" in shown
    assert "lowest bits" in shown or "no bound" in shown


def test_the_comparisons_are_suites() -> None:
    for line in COMPARISONS.splitlines():
        words = shlex.split(line, comments=True)
        assert words[:3] == ["bitplan", "compare", "digits"]
        assert find_suite(words[words.index("--suite") + 1]).make is not None


def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(first, names)
    assert names["cr"].bits(0, 64000) == 3
    assert names["cr"].summary(64000).relative_cost == 0.633375
    assert names["mine"].table(4).tolist() == [4, 4, 8, 8]
    exec(second, names)
    assert 0 < float(capsys.readouterr().out) < 0.2


def test_the_plans_load() -> None:
    plans = [Plan.from_yaml(text) for text in re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)]
    assert len(plans) == 2
    assert all(plan.moves for plan in plans)


def test_the_figures_are_so() -> None:
    for group, names, costs in re.findall(r"^\| ([a-z-]+) \| ([A-Z, /]+) \| ([0-9. /]+) \|$", TEXT, flags=re.MULTILINE):
        for some, cost in zip(names.split("/"), costs.split("/"), strict=True):
            for name in some.split(","):
                found = schedule(name.strip(), low=3, high=8).summary(64000).relative_cost
                assert round(found, 3) == float(cost), (group, name)
    assert f"({WINDOW} steps)" in TEXT
    assert f"({THRESHOLD:.0%}".replace("%", " %") in TEXT
    assert all(f"`{name}`" in TEXT for name in SCHEDULE_NAMES if name not in TEN)
