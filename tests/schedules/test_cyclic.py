"""The ten cyclic schedules: their figures, their ends, and their parts."""

from __future__ import annotations

import numpy as np
import pytest

from bitplan.errors import ScheduleError
from bitplan.plans.schedules import TEN, Cyclic, Ramp, schedule

#: Costs relative to static at the top, with the backward pass at the top (64,000 steps, 8 cycles).
COSTS = {
    (3, 8): {"RR": 0.399, "LR": 0.6276, "CR": 0.633, "RTV": 0.637, "ETV": 0.635, "ER": 0.822},
    (5, 8): {"RR": 0.611, "LR": 0.766, "CR": 0.7686, "RTV": 0.770, "ETV": 0.769, "ER": 0.895},
}
#: Schedules that cost what another one does.
PAIRS = {"RTH": "RR", "LT": "LR", "CT": "CR", "ETH": "ER"}


@pytest.mark.parametrize("name", TEN)
@pytest.mark.parametrize("bits", COSTS)
def test_costs(name: str, bits: tuple[int, int]) -> None:
    actual = schedule(name, low=bits[0], high=bits[1], cycles=8).summary(64000)
    expected = COSTS[bits][PAIRS.get(name, name)]
    digits = 4 if round(expected, 3) != expected else 3
    assert round(actual.relative_cost, digits) == expected
    assert (actual.first, actual.last) == (bits["T" in name], bits[1])


def test_mean_bits_and_shares_at_the_top() -> None:
    result = {name: schedule(name, low=3, high=8).summary(64000) for name in TEN}
    for name, mean in {"RR": 3.805, "RTH": 3.805, "ER": 6.83, "ETH": 6.83}.items():
        assert result[name].mean_bits == pytest.approx(mean, abs=0.006)
    for name in ("LR", "LT", "CR", "CT", "RTV", "ETV"):
        assert round(result[name].mean_bits, 2) == 5.50
    shares = {"RR": 0.011, "LR": 0.100, "CR": 0.205, "ETV": 0.225, "RTV": 0.269, "ER": 0.424}
    for name, share in shares.items():
        assert round(result[name].share_at_max, 3) == share


@pytest.mark.parametrize("name", TEN)
def test_what_ends_growing_ends_at_the_top_for_every_length_and_number_of_cycles(name: str) -> None:
    totals = np.arange(1, 2001)
    for cycles in range(1, 33):
        chosen = schedule(name, low=3, high=8, cycles=cycles)
        assert isinstance(chosen, Cyclic)
        ends = chosen.at(totals - 1, totals)  # type: ignore[arg-type]  # every length at once
        starts = chosen.at(np.zeros_like(totals)[1:], totals[1:])  # type: ignore[arg-type]
        assert (starts == (8 if chosen.shape == "triangular" else 3)).all()
        if chosen.ends_growing:
            assert (ends == 8).all()
        else:
            assert chosen.shape == "triangular"
            assert cycles % 2 == 1
            assert ends[-1] < 8


@pytest.mark.parametrize("name", TEN)
@pytest.mark.parametrize("total", [1, 7, 100, 731])
def test_one_step_and_the_whole_table_agree(name: str, total: int) -> None:
    chosen = schedule(name, low=2, high=9, cycles=5)
    table = chosen.table(total)
    assert [chosen.bits(step, total) for step in range(total)] == table.tolist()
    assert chosen.bits(total + 10, total) == table[-1]
    assert table.min() >= 2
    assert table.max() <= 9


def test_cycles_do_not_wrap_where_they_do_not_divide_the_run() -> None:
    # 64000 = 7 * 9142 + 6: with cycles of int(64000 / 7) steps the last six would begin an eighth one at 3 bits.
    table = schedule("LR", low=3, high=8, cycles=7).table(64000)
    assert np.flatnonzero(np.diff(table) < 0).size == 6
    assert table[-7:].tolist() == [8] * 7


def test_a_fall_is_upside_down_or_backwards() -> None:
    growth = Cyclic("E", 0 + 1, 9, 1).table(1000)
    vertical = Cyclic("E", 1, 9, 1, "triangular", "V").table(1000)
    backwards = Cyclic("E", 1, 9, 1, "triangular", "H").table(1000)
    assert abs(vertical - (10 - growth))[:-1].max() <= 1  # a half goes to the even number both ways
    assert (backwards[1:-1] == growth[::-1][:-2]).all()
    assert (vertical != backwards).any()


def test_parts_give_the_ten_and_others() -> None:
    for name, (profile, shape, reflection) in TEN.items():
        parts = schedule("cyclic", profile=profile, low=3, high=8, cycles=4, shape=shape, reflection=reflection)
        assert parts == schedule(name, low=3, high=8, cycles=4)
        assert parts.name == name
    assert Cyclic("C", 3, 8, shape="triangular", reflection="H") == Cyclic("C", 3, 8, shape="triangular")
    assert schedule("cr", low=3, high=8) == schedule("CR", low=3, high=8)


def test_ramps_end_where_they_lead() -> None:
    for total in range(1, 200):
        assert Ramp("R", 3, 8).table(total)[-1] == 8
        assert Ramp("E", 3, 8, falls=True).table(total)[-1] == 3
    assert Ramp("L", 3, 8).table(100)[0] == 3
    assert (np.diff(Ramp("C", 3, 8, falls=True).table(500)) <= 0).all()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: schedule("CR", low=8, high=3), "exchange them"),
        (lambda: schedule("CR", low=0, high=3), "1 to 32"),
        (lambda: schedule("CR", low=3, high=True), "whole number of bits"),
        (lambda: schedule("CR", low=3, high=8, cycles=0), "whole number of 1 to"),
        (lambda: schedule("CR", low=3, high=8, cycle=4), "has no 'cycle'"),
        (lambda: schedule("CR", low=3), "needs high"),
        (lambda: schedule("CX", low=3, high=8), "did you mean"),
        (lambda: Cyclic("X", 3, 8), "there is no profile"),  # type: ignore[arg-type]
        (lambda: Cyclic("C", 3, 8, reflection="V"), "never falls"),
        (lambda: Cyclic("E", 3, 8, shape="triangular", reflection="W"), "upside down"),  # type: ignore[arg-type]
        (lambda: Ramp("C", 3, 8, reflection="V"), "use decay"),
        (lambda: schedule("CR", low=3, high=8).bits(-1, 10), "counted from 0"),
        (lambda: schedule("CR", low=3, high=8).table(0), "a run has 1 to"),
    ],
)
def test_mistakes_are_sentences(make: object, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        make()  # type: ignore[operator]
