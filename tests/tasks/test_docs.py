"""What docs/tasks.md shows works as it says."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from bitplan.cli import main
from bitplan.lab.tasks.registry import task_class, task_names

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL) for line in block.splitlines() if line
]


def test_the_commands_and_the_example_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_task.py").write_text(EXAMPLE)
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        assert words[0] == "bitplan"
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        assert not ended.value.code, line
    shown = capsys.readouterr().out
    accuracies = re.findall(r"spirals, .*? accuracy (0\.\d+|1\.0+) \(the trivial predictor: 0\.5\)", shown)
    assert len(accuracies) == 2
    assert all(float(accuracy) > 0.9 for accuracy in accuracies)


def test_every_task_and_every_setting_is_told_of() -> None:
    for name in task_names():
        assert f"`{name}`" in TEXT
        for field in fields(task_class(name).settings_class):
            assert f"`{field.name}`" in TEXT, (name, field.name)
