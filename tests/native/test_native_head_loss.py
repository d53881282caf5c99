"""The chunked loss of a head on low-precision units: equal to the emulated one up to the order of accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_losses import RULES, ChunkedLoss, WholeLoss, assert_same, trained

import bitplan
from bitplan.executions.native.backends import Float8Backend, GemmBackend, Int8Backend

NATIVE = bitplan.Native(min_macs=0)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes (m, k, n) of the products on low-precision units."""
    shapes: list[tuple[int, ...]] = []
    kind: type[GemmBackend]
    for kind in (Float8Backend, Int8Backend):

        def multiply(self: Any, a: Any, b: Any, *args: Any, original: Any = kind.multiply) -> Any:
            shapes.append((*a.shape, b.shape[1]))
            return original(self, a, b, *args)

        monkeypatch.setattr(kind, "multiply", multiply)
    return shapes


@pytest.mark.parametrize("rule", ["fp8", "fp8 scaled", "delayed", "int8", "slots apart", "vectors"])
def test_native_equals_emulate(rule: str, products: list[tuple[int, ...]]) -> None:
    actual = trained(ChunkedLoss, RULES[rule], NATIVE, steps=1)
    assert {shape for shape in products if 64 in shape} >= {(16, 32, 64)}
    assert not any(64 in shape and 36 in shape for shape in products)  # no product of all tokens at once
    assert_same(actual, trained(ChunkedLoss, RULES[rule], "emulate", steps=1), tolerance=1e-3)


def test_all_three_passes_of_all_chunks(products: list[tuple[int, ...]]) -> None:
    trained(ChunkedLoss, RULES["int8"], NATIVE, steps=1)
    logits = [(16, 32, 64), (16, 32, 64), (4, 32, 64)]
    backward = [shape for tokens in (16, 16, 4) for shape in ((tokens, 32, 64), (tokens, 64, 32), (64, tokens, 32))]
    assert products == logits + backward


def test_compiled_native(products: list[tuple[int, ...]]) -> None:
    torch.compiler.reset()
    actual = trained(ChunkedLoss, RULES["fp8 scaled"], NATIVE, compiled=True)
    assert products
    assert_same(actual, trained(WholeLoss, RULES["fp8 scaled"], NATIVE), tolerance=1e-3)
