from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from bitplan.analysis.memory import Memory
from bitplan.errors import MemoryEstimateError


def test_what_remains_of_the_peak_is_other() -> None:
    held = Memory.of(weights=10, gradients=7, activations=20, optimizer=5, peak=40)
    assert held.other == 5  # 40 - 10 - 5 - 20: gradients are born while activations die
    assert Memory.of(weights=10, gradients=30, activations=20, optimizer=5, peak=50).other == 5


def test_a_peak_is_never_below_what_is_counted() -> None:
    assert Memory.of(weights=10, gradients=0, activations=20, optimizer=0, peak=29).peak == 30


def test_classes_that_do_not_make_up_the_peak_are_refused() -> None:
    with pytest.raises(MemoryEstimateError, match=r"use Memory\.of"):
        Memory(weights=1, gradients=1, activations=1, optimizer=1, other=1, peak=100)


@pytest.mark.parametrize("wrong", [-1, 1.5, "3"])
def test_bytes_are_whole_numbers(wrong: object) -> None:
    with pytest.raises(MemoryEstimateError, match="weights are bytes"):
        Memory.of(weights=wrong, gradients=0, activations=0, optimizer=0, peak=10**9) if isinstance(  # type: ignore[arg-type]
            wrong, (int, float)
        ) else Memory(wrong, 0, 0, 0, 0, 0)  # type: ignore[arg-type]


def test_it_cannot_be_changed() -> None:
    held = Memory.of(1, 1, 1, 1, 10)
    with pytest.raises(FrozenInstanceError):
        held.peak = 0  # type: ignore[misc]


def test_it_is_told_as_a_table_as_html_and_as_plain_numbers() -> None:
    held = Memory.of(weights=2048, gradients=7, activations=3 * 2**20, optimizer=5, peak=4 * 2**20)
    lines = str(held).splitlines()
    assert [line.split()[0] for line in lines] == [
        *("weights", "optimizer", "activations", "gradients", "other", "peak")
    ]
    assert "3.0 MiB" in lines[2]
    html = held._repr_html_()
    assert html.startswith("<table>")
    assert "2.0 KiB" in html
    assert html.count("<tr>") == 7  # a heading and six classes
    assert held.to_dict() == {
        "weights": 2048,
        "gradients": 7,
        "activations": 3 * 2**20,
        "optimizer": 5,
        "other": 4 * 2**20 - 3 * 2**20 - 2048 - 5,
        "peak": 4 * 2**20,
    }
