"""What takes long says so on stderr, once, and what does not stays silent."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from torch import nn

import bitplan as bp
from bitplan import progress
from bitplan.progress import announced, say_once


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_said", set())


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_default_emulation_says_once_that_it_saves_nothing(capsys: Any) -> None:
    for _ in range(2):
        bp.attach(net(), "int8-linear")
    (line,) = capsys.readouterr().err.splitlines()
    assert "execution='packed'" in line
    assert "saves neither memory nor time" in line


@pytest.mark.parametrize("options", [{"execution": "emulate"}, {"execution": "packed"}, {"execution": bp.Packed()}])
def test_a_chosen_execution_is_not_commented(options: dict[str, Any], capsys: Any) -> None:
    bp.attach(net(), "int8-linear", **options)
    assert capsys.readouterr().err == ""


def test_planners_and_measurements_do_not_comment_on_their_own_attachments(capsys: Any) -> None:
    bp.estimate_memory(net(), torch.randn(2, 4), plan="int8-linear")
    bp.attach(net(), bp.Plan())
    assert capsys.readouterr().err == ""


def test_only_long_compilations_are_announced(capsys: Any) -> None:
    x = torch.randn(2, 4)
    bp.attach(net(), "int8-linear", example=x, execution="emulate").compile()
    assert capsys.readouterr().err == ""
    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200)))
    bp.attach(deep, "int8-linear", example=x, execution="emulate").compile()
    assert "compiles 200 operations, some 40 seconds" in capsys.readouterr().err


def test_a_bar_is_drawn_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (False, True):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign, misc]
        monkeypatch.setattr(sys, "stderr", stream)
        with announced("measuring.", 4) as advance:
            advance()
            advance(9)
        assert stream.getvalue().startswith("bitplan: measuring.\n")
        assert ("4/4" in stream.getvalue()) == is_terminal
        assert ("1/4" in stream.getvalue()) == is_terminal


def test_of_several_processes_the_first_one_speaks(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        progress.say(f"rank {rank}")
    assert capsys.readouterr().err == "bitplan: rank 0\n"


def test_the_same_sentence_is_said_once(capsys: Any) -> None:
    say_once("a")
    say_once("a")
    say_once("b")
    assert capsys.readouterr().err == "bitplan: a\nbitplan: b\n"
