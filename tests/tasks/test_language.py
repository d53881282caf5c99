from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from bitplan.errors import TaskError
from bitplan.lab.tasks.language import (
    DecoderLanguageModelling,
    DecoderSettings,
    perplexity_figures,
    transformer_optimizer,
    unigram_perplexity,
)
from bitplan.lab.tasks.registry import find_task

#: Every task that reads a text, with settings that make it small.
TEXT_TASKS = {"lstm-lm": ["features=8"], "lm": ["features=8", "layers=1"], "mlm": []}


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat and the dog sat on the log\n" * 60)
    return f"data={path}"


def test_unigram_perplexity_by_hand() -> None:
    # Counts 3 and 1, each one more: chances 4/6 and 2/6.
    expected = math.exp(-(math.log(4 / 6) + 2 * math.log(2 / 6)) / 3)
    assert unigram_perplexity(2, torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 1])) == pytest.approx(expected)


def test_a_token_that_training_never_had_is_not_impossible() -> None:
    assert math.isfinite(unigram_perplexity(3, torch.tensor([0, 1]), torch.tensor([2])))


def test_perplexity_is_finite_whatever_the_loss() -> None:
    assert perplexity_figures(2.0) == {"perplexity": math.exp(2.0), "validation_loss": 2.0}
    assert math.isfinite(perplexity_figures(1e9)["perplexity"])
    assert math.isnan(perplexity_figures(math.nan)["perplexity"])


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_a_file_of_your_own_is_learnt_from(name: str, book: str) -> None:
    if name == "mlm":
        pytest.importorskip("transformers")
    task = find_task(name, [book, "batch=4", "length=8", *TEXT_TASKS[name]])
    model = task.model()
    inputs, target = task.batch(0)
    loss = task.loss(model(inputs), target)
    loss.backward()
    with torch.no_grad():
        figures = task.evaluate(model.eval())
    assert figures["perplexity"] == pytest.approx(math.exp(figures["validation_loss"]))
    assert 1 < task.metric.trivial < 60
    assert task.metric.better == "lower"


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_batches_are_a_function_of_seed_and_step(name: str, book: str) -> None:
    settings = [book, "batch=4", "length=8"]
    first, second = (find_task(name, settings, seed=1) for _ in range(2))
    third = first.batch(3)
    before = torch.get_rng_state()
    second.batch(7)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(third, second.batch(3), strict=True))
    assert not torch.equal(third[0], first.batch(4)[0])


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_a_text_too_short_for_a_batch_is_one_sentence(name: str, book: str) -> None:
    task = find_task(name, [book, "batch=400", "length=3000"])
    with pytest.raises(
        TaskError, match=r"\d+ tokens to learn from are fewer than the \d+ that a batch takes: name a longer"
    ):
        task.batch(0)


@pytest.mark.parametrize(
    ("name", "setting", "sentence"),
    [
        ("lm", "level=letters", r"there is no level 'letters'"),
        ("lm", "vocabulary=1", r"vocabulary is 1; it must be at least 2\."),
        ("lm", "evaluation=-1", r"evaluation is -1; it must be at least 0\."),
        ("lm", "heads=3", r"features=128 do not fall into heads=3 equal parts\."),
        ("lm", "layers=0", r"layers is 0; it must be at least 1\."),
        ("lm", "decay=never", r"there is no decay 'never'"),
        ("lm", "weight_decay=-1", r"weight_decay is -1\.0; it must be at least 0\."),
        ("mlm", "size=huge", r"there is no size 'huge'"),
        ("mlm", "masked=1", r"masked is 1\.0; it must be above 0 and below 1\."),
        ("mlm", "dropout=1", r"dropout is 1\.0; it must be at least 0 and below 1\."),
        ("lstm-lm", "dropout=-1", r"dropout is -1\.0"),
        ("lstm-lm", "features=0", r"features is 0; it must be at least 1\."),
        ("lstm-lm", "divide=0.5", r"divide is 0\.5; it must be at least 1"),
        ("lstm-lm", "data=absent.txt", r"there is no file or folder absent\.txt"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(name: str, setting: str, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        find_task(name, [setting]).batch(0)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    matrices, vectors = transformer_optimizer(model, DecoderSettings(weight_decay=0.3)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert [parameter.dim() for parameter in matrices["params"]] == [2]
    assert len(vectors["params"]) == 3


def test_a_decoder_is_asked_for_the_token_after_each() -> None:
    task = DecoderLanguageModelling(DecoderSettings(batch=3, length=10))
    inputs, following = task.batch(0)
    assert torch.equal(inputs[:, 1:], following[:, :-1])
    text = bytes(task.training.tolist())
    assert all(bytes(row.tolist()) in text for row in inputs)


def test_a_decoder_that_knows_the_text_has_perplexity_one(book: str) -> None:
    task = find_task("lm", [book, "batch=4", "length=8"])

    class Knows(nn.Module):
        """Reads on in the text; every window but a repeated one is met once, in order."""

        def __init__(self) -> None:
            super().__init__()
            self.anchor = nn.Parameter(torch.zeros(1))
            self.starts: list[int] = []

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            held_out: torch.Tensor = task.held_out  # type: ignore[attr-defined]
            following = []
            for row in tokens:
                windows = held_out.unfold(0, 8, 8)
                place = int((windows == row).all(1).nonzero()[0]) * 8
                self.starts.append(place)
                following.append(held_out[place + 1 : place + 9])
            return nn.functional.one_hot(torch.stack(following), 256).float() * 100

    model = Knows()
    assert task.evaluate(model)["perplexity"] == pytest.approx(1.0)
    assert len(model.starts) == len(task.held_out) // 8 // 4 * 4  # type: ignore[attr-defined]


def test_evaluation_can_be_cut_short(book: str) -> None:
    task = find_task("lm", [book, "batch=4", "length=8", "evaluation=2", "features=8", "layers=1"])
    calls: list[int] = []
    model = task.model().eval()
    model.register_forward_hook(lambda module, inputs, output: calls.append(1))
    with torch.no_grad():
        task.evaluate(model)
    assert len(calls) == 2
