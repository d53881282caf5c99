"""Budgets: the measured peak of a packed step stays under them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.errors import PlanError
from bitplan.lab.models.language_models import GPT, next_token_loss
from bitplan.planners.assign import AssignRequest, choose_formats, make_assignment
from bitplan.planners.assign.budget import Budget, Step, fit
from bitplan.plans import Plan


def cnn() -> tuple[nn.Module, Any, Any]:
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 256, 10))
    return net, (torch.randn(32, 3, 16, 16), torch.randint(10, (32,))), F.cross_entropy


def gpt() -> tuple[nn.Module, Any, Any]:
    model = GPT(tokens=32, length=64, layers=2, heads=2, features=32)
    return model, (torch.randint(32, (32, 64)), torch.randint(32, (32, 64))), next_token_loss


@pytest.mark.parametrize(("make", "budget"), [(cnn, "80%"), (gpt, "78%")], ids=["cnn", "gpt"])
def test_what_is_measured_lies_within_the_budget(make: Callable[[], tuple[Any, ...]], budget: str) -> None:
    torch.manual_seed(0)
    model, batch, loss = make()
    requests = AssignRequest(budget=budget)
    result = make_assignment(model, batch, loss, requests, choose_formats(requests))
    plain = bitplan.analysis.memory.measure_memory(model, batch, loss, steps=2)
    packed = bitplan.analysis.memory.measure_memory(model, batch, loss, plan=result.plan, execution="packed", steps=2)
    assert packed.peak <= Budget.parse(budget).limit(plain.peak)
    assert result.demoted  # BF16 alone would not do
    assert packed.peak == pytest.approx(result.provenance["peak_predicted"], rel=0.02)


class FakeStep(Step):
    """A step whose peaks are known."""

    def __init__(self, peaks: list[int]) -> None:
        super().__init__(nn.Identity(), None)
        object.__setattr__(self, "peaks", peaks)
        object.__setattr__(self, "asked", [])

    def measure_plain_peak(self, estimate: int) -> int | None:
        return None

    def estimate_peak(self, plan: Plan | None) -> int:
        if plan is None:
            return 1000
        number = int(plan.name or "")
        self.asked.append(number)  # type: ignore[attr-defined]
        return int(self.peaks[number])  # type: ignore[attr-defined]


def fitted(peaks: list[int], budget: str | int) -> tuple[int, list[int]]:
    step = FakeStep(peaks)
    return fit(Budget.parse(budget), step, lambda made: Plan(name=str(made)), len(peaks) - 1).moves_made, step.asked  # type: ignore[attr-defined]


def test_the_smallest_cut_that_fits_is_found_by_halving() -> None:
    peaks = list(range(900, 100, -10))
    made, requests = fitted(peaks, "70%")
    assert peaks[made] <= 0.98 * 700 < peaks[made - 1]
    assert len(requests) < 12
    assert fitted(peaks, "95%")[0] == 0
    assert fitted(peaks, "113B")[0] == len(peaks) - 1


class Deceiving(FakeStep):
    """One whose peaks come out a tenth above what was estimated."""

    def measure_peak(self, plan: Plan | None) -> int | None:
        assert plan is not None
        return int(1.1 * self.estimate_peak(plan))


def test_what_is_measured_above_the_budget_goes_further_down() -> None:
    peaks = list(range(900, 100, -10))
    step = Deceiving(peaks)
    result = fit(Budget.parse("70%"), step, lambda made: Plan(name=str(made)), len(peaks) - 1, check_peak=True)
    assert result.measured_peak is not None
    assert result.measured_peak <= 700
    assert result.peak > 600  # and no further than needed
    with pytest.raises(PlanError, match=r"the least measured is 121 B"):
        fit(Budget.parse("115B"), Deceiving(peaks), lambda made: Plan(name=str(made)), len(peaks) - 1, check_peak=True)


class Measured(Deceiving):
    """One whose peak without a plan is measured, a tenth below what was estimated."""

    def measure_plain_peak(self, estimate: int) -> int | None:
        return int(0.9 * estimate)


def test_a_share_is_one_of_the_measured_peak() -> None:
    peaks, said = list(range(900, 100, -10)), list[str]()
    step = Measured(peaks)
    result = fit(Budget.parse("70%"), step, lambda made: Plan(name=str(made)), len(peaks) - 1, said.append)
    assert (result.baseline_peak, result.limit, result.is_baseline_measured) == (900, 630, True)
    assert "900 B, measured (1000 B estimated); the budget is 630 B" in said[0]
    # The estimate was off, so the plan was measured as well.
    assert result.measured_peak is not None
    assert result.measured_peak <= 630
    absolute = fit(Budget.parse("700B"), Measured(peaks), lambda made: Plan(name=str(made)), len(peaks) - 1)
    assert (absolute.limit, absolute.is_baseline_measured, absolute.measured_peak) == (700, False, None)


class UNet(nn.Module):
    """Group norms, SiLU, a transposed convolution and a concatenation: its peak is not estimated well."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.first, self.second = self.block(width, width), self.block(width, 2 * width)
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.third, self.leave = self.block(2 * width, width), nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Module:
        layers = [nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)]
        return nn.Sequential(*layers, nn.GroupNorm(4, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(self.enter(x))
        out: Tensor = self.leave(self.third(torch.cat([wide, self.up(self.second(self.down(wide)))], 1)))
        return out


def test_a_share_of_a_model_whose_estimate_is_off() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 32, 32)
    model, batch = UNet(), (x, x.clone())
    request = AssignRequest(budget="75%")
    result = make_assignment(model, batch, F.mse_loss, request, choose_formats(request))
    plain = bitplan.analysis.memory.measure_memory(model, batch, F.mse_loss, steps=2).peak
    packed = bitplan.analysis.memory.measure_memory(
        model, batch, F.mse_loss, plan=result.plan, execution="packed", steps=2
    ).peak
    assert packed <= 0.75 * plain
    assert result.provenance["peak_today"] == pytest.approx(plain, rel=0.005)
    assert result.provenance["peak_today_from"] == "measured"
    # The estimate is 3.7 % off, so the plan was measured, too.
    assert result.provenance["peak_measured"] == pytest.approx(packed, rel=0.005)
    with torch.device("meta"):
        shapes, shape_batch = UNet(), tuple(torch.empty(8, 3, 32, 32) for _ in range(2))
    other = make_assignment(shapes, shape_batch, F.mse_loss, request, choose_formats(request), device="cpu")
    assert other.provenance["peak_today_from"] == "estimated"
    assert other.provenance["peak_today"] != pytest.approx(plain, rel=0.01)


def test_what_is_impossible_says_the_least() -> None:
    with pytest.raises(PlanError, match=r"within 100 B: the least is 500 B, with every group at the lowest level\."):
        fitted([900, 700, 500], "10%")
    with pytest.raises(PlanError, match=r"the least is 800 B, after 1 of 2 moves"):
        fitted([900, 800, 850], "10%")


def test_the_least_that_fits_only_without_what_is_spared_says_which_budget_would_do() -> None:
    with pytest.raises(
        PlanError, match=r"within 505 B: the least is 500 B.*, and 2% of the budget is reserved"
    ) as refused:
        fitted([900, 700, 500], "505B")
    needed = re.search(r"a budget of (\d+) bytes or more", str(refused.value))
    assert needed is not None
    assert fitted([900, 700, 500], int(needed[1]))
    with pytest.raises(PlanError, match="least"):
        fitted([900, 700, 500], int(needed[1]) - 3)


@pytest.mark.parametrize(("text", "limit"), [("70%", 700), ("1.5KiB", 1536), (64, 64), ("12.5 %", 125)])
def test_budgets_are_bytes_or_shares(text: str | int, limit: int) -> None:
    assert Budget.parse(text).limit(1000) == limit
