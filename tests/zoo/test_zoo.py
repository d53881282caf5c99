"""A sample of the zoo, and its instrument; ``make zoo`` runs all of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo_checks import CHECKS, NATIVE, PLANS, UNSCALED, Failure, _Call, _layers, attached
from zoo_models import MODELS
from zoo_spy import ProductSpy, is_on_float_grid, is_on_integer_grid

import bitplan as bp

#: Quick, and of different kinds: rotary attention, tied weights and addmm, an encoder, a masked attention of one's own,
#: convolutions, batch norm, index arithmetic on graphs, a decomposed recurrent layer.
SAMPLE = ["phi", "gpt2", "nanogpt", "resnet", "gcn", "lstm"]
#: Compiling is most of the zoo's time: one model, under a plan for operands and one for classes of tensors.
COMPILED = [("nanogpt", "operands"), ("nanogpt", "int8-all")]


def _cases() -> list[tuple[str, str, str]]:
    return [
        (model, check.name, plan.name)
        for model in SAMPLE
        for check in CHECKS.values()
        for plan in check.plans
        if check.applies(MODELS[model]) and (check.name != "compiled" or (model, plan.name) in COMPILED)
    ]


@pytest.mark.parametrize(("model", "check", "plan"), _cases())
def test_sample(model: str, check: str, plan: str) -> None:
    zoo = MODELS[model]
    if zoo.library in ("timm", "torch_geometric", "transformers") and importlib.util.find_spec(zoo.library) is None:
        pytest.skip(f"{zoo.library} is not installed")
    plans = {item.name: item for item in CHECKS[check].plans}
    CHECKS[check].function(zoo, plans[plan])


# --- the instrument ---


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float_grids_are_recognised_at_any_scale(dtype: torch.dtype) -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    for scale in (1.0, 2.0**-12, 2.0**9):
        assert is_on_float_grid(values * scale, dtype, power_of_two=True)
    assert is_on_float_grid(values * 0.013, dtype, power_of_two=False)
    assert not is_on_float_grid(values * 0.013, dtype, power_of_two=True)
    # A slice without the largest value is on the grid as well, and one value off the grid is enough.
    assert is_on_float_grid(values[values.abs() < 0.5] * 4, dtype, power_of_two=True)
    values[17] *= 1.01
    assert not is_on_float_grid(values, dtype, power_of_two=True)
    assert not is_on_float_grid(values * 0.013, dtype, power_of_two=False)


def test_integer_grids_are_recognised_per_tensor_and_per_row() -> None:
    codes = torch.randint(0, 256, (6, 50), generator=torch.Generator().manual_seed(0)).float()
    rows = codes * torch.rand(6, 1) - torch.rand(6, 1)
    assert is_on_integer_grid(codes * 0.37 - 11.0)
    assert is_on_integer_grid(rows)
    assert is_on_integer_grid(rows.T)
    rows[3, 4] += 0.003
    assert not is_on_integer_grid(rows)
    assert not is_on_integer_grid(torch.randn(6, 50))


def _spy(model: nn.Module, x: Tensor) -> ProductSpy:
    spy = ProductSpy(model, x, PLANS["operands"].is_on_grid, inputs_are_rounded=True, reports_fused=True)
    with spy:
        loss = model(x).sum()
        spy.backward = True
        loss.backward()
    return spy


def test_the_spy_sees_products_that_are_not_rounded() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    assert {(found.op, found.backward) for found in _spy(model, x).off_grid} >= {("addmm", False), ("mm", True)}
    with attached(model, PLANS["operands"]):
        model(x)
        assert not _spy(model, x).off_grid


def test_the_spy_leaves_products_of_constants_alone() -> None:
    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(4.0)[:, None] @ torch.logspace(0, -2, 8)[None]
            return x * angles.cos()

    spy = _spy(Rotary(), torch.randn(4, 8, requires_grad=True))
    assert spy.products == 0


def test_a_copy_of_the_input_is_exempt_and_nothing_else_of_batch_first_attention() -> None:
    """Attention with batch_first copies the model's input, which plans for classes of tensors do not round."""
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    plans = {
        "rounded": {"version": 1, "rules": [{"match": "*", "weight": "e4m3", "activation": "e4m3"}]},
        "without softmax": {
            "version": 1,
            "rules": [
                {"match": "*", "weight": "e4m3", "activation": "e4m3"},
                {"match": "*", "op": "softmax", "keep": True},
            ],
        },
    }
    reports = {}
    for name, plan in plans.items():
        for inputs_are_rounded in (False, True):
            run = bp.attach(model, plan)
            model(x, x, x)
            spy = ProductSpy(
                model,
                x,
                UNSCALED.is_on_grid,
                inputs_are_rounded=inputs_are_rounded,
                reports_fused=True,
                checks_backward=False,
            )
            with spy:
                model(x, x, x)
            run.detach()
            reports[name, inputs_are_rounded] = [(found.op, found.operand) for found in spy.off_grid]
    assert reports["rounded", False] == []
    assert reports["rounded", True] == [("mm", "left operand")]  # the input itself
    assert reports["without softmax", False] == [("bmm", "left operand")]


def test_a_native_product_that_differs_from_emulation_is_reported() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    layers = _layers(model)
    with attached(model, NATIVE, execution=bp.Native(min_macs=0)):
        call = _Call(model[2])
        model(torch.randn(8, 16)).square().sum().backward()
    gradient = model[2].weight.grad
    call.require_same_by_itself(NATIVE, "2", layers["2"], gradient)
    with pytest.raises(Failure, match="dw of 2"):
        call.require_same_by_itself(NATIVE, "2", layers["2"], gradient * (1 + 1e-6))
    with pytest.raises(Failure, match="output of 2"):
        call.require_same_by_itself(NATIVE, "2", layers["0"], gradient)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run.py``, which starts a process for each model that it checks."""
    path = Path(__file__).with_name("run.py")
    monkeypatch.setenv("PYTHONPATH", str(path.parents[2] / "src"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds its folder
    spec = importlib.util.spec_from_file_location("zoo_runner", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_runner_writes_a_table_and_goes_on_where_it_was_stopped(
    runner: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = tmp_path / "zoo.jsonl"
    command = ["--only", "lstm", "--check", "save", "--results", str(stored), "--out", str(tmp_path / "zoo.md")]
    assert runner.main(command) == 0
    assert "lstm: 1 of 1 pass" in capsys.readouterr().out
    assert "| lstm | torch |" in (tmp_path / "zoo.md").read_text()
    result = json.loads(stored.read_text())
    # A stored failure is shown again without a run; one of other code, or a line that was cut off, is not.
    stored.write_text(json.dumps({**result, "message": "stored"}) + "\n" + stored.read_text()[:20])
    assert runner.main(command) == 1
    assert "save, int8-all: stored" in capsys.readouterr().out
    stored.write_text(json.dumps({**result, "message": "stored", "checksum": "other"}) + "\n")
    assert runner.main(command) == 0
