"""Schedules as plotly figures."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest

from bitplan.errors import ScheduleError
from bitplan.plans.schedules import TEN, schedule
from bitplan.plans.schedules.plots import pieces_of


@pytest.mark.parametrize("name", TEN)
@pytest.mark.parametrize("total", [1, 7, 1000])
def test_pieces_are_the_table_in_short(name: str, total: int) -> None:
    chosen = schedule(name, low=3, high=8, cycles=4)
    pieces = pieces_of(chosen, total)
    whole = np.concatenate([np.full(piece.last - piece.first + 1, piece.bits) for piece in pieces])
    assert whole.tolist() == chosen.table(total).tolist()
    assert all(first.bits != second.bits for first, second in pairwise(pieces))


def test_a_very_long_run_is_looked_at_here_and_there() -> None:
    chosen = schedule("deficit", low=3, high=8, start="25%", end="50%")
    pieces = pieces_of(chosen, 10**9)
    assert [piece.bits for piece in pieces] == [8, 3, 8]
    assert pieces[1].first == pytest.approx(250_000_000, rel=1e-4)
    assert (pieces[0].first, pieces[-1].last) == (0, 10**9 - 1)


def test_a_plot_shows_the_bits_of_every_step() -> None:
    pytest.importorskip("plotly")
    chosen = schedule("RTH", low=3, high=8, cycles=4)
    figure = chosen.plot(500)
    (line,) = figure.data
    assert line.line.shape == "hv"
    at = np.searchsorted(np.array(line.x), np.arange(500), side="right") - 1
    assert np.array(line.y)[at].tolist() == chosen.table(500).tolist()
    assert line.x[-1] == 500
    assert "RTH 3-8 x4, over 500 steps" in figure.layout.title.text


def test_without_plotly_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ScheduleError, match="needs plotly, which is not installed: run 'pip install plotly'"):
        schedule("CR", low=3, high=8).plot(100)


def test_a_run_without_steps_is_one_sentence() -> None:
    with pytest.raises(ScheduleError, match="a run has 1 to"):
        pieces_of(schedule("CR", low=3, high=8), 0)
