"""Sensitivity: groups whose rounding hurts the gradient go down last."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitplan
from bitplan.errors import PlanError
from bitplan.planners.assign import AssignRequest, choose_formats, make_assignment
from bitplan.planners.assign.levels import Move, order_moves_by_sensitivity


def planted() -> tuple[nn.Sequential, tuple[torch.Tensor, torch.Tensor]]:
    """The middle layer's activations are far too large for FP(4,3,4), whose largest value is 30."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        net[2].weight.mul_(200)
    return net, (torch.randn(32, 16), torch.randint(4, (32,)))


def test_the_group_that_overflows_goes_down_last() -> None:
    net, batch = planted()
    requests = AssignRequest(ratio=0.5, order="sensitivity")
    result = make_assignment(net, batch, F.cross_entropy, requests, choose_formats(requests))
    starts = [row["start"] for row in result.rows()]
    # Its weights, which overflow as well, lie in the group before it.
    assert starts.index("0/linear.0") > starts.index("4/linear.0")
    assert starts.index("0/linear.0") >= 2
    # One exact pass and one for each group, on two batches.
    assert result.provenance["probe"] == {"passes": 2 * (1 + len(starts)), "warm_steps": 0}


def test_the_model_and_the_generator_stay_as_they_are_and_it_repeats() -> None:
    net, batch = planted()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    plans = [
        bitplan.assign(net, batch, F.cross_entropy, ratio=0.4, order="sensitivity", optimizer=optimizer)
        for _ in range(2)
    ]
    assert plans[0] == plans[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert not any(parameter.grad is not None for parameter in net.parameters())


def test_moves_wait_for_those_before_them_and_count_what_they_add() -> None:
    sensitivities = {Move(0, 1): 4.0, Move(0, 2): 4.5, Move(1, 1): 1.0, Move(1, 2): 9.0}
    ordered = order_moves_by_sensitivity(sensitivities, dict.fromkeys(sensitivities, 1.0))
    assert ordered == [Move(1, 1), Move(0, 1), Move(0, 2), Move(1, 2)]


def test_a_model_without_weights_cannot_be_probed() -> None:
    with torch.device("meta"):
        net, batch = nn.Linear(4, 2), (torch.randn(3, 4), torch.randint(2, (3,)))
    with pytest.raises(PlanError, match="real weights"):
        bitplan.assign(net, batch, F.cross_entropy, ratio=0.5, order="sensitivity")
    with pytest.raises(PlanError, match="give a loss"):
        bitplan.assign(nn.Linear(4, 2), torch.randn(3, 4), ratio=0.5, order="sensitivity")
