"""Plans in training loops of Accelerate."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainer_plans import HISTORY, SCHEDULE

import bitplan as bp
from bitplan.capture.scopes import is_planned
from bitplan.errors import MissingPackageError, PlanError, RunError
from bitplan.integrations.accelerate import prepare
from bitplan.runtime.state_file import STATE_FILE

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def train(
    plan: Any, stop: int = 6, *, start: int = 0, load: Path | None = None, save: Path | None = None, **options: Any
) -> tuple[dict[str, Tensor], Any]:
    """Batches `start` to `stop`; the accelerator's state is loaded before and saved behind them."""
    settings = {"cpu": True, **options.pop("accelerator", {})}
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(**settings)
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(X), batch_size=4, generator=torch.Generator())  # or it draws from dropout's
    if plan is None:
        run = None
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        model, optimizer, loader, run = prepare(accelerator, model, optimizer, plan, loader, **options)
    if load is not None:
        accelerator.load_state(str(load))
    for number, (x,) in enumerate(loader):
        if not start <= number < stop:
            continue
        with accelerator.accumulate(model):
            accelerator.backward((model(x).squeeze(-1) - x.sum(-1)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(str(save))
    return {name: tensor.clone() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}, run


def is_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_it_rounds_as_attach_does() -> None:
    weights, run = train(HISTORY)
    assert not is_same(weights, train(None)[0])
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with bp.attach(model, HISTORY, optimizer=optimizer):
        for x in X[:24].split(4):
            (model(x).squeeze(-1) - x.sum(-1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert is_same(weights, dict(model.state_dict()))
    run.detach()


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}], ids=["fp32", "bf16"])
def test_packed_equals_emulate_and_detaching_leaves_a_model_that_runs(settings: dict[str, Any]) -> None:
    emulated, _ = train(HISTORY, accelerator=settings)
    packed, run = train(HISTORY, accelerator=settings, execution="packed")
    assert is_same(emulated, packed)
    assert not is_same(emulated, train(None, accelerator=settings)[0])
    run.detach()
    assert not any(is_planned(module) for module in run.model.modules())
    assert run.model(X[:2]).isfinite().all()


def test_accumulation_counts_optimizer_steps() -> None:
    _, run = train(HISTORY, stop=12, accelerator={"gradient_accumulation_steps": 4})
    assert run.steps_done == 3


def test_a_plan_that_moves_takes_its_steps() -> None:
    _, run = train(SCHEDULE, steps=6)
    assert run.scalars()["bitplan/bits/cycle"] == 8
    with pytest.raises(PlanError, match="set_total_steps"):
        train(SCHEDULE)


def test_without_a_plan_the_loop_of_this_file_resumes_bit_for_bit(tmp_path: Path) -> None:
    train(None, stop=3, save=tmp_path)
    assert is_same(train(None)[0], train(None, start=3, load=tmp_path)[0])


@pytest.mark.parametrize("plan", [HISTORY, SCHEDULE], ids=["history", "schedule"])
def test_a_saved_state_resumes_bit_for_bit(tmp_path: Path, plan: Any) -> None:
    options = {"steps": 6}
    whole, _ = train(plan, **options)
    train(plan, stop=3, save=tmp_path, **options)
    resumed, run = train(plan, start=3, load=tmp_path, **options)
    assert is_same(whole, resumed)
    assert run.steps_done == 6
    assert (tmp_path / STATE_FILE).is_file()
    assert not list(tmp_path.glob("custom_checkpoint*"))  # which would be a pickle


def test_a_state_without_the_plan_is_refused_or_begins_with_empty_histories(tmp_path: Path) -> None:
    whole, _ = train(HISTORY)
    train(HISTORY, stop=3, save=tmp_path)
    (tmp_path / STATE_FILE).unlink()
    with pytest.raises(RunError, match="fresh_state=True"):
        train(HISTORY, start=3, load=tmp_path)
    fresh, _ = train(HISTORY, start=3, load=tmp_path, fresh_state=True)
    assert not is_same(whole, fresh)


def test_scalars_go_to_trackers_of_the_accelerator() -> None:
    seen = []

    class Tracked(Accelerator):
        def log(self, values: dict[str, float], step: int | None = None, log_kwargs: Any = None) -> None:
            seen.append((step, values))

    accelerator = Tracked(cpu=True)
    model = make_model()
    model, optimizer, run = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), HISTORY)
    run.log_to(accelerator, every=2)
    for x in X[:16].split(4):
        accelerator.backward(model(x).mean())
        optimizer.step()
    assert [step for step, _ in seen] == [2, 4]
    assert 4 < seen[0][1]["bitplan/bits"] < 8


def test_a_plan_that_matches_nothing_raises_before_the_first_step() -> None:
    with pytest.raises(PlanError, match="no_such"):
        train({"version": 1, "rules": [{"match": "no_such", "w": "int8"}]})
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator = Accelerator(cpu=True)
    plan = {"version": 1, "rules": [{"match": "*", "op": "conv2d", "w": "int8"}]}
    model, optimizer, _ = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    accelerator.backward(model(X[:4]).mean())
    with pytest.raises(PlanError, match="conv2d"):
        optimizer.step()
    assert is_same(before, dict(model.state_dict()))


def test_a_plan_with_selectors_needs_an_example() -> None:
    with pytest.raises(PlanError, match="example="):
        train("fp8-train", execution="emulate")
    assert train("fp8-train", execution="emulate", example=X[:4])[1].coverage().unrounded == ("3/linear.0",)


def test_a_model_that_arrives_too_late_names_the_right_place() -> None:
    accelerator = Accelerator(cpu=True)
    for make, token in (
        (lambda: torch.compile(make_model(), backend="eager"), "compiled"),
        (lambda: nn.DataParallel(make_model()), "DataParallel"),
    ):
        model = make()
        with pytest.raises(PlanError, match=rf"{token}.*prepare\(\)"):
            prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), HISTORY)
    model = make_model()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(PlanError, match="prepared already"):
        prepare(accelerator, prepared, optimizer, HISTORY)


def test_a_second_plan_raises() -> None:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bp.attach(model, HISTORY)
    with pytest.raises(PlanError, match="one plan"):
        prepare(accelerator, model, optimizer, HISTORY)


def test_a_dynamo_backend_is_for_emulation() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend=DynamoBackend.AOT_EAGER))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="compile=True"):
        prepare(accelerator, model, optimizer, HISTORY, execution="packed")
    model, optimizer, run = prepare(accelerator, model, optimizer, HISTORY, example=X[:4])
    accelerator.backward(model(X[:4]).mean())
    optimizer.step()
    assert run.steps_done == 1


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "bitplan.integrations.accelerate", raising=False)
    with pytest.raises(MissingPackageError, match=r"bitplan\[accelerate\]"):
        importlib.import_module("bitplan.integrations.accelerate")
