from __future__ import annotations

import signal
import threading

import pytest

from bitplan.lab.train.loop import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_does_what_it_always_did(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda received, frame: seen.append(received))
    own = signal.getsignal(number)
    try:
        with stop_on_signals() as request:
            assert not request()
            signal.raise_signal(number)
            assert request()
            assert request.signal == number
            assert seen == []
            signal.raise_signal(number)
            assert seen == [number]
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


def test_other_threads_are_left_alone() -> None:
    handlers = []

    def look() -> None:
        with stop_on_signals() as request:
            handlers.append((signal.getsignal(signal.SIGINT), request()))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [(before, False)]
