from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Bitplan = Callable[..., Any]


def test_json_has_the_plan_beside_fp32_and_bf16(bitplan: Bitplan) -> None:
    ran = bitplan("cost", "gpt-tiny", "--plan", "fp8-all", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert (ran.json["plan"], ran.json["target"], ran.json["steps"]) == ("fp8-all", "gpt-tiny", 1)
    for key in ("bit_operations", "bytes"):
        assert set(ran.json[key]) == {"plan", "fp32", "bf16"}
    weights = {name: held["weight"] for name, held in ran.json["bytes"].items()}
    assert weights["fp32"] == 4 * weights["plan"] == 2 * weights["bf16"]
    assert 0 < ran.json["relative_to_fp32"] < 1
    assert 0 < ran.json["low_precision_ratio"] < 1


def test_the_table_has_a_column_for_each(bitplan: Bitplan) -> None:
    out = bitplan("cost", "gcn", "--plan", "bf16-all").out
    heading = next(line for line in out.splitlines() if "FP32" in line)
    assert heading.split() == ["1", "step", "bf16-all", "FP32", "BF16"]
    row = next(line for line in out.splitlines() if line.startswith("mean bits"))
    assert row.split() == ["mean", "bits", "16.000", "32.000", "16.000"]


def test_a_published_run_is_priced_without_running_it(bitplan: Bitplan) -> None:
    """CIFAR ResNet-38 at 8 bits for 64,000 iterations of 128 images: 1.31e8 GBitOPs (arXiv 2101.09868)."""
    gbitops = bitplan("cost", "resnet38", "--plan", "int8-minmax", "--steps", "64000", "--json").json["gbitops"]
    assert round(gbitops / 1e8, 2) == 1.31


@pytest.mark.parametrize("arguments", [["gcn", "--plan", "no-plan"], ["no-model", "--plan", "bf16-all"]])
def test_a_mistake_is_one_sentence_on_stderr(bitplan: Bitplan, arguments: list[str]) -> None:
    ran = bitplan("cost", *arguments, "--json")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("bitplan: there is no ")
    assert ran.err.count("\n") == 1
