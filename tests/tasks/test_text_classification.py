from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.analysis.explain import explain
from bitplan.errors import TaskError
from bitplan.lab.sources.texts import PACKAGES, docstrings_in, library_docstrings
from bitplan.lab.targets import load_target
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.text_classification import Docstrings
from bitplan.lab.tasks.tokens import END, PAD, SPECIAL, START, LearntEncoder
from bitplan.lab.train import RunFolder, train
from bitplan.planners import cpt_plan

#: Cut by words: pieces take a second to learn.
QUICK = {"level": "words", "vocabulary": "500", "length": "16", "batch": "8"}


def quick(*more: str, seed: int = 0) -> Docstrings:
    chosen = {**QUICK, **dict(item.split("=") for item in more)}
    task = find_task("text-classification", [f"{key}={value}" for key, value in chosen.items()], seed)
    assert isinstance(task, Docstrings)
    return task


# --- docstrings ---


def test_no_docstring_is_on_both_sides_and_every_package_is_on_both() -> None:
    data = library_docstrings()
    first, second = (set(part.samples) for part in (data.training, data.held_out))
    assert not first & second
    assert (len(first), len(second)) == (len(data.training), len(data.held_out))
    for part in (data.training, data.held_out):
        assert set(part.labels) == set(range(len(PACKAGES)))
        assert max(map(part.labels.count, set(part.labels))) < 0.3 * len(part)
    assert 0.15 < len(second) / (len(first) + len(second)) < 0.25
    assert len(first) > 1000


def test_docstrings_are_read_and_files_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "inner.py").write_text('"""Of a test."""')
    (tmp_path / "a.py").write_text(
        '"""Of the module."""\nraise SystemExit\n'
        'class A:\n    """Of a class."""\n    async def f(self):\n        """Of it."""'
    )
    assert list(docstrings_in(tmp_path)) == ["Of the module.", "Of a class.", "Of it."]


def test_without_sources_the_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    library_docstrings.cache_clear()
    with pytest.raises(TaskError, match=r"no sources of its package asyncio .* set data= to a folder"):
        quick().batch(0)
    library_docstrings.cache_clear()


# --- rows ---


class Letters(LearntEncoder):
    """Every letter is its own number."""

    def __init__(self) -> None:
        pass

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("sample", "row", "kinds"),
    [
        (("ab", ""), [START, 97, 98, END, PAD, PAD, PAD, PAD], [0] * 8),
        (("abcdefghij", ""), [START, 97, 98, 99, 100, 101, 102, END], [0] * 8),
        (("ab", "c"), [START, 97, 98, END, 99, END, PAD, PAD], [0, 0, 0, 0, 1, 1, 0, 0]),
        (("abcdefg", "xy"), [START, 97, 98, 99, END, 120, 121, END], [0, 0, 0, 0, 0, 1, 1, 1]),
    ],
)
def test_rows_are_framed_cut_and_filled(sample: tuple[str, str], row: list[int], kinds: list[int]) -> None:
    tokens, of_second = Letters().rows([sample], 8)
    assert tokens.tolist() == [row]
    assert of_second.tolist() == [kinds]


def test_what_is_learnt_comes_from_training_texts_alone() -> None:
    task = quick()
    tokens, _, labels = task.training
    assert tokens.shape == (len(task.data.training), 16)
    assert (int(tokens.min()), len(labels)) == (PAD, len(tokens))
    assert int(tokens.max()) < SPECIAL + 500
    text = task.data.training.samples[0][0]
    assert task.encoder.tokens(text)[:14] == tokens[0, 1:15].tolist()[: len(task.encoder.tokens(text))]


# --- the task ---


class Knows(nn.Module):
    """Tells the right class of every text but the first `wrong` ones it sees."""

    def __init__(self, task: Docstrings, wrong: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.rows = {
            tuple(row.tolist()): int(label) for row, label in zip(task.held_out[0], task.held_out[2], strict=True)
        }
        self.wrong, self.shapes = wrong, set[tuple[int, ...]]()

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        self.shapes.add(tuple(tokens.shape))
        reported = torch.tensor([self.rows[tuple(row.tolist())] for row in tokens])
        here = min(self.wrong, len(reported))
        reported[:here] = (reported[:here] + 1) % len(PACKAGES)
        self.wrong -= here
        return nn.functional.one_hot(reported, len(PACKAGES)).float()


def test_accuracy_counts_every_held_out_text_once_and_shapes_never_change() -> None:
    task = quick("batch=100", "length=48")
    model = Knows(task, wrong=41)
    whole = len(task.data.held_out)
    # Docstrings that begin alike are rows alike: of some, the class of another is told.
    assert task.evaluate(model)["accuracy"] == pytest.approx(1 - 41 / whole, abs=0.02)
    assert model.shapes == {(100, 48)}


def test_few_batches_are_spread_over_all_classes() -> None:
    task = quick("evaluation=4", "batch=25", "length=48")
    seen: list[Tensor] = []

    class Listens(nn.Linear):
        def forward(self, tokens: Tensor, kinds: Tensor | None = None) -> Tensor:
            seen.append(tokens)
            return torch.zeros(len(tokens), 8)

    task.evaluate(Listens(1, 1))
    rows = {tuple(row.tolist()): int(label) for row, label in zip(task.held_out[0], task.held_out[2], strict=True)}
    assert len(seen) == 4
    assert len({rows[tuple(row.tolist())] for row in torch.cat(seen)}) == len(PACKAGES)


def test_trivial_is_the_commonest_package() -> None:
    task = quick()
    labels = task.data.held_out.labels
    assert task.metric.trivial == pytest.approx(labels.count(0) / len(labels))  # asyncio


def test_batches_are_a_function_of_seed_and_step() -> None:
    first, second = quick(seed=1), quick(seed=1)
    third = first.batch(3)
    second.batch(0)
    assert all(torch.equal(a, b) for a, b in zip(third[0], second.batch(3)[0], strict=True))
    assert torch.equal(third[1], second.batch(3)[1])
    assert not torch.equal(third[0][0], quick(seed=2).batch(3)[0][0])
    example = first.example()
    assert [part.shape for part in example[0]] == [part.shape for part in third[0]]
    assert [part.dtype for part in example[0]] == [part.dtype for part in third[0]]


def test_an_epoch_sees_every_text() -> None:
    task = quick("batch=100")
    assert (task.epoch() - 1) * 100 < len(task.data.training) <= task.epoch() * 100


def test_filling_is_not_looked_at() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    task = quick()
    model = task.model().eval()
    tokens = torch.randint(SPECIAL, 500, (1, 16))
    tokens[:, 6:] = PAD
    kinds = torch.zeros_like(tokens)
    with torch.no_grad():
        long, short = model(tokens, kinds), model(tokens[:, :6], kinds[:, :6])
    torch.testing.assert_close(long, short)


def test_a_stopped_run_under_a_plan_goes_on_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    chosen = ("steps=4", "evaluate_every=2", "evaluation=1")
    target = quick(*chosen).target()
    plan = cpt_plan(target.model, target.batch, target.loss, low=5)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(quick(*chosen), plan, folder=whole)
    seen: list[int] = []
    options: dict[str, Any] = {"on_progress": lambda now: seen.append(now.step), "stop": lambda: seen[-1:] == [3]}
    assert train(quick(*chosen), plan, folder=parts, **options).status == "stopped"
    assert train(quick(*chosen), plan, folder=parts).status == "finished"
    first, second = (RunFolder(folder) for folder in (whole, parts))
    assert first.metrics_file.read_bytes() == second.metrics_file.read_bytes()
    assert first.model_file.read_bytes() == second.model_file.read_bytes()


def test_the_plan_of_cyclic_precision_training_has_all_linears_and_attention() -> None:
    pytest.importorskip("transformers")
    target = load_target("text-classification", shapes_only=True)
    plan = cpt_plan(target.model, target.batch, target.loss, low=5)
    rows = explain(target.model, plan, target.batch, target.loss)
    products = {row.site.module.split(".")[-1] for row in rows if row.site.role == "fprop.x" and row.quantizer}
    assert products == {"query", "key", "value", "self", "dense", "classifier"}
    assert all(row.quantizer for row in rows if row.site.role.startswith(("fprop", "dgrad", "wgrad")))
    assert not any(row.quantizer for row in rows if row.site.role in ("weight", "activation", "grad_activation"))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("size=huge", r"there is no size 'huge'"),
        ("dropout=1", r"dropout is 1\.0; it must be at least 0 and below 1\."),
        ("length=4", r"length is 4; it must be at least 8"),
        ("decay=fast", r"there is no decay 'fast'"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        find_task("text-classification", [setting])
