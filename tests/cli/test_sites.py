from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Bitplan = Callable[..., Any]

OWN = """
import torch
from torch import nn
print("said by the file")

def make():
    return nn.Sequential(nn.Linear(6, 3), nn.ReLU()), torch.randn(4, 6), lambda y: y.sum()

def scripted():
    return nn.Sequential(nn.ReLU(), torch.jit.trace(nn.Linear(6, 3), torch.randn(4, 6))), torch.randn(4, 6), None

def broken():
    return nn.Linear(6, 3), torch.randn(4, 5), None
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py:make"


def test_json_is_a_list_of_sites_in_the_order_they_are_made(bitplan: Bitplan, own: str) -> None:
    ran = bitplan("sites", own, "--json")
    assert ran.code == 0
    assert ran.err == "said by the file\n"
    assert [site["name"] for site in ran.json] == [
        *("0/linear.0:weight", "0/linear.0:weight(bias)", "0/linear.0:fprop.x", "0/linear.0:fprop.w"),
        *("0/linear.0:activation", "1/relu.0:activation", "loss/sum.0:activation"),
        *("loss/sum.0:grad_activation", "1/relu.0:grad_activation", "0/linear.0:grad_activation"),
        *("0/linear.0:grad_weight", "0/linear.0:grad_weight(bias)"),
        *("0/linear.0:dgrad.dy", "0/linear.0:dgrad.w", "0/linear.0:wgrad.dy", "0/linear.0:wgrad.x"),
    ]
    assert ran.json[5] == {
        "name": "1/relu.0:activation",
        "module": "1",
        "op": "relu.0",
        "role": "activation",
        "shape": [4, 3],
        "dtype": "float32",
        "bytes": 48,
        "producer": "0/linear.0:activation",
        "consumers": ["loss/sum.0:activation"],
        "parameter": None,
    }
    assert ran.json[1]["parameter"] == "0.bias"


def test_the_table_leaves_slots_out_unless_they_are_asked_for(bitplan: Bitplan, own: str) -> None:
    plain, full = bitplan("sites", own).out, bitplan("sites", own, "--slots").out
    assert "0/linear.0:activation" in plain
    assert "fprop.x" not in plain
    assert "0/linear.0:fprop.x" in full
    assert "2 weight (84 B), 3 activation (100 B), 3 grad_activation (100 B), 2 grad_weight (84 B)." in plain


def test_a_large_built_in_model_is_listed_without_being_made(bitplan: Bitplan) -> None:
    listed = bitplan("sites", "gpt2-small", "--json").json
    assert sum(site["bytes"] for site in listed if site["role"] == "weight") == 124_439_808 * 4


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_modules_are_named_as_unseen(bitplan: Bitplan, own: str) -> None:
    ran = bitplan("sites", own.replace(":make", ":scripted"), "--json")
    assert ran.code == 0
    assert "bitplan: 1 is scripted: nothing inside it is seen.\n" in ran.err
    assert {site["module"] for site in ran.json} == {"0"}


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("resnet2", "there is no built-in model or task 'resnet2'; did you mean"),
        ("absent.py:make", "there is no file absent.py: a target is"),
        ("own.py:mak", "own.py has no function 'mak'; did you mean make?"),
        ("own.py:broken", "own.py:broken does not run on its batch: "),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr(
    bitplan: Bitplan, own: str, monkeypatch: pytest.MonkeyPatch, target: str, sentence: str
) -> None:
    monkeypatch.chdir(Path(own).parent)
    ran = bitplan("sites", target, "--json")
    assert (ran.code, ran.out) == (2, "")
    said = ran.err.removeprefix("said by the file\n")
    assert said.startswith(f"bitplan: {sentence}")
    assert said.count("\n") == 1
