"""Tensors, units and groups: the paper's figures, and what other models get."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.errors import PlanError
from bitplan.lab.targets import load_target
from bitplan.planners.assign.assignment import count_moves_for_ratio
from bitplan.planners.assign.groups import DATA, StepTensors, count_tensors
from bitplan.planners.assign.levels import PAPER, order_moves

Network = Callable[..., StepTensors]


def starts(step_tensors: StepTensors) -> list[str]:
    return [group.start for group in step_tensors.groups]


def group_named(step_tensors: StepTensors, tensor: str) -> int:
    return next(item.group for item in step_tensors.tensors if item.name == tensor)


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "groups"),
    [
        ("resnet18", 11_220_132, 264, 22),
        ("squeezenet", 781_156, 370, 27),
        ("mobilenet-v2", 2_412_212, 684, 59),
        # 680 without the two halves of 13 splits, each with its gradient.
        ("shufflenet-v2", 1_356_104, 732, 58),
    ],
)
def test_the_paper_s_networks(network: Network, name: str, parameters: int, tensors: int, groups: int) -> None:
    step_tensors = network(name)
    assert (step_tensors.parameters, len(step_tensors.tensors), len(step_tensors.groups)) == (
        parameters,
        tensors,
        groups,
    )
    assert sum(group.size for group in step_tensors.groups) == step_tensors.elements
    assert all(len(unit.groups) == 1 for unit in step_tensors.units)


@pytest.mark.parametrize(
    ("name", "order", "expected"),
    [
        ("squeezenet", "largest", [1, 1, 2, 3, 4, 6, 7, 10, 15]),
        ("resnet18", "largest", [1, 2, 3, 4, 5, 7, 9, 11, 15]),
        ("resnet18", "smallest", [8, 12, 14, 16, 18, 19, 20, 21, 22]),
    ],
)
def test_as_many_groups_are_demoted_as_in_the_paper(
    network: Network, name: str, order: str, expected: list[int]
) -> None:
    step_tensors = network(name)
    moves = order_moves(order, step_tensors.groups, 1)
    assert [count_moves_for_ratio(step_tensors, PAPER, moves, tenths / 10) for tenths in range(1, 10)] == expected
    assert count_moves_for_ratio(step_tensors, PAPER, moves, 0.0) == 0
    assert count_moves_for_ratio(step_tensors, PAPER, moves, 1.0) == len(step_tensors.groups)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet", "mobilenet-v2", "shufflenet-v2"])
@pytest.mark.parametrize("width", [0.5, 0.25, 0.1])
def test_the_cut_is_the_least_at_every_width(network: Network, name: str, width: float) -> None:
    step_tensors = network(name, width)
    # Groups are cut at products: one for each convolution and linear layer, and one for the data.
    products = [op for op in step_tensors.operations if op.op in ("conv2d", "linear")]
    assert len(step_tensors.groups) == 1 + len(products)
    # Two tensors for each operation's output, for the data and for each parameter; splits add theirs.
    operations, splits = len(step_tensors.operations), sum(len(op.parts) for op in step_tensors.operations)
    parameters = sum(len(op.parameters) for op in step_tensors.operations)
    assert len(step_tensors.tensors) == 2 * (1 + operations + splits + parameters)
    sizes = sorted((group.size for group in step_tensors.groups), reverse=True)
    moves = order_moves("largest", step_tensors.groups, 1)
    for tenths in range(1, 10):
        cut = count_moves_for_ratio(step_tensors, PAPER, moves, tenths / 10)
        assert sum(sizes[:cut]) >= tenths / 10 * step_tensors.elements > sum(sizes[: cut - 1])


def test_a_product_s_weight_lies_in_the_group_before_it_and_a_norm_s_in_its_own(network: Network) -> None:
    step_tensors = network("resnet18")
    at = {label: number for number, label in enumerate(starts(step_tensors))}
    assert group_named(step_tensors, "conv1/conv2d.0:weight") == DATA
    assert group_named(step_tensors, "layer1.0.conv1/conv2d.0:weight") == at["conv1/conv2d.0"]
    assert group_named(step_tensors, "layer1.0.conv1/conv2d.0:activation") == at["layer1.0.conv1/conv2d.0"]
    assert group_named(step_tensors, "layer1.0.bn1/batch_norm.0:weight(bias)") == at["layer1.0.conv1/conv2d.0"]
    # A shortcut reads the block's input, whichever operations ran in between.
    assert group_named(step_tensors, "layer2.0.shortcut.0/conv2d.0:weight") == at["layer1.1.conv2/conv2d.0"]
    assert group_named(step_tensors, "layer2.0/add.0:activation") == at["layer2.0.shortcut.0/conv2d.0"]
    assert group_named(step_tensors, "loss/log_softmax.0:grad_activation") == at["fc/linear.0"]


def test_data_is_counted_with_its_gradient_and_a_loss_left_whole_is_one_operation() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    batch = torch.randn(5, 4), torch.randint(2, (5,))
    step_tensors = count_tensors(net, batch, F.cross_entropy)
    data = [tensor for tensor in step_tensors.tensors if tensor.name == "input"]
    assert [(tensor.role, tensor.elements, tensor.group) for tensor in data] == [
        ("activation", 20, DATA),
        ("grad_activation", 20, DATA),
    ]
    whole = count_tensors(net, batch, F.cross_entropy, decompose_loss=False)
    assert len(step_tensors.tensors) == len(whole.tensors) + 2


def test_a_loss_that_cannot_be_opened_stays_whole() -> None:
    def smooth(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=0.1)

    step_tensors = count_tensors(nn.Linear(4, 3), (torch.randn(5, 4), torch.randint(2, (5,))), smooth)
    assert [op.op for op in step_tensors.operations] == ["linear", "cross_entropy"]


def test_a_transformer_is_cut_at_its_linears_and_at_attention() -> None:
    target = load_target("gpt-tiny", shapes_only=True)
    step_tensors = count_tensors(target.model, target.batch, target.loss)
    assert starts(step_tensors)[:4] == [
        "input",
        "blocks.0.attention.qkv/linear.0",
        "blocks.0.attention/scaled_dot_product_attention.0",
        "blocks.0.attention.out/linear.0",
    ]
    # The embedding is also the head's weight: it is low only if what feeds either is.
    tied = next(
        unit for unit in step_tensors.units if ("head", "linear.0") in unit.operations and unit.kind == "weight"
    )
    assert ("token_embedding", "embedding.0") in tied.operations
    assert tied.groups == {DATA, group_named(step_tensors, "norm/layer_norm.0:activation")}


def test_all_steps_of_a_recurrent_layer_are_one_group() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(x)[0])
            return out

    step_tensors = count_tensors(Recurrent(), torch.randn(6, 2, 4))
    assert starts(step_tensors) == ["input", "lstm/linear.0", "lstm/linear.1", "head/linear.0"]
    recurrent = next(
        unit for unit in step_tensors.units if unit.kind == "weight" and ("lstm", "linear.3") in unit.operations
    )
    assert recurrent.groups == {2}


def test_a_graph_network_is_cut_at_its_neighbour_sums() -> None:
    target = load_target("gcn", shapes_only=True)
    step_tensors = count_tensors(target.model, target.batch, target.loss)
    assert sum("sparse_matmul" in start for start in starts(step_tensors)) == 3


def test_what_one_name_means_has_one_precision() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.relu(self.two(self.relu(self.one(x))))
            return y

    step_tensors = count_tensors(Shared(), torch.randn(3, 4))
    relu = next(
        unit for unit in step_tensors.units if unit.operations == (("relu", "relu.0"),) and unit.kind == "activation"
    )
    assert relu.groups == {1, 2}
    assert len([tensor for tensor in step_tensors.tensors if tensor.name == "relu/relu.0:activation"]) == 2


def test_a_model_without_products_has_nothing_to_assign() -> None:
    with pytest.raises(PlanError, match="no product"):
        count_tensors(nn.ReLU(), torch.randn(3))
