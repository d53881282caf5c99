"""Runs with planted failures, and what the doctor says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking_runs import Net, Planted
from torch import Tensor, nn

from bitplan.errors import BitplanWarning, RunError
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import RunFolder, train
from bitplan.lab.train.checkpoint import checkpoints_in
from bitplan.lab.train.doctor import diagnose_run
from bitplan.planners import Diagnosis
from bitplan.plans import Plan

MakeTask = Callable[..., Task]

INT8 = {"format": "int8", "scale": "tensor"}
LINEAR = {"match": "*", "op": "linear", "x": INT8, "w": INT8, "dy": {"format": "e5m2", "scale": "tensor"}}
NARROW = {"match": "4", "op": "linear", "dgrad.dy": "e2m1"}


def plan(*rules: dict[str, Any]) -> Plan:
    return Plan.from_dict({"version": 1, "rules": list(rules)})


def culprits(diagnosis: Diagnosis) -> list[str]:
    return [str(tensor) for tensor in diagnosis.culprits]


def test_a_gradient_in_four_bits_is_found_and_mended(tiny: MakeTask, tmp_path: Path) -> None:
    train(tiny("steps=40"), plan(LINEAR, NARROW), folder=tmp_path / "run")
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    diagnosis = diagnose_run(tiny("steps=40"), tmp_path / "run")
    assert (diagnosis.cause, culprits(diagnosis)) == ("plan", ["4/linear.0:dgrad.dy"])
    assert "in the backward pass" in diagnosis.summary
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == files
    mended, before = (
        train(tiny("steps=40"), document, folder=tmp_path / name)
        for name, document in (("mended", diagnosis.plan), ("again", plan(LINEAR, NARROW)))
    )
    assert mended.loss is not None
    assert before.loss is not None
    assert mended.loss < 0.7 * before.loss


class Clouds(Planted):
    """Three clouds of points with a last feature that is always 0, which no weight of its own can matter for."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make, 99, steps=60, batch=32, lr=0.2)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(step)
        labels = torch.randint(3, (self.settings.batch,), generator=own)
        points = 2.0 * nn.functional.one_hot(labels, 6) + 0.5 * torch.randn(self.settings.batch, 6, generator=own)
        points[:, -1] = 0
        return points, labels

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        points, labels = self.batch(1000)
        return {"error": float(self.loss(model(points), labels))}


def net_with_outlier() -> nn.Module:
    """The outlier leaves no other weight of the first layer a code but 0 in INT8."""
    net = Net()
    with torch.no_grad():
        net.first.weight[0, -1] = 1e3
    return net


def test_an_outlier_in_the_weights_of_a_layer_is_found_and_mended(tmp_path: Path) -> None:
    before = train(Clouds(net_with_outlier), plan(LINEAR), folder=tmp_path / "run")
    diagnosis = diagnose_run(Clouds(net_with_outlier), tmp_path / "run")
    assert (diagnosis.cause, culprits(diagnosis)) == ("plan", ["first/linear.0:fprop.w"])
    assert "in the forward pass" in diagnosis.summary
    assert diagnosis.plan is not None
    assert str(diagnosis.plan.decide("first", "linear.0")["fprop.w"].quantizer) not in ("None", "int8 tensor")
    mended = train(Clouds(net_with_outlier), diagnosis.plan, folder=tmp_path / "mended")
    assert mended.loss is not None
    assert before.loss is not None
    assert mended.loss < 0.7 * before.loss


def test_a_loss_that_jumps_is_found_in_the_logged_losses(tmp_path: Path) -> None:
    late = {"until": 40, "use": "bf16", "then": INT8}
    document = plan({"match": "first", "op": "linear", "fprop.w": late}, {"match": "third", "weight": "bf16"})
    assert train(Clouds(net_with_outlier), document, folder=tmp_path, log_every=1).status == "finished"
    diagnosis = diagnose_run(Clouds(net_with_outlier), tmp_path)
    assert "The loss jumps from about" in diagnosis.summary
    assert "at step 41." in diagnosis.summary
    assert culprits(diagnosis) == ["first/linear.0:fprop.w"]


def test_a_run_that_falls_behind_its_reference_is_looked_at_there(tiny: MakeTask, tmp_path: Path) -> None:
    train(tiny("steps=60"), plan(LINEAR, NARROW), folder=tmp_path / "run")
    train(tiny("steps=60"), folder=tmp_path / "fp32")
    diagnosis = diagnose_run(tiny("steps=60"), tmp_path / "run", reference=tmp_path / "fp32", steps=30)
    assert culprits(diagnosis) == ["4/linear.0:dgrad.dy"]
    assert f"above that of {tmp_path / 'fp32'}" in diagnosis.summary
    healthy = diagnose_run(tiny("steps=60"), tmp_path / "fp32", reference=tmp_path / "run")
    assert healthy.cause == "none"
    train(tiny("steps=6"), folder=tmp_path / "short")
    with pytest.raises(RunError, match="steps"):
        diagnose_run(tiny("steps=60"), tmp_path / "run", reference=tmp_path / "short")


def scaled_net() -> nn.Module:
    """The outputs of its first layer do not fit into FP16."""
    net = Net(torch.relu)
    with torch.no_grad():
        net.first.weight *= 1e6
        net.second.weight /= 1e6
    return net


def test_a_divergence_is_replayed_from_the_last_good_checkpoint(tmp_path: Path) -> None:
    task = Planted(scaled_net, 99, lr=1e-12)
    late = {"until": 10, "use": "bf16", "then": "fp16"}
    document = plan({"match": "first", "activation": late}, {"match": "third", "weight": "e4m3"})
    summary = train(task, document, folder=tmp_path)
    assert (summary.status, summary.step) == ("diverged", 10)
    diagnosis = diagnose_run(task, tmp_path)
    assert culprits(diagnosis) == ["first/linear.0:activation"]
    assert "diverged in step 11 at first/linear.0:activation" in diagnosis.summary
    assert "from step 9 on" in diagnosis.summary
    assert diagnosis.plan is not None
    assert train(task, diagnosis.plan, folder=tmp_path / "mended").status == "finished"


def test_an_outlier_of_the_data_that_breaks_fp32_too_blames_no_operand(tmp_path: Path) -> None:
    task = Planted(lambda: Net(torch.relu), 8, size=1e30)
    assert train(task, plan({"match": "first", "activation": "bf16"}), folder=tmp_path).status == "diverged"
    diagnosis = diagnose_run(task, tmp_path)
    assert (diagnosis.cause, diagnosis.plan, diagnosis.culprits) == ("not the plan", None, ())


@pytest.mark.parametrize("document", [plan(LINEAR), None], ids=["a plan", "no plan"])
def test_a_learning_rate_that_is_too_high_blames_no_operand(
    tiny: MakeTask, tmp_path: Path, document: Plan | None
) -> None:
    settings = ("steps=40", "lr=500")
    train(tiny(*settings), document, folder=tmp_path)
    diagnosis = diagnose_run(tiny(*settings), tmp_path)
    assert (diagnosis.cause, diagnosis.plan, diagnosis.culprits) == ("not the plan", None, ())
    assert "no operand is to blame" in diagnosis.summary


def test_a_healthy_run_has_no_culprit(tiny: MakeTask, tmp_path: Path) -> None:
    train(tiny(), "bf16-all", folder=tmp_path)
    assert diagnose_run(tiny(), tmp_path).cause == "none"


def test_a_step_may_be_named(tiny: MakeTask, tmp_path: Path) -> None:
    train(tiny("steps=40"), plan(LINEAR, NARROW), folder=tmp_path)
    diagnosis = diagnose_run(tiny("steps=40"), tmp_path, at=30, steps=34)
    assert "34 steps from step 0 on" in diagnosis.summary
    with pytest.raises(RunError, match="step 41"):
        diagnose_run(tiny("steps=40"), tmp_path, at=41)


def test_a_run_that_is_trained_now_is_not_replayed(tiny: MakeTask, tmp_path: Path) -> None:
    train(tiny(), plan(LINEAR), folder=tmp_path)
    with RunFolder(tmp_path).locked(), pytest.raises(RunError, match="a process trains"):
        diagnose_run(tiny(), tmp_path)


# --- checkpoints that are not finite


@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_a_checkpoint_with_a_nan_is_named_and_the_one_before_it_is_used(
    tiny: MakeTask, tmp_path: Path, where: str
) -> None:
    stop = iter([False] * 12 + [True])
    train(tiny(), folder=tmp_path, stop=lambda: next(stop))
    newest, older = checkpoints_in(tmp_path / "checkpoints")
    assert (newest.step, older.step) == (13, 12)
    state = newest.load()
    if where == "model":
        state["model"]["0.weight"][1, 2] = torch.nan
    else:
        state["optimizer"]["state"][0]["momentum_buffer"][1, 2] = torch.inf
    place = RunFolder(tmp_path)
    newest.save(state, place.config().identity(place.plan_text()))
    with pytest.warns(BitplanWarning, match=r"step-00000013.*NaN or infinity in .*0\.weight.*step 12 is used"):
        assert train(tiny(), folder=tmp_path).status == "finished"


def test_optimizer_state_that_is_not_finite_reaches_no_checkpoint(tmp_path: Path) -> None:
    """The squared gradients of Adam overflow at once, while weights and losses stay finite."""

    class Overflowing(Planted):
        def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW(model.parameters(), 1e-30, weight_decay=0)

        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return 1e25 * super().loss(output, target)

    task = Overflowing(Net, 99)
    summary = train(task, folder=tmp_path)
    assert summary.status == "diverged"
    assert summary.why is not None
    assert "step 1 broke the optimizer's exp_avg_sq of first.weight" in summary.why
    assert not checkpoints_in(tmp_path / "checkpoints")
