from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from bitplan.errors import TaskError
from bitplan.lab.tasks.mlm import NOT_ASKED, SIZES, MaskedLanguageModelling, MaskedSettings
from bitplan.lab.tasks.registry import find_task

#: Cut by words: pieces take a second to learn.
QUICK = MaskedSettings(level="words", vocabulary=500, batch=64)


def test_fifteen_percent_are_asked_in_every_sample() -> None:
    task = MaskedLanguageModelling(QUICK)
    shown, requests = task.batch(0)
    places = requests != NOT_ASKED
    assert places.sum(1).tolist() == [5] * 64  # 0.15 * 32, rounded
    assert bool((requests[places] < task.tokens).all())
    assert bool((shown[~places] != task.mask).all())


def test_masked_tokens_show_the_mask_others_or_themselves() -> None:
    task = MaskedLanguageModelling(QUICK)
    batches = [task.batch(step) for step in range(20)]
    shown, requests = (torch.cat(item) for item in zip(*batches, strict=True))
    places = requests != NOT_ASKED
    masks = float((shown[places] == task.mask).float().mean())
    themselves = float((shown[places] == requests[places]).float().mean())
    assert masks == pytest.approx(0.8, abs=0.03)
    assert themselves == pytest.approx(0.1, abs=0.03)


def test_what_is_asked_is_the_text() -> None:
    task = MaskedLanguageModelling(QUICK)
    shown, requests = task.batch(0)
    whole = torch.where(requests == NOT_ASKED, shown, requests)
    text = task.training.unfold(0, 32, 1)
    assert all(bool((text == row).all(1).any()) for row in whole[:4])


def test_held_out_masks_are_the_same_in_every_run() -> None:
    class Listens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anchor = nn.Parameter(torch.zeros(1))
            self.heard: list[Tensor] = []

        def forward(self, tokens: Tensor) -> Tensor:
            self.heard.append(tokens)
            return torch.zeros(*tokens.shape, 501)

    models = Listens(), Listens()
    for seed, model in enumerate(models):
        figures = MaskedLanguageModelling(QUICK, seed=seed).evaluate(model)
        assert figures["perplexity"] == pytest.approx(501, rel=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(models[0].heard, models[1].heard, strict=True))
    assert not torch.equal(models[0].heard[0], models[0].heard[1])


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_the_published_ones(size: str) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = MaskedLanguageModelling(MaskedSettings(level="words", vocabulary=500, size=size)).model()
    layers, features = SIZES[size]
    config = model.model.config  # type: ignore[union-attr]
    assert (config.num_hidden_layers, config.hidden_size) == (layers, features)  # type: ignore[union-attr]
    assert config.intermediate_size == 4 * features  # type: ignore[union-attr]


def test_bert_mini_is_mini() -> None:
    assert find_task("bert-mini").settings.size == "mini"
    assert find_task("mlm", ["size=base"]).settings.size == "base"


def test_without_transformers_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        TaskError, match=r"needs transformers, which is not installed: run 'pip install transformers'\."
    ):
        MaskedLanguageModelling(QUICK).model()
