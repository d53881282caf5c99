"""The list of a training step's tensors: their names, roles, order, and what comes from what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import Apply
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from bitplan.analysis.sites import Site, list_sites
from bitplan.capture.recording import record
from bitplan.lab.models.resnet import cifar_resnet
from bitplan.plans import ROLES, SLOTS, Plan
from bitplan.runtime.attach import attach


def names(function: Callable[..., Any], *inputs: Tensor, weight: tuple[int, ...] = ()) -> list[str]:
    return [site.name for site in list_sites(Apply(function, *weight), inputs)]


def activations(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    result = names(function, *inputs)
    return [name.removeprefix("/").removesuffix(":activation") for name in result if name.endswith(":activation")]


X = torch.randn(4, 6)


# --- names, roles, order ---


def test_a_layer_has_its_weights_slots_result_and_their_gradients() -> None:
    result = list_sites(nn.Sequential(nn.Linear(6, 3)), X)
    assert [site.name for site in result] == [
        f"0/linear.0:{role}"
        for role in (
            *("weight", "weight(bias)", "fprop.x", "fprop.w", "activation"),
            *("grad_activation", "grad_weight", "grad_weight(bias)", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"),
        )
    ]
    by_name = {site.name.split(":")[1]: site for site in result}
    assert {role: site.shape for role, site in by_name.items()} == {
        "weight": (3, 6),
        "weight(bias)": (3,),
        "fprop.x": (4, 6),
        "fprop.w": (3, 6),
        "activation": (4, 3),
        "grad_activation": (4, 3),
        "grad_weight": (3, 6),
        "grad_weight(bias)": (3,),
        "dgrad.dy": (4, 3),
        "dgrad.w": (3, 6),
        "wgrad.dy": (4, 3),
        "wgrad.x": (4, 6),
    }
    assert {site.role for site in result} == {*ROLES, *SLOTS}
    weight = by_name["weight"]
    assert (weight.module, weight.op, weight.parameter, weight.dtype) == ("0", "linear.0", "0.weight", torch.float32)
    assert (weight.elements, weight.bytes, str(weight)) == (18, 72, "0/linear.0:weight")


def test_a_residual_network_is_listed_in_the_order_of_a_step() -> None:
    batch = torch.randn(2, 3, 8, 8), torch.randint(10, (2,))
    result = [site.name for site in list_sites(cifar_resnet(8), batch, F.cross_entropy)]
    assert "layer1.0.conv1/conv2d.0:activation" in result
    forward = [name for name in result if name.endswith(":activation")]
    assert forward[:9] == [
        f"{place}:activation"
        for place in (
            *("conv1/conv2d.0", "bn1/batch_norm.0", "/relu.0"),
            *("layer1.0.conv1/conv2d.0", "layer1.0.bn1/batch_norm.0", "layer1.0/relu.0"),
            *("layer1.0.conv2/conv2d.0", "layer1.0.bn2/batch_norm.0", "layer1.0/add.0"),
        )
    ]
    assert forward[-1] == "loss/cross_entropy.0:activation"
    backward = [name for name in result if name.endswith(":grad_activation")]
    assert backward == [name.replace("activation", "grad_activation") for name in reversed(forward)]
    assert result.index(backward[0]) > result.index(forward[-1])
    assert len(result) == len(set(result))


def test_names_are_the_same_from_run_to_run_and_the_model_is_left_alone() -> None:
    model = cifar_resnet(8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(2, 3, 8, 8)
    assert list_sites(model, x) == list_sites(model, x)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert type(model).__mro__[1] is nn.Module


def test_a_module_with_two_names_keeps_its_parameters() -> None:
    model = nn.Module()
    model.first = model.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.forward = lambda x: model.second(model.first(x))  # type: ignore[method-assign]
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    names = {site.name for site in list_sites(model, torch.randn(2, 4))}
    assert {"first.0/linear.0:weight", "first.0/linear.0:activation"} <= names
    after = model.state_dict(keep_vars=True)
    assert {name: id(tensor) for name, tensor in after.items()} == {name: key for name, (key, _) in before.items()}
    assert all(torch.equal(after[name], tensor) for name, (_, tensor) in before.items())


def test_producers_and_consumers_are_named() -> None:
    def fan_out(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return (torch.relu(y).t() + torch.sigmoid(y).t()).contiguous()

    result = {site.name: site for site in list_sites(Apply(fan_out), X)}
    tanh = result["/tanh.0:activation"]
    assert tanh.producer is None
    assert tanh.consumers == ("/relu.0:activation", "/sigmoid.0:activation")
    assert result["/relu.0:activation"].producer == "/tanh.0:activation"
    assert result["/add.0:activation"].producer == "/relu.0:activation"


# --- what makes a site ---


def test_views_copies_and_questions_make_no_site() -> None:
    def looks(x: Tensor) -> Tensor:
        y = x.view(2, 12).t().reshape(-1)[3:].unsqueeze(0).expand(2, -1).contiguous().to(torch.float64).clone()
        first, _ = y.chunk(2)
        assert first.shape[0] == 1
        assert first.is_floating_point()
        return first.flatten().unflatten(0, (3, -1)).permute(1, 0)

    assert activations(looks, X) == []


OPERATIONS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "a residual sum": (lambda x: torch.relu(x) + x, ["relu.0", "add.0"]),
    "numbers on either side": (lambda x: 1 - x * 2 / 3, ["mul.0", "div.0", "sub.0"]),
    "+=": (lambda x: x.clone().__iadd__(1), ["add.0"]),
    "relu_": (lambda x: x.clone().relu_(), ["relu.0"]),
    "F.relu(inplace)": (lambda x: F.relu(x.clone(), inplace=True), ["relu.0"]),
    "out=": (lambda x: torch.mul(x, 2, out=torch.empty(4, 6)), ["mul.0"]),
    "cat": (lambda x: torch.cat([x, x]), ["cat.0"]),
    "stack": (lambda x: torch.stack([x, x]), ["stack.0"]),
    "pooling": (lambda x: F.max_pool1d(F.avg_pool1d(x, 2), 3), ["avg_pool1d.0", "max_pool1d.0"]),
    "a norm": (lambda x: F.layer_norm(x, (6,)), ["layer_norm.0"]),
    "softmax": (lambda x: x.softmax(-1), ["softmax.0"]),
    "scatter": (lambda x: x.new_zeros(4, 6).scatter_add_(0, torch.zeros(4, 6).long(), x), ["scatter_add.0"]),
    "index_add": (lambda x: x.new_zeros(2, 6).index_add(0, torch.tensor([0, 1, 1, 0]), x), ["index_add.0"]),
    "a mean of a norm": (lambda x: x.norm(dim=1).mean(), ["norm.0", "mean.0"]),
    "two of a kind": (lambda x: torch.tanh(torch.tanh(x)), ["tanh.0", "tanh.1"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_all_forms_are_seen(name: str) -> None:
    function, expected = OPERATIONS[name]
    assert activations(function, X) == expected


def test_a_sparse_product_is_seen() -> None:
    adjacency = torch.eye(4).to_sparse()
    assert activations(lambda a, x: torch.sparse.mm(a, x), adjacency, X) == ["sparse_matmul.0"]


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (4, 6), (5, 6)),
    "conv1d": (F.conv1d, (2, 3, 8), (4, 3, 3)),
    "conv2d": (F.conv2d, (2, 3, 8, 8), (4, 3, 3, 3)),
    "conv3d": (F.conv3d, (2, 3, 4, 4, 4), (4, 3, 3, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 3, 4, 4), (3, 4, 2, 2)),
    "matmul": (lambda x, w: x @ w, (4, 6), (6, 5)),
    "bmm": (torch.bmm, (2, 4, 6), (2, 6, 5)),
    "baddbmm": (lambda x, w: torch.baddbmm(x.new_zeros(1), x, w), (2, 4, 6), (2, 6, 5)),
    "einsum": (lambda x, w: torch.einsum("ij,jk->ik", x, w), (4, 6), (6, 5)),
}


@pytest.mark.parametrize("op", PRODUCTS)
def test_products_have_six_slots(op: str) -> None:
    function, x, w = PRODUCTS[op]
    result = names(function, torch.randn(x), weight=w)
    assert [name for name in result if name.split(":")[1] in SLOTS] == [f"/{op}.0:{slot}" for slot in SLOTS]


def test_a_view_of_a_weight_is_that_weight() -> None:
    result = list_sites(Apply(lambda x, w: x @ w.view(5, 6).t()[:, :3], 5, 6), X)
    (weight,) = [site for site in result if site.role == "weight"]
    assert (weight.parameter, weight.shape) == ("weight", (5, 6))


def test_a_weight_that_is_used_twice_is_listed_once() -> None:
    first, second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    second.weight = first.weight
    result = list_sites(nn.Sequential(first, second), X)
    assert [site.name for site in result if site.role in ("weight", "grad_weight")] == [
        "0/linear.0:weight",
        "0/linear.0:grad_weight",
    ]


def test_without_gradients_there_are_no_sites_of_them() -> None:
    model = nn.Sequential(nn.Linear(6, 3).requires_grad_(False))
    assert {site.role for site in list_sites(model, X)} == {"weight", "activation", "fprop.x", "fprop.w"}


# --- fused operations ---


def test_a_fused_operation_is_one_site_unless_it_is_opened() -> None:
    model = nn.LSTM(6, 4)
    x = X[:, None]
    fused = [site.name for site in list_sites(model, x) if site.role == "activation"]
    assert fused == ["/lstm.0:activation[0]", "/lstm.0:activation[1]", "/lstm.0:activation[2]"]
    opened = record(model, x, opens=lambda module, op: op == "lstm")
    assert [op.op for op in opened].count("linear") == 1 + len(x)
    assert {op.inside for op in opened} == {"lstm"}


def test_multi_head_attention_shows_its_products() -> None:
    x = torch.randn(3, 2, 8)
    result = [site.op for site in list_sites(nn.MultiheadAttention(8, 2), (x, x, x)) if site.role == "fprop.x"]
    assert result.count("bmm.0") == 1
    assert len([op for op in result if op.startswith("linear")]) >= 2


# --- models that do not fit, and models that have a plan ---


def huge() -> nn.Module:
    return nn.Sequential(nn.Linear(400_000, 400_000, bias=False), nn.ReLU(), nn.Linear(400_000, 400_000, bias=False))


def of_meta_tensors() -> list[Site]:
    with torch.device("meta"):
        return list_sites(huge(), torch.empty(2, 400_000))


def of_fake_tensors() -> list[Site]:
    with FakeTensorMode():
        model, x = huge(), torch.empty(2, 400_000)
    return list_sites(model, x)


@pytest.mark.parametrize("listed", [of_meta_tensors, of_fake_tensors])
def test_a_model_that_does_not_fit_into_memory_can_be_listed(listed: Callable[[], list[Site]]) -> None:
    result = listed()
    assert sum(site.bytes for site in result if site.role == "weight") == 2 * 4 * 400_000**2  # over a terabyte
    assert [site.op for site in result if site.role == "activation"] == ["linear.0", "relu.0", "linear.0"]


def test_a_model_with_a_plan_is_listed_as_without_and_keeps_it() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    plain, y = list_sites(model, X), model(X)
    with attach(model, Plan.from_dict({"version": 1, "rules": [{"match": "*", "weight": "e2m1"}]})):
        planned = model(X)
        assert list_sites(model, X) == plain
        assert torch.equal(model(X), planned)
        assert not torch.equal(planned, y)


def test_a_compiled_model_is_listed_under_the_paths_it_has_uncompiled() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)))
    plain = [(site.name, site.role, site.shape) for site in list_sites(model, X)]
    model[1] = torch.compile(model[1], backend="aot_eager", fullgraph=True)
    assert [(site.name, site.role, site.shape) for site in list_sites(model, X)] == plain


def test_recurrent_layers_keep_their_lists_of_weights() -> None:
    layer = nn.LSTM(4, 4)
    list_sites(layer, torch.randn(2, 1, 4))
    assert layer._flat_weights[0] is layer.weight_ih_l0
    assert not layer._weights_have_changed()
