import threading

import pytest

from bitplan.lab.train.session import Ahead


def test_batches_come_in_any_order_and_are_made_by_one_thread_ahead_of_time() -> None:
    made: list[tuple[int, str]] = []
    third = threading.Event()

    def batch(step: int) -> int:
        made.append((step, threading.current_thread().name))
        if step == 2:
            third.set()
        return 10 * step

    ahead = Ahead(batch, end=5)
    assert [ahead(0), ahead(1)] == [0, 10]
    assert third.wait(10)  # that of step 2, though nobody has asked for it
    assert [ahead(4), ahead(2), ahead(3), ahead(4)] == [40, 20, 30, 40]
    ahead.close()
    assert max(step for step, _ in made) == 4  # none after the end
    assert len({thread for _, thread in made}) == 1
    assert threading.current_thread().name not in {thread for _, thread in made}


def test_what_goes_wrong_is_told_to_who_asks_for_it() -> None:
    def batch(step: int) -> int:
        if step == 1:
            raise ValueError("no such batch")
        return step

    ahead = Ahead(batch, end=3)
    assert ahead(0) == 0
    with pytest.raises(ValueError, match="no such batch"):
        ahead(1)
    assert ahead(2) == 2
    ahead.close()
