"""The table that decides which products run natively: shown, and measured again on request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Ran

from bitplan.executions.native import crossover
from bitplan.executions.native.backends import Int8Backend

Run = Callable[..., Ran]


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times of native products; those in the model's precision take 2 ms."""
    native = {"ms": 1.0}
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(Int8Backend, "is_available", lambda self, device: device.type == "cpu")
    monkeypatch.setattr(crossover, "SIZES", {"cpu": (8,)})
    monkeypatch.setattr(crossover, "CHANNELS", (16,))
    for name, size in (("measure_crossover", 8), ("measure_im2col_crossover", 16)):
        monkeypatch.setattr(
            *(crossover, name),
            lambda *_, size=size: crossover.Rounds([[crossover.Crossing("int8", size, 2.0, native["ms"])]]),
        )
    return native


def test_the_table_is_stored_and_measured_again_on_request(bitplan: Run, times: dict[str, float]) -> None:
    first = bitplan("crossover", "--json").json
    assert (first["min_macs"], first["min_channels"]) == ({"int8": 512}, {"int8": 16})
    times["ms"] = 3.0
    assert bitplan("crossover", "--json").json == first
    again = bitplan("crossover", "--measure", "--json").json
    assert again["min_macs"] == {"int8": crossover.NEVER}
    assert bitplan("crossover", "--json").json == again
    shown = bitplan("crossover")
    assert shown.code == 0
    assert "int8 never pays here" in shown.out


def test_a_device_without_units_and_a_wrong_dtype_are_sentences(
    bitplan: Run, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]
) -> None:
    assert "'float31'" in bitplan("crossover", "--dtype", "float31").err
    monkeypatch.setattr(Int8Backend, "is_available", lambda self, device: False)
    assert "no low-precision units" in bitplan("crossover").out
