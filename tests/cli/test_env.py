from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bitplan._version import __version__

Bitplan = Callable[..., Any]


def test_a_bug_report_has_what_it_needs(bitplan: Bitplan) -> None:
    ran = bitplan("env")
    assert (ran.code, ran.err) == (0, "")
    lines = {line.split(":")[0]: line for line in ran.out.splitlines()}
    assert lines["bitplan"].split() == ["bitplan:", __version__]
    assert f"torch {torch.__version__}" in lines["packages"]
    assert {"python", "cpu", "cpu flags", "gpu", "cuda", "variables", "not installed"} <= set(lines)


def test_json_has_the_same(bitplan: Bitplan) -> None:
    output = bitplan("env", "--json").json
    assert output["bitplan"] == __version__
    assert output["packages"]["torch"] == torch.__version__
    assert output["cpu"]["threads"] == torch.get_num_threads()
