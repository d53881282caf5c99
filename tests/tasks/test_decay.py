from __future__ import annotations

from itertools import pairwise

import pytest

from bitplan.lab.tasks.task import DECAYS, decayed


@pytest.mark.parametrize("decay", DECAYS)
def test_a_rise_then_the_peak_then_never_a_rise_again(decay: str) -> None:
    factors = [decayed(decay, step, 100, warmup=10) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0
    assert all(later <= earlier for earlier, later in pairwise(factors[10:]))
    assert (factors[-1] < 0.05) == (decay != "constant")


@pytest.mark.parametrize("decay", DECAYS)
def test_shortest_runs(decay: str) -> None:
    assert decayed(decay, 0, 1) == 1.0
    assert decayed(decay, 0, 1, warmup=5) == 0.2


def test_known_values() -> None:
    assert [decayed("linear", step, 4) for step in range(4)] == [1.0, 0.75, 0.5, 0.25]
    assert [decayed("steps", step, 8) for step in (3, 4, 5, 6, 7)] == [1.0, 0.1, 0.1, 0.01, 0.01]
