"""Mistakes on the command line, each answered by one sentence that names what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODEL = """
import torch
from torch import nn

def make():
    return nn.Linear(8, 4), torch.randn(2, 8), None

def train(plan, seed):
    return 1.0
"""

#: Command -> what the sentence must name.
MISTAKES = {
    # A plan and a target that changed places, or a plan without its option.
    "cost fp8-linear --plan resnet20": "resnet20 --plan fp8-linear",
    "cost fp8-linear resnet20": "bitplan cost resnet20 --plan fp8-linear",
    "memory resnet20 own.yaml": "bitplan memory resnet20 --plan own.yaml",
    "sites model.py:make fp8-linear": "bitplan sites model.py:make --plan fp8-linear",
    "train digits int8-all": "bitplan train digits --plan int8-all",
    "train int8-all --plan digits": "digits --plan int8-all",
    "compare int8-all digits": "digits --plans fp32 int8-all",
    "plan explain gpt-tiny fp8-linear": "bitplan plan explain gpt-tiny --plan fp8-linear",
    "plan explain fp8-linear --plan gpt-tiny": "bitplan plan explain gpt-tiny --plan fp8-linear",
    "plan check resnet20 int8-all": "bitplan plan check resnet20 --plan int8-all",
    "plan explain fp8-linear": "bitplan plan explain TARGET --plan fp8-linear",
    # Files that hold something else than the command needs.
    "train model.py:make": "train(plan, seed)",
    "train makes.py": "train(plan, seed)",
    "compare makes.py --plans fp32": "train(plan, seed)",
    "compare makes.py:make --suite cpt": "train(plan, seed)",
    "compare model.py:train --suite cpt": "give --plans",
    "train model.py": "bitplan compare model.py:train",
    "cost model.py:train --plan int8-all": "add make()",
    "range-test model.py:make": "train(plan, seed)",
    # Names.
    "train digits --set stepz=3": "did you mean steps?",
    "train digits --plan int8": "did you mean int8-all",
    "cost resnet21 --plan fp8-linear": "did you mean resnet20",
    "sites gpt-tiny --match qkvv": "*.qkv",
    "formats fp8": "e5m2 for gradients",
    "compare digits": "--suite static",
    "report nothing": "there is no folder nothing",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered_by_a_sentence_that_names_the_fix(
    bitplan: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("makes.py").write_text(MODEL.partition("def train")[0])
    ran = bitplan(*command.split())
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert MISTAKES[command] in ran.err
    assert not Path("runs").exists()
