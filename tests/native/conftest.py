"""What all tests of native execution stand on."""

from __future__ import annotations

import pytest
import torch

from bitplan.native.units import Float8Unit, Int8Unit


@pytest.fixture(autouse=True)
def _units_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unit computes on a CPU, if slowly: torch emulates what the chip lacks."""
    for unit in (Int8Unit, Float8Unit):
        monkeypatch.setattr(unit, "is_on", lambda self, device: device.type == "cpu")
    torch._dynamo.reset()
