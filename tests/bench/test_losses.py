"""Losses of variants: trials beside a block, and those of published recipes."""

import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import recipe_losses
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


def test_losses_of_recipes_go_on_and_are_compared_with_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, result = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("to be or not to be, that is the question. " * 200)
    words = [str(text), "--steps", "2", "--runs", str(tmp_path / "runs"), "--json", str(result)]
    for seeds in (1, 2):
        recipe_losses.main([*words, "--seeds", str(seeds)])
    assert capsys.readouterr().out.count("seed 0:") == 2 * len(recipe_losses.PLANS)
    document = json.loads(result.read_text())
    rows = {row["plan"]: row for row in document["rows"]}
    assert list(rows) == list(recipe_losses.PLANS)
    reference = rows["bf16-all"]["losses"]
    assert rows["bf16-all"]["gap"] is None
    gaps = [rows["nvfp4"]["losses"][seed] - reference[seed] for seed in ("0", "1")]
    assert rows["nvfp4"]["gap"] == pytest.approx(sum(gaps) / 2)
    assert rows["nvfp4"]["low"] < rows["nvfp4"]["gap"] < rows["nvfp4"]["high"]
    assert all(gap != 0 for gap in gaps)  # the recipe was applied
