"""What docs/measure.md and docs/advise.md show works as they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bitplan.analysis.measure import DEFAULT_CANDIDATES, Measurement
from bitplan.cli import main

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)


def test_the_commands_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bitplan.lab.train.stages.STEPS", 3)  # what they print is not looked at
    for line in (
        line for page in ("measure.md", "advise.md") for block in blocks(page, "sh") for line in block.splitlines()
    ):
        words = shlex.split(line, comments=True)
        assert words[0] == "bitplan"
        if words[1] == "train" or "--verify" in words:
            continue  # tests of training and of verifying do that on less
        with pytest.raises(SystemExit) as ended:
            main(words[1:])
        assert not ended.value.code, line
        capsys.readouterr()
    assert Measurement.load("measurement.json").stages == ["early", "middle", "late"]
    for file in ("measurement.html", "plan.yaml"):
        assert Path(file).is_file()


@pytest.mark.parametrize("page", ["measure.md", "advise.md"])
def test_the_examples_run(page: str) -> None:
    names: dict[str, Any] = {}
    for example in blocks(page, "python"):
        exec(example, names)
    assert "found" in names or "advice" in names


def test_the_default_set_is_the_one_that_is_written_down() -> None:
    text = (DOCS / "measure.md").read_text()
    table = {row[0].strip(): row[1:] for line in text.splitlines() if (row := line.strip("|").split("|"))}
    told = set()
    for kind, suffix in (("both operands", ""), ("mixed", ""), ("stochastic gradient", " stochastic-dy")):
        for scale, cell in zip(("tensor", "vector"), table[kind], strict=True):
            names = re.sub(r"\(.*?\)|stochastic-dy", "", cell).split(",")
            told |= {f"{name.strip()} {scale}{suffix}" for name in names}
    assert told == set(map(str, DEFAULT_CANDIDATES))
