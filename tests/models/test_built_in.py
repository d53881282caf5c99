from __future__ import annotations

import pytest
import torch

from bitplan.analysis.sites import list_sites
from bitplan.lab.models.built_in import BUILT_IN
from bitplan.lab.targets import load_target


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("resnet110", "resnet152", "resnet164")])
def test_every_built_in_model_can_be_listed_from_its_shapes_alone(name: str) -> None:
    target = load_target(name, shapes_only=True)
    result = list_sites(target.model, target.batch, target.loss)
    trained = {site.parameter for site in result if site.role == "grad_weight"}
    assert trained == {parameter for parameter, _ in target.model.named_parameters()}
    assert result[0].role == ("activation" if name == "gat" else "weight")  # graph attention begins with a dropout
    assert any(site.module == "loss" for site in result)


@pytest.mark.parametrize("name", ["resnet20", "gpt-tiny", "gcn"])
def test_the_batch_fits_the_model_and_the_loss_is_a_number(name: str) -> None:
    target = BUILT_IN[name]()
    inputs, expected = target.batch
    with torch.no_grad():
        loss = target.loss(target.model(*inputs) if isinstance(inputs, tuple) else target.model(inputs), expected)
    assert loss.shape == ()
    assert torch.isfinite(loss)
