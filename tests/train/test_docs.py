"""What docs/runs.md shows works as it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from bitplan.cli import main
from bitplan.lab.tasks import find_task
from bitplan.lab.train import RunFolder, train

TEXT = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()


def test_the_commands_and_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(Path(__file__).with_name("tiny_task.py").read_text().replace("Tiny", "MyTask"))
    train(find_task("my_task.py:MyTask"), folder="runs/own", task_source="my_task.py:MyTask", stop=lambda: True)
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(blocks) == 2
    for line in "".join(blocks).splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "bitplan"
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        assert not ended.value.code, line
    assert Path("runs/digits-fp32-s0").is_dir()
    assert RunFolder("runs/own").status() == "finished"
    listed = capsys.readouterr().out
    assert "int8-minmax" in listed
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(example, names)
    assert set(names["same"]) == set(names["weights"])
    assert all(torch.equal(tensor, names["weights"][name]) for name, tensor in names["same"].items())
    assert names["summary"].status == "finished"
    assert len(names["losses"]) == 3


def test_every_file_of_a_run_is_told_of() -> None:
    folder = RunFolder("x")
    for path in vars(folder).values():
        if path != folder.path:
            assert f"`{path.name}" in TEXT
