"""Trials beside a block: what becomes of their processes."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from benchmarks.losses import Trial, beside


def endless(variant: str) -> Trial:
    plan = {"version": 1, "rules": []}
    return Trial("digits", variant, plan, "cpu", 4, "sgd", autocast=False, seed=0)


@contextmanager
def interrupted(result: dict[str, Future[list[float]]]) -> Iterator[None]:
    """A block that begins trials, remembers them, and is left by Ctrl-C."""
    with beside([endless(name) for name in ("bf16", "packed", "bf16-checkpointed")], 10**9, 1) as pending:
        result.update(pending)
        yield


def test_a_block_that_is_interrupted_ends_all_trials_and_leaves_no_process() -> None:
    result: dict[str, Future[list[float]]] = {}
    with pytest.raises(KeyboardInterrupt), interrupted(result):
        raise KeyboardInterrupt
    assert len(result) == 3
    assert all(future.done() and future.exception() is not None for future in result.values())
    assert not multiprocessing.active_children()
