"""A run that breaks names the tensor that broke first, and keeps its last good checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from breaking_runs import Net, Planted
from torch import Tensor, nn

from bitplan.files import json_text
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import RunFolder, Summary, train
from bitplan.lab.train.checkpoint import checkpoints_in
from bitplan.plans import Plan


def plan(*rules: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules)})


def broken(folder: Path, task: Task, arguments: Plan | None, **options: Any) -> Summary:
    summary = train(task, arguments, folder=folder, **options)
    assert summary.status == "diverged"
    assert summary.why is not None
    read = RunFolder(folder).summary()
    assert read is not None
    assert json_text(read.to_dict()) == json_text(summary.to_dict())  # NaN is not even equal to itself
    return summary


def test_rounding_that_overflows_is_named_with_its_share_and_its_rule(tmp_path: Path) -> None:
    """fp16 ends at 65504, and the data of step 8 are a million times as large."""
    summary = broken(
        tmp_path,
        Planted(lambda: Net(torch.relu), 8),
        plan({"match": "second", "weight": "e4m3"}, {"match": "first", "activation": "fp16"}),
    )
    assert summary.site == "first/linear.0:activation"
    assert summary.step == 7
    assert "step 8 broke at first/linear.0:activation (fp16" in summary.why
    assert "% of its values, up to " in summary.why
    assert "The checkpoint of step 6 is good." in summary.why
    (newest, _) = checkpoints_in(tmp_path / "checkpoints")
    assert newest.step == 6
    assert all(bool(t.isfinite().all()) for t in newest.load()["model"].values())
    last = RunFolder(tmp_path).metrics()[-1]
    assert last == {"step": 8, "loss": last["loss"], "diverged": True}
    assert last["loss"] in ("NaN", "Infinity")


@pytest.mark.parametrize(
    ("rule", "site"),
    [
        ({"match": "second", "weight": "fp16"}, "second/linear.0:weight"),
        ({"match": "second", "w": "fp16"}, "second/linear.0:fprop.w"),
        ({"match": "first", "x": "fp16"}, "first/linear.0:fprop.x"),
    ],
)
def test_operands_that_overflow_are_told_from_results(tmp_path: Path, rule: dict[str, Any], site: str) -> None:
    def huge() -> nn.Module:
        net = Net()
        if rule["match"] == "second":
            nn.init.constant_(net.second.weight, 1e5)
        return net

    assert broken(tmp_path, Planted(huge, 1 if rule["match"] == "second" else 5), plan(rule)).site == site


@pytest.mark.parametrize(
    "arguments", [None, plan({"match": "third", "weight": "e4m3"})], ids=["no plan", "a plan elsewhere"]
)
def test_an_operation_that_breaks_by_itself_is_named(tmp_path: Path, arguments: Plan | None) -> None:
    summary = broken(tmp_path, Planted(lambda: Net(torch.exp), 5), arguments)
    assert summary.site == "/exp.0:activation"
    assert "step 5 broke at /exp.0:activation, which is no longer finite, though what it is made of is" in summary.why


def test_a_loss_that_breaks_is_a_site_too(tmp_path: Path) -> None:
    class Logarithm(Planted):
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return torch.log(output.square().mean() * (0.0 if self.size == 0 and target.sum() == 0 else 1.0) + 0.0)

        def batch(self, step: int) -> tuple[Tensor, Tensor]:
            x, target = super().batch(step)
            return x, 0.0 * target if step == self.at - 1 else target

    for number, arguments in enumerate((None, plan({"match": "third", "weight": "e4m3"}))):
        assert broken(tmp_path / str(number), Logarithm(Net, 4, 0.0), arguments).site == "loss/log.0:activation"


def test_infinities_of_a_mask_are_not_blamed(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.triu(torch.ones(6, 6), 1).bool()
            scores = (self.score(x)[:, :, None] * x[:, None]).masked_fill(mask, -torch.inf)
            return (scores.softmax(-1) @ torch.exp(self.value(x))[..., None]).squeeze(-1)

    summary = broken(tmp_path, Planted(Attention, 5, 1e3), None)
    assert summary.site == "/exp.0:activation"


def test_gradients_that_overflow_are_traced_to_an_earlier_step(tmp_path: Path) -> None:
    """The loss of step 5 is finite and its gradients are not; the loss of step 6 is the first that is not."""
    tall = {"format": "e5m2", "overflow": "special"}

    class Steep(Planted):
        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return 1e7 * super().loss(output, target) if float(target.sum()) == 0 else super().loss(output, target)

        def batch(self, step: int) -> tuple[Tensor, Tensor]:
            x, target = super().batch(step)
            return x, 0.0 * target if step == self.at - 1 else target

    task = Steep(Net, 5, 1.0)
    task.loss = Steep.loss.__get__(task)  # type: ignore[method-assign]
    summary = broken(tmp_path, task, plan({"match": "third", "grad_activation": tall}), checkpoint_every=2)
    assert summary.site == "third/linear.0:grad_activation"
    assert summary.why is not None
    assert "step 5 broke at third/linear.0:grad_activation (e5m2 special" in summary.why
    assert "The checkpoint of step 4 is good." in summary.why


def test_without_a_checkpoint_the_search_begins_at_the_first_step(tmp_path: Path) -> None:
    class Root(nn.Module):
        """Finite where its gradient is not."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).abs().sqrt()

    summary = broken(tmp_path, Planted(Root, 3, 0.0), None, checkpoint_every=0)
    assert summary.why is not None
    assert summary.why.startswith("step 3 broke at /abs.0:grad_activation, which arrives there not finite")
    assert summary.step == 3
    assert not checkpoints_in(tmp_path / "checkpoints")


def test_a_learning_rate_that_is_too_high_is_named(tmp_path: Path) -> None:
    class Rising(Planted):
        def learning_rate(self, step: int) -> float:
            return torch.inf if step == 4 else 1.0

    summary = broken(tmp_path, Rising(Net, 99), None)
    assert summary.why is not None
    assert summary.why.startswith("step 5 broke ")
    assert "but the optimizer's step on it was not. Lower the learning rate." in summary.why


def test_broken_weights_reach_no_checkpoint(tmp_path: Path) -> None:
    """Here the checkpoint is due before the next loss could tell."""

    class Rising(Planted):
        def learning_rate(self, step: int) -> float:
            return torch.inf if step == 5 else 1.0

    summary = broken(tmp_path, Rising(Net, 99), None)
    assert [item.step for item in checkpoints_in(tmp_path / "checkpoints")] == [3]
    assert summary.step == 6
    assert summary.why is not None
    assert summary.why.startswith("step 6 broke ")


def test_a_diverged_run_is_not_made_again(tmp_path: Path) -> None:
    first = broken(tmp_path, Planted(lambda: Net(torch.exp), 5), None)
    steps: list[int] = []
    again = train(Planted(lambda: Net(torch.exp), 5), folder=tmp_path, on_progress=lambda now: steps.append(now.step))
    assert json_text(again.to_dict()) == json_text(first.to_dict())
    assert not steps


def test_the_plan_is_off_the_model_at_the_end(tmp_path: Path) -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(Net(torch.exp))
        return made[-1]

    broken(tmp_path, Planted(make, 5), plan({"match": "third", "weight": "e4m3"}))
    assert [type(net) for net in made] == [Net]
