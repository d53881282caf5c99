"""What the benchmark of speed writes down; no test asserts a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bitplan.bench import speed
from bitplan.errors import BitplanError


def test_every_variant_has_a_row_and_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: nn.Module, x: torch.Tensor) -> None:
        raise RuntimeError("does not work here")

    monkeypatch.setattr(speed, "peers", lambda device: {"a peer": broken})
    monkeypatch.setitem(speed.SHAPES, "small", lambda: (nn.Linear(16, 16, bias=False), torch.randn(8, 16)))
    monkeypatch.setattr("bitplan.native.crossover.SIZES", (8,))
    monkeypatch.setattr(torch, "compile", lambda model, **settings: model)
    seen: list[str] = []
    document = speed.bench_speed(["small"], turns=1, on_row=lambda shape, row: seen.append(row.variant))
    rows = document["rows"]["small"]
    assert [row["variant"] for row in rows] == seen == ["bf16", "native-int8", "native-int8-tensor"]
    assert rows[0]["ratio"] == 1.0
    assert all(row["milliseconds"] > 0 and row["peak"] is None for row in rows)
    assert document["failed"] == {"small": {"a peer": "RuntimeError: does not work here"}}
    assert {row["size"] for row in document["crossover"]} <= {8}
    assert set(document["plans"]) == {"native-int8", "native-int8-tensor"}


def test_every_plan_may_spare_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "peers", lambda device: {})
    monkeypatch.setitem(speed.SHAPES, "small", lambda: (nn.Linear(16, 16, bias=False), torch.randn(8, 16)))
    monkeypatch.setattr("bitplan.native.crossover.SIZES", (8,))
    backends: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda model, **given: backends.append(str(given.get("backend"))) or model)
    document = speed.bench_speed(["small"], ["native-int8"], turns=1, sparing=True)
    variants = [row["variant"] for row in document["rows"]["small"]]
    sparing = [f"native-int8, sparing {what}" for what in ("weights", "inputs", "products")]
    assert variants == ["bf16", "native-int8", *sparing]
    assert ["compile_native" in backend for backend in backends] == [False, False, False, True, True]


def test_a_shape_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(BitplanError, match="there is no shape 'llama-4069'; did you mean llama-4096"):
        speed.bench_speed(["llama-4069"])


@pytest.mark.parametrize("name", speed.OWN_PLANS)
def test_the_plans_of_the_benchmark_run_all_three_products_natively(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.native.units import Float8Unit, Int8Unit

    for kind in (Int8Unit, Float8Unit):
        monkeypatch.setattr(kind, "is_on", lambda self, device: True)
    model, x = speed.SHAPES["llama-tiny"]()
    with speed._planned(speed.own_plan(name), model.bfloat16(), x.bfloat16()) as run:
        assert run.fallbacks() == []
        model(x.bfloat16()).sum().backward()
