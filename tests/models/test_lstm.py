from __future__ import annotations

import torch

from bitplan.lab.models.language_models import LSTMModel


def test_logits_are_per_step_and_text() -> None:
    assert LSTMModel(50, 12, layers=2)(torch.randint(50, (7, 3))).shape == (7, 3, 50)


def test_the_parameters_are_embedding_gates_and_decoder() -> None:
    with torch.device("meta"):
        model = LSTMModel(10_000, 800)
    gates = 4 * 800 * (800 + 800 + 2)
    assert sum(p.numel() for p in model.parameters()) == 10_000 * 800 + gates + 10_000 * 801


def test_dropout_is_for_training_only() -> None:
    model, text = LSTMModel(50, 12), torch.randint(50, (7, 3))
    assert not torch.equal(model(text), model(text))
    model.eval()
    assert torch.equal(model(text), model(text))


def test_a_later_word_changes_no_earlier_logit() -> None:
    model, text = LSTMModel(50, 12).eval(), torch.zeros(7, 1, dtype=torch.long)
    changed = text.clone()
    changed[4] = 1
    same = (model(text) == model(changed)).all(-1).flatten()
    assert same.tolist() == [True] * 4 + [False] * 3
