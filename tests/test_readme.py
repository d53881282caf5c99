"""The README's examples run, and what their comments say is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import bitplan

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_trains_under_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    planned: dict[str, Any] = {}
    exec(BLOCKS[0], planned)
    shown = capsys.readouterr().out
    assert "0/linear.0:weight: e3m2" in shown
    assert "GBitOPs" in shown
    plain: dict[str, Any] = {}
    exec(
        BLOCKS[0].replace("bp.attach(model, plan, example=batch)", "bp.attach(model, bp.Plan(), example=batch)"), plain
    )
    assert len(planned["losses"]) == len(plain["losses"]) == 20
    differences = [abs(one - other) for one, other in zip(planned["losses"], plain["losses"], strict=True)]
    assert all(difference > 1e-6 for difference in differences)
    assert max(differences) < 0.1
    assert planned["losses"][-1] < planned["losses"][0]


def test_packing_example(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(BLOCKS[1], {})
    (promised,) = re.findall(r"print\(p\.nbytes\) +# (\d+)", BLOCKS[1])
    assert capsys.readouterr().out == f"{promised}\n"


def test_format_example() -> None:
    first, second, third = BLOCKS[2].splitlines()
    names: dict[str, Any] = {"bitplan": bitplan}
    exec(first, names)
    shown, promised = second.split("#")
    assert eval(shown, names) == eval(promised.strip())
    assert len(eval(third.split("#")[0], names)) == 255


def test_scale_examples() -> None:
    *statements, size = BLOCKS[3].splitlines()
    names: dict[str, Any] = {"bitplan": bitplan, "torch": torch}
    exec("\n".join(statements), names)
    shown, promised = size.split("# ")
    assert eval(shown, names) == int(promised.partition(":")[0])


@pytest.mark.parametrize("mode", ["nearest", "nearest-away", "toward-zero", "stochastic"])
def test_rounding_modes_of_the_table_exist(mode: str) -> None:
    assert f'`"{mode}"`' in README
    assert bitplan.quantize(torch.ones(3), "e4m3", rounding=mode, seed=0).tolist() == [1.0] * 3
