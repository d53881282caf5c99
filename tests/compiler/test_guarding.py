"""One word a module in place of torch's guards on a plan: it must change whenever a graph would."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

from bitplan.compiler.tracing import VERSION, keep_guards, version_of
from bitplan.plans import Plan
from bitplan.runtime.attach import attach

#: How guards spell what a module holds of its plan; torch 2.11 and later ones differ.
OF_THE_STATE = re.compile(r"(__dict__\['|\.)_bitplan(?!\w)")

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def plan_of(*rules: dict[str, Any], **more: Any) -> Plan:
    return Plan.from_dict({"version": 1, **more, "rules": list(rules)})


ALL = plan_of({"match": "*", "activation": "e4m3"})


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def compiled(module: nn.Module) -> Any:
    """As ``run.compile()`` does it, but with a backend that takes no time."""
    options = {"guard_filter_fn": keep_guards}
    return torch.compile(module, fullgraph=True, backend="eager", options=options)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def guards_of(module: nn.Module) -> str:
    (entry,) = _debug_get_cache_entry_list(type(module).forward.__code__)  # type: ignore[arg-type]
    return str(entry.guard_manager)


def test_nothing_of_a_plan_is_guarded_but_versions() -> None:
    model = small()
    with attach(model, ALL, example=X):
        compiled(model)(X)
        guards = guards_of(model)
        assert not OF_THE_STATE.search(guards)
        assert guards.count(f"{VERSION}'] ==") + guards.count(f"{VERSION} ==") == 4  # the model and its three layers


def test_a_version_is_the_same_word_for_the_same_state() -> None:
    assert version_of((1, "a")) == version_of((1, "a")) != version_of((2, "a"))


def test_every_phase_of_a_plan_has_its_own_graph_and_finds_it_again() -> None:
    plan = plan_of({"match": "*", "activation": {"until": 2, "use": "e4m3", "then": "e2m1"}})
    model = small()
    called = compiled(model)
    with attach(model, plan, steps=4, example=X) as run:
        start = run.state_dict()
        for _ in range(2):
            for _ in range(4):
                assert torch.equal(called(X), model(X))
                run.step()
            run.load_state_dict(start)
    assert graphs() == 2


def test_packed_graphs_are_made_anew_for_another_format_and_found_again() -> None:
    plan = plan_of({"match": "*", "activation": "mine"}, quantizers={"mine": {"format": "e4m3"}})
    model = small()
    with attach(model, plan, mutable_formats=True, example=X, execution="packed") as run:
        versions = []
        for name in ("e4m3", "e2m1", "e4m3"):
            run.set_format("mine", name)
            versions.append([module.__dict__[VERSION] for module in model.modules()])
    assert versions[0] == versions[2]
    assert all(first != second for first, second in zip(versions[0], versions[1], strict=True))


def test_a_live_format_changes_without_a_new_graph() -> None:
    plan = plan_of({"match": "*", "activation": "mine"}, quantizers={"mine": {"format": "e4m3"}})
    model = small()
    called = compiled(model)
    with attach(model, plan, mutable_formats=True, example=X) as run:
        outputs = []
        for name in ("e4m3", "e2m1"):
            run.set_format("mine", name)
            outputs.append(called(X).detach())
            assert torch.equal(outputs[-1], model(X))
    assert graphs() == 1
    assert not torch.equal(*outputs)


def test_models_of_one_class_with_other_plans_do_not_share_a_graph() -> None:
    plans = [ALL, plan_of({"match": "0", "activation": "e4m3"}), plan_of({"match": "*", "activation": "e2m1"}), ALL]
    for plan in plans:
        model = small()
        with attach(model, plan, example=X):
            assert torch.equal(compiled(model)(X), model(X))
    assert graphs() == 3


def test_equal_blocks_share_a_graph_and_others_do_not() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Stack()
    plan = plan_of({"match": "*", "activation": "e4m3"}, {"match": "blocks.2.*", "activation": "e2m1"})
    with attach(model, plan, example=X):
        for block in blocks:
            assert torch.equal(compiled(block)(X), block(X))
    assert graphs() == 2


def test_a_compiled_copy_becomes_plain_when_the_plan_is_detached() -> None:
    model, plain = small(), small()
    run = attach(model, ALL, example=X)
    twin = copy.deepcopy(model)
    called = compiled(twin)
    assert torch.equal(called(X), model(X))
    assert not torch.equal(called(X), plain(X))
    run.detach()
    assert torch.equal(called(X), plain(X))


def test_a_copy_follows_the_phases() -> None:
    plan = plan_of({"match": "*", "activation": {"until": 1, "use": "e4m3", "then": "e2m1"}})
    model = small()
    with attach(model, plan, steps=2, example=X) as run:
        twin = copy.deepcopy(model)
        called = compiled(twin)
        for _ in range(2):
            assert torch.equal(called(X), model(X))
            run.step()


def test_what_is_met_eagerly_is_part_of_the_version() -> None:
    model = small()
    with attach(model, ALL, stats=True) as run:
        before = model[0].__dict__[VERSION]
        model(X)
        assert model[0].__dict__[VERSION] != before
        called = compiled(model)
        called(X).sum().backward()
        run.step()
        assert run.stats()["0/linear.0:activation"].steps == 1


def test_a_plan_leaves_no_version_behind() -> None:
    model = small()
    with attach(model, ALL, example=X):
        assert VERSION not in vars(pickle.loads(pickle.dumps(model)))
    assert not any(VERSION in vars(module) for module in model.modules())


@pytest.mark.usefixtures("without_inductor")
def test_run_compile_takes_a_module_around_the_model() -> None:
    class Around(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).square().sum()  # type: ignore[no-any-return]

    model = small()
    around = Around(model)
    with attach(model, ALL, example=X, execution="packed") as run:
        torch.testing.assert_close(run.compile(around)(X), around(X))
        assert not OF_THE_STATE.search(guards_of(around))


@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_a_rule_that_waits_for_a_loss_costs_no_second_graph() -> None:
    torch._dynamo.reset()
    counters.clear()
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    rules = [{"match": "*", "weight": "e4m3"}, {"match": "*", "op": "mse_loss", "activation": "e4m3", "strict": False}]
    with attach(model, Plan.from_dict({"version": 1, "rules": rules}), example=x) as run:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            compiled(x).sum().backward()
            run.step()
    assert counters["stats"]["unique_graphs"] == 1
