from __future__ import annotations

import math

import pytest
import torch

from bitplan.lab.models.language_models import GPT, gpt2_small, next_token_loss


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(tokens=20, length=8, layers=2, heads=2, features=16)


def test_the_smallest_gpt_2_has_its_parameters() -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in gpt2_small().parameters()) == 124_439_808


def test_no_token_sees_those_behind_it() -> None:
    model, tokens = tiny(), torch.randint(20, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 20
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_the_embedding_is_the_heads_weight() -> None:
    model = tiny()
    assert model.head.weight is model.token_embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_an_untrained_model_knows_nothing() -> None:
    tokens = torch.randint(20, (4, 8))
    assert next_token_loss(tiny()(tokens), torch.randint(20, (4, 8))).item() == pytest.approx(math.log(20), abs=0.3)


def test_heads_must_share_the_features_evenly() -> None:
    with pytest.raises(ValueError, match="16 features cannot be shared out among 3 heads"):
        GPT(20, 8, 1, heads=3, features=16)
