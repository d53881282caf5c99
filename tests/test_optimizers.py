"""Optimizer state in few bits: it is really small, it is promised or refused, and it goes through plain files."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan.analysis.memory.fakes import storage_bytes
from bitplan.errors import PlanError
from bitplan.lab.train.checkpoint import Checkpoint
from bitplan.plans import Plan
from bitplan.runtime import optimizers
from bitplan.runtime.optimizers import decoded, is_low_bit, load_plain_state, plain_state

pytest.importorskip("torchao")

#: Bytes of a moment's value, its share of a scale included.
BYTES = {"int8": 1 + 4 / 256, "int4": 0.5 + 4 / 128, "e4m3": 1 + 4 / 256}


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """torchao compiles its step, which takes seconds for every shape; uncompiled it computes the same thing."""
    with torch.compiler.set_stance("force_eager"):
        yield


def a_model(width: int = 128) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def plan_of(state: str) -> Plan:
    return Plan.from_yaml(f"version: 1\noptimizer: {{state: {state}}}\n", "p.yaml")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)
        inputs = torch.randn(8, next(model.parameters()).shape[1])
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for item in optimizer.state.values() for t in item.values() if isinstance(t, Tensor)]
    return storage_bytes(tensors)


@pytest.mark.parametrize("state", BYTES)
def test_the_state_is_really_small_and_the_model_learns(state: str) -> None:
    small, plain = a_model(), a_model()
    with bitplan.attach(small, plan_of(state)) as run, bitplan.attach(plain, Plan()) as other:
        ours = run.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
        theirs = other.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
        assert type(theirs) is torch.optim.AdamW
        assert float(ours.param_groups[0]["lr"]) == pytest.approx(1e-2)
        assert (ours.param_groups[0]["weight_decay"], ours.param_groups[0]["betas"]) == (0.1, (0.9, 0.95))
        train(small, ours, run, 5)
        train(plain, theirs, other, 5)
    ratio = state_bytes(ours) / state_bytes(theirs)
    expected = BYTES[state] / 4
    assert expected <= ratio <= expected * 1.1 + 0.02  # biases are kept in full
    assert sum(is_low_bit(value) for item in ours.state.values() for value in item.values()) == 4
    moved = [(a - b).abs().max() for a, b in zip(plain.parameters(), a_model().parameters(), strict=True)]
    gaps = [(a - b).abs().mean() for a, b in zip(small.parameters(), plain.parameters(), strict=True)]
    assert all(0 < gap < 0.5 * move for gap, move in zip(gaps[::2], moved[::2], strict=True))


def test_groups_and_settings_of_a_made_optimizer_are_taken_over() -> None:
    model = a_model()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is expected] for expected in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 0.5}]
    run = bitplan.attach(model, plan_of("int8"))
    made = run.optimizer(torch.optim.AdamW(groups, lr=0.1, eps=1e-6))
    assert type(made).__name__ == "AdamW8bit"
    assert [float(g["lr"]) for g in made.param_groups] == pytest.approx([0.1, 0.5])
    assert [g["weight_decay"] for g in made.param_groups] == [0.3, 0.0]
    assert [g["eps"] for g in made.param_groups] == [1e-6, 1e-6]
    assert [len(g["params"]) for g in made.param_groups] == [2, 2]
    assert type(run.optimizer(torch.optim.Adam, lr=1e-3)).__name__ == "Adam8bit"
    assert type(run.optimizer(torch.optim.Adam, lr=1e-3, decoupled_weight_decay=True)).__name__ == "AdamW8bit"
    assert run.optimizer(made) is made
    run.detach()


def test_what_has_no_twin_is_refused_with_a_sentence() -> None:
    model = a_model()
    with bitplan.attach(model, plan_of("int8")) as run:
        with pytest.raises(PlanError, match=r"p.yaml:2: optimizer: SGD .* int8: use torch.optim.AdamW"):
            run.optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(PlanError, match=r"maximize=True has no version"):
            run.optimizer(torch.optim.AdamW, maximize=True)
        with pytest.raises(PlanError, match=r"takes an optimizer's class"):
            run.optimizer("adamw")
        stepped = torch.optim.AdamW(model.parameters())
        stepped.state[next(model.parameters())]["step"] = torch.tensor(1.0)
        with pytest.raises(PlanError, match=r"has made steps already"):
            run.optimizer(stepped)
    with (
        bitplan.attach(nn.Linear(8, 8), plan_of("int4")) as run,
        pytest.raises(PlanError, match=r"has no effect here: no parameter has 4096 values or more in whole blocks"),
    ):
        run.optimizer(torch.optim.AdamW)


def test_torchao_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(PlanError, match=r"p.yaml:2: optimizer: .* not installed: pip install torchao\."):
        bitplan.attach(a_model(), plan_of("int8"))
    bitplan.attach(a_model(), Plan()).optimizer(torch.optim.SGD, lr=0.1)


def test_a_promise_that_is_not_kept_raises() -> None:
    model = a_model()
    with bitplan.attach(model, plan_of("int8")) as run:
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(2, 128)).sum().backward()
        with pytest.raises(PlanError, match=r"this AdamW has it in full precision: make it by run.optimizer"):
            torch.optim.AdamW(model.parameters()).step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        torch.optim.AdamW(a_model().parameters()).step()  # another model's
        run.step()
        with pytest.raises(PlanError, match=r"no such optimizer has made a step: make it by run.optimizer"):
            run.step()
    torch.optim.AdamW(model.parameters()).step()  # detached, everyone is free


def test_state_that_stays_full_in_fact_raises() -> None:
    model = a_model()
    for layer in (model[0], model[2]):  # type: ignore[index]
        layer.weight.requires_grad_(False)
    with bitplan.attach(model, plan_of("int8")) as run:
        optimizer = run.optimizer(torch.optim.AdamW, list(model.parameters()), lr=1e-3)
        with pytest.raises(PlanError, match=r"after a step all optimizer state is in full precision"):
            train(model, optimizer, run, 2)


@pytest.mark.parametrize("state", BYTES)
def test_plain_state_decodes_in_plain_torch_bit_for_bit(state: str) -> None:
    model = a_model()
    with bitplan.attach(model, plan_of(state)) as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        train(model, optimizer, run, 3)
    plain = plain_state(optimizer)
    for key, parameter in enumerate(model.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            held, written = optimizer.state[parameter][name], plain["state"][key][name]
            if not is_low_bit(held):
                assert type(written) is Tensor
                continue
            assert all(type(value) in (Tensor, str, list, bool) for value in written.values())
            codes = written["codes"]
            if written["format"] == "int4":
                codes = torch.stack([codes >> 4, codes & 15], dim=-1)
            values = codes.float() if written["format"] == "e4m3" else written["qmap"][codes.int()]
            values = (values.view(len(written["scale"]), -1) * written["scale"].view(-1, 1)).view(written["shape"])
            assert torch.equal(values, held.dequantize())
            assert torch.equal(decoded(written), values)
            assert values.abs().max() > 0


@pytest.mark.parametrize("state", BYTES)
def test_a_run_goes_on_bit_for_bit_from_files(state: str, tmp_path: Path) -> None:
    whole, part, rest = a_model(), a_model(), a_model()
    with bitplan.attach(whole, plan_of(state)) as run:
        train(whole, run.optimizer(torch.optim.AdamW, lr=1e-2), run, 5)
    with bitplan.attach(part, plan_of(state)) as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        train(part, optimizer, run, 2)
        Checkpoint(tmp_path, 2).save({"model": part.state_dict(), "optimizer": plain_state(optimizer)})
    json.loads((tmp_path / "step-00000002.json").read_text())
    loaded = Checkpoint(tmp_path, 2).load()
    rest.load_state_dict(loaded["model"])
    with bitplan.attach(rest, plan_of(state)) as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=3.0)  # the state's own rate counts
        load_plain_state(optimizer, loaded["optimizer"])
        assert state_bytes(optimizer) < 0.4 * 8 * sum(p.numel() for p in rest.parameters())
        train(rest, optimizer, run, 3, first=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))
    assert not torch.equal(next(whole.parameters()), next(part.parameters()))


def test_state_of_another_kind_is_refused() -> None:
    states, kinds = {}, ("int8", "int4", "keep")
    for kind in kinds:
        model = a_model()
        with bitplan.attach(model, plan_of(kind)) as run:
            optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
            train(model, optimizer, run, 1)
            states[kind] = plain_state(optimizer)
    for kind in kinds:
        for other in kinds:
            fresh = a_model()
            with bitplan.attach(fresh, plan_of(kind)) as run:
                optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
                if kind == other:
                    load_plain_state(optimizer, states[other])
                    continue
                with pytest.raises(PlanError, match=r"stored (in|differently)"):
                    load_plain_state(optimizer, states[other])
                assert not optimizer.state
    damaged = states["int8"]
    damaged["state"][0]["exp_avg"]["dtype"] = "_inductor"  # a name that torch would import a submodule for
    with bitplan.attach(a_model(), plan_of("int8")) as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        with pytest.raises(KeyError, match="_inductor"):
            load_plain_state(optimizer, damaged)
