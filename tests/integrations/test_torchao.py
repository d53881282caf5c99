"""Plans through torchao's quantize_."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import quantize_
from trainer_plans import HISTORY

import bitplan as bp
from bitplan.capture.scopes import is_planned
from bitplan.errors import MissingPackageError, PlanError, RunError
from bitplan.integrations.torchao import BitplanConfig, LayerRuns

X = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 2))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor = X) -> list[float]:
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("execution", ["emulate", "packed"])
@pytest.mark.parametrize("plan", ["fp8-linear", "mxfp8-linear"])
def test_every_layer_follows_the_operands_of_the_plan(plan: str, execution: str) -> None:
    """As attach does to the whole model, whose other operations these plans leave alone."""
    attached = make_model()
    with bp.attach(attached, plan, optimizer=(optimizer := optimizer_of(attached)), execution=execution):
        expected = train(attached, optimizer)
    model = make_model()
    quantize_(model, BitplanConfig(plan, execution))
    assert train(model, optimizer_of(model)) == expected
    plain = make_model()
    assert train(plain, optimizer_of(plain)) != expected
    LayerRuns(model).detach()
    assert not any(is_planned(module) for module in model.modules())
    assert type(model[0]) is nn.Linear


def test_filter_fn_chooses_layers_and_the_state_dict_is_plain() -> None:
    model = make_model()
    names = list(model.state_dict())
    quantize_(model, BitplanConfig("fp8-linear"), filter_fn=lambda module, path: path in ("0", "2"))
    assert list(LayerRuns(model).runs) == ["0", "2"]
    assert list(model.state_dict()) == names
    assert type(model.state_dict()["0.weight"]) is Tensor


def test_layers_draw_bits_of_their_own_and_count_the_steps_of_their_optimizer() -> None:
    model = make_model()
    with torch.no_grad():
        model[2].weight.copy_(model[0].weight)
    quantize_(model, BitplanConfig(HISTORY))
    first = model[0](X[0])
    assert not torch.equal(first - model[0].bias, model[2](X[0]) - model[2].bias)
    model.zero_grad()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.0), torch.optim.SGD(model[2].parameters(), lr=0.0)]
    model(X[0]).sum().backward()
    optimizers[0].step()
    optimizers[0].step()
    runs = LayerRuns(model).runs
    assert [run.steps_done for run in runs.values()] == [2, 0, 0]
    assert not torch.equal(model[0](X[0]), first)  # other random bits


def test_a_saved_state_resumes_bit_for_bit() -> None:
    model = make_model()
    quantize_(model, BitplanConfig(HISTORY))
    optimizer = optimizer_of(model)
    train(model, optimizer, X[:3])
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), LayerRuns(model).state_dict()])
    expected = train(model, optimizer, X[3:])
    losses = []
    for has_state in (True, False):
        resumed = make_model()
        quantize_(resumed, BitplanConfig(HISTORY))
        resumed_optimizer = optimizer_of(resumed)
        resumed.load_state_dict(saved[0])
        resumed_optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if has_state:
            LayerRuns(resumed).load_state_dict(saved[2])
        losses.append(train(resumed, resumed_optimizer, X[3:]))
    assert losses[0] == expected != losses[1]
    other = make_model()
    quantize_(other, BitplanConfig(HISTORY), filter_fn=lambda module, path: path == "0")
    with pytest.raises(RunError, match="3 layers"):
        LayerRuns(other).load_state_dict(saved[2])


def test_a_layer_that_never_runs_does_not_stop_the_others() -> None:
    """As an expert without tokens."""
    model = make_model()
    model.add_module("unused", nn.Identity())
    model.unused.inner = nn.Linear(2, 2)
    quantize_(model, BitplanConfig("fp8-linear"))
    train(model, optimizer_of(model))


def test_a_quantized_model_compiles() -> None:
    eager, compiled = make_model(), make_model()
    for model in (eager, compiled):
        quantize_(model, BitplanConfig("fp8-linear"))
    graph = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    assert train(graph, optimizer_of(compiled), X[:2]) == train(eager, optimizer_of(eager), X[:2])


LINEAR = {"match": "*", "op": "linear", "x": "e4m3"}


@pytest.mark.parametrize(
    ("plan", "token"),
    [
        ("fp8-all", "op: linear"),
        ("fp8-train", "select"),
        ({"rules": [{**LINEAR, "match": "layers.*"}]}, "filter_fn"),
        ({"rules": [{"match": "*", "op": "conv2d", "x": "e4m3"}]}, "op: linear"),
        ({"rules": [{"match": "*", "x": "e4m3"}]}, "op: linear"),
        ({"rules": [{"match": "*", "op": "linear", "activation": "e4m3"}]}, "activation"),
        ({"rules": [{"match": "*", "op": "linear", "weight": "e4m3"}]}, "weight"),
        ({"rules": [{**LINEAR, "x": {"until": "50%", "use": "e4m3", "then": "bf16"}}]}, "over time"),
        ({"rules": [LINEAR], "loss": "chunked"}, "loss"),
        ({"rules": [LINEAR], "optimizer": {"state": "int8"}}, "optimizers"),
        ({"rules": []}, "no rules"),
    ],
)
def test_what_a_plan_says_beyond_linear_layers_raises(plan: Any, token: str) -> None:
    with pytest.raises(PlanError, match=token) as raised:
        BitplanConfig(plan if isinstance(plan, str) else {"version": 1, **plan})
    assert "attach" in str(raised.value)


def test_a_filter_that_chooses_nothing_raises_before_the_first_step() -> None:
    model = make_model()
    quantize_(model, BitplanConfig("fp8-linear"), filter_fn=lambda module, path: False)
    optimizer = optimizer_of(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match="filter_fn"):
        train(model, optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(PlanError, match="quantize_"):
        LayerRuns(model)


def test_other_modules_and_a_second_plan_raise() -> None:
    model = make_model()
    with pytest.raises(PlanError, match="LayerNorm"):
        quantize_(model, BitplanConfig("fp8-linear"), filter_fn=lambda module, path: path == "3")
    quantize_(model, BitplanConfig("fp8-linear"))
    with pytest.raises(PlanError, match="already"):
        quantize_(model, BitplanConfig("fp8-linear"))
    with pytest.raises(PlanError, match="already"):
        bp.attach(model, "fp8-linear")


@pytest.fixture(autouse=True)
def _no_config_is_left() -> Any:
    yield
    from bitplan.integrations import torchao

    torchao._unused.clear()


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.core.config", None)
    monkeypatch.delitem(sys.modules, "bitplan.integrations.torchao", raising=False)
    with pytest.raises(MissingPackageError, match=r"bitplan\[torchao\]"):
        importlib.import_module("bitplan.integrations.torchao")
