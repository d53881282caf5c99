from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitplan.errors import TaskError
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.rl import Environments, PPOSettings, ReinforcementLearning, make_rollout
from bitplan.lab.train import train
from bitplan.lab.train.session import Session
from bitplan.planners import cpt_plan
from bitplan.plans import Plan

gymnasium = pytest.importorskip("gymnasium")

#: Four updates for each rollout.
SMALL = ("environments=2", "rollout=8", "batch=8", "epochs=2", "features=8", "steps=12", "evaluate_every=12")

COARSE = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", "w": "e2m1"}]})


def small(*settings: str, seed: int = 0) -> ReinforcementLearning:
    chosen = dict(text.split("=", 1) for text in (*SMALL, *settings))
    task = find_task("rl", [f"{key}={value}" for key, value in chosen.items()], seed)
    assert isinstance(task, ReinforcementLearning)
    return task


# --- environments


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1"])
def test_environments_are_gymnasium_s_with_their_time_limit(name: str) -> None:
    ours, theirs = Environments(name, 2, "here"), gymnasium.make(name)
    draws, lengths, cuts = torch.Generator().manual_seed(0), list[int](), 0
    state = ours._environments[1].state
    theirs.reset()
    theirs.unwrapped.state = state.copy()
    length = 0
    for _ in range(520):
        actions = torch.randint(2, (2,), generator=draws).tolist()
        rewards, ended, cut = ours.step(actions)
        observation, reward, is_terminated, is_truncated, _ = theirs.step(actions[1])
        length += 1
        assert float(rewards[1]) == reward
        assert bool(ended[1]) == (is_terminated or is_truncated)
        if ended[1]:
            lengths.append(length)
            cuts += 1 in cut
            assert (1 in cut) == (is_truncated and not is_terminated)
            if 1 in cut:
                assert torch.equal(cut[1], torch.from_numpy(observation))
            theirs.reset()
            theirs.unwrapped.state = ours._environments[1].state.copy()
            length = 0
        else:
            assert torch.equal(ours.observations[1], torch.from_numpy(observation))
    assert (max(lengths), cuts) == (500, 1) if name == "Acrobot-v1" else len(lengths) > 5


def test_a_state_that_is_loaded_elsewhere_goes_on_alike_and_episodes_differ() -> None:
    first, second = Environments("CartPole-v1", 3, 7), Environments("CartPole-v1", 3, 8)
    assert not torch.equal(first.observations, second.observations)
    assert len({tuple(row) for row in first.observations.tolist()}) == 3
    draws = torch.Generator().manual_seed(0)

    def walk(environments: Environments, actions: Tensor) -> list[Any]:
        return [(*map(str, environments.step(row)), environments.observations.tolist()) for row in actions.tolist()]

    walk(first, torch.randint(2, (33, 3), generator=draws))
    third = Environments("CartPole-v1", 3, 7)
    third.load(first.state())
    actions = torch.randint(2, (60, 3), generator=draws)
    assert walk(third, actions) == walk(first, actions)


# --- rollouts


class Scripted:
    """Two environments: one ends after 3 steps, the other is cut off there; the reward is the number of the step."""

    def __init__(self) -> None:
        self.now = 0

    @property
    def observations(self) -> Tensor:
        return torch.full((2, 4), float(self.now))

    def step(self, actions: list[int]) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        self.now += 1
        is_end = self.now == 3
        cut = {1: torch.full((4,), 100.0)} if is_end else {}
        return torch.full((2,), float(self.now)), torch.tensor([is_end] * 2), cut


class Values(nn.Module):
    """Every observation is worth a tenth of its first number."""

    def __init__(self) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor([0.0, math.log(3)]).expand(len(x), 2), x[:, 0] / 10


def test_returns_are_discounted_rewards_and_go_on_behind_the_time_limit_alone() -> None:
    recipe = PPOSettings(environments=2, rollout=5, batch=10, discount=0.5, trace=1.0)
    rollout = make_rollout(Scripted(), Values(), recipe, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    tail = [4 + 0.5 * 5 + 0.25 * 0.5, 5 + 0.5 * 0.5]  # the last observation is worth 0.5
    ended = [1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3.0]
    cut = [value + 0.5 ** (3 - step) * 10 for step, value in enumerate(ended)]
    assert rollout.returns.view(5, 2).t().tolist() == [pytest.approx(ended + tail), pytest.approx(cut + tail)]
    torch.testing.assert_close(rollout.advantages, rollout.returns - rollout.observations[:, 0] / 10)
    expected = torch.tensor([0.25, 0.75]).log()[rollout.actions]
    torch.testing.assert_close(rollout.log_probabilities, expected)
    short = PPOSettings(environments=2, rollout=5, batch=10, discount=0.5, trace=0.0)
    one_step = make_rollout(Scripted(), Values(), short, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    assert one_step.returns[0].item() == pytest.approx(1 + 0.5 * 0.1)


def test_batches_without_a_policy_are_functions_of_seed_and_step() -> None:
    task, other = small(), small(seed=1)
    inputs, target = task.batch(5)
    assert [part.shape for part in (inputs, *target)] == [
        part.shape for part in (task.example()[0], *task.example()[1])
    ]
    task.batch(0)
    assert torch.equal(task.batch(5)[0], inputs)
    assert torch.equal(small().batch(5)[0], inputs)
    assert not torch.equal(other.batch(5)[0], inputs)
    assert torch.equal(target[1], torch.full((8,), math.log(0.5)))
    seen = torch.cat([task.batch(step)[0] for step in (4, 5)])  # an epoch of the second rollout
    assert len({tuple(row) for row in seen.tolist()}) == 16
    assert not {tuple(row) for row in task.batch(0)[0].tolist()} & {tuple(row) for row in seen.tolist()}


def test_an_update_gains_from_a_better_policy_up_to_the_clip() -> None:
    task = small("value=0", "entropy=0")

    def loss(probability: float, advantage: float) -> float:
        logits = torch.tensor([[math.log(probability), math.log(1 - probability)]])
        target = torch.tensor([0]), torch.tensor([math.log(0.5)]), torch.tensor([advantage]), torch.zeros(1)
        return float(task.loss((logits, torch.ones(1)), target))

    assert loss(0.55, 2.0) == pytest.approx(-1.1 * 2)
    assert loss(0.9, 2.0) == pytest.approx(-1.2 * 2)
    assert loss(0.45, -2.0) == pytest.approx(0.9 * 2)
    assert loss(0.1, -2.0) == pytest.approx(0.8 * 2)
    assert loss(0.9, -2.0) == pytest.approx(1.8 * 2)  # away from what was bad there is no limit
    rest = small("value=0.5", "entropy=2")
    target = torch.tensor([0]), torch.tensor([math.log(0.5)]), torch.tensor([0.0]), torch.tensor([3.0])
    assert float(rest.loss((torch.zeros(1, 2), torch.ones(1)), target)) == pytest.approx(0.5 * 4 - 2 * math.log(2))


# --- where the plan holds


def rolled_out(rounded: str) -> SimpleNamespace:
    """The first rollout and the first loss of a run under a coarse plan, and both without any plan."""
    task = small(f"rounded={rounded}")
    torch.manual_seed(task.seed)
    plain = task.model()
    session = Session(task, COARSE, execution="emulate", device=torch.device("cpu"), compile=False)
    try:
        inputs, target = session.next_batch()
        loss = session.forward_backward()
        session.apply()
        pairs = zip(session.model.parameters(), plain.parameters(), strict=True)
        assert any(not torch.equal(trained, untrained) for trained, untrained in pairs)  # it learns
    finally:
        session.close()
    transitions = task.memory["transitions"]
    logits, _ = plain(transitions["observations"])
    acted = logits.log_softmax(-1).gather(1, transitions["actions"][:, None]).squeeze(1)
    return SimpleNamespace(
        acts_rounded=not torch.allclose(acted, transitions["log_probabilities"], atol=1e-6),
        updates_rounded=loss != pytest.approx(task.loss(plain(inputs), target).item(), rel=1e-6),
        mismatch=task.memory["mismatch"],
    )


@pytest.mark.parametrize(
    ("rounded", "acts", "updates"), [("both", True, True), ("rollout", True, False), ("update", False, True)]
)
def test_the_plan_holds_where_it_should(rounded: str, acts: bool, updates: bool) -> None:
    result = rolled_out(rounded)
    assert (result.acts_rounded, result.updates_rounded) == (acts, updates)
    # Weights alone are rounded here, so that scales do not depend on the batch.
    assert (result.mismatch > 1e-5) == (rounded != "both")


@pytest.mark.parametrize("rounded", ["rollout", "update"])
def test_a_cyclic_plan_holds_in_one_of_both_to_the_end(tmp_path: Path, rounded: str) -> None:
    settings = (f"rounded={rounded}", "steps=6")
    target = small(*settings).target()
    plan = cpt_plan(target.model, target.batch, target.loss)
    summary = train(small(*settings), plan, folder=tmp_path / "run")
    assert summary.status == "finished"
    assert summary.metrics["mismatch"] > 1e-7


# --- runs


def test_a_policy_that_breaks_has_diverged(tmp_path: Path) -> None:
    assert train(small("lr=1e30", "clip=0"), folder=tmp_path / "run").status == "diverged"
    task = small()
    model: Any = task.model()
    nn.init.constant_(model.actor[0].weight, math.nan)
    inputs, target = task.batch_of(model, 0)  # it acts all the same, so that the loss tells
    assert not task.loss(model(inputs), target).isfinite()
    with torch.no_grad():
        assert task.evaluate(model)["return"] > 0


def test_the_return_is_that_of_whole_episodes_and_the_trivial_policy_acts_at_random() -> None:
    task = small()
    assert 15 < task.metric.trivial < 30

    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anchor = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tensor([1.0, 0.0]).expand(len(x), 2), torch.zeros(len(x))

    assert 8 <= task.evaluate(Left())["return"] <= 11  # a pole that is pushed to one side falls within 11 steps


@pytest.mark.parametrize(
    ("settings", "token"),
    [
        (["environment=Pong-v5"], "there is no environment 'Pong-v5'"),
        (["rounded=none"], "there is no rounded 'none'"),
        (["batch=300"], "batch=300 does not divide"),
        (["epochs=0"], "epochs is 0"),
        (["discount=2"], "discount is 2.0"),
        (["clip_ratio=0"], "clip_ratio is 0.0"),
        (["entropy=-1"], "entropy is -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(settings: list[str], token: str) -> None:
    with pytest.raises(TaskError, match=token):
        find_task("rl", settings)


def test_without_gymnasium_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(TaskError, match=r"bitplan\[rl\]"):
        small().batch(0)
    assert small().example()[0].shape == (8, 4)  # shapes need no package
