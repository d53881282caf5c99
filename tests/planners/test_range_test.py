"""The precision range test: planted bounds, and nothing of the user's touched."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bitplan
from bitplan.errors import PlanError
from bitplan.planners.range_test import Level, RangeTest, evaluate_losses, range_test
from bitplan.plans import Plan

FEATURES = 16
#: bitplan.planners.range_test is the function.
range_test_module = importlib.import_module("bitplan.planners.range_test")


def planted(bits: int, seed: int = 0) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A task whose two classes fall on one value of the grid below that many bits, and on two from there on.

    Two features span the range -1..1 whatever the batch; the others lie a little above or below the middle of two
    neighbours on the grid of `bits`, which is no middle of two neighbours on any coarser grid.
    """
    own = torch.Generator().manual_seed(seed)

    def values(centre: float, width: float, sign: Tensor) -> Tensor:
        return centre + width * sign

    def grid(width: int) -> Tensor:
        return torch.linspace(-1, 1, 2**width)

    def split(centre: float, width: int) -> bool:
        pair = torch.tensor([centre - apart, centre + apart])
        nearest = (pair[:, None] - grid(width)).abs().argmin(1)
        return bool(nearest[0] != nearest[1])

    apart = 0.3 * 2 / (2**bits - 1)
    middles = (grid(bits)[1:] + grid(bits)[:-1]) / 2
    centre = next(float(c) for c in middles if not any(split(float(c), width) for width in range(2, bits)))
    assert all(split(centre, width) for width in range(bits, 9))
    batches = []
    for _ in range(16):
        labels = torch.randint(2, (32,), generator=own)
        sign = (2.0 * labels - 1)[:, None].expand(-1, FEATURES)
        ends = torch.tensor([-1.0, 1.0]).expand(32, 2)
        batches.append((torch.cat([values(centre, apart, sign), ends], 1), labels))
    torch.manual_seed(seed)
    # Batch norm makes small differences large, and leaves what does not differ at all.
    return nn.Sequential(nn.Linear(FEATURES + 2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), batches


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("bits", [3, 5, 6])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_task_that_cannot_be_learnt_below_some_width_gets_that_width(bits: int, seed: int) -> None:
    model, batches = planted(bits, seed)
    result = range_test(model, adam(model), batches, nn.functional.cross_entropy, seed=seed)
    assert result.low == bits, result.reason
    assert result.reason.startswith(f"{bits} bits: ")
    assert [width.learns for width in result.widths][: bits - 2] == [False] * (bits - 2)
    assert len(result.losses) == result.window * 8


@pytest.mark.parametrize("offset", [2.0, 4.0])
def test_what_needs_nothing_of_the_inputs_is_no_learning(offset: float) -> None:
    """A wrong bias makes the loss high at first; every width unlearns it, over several windows, and no more than it."""
    model, batches = planted(5)
    with torch.no_grad():
        model[-1].bias.copy_(torch.tensor([offset, -offset]))  # type: ignore[index,operator,union-attr]
    result = range_test(model, adam(model), batches, nn.functional.cross_entropy)
    assert result.low == 5, result.reason


def test_nothing_of_the_users_is_touched() -> None:
    model, batches = planted(5)
    model.append = None  # type: ignore[assignment]  # a plain attribute
    optimizer = adam(model)
    model(batches[0][0]).sum().backward()
    optimizer.step()
    model.eval()
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])),
        batch_size=32,
        shuffle=True,
    )
    range_test(model, optimizer, loader, nn.functional.cross_entropy, window=4)
    after = (model.state_dict(), optimizer.state_dict())
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert str(before[1]) == str(after[1])
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))  # type: ignore[arg-type]
    assert not model.training
    assert not any("_bitplan" in vars(module) for module in model.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))


def test_a_plan_of_the_users_own() -> None:
    model, batches = planted(5)
    plan = Plan.from_yaml(
        "version: 1\nschedules: {s: {name: CR, low: 3, high: 4}}\n"
        "rules: [{match: '0', x: {format: int, bits: s, scale: tensor, range: minmax}}]"
    )
    result = bitplan.range_test(model, adam(model), batches, nn.functional.cross_entropy, plan=plan)
    assert result.low == 5
    with pytest.raises(PlanError, match="no bits that follow a schedule"):
        range_test(model, adam(model), batches, nn.functional.cross_entropy, plan=Plan.preset("int8-all"))


def losses(level: float, noise: float = 0.0, seed: int = 0) -> list[float]:
    own = torch.Generator().manual_seed(seed)
    return [level + noise * float(torch.randn((), generator=own)) for _ in range(20)]


def judged(*levels: float, threshold: float = 0.05, noise: float = 0.0) -> RangeTest:
    """Of the level before, and of 2, 3, ... bits."""
    before, *widths = (losses(level, noise, seed) for seed, level in enumerate(levels))
    half = np.array(before[10:])
    reference = Level(float(half.mean()), float(half.std(ddof=1)) / 10**0.5)
    return evaluate_losses(reference, before, dict(enumerate(widths, 2)), 20, threshold)


def test_the_judgement() -> None:
    assert judged(2.3, 2.3, 2.3, 1.5, 1.4).low == 4
    assert judged(2.3, 2.3, 2.25, 2.2, 1.5).low == 5
    assert judged(2.3, 2.3, 2.25, 2.2, 1.5, threshold=0.01).low == 3
    assert judged(2.3, 4.0, 2.3, 1.5, 1.4).low == 4
    # Noise is no learning; a loss that is not finite is none either.
    assert judged(2.3, 2.1, 2.2, 2.3, 0.5, noise=1.0).low == 5
    broken = judged(2.3, float("nan"), float("inf"), 1.5, 1.4)
    assert broken.low == 4
    assert "2, 3: the loss was no longer finite" in broken.reason
    assert [width.is_finite for width in broken.widths] == [False, False, True, True]
    nothing = judged(2.3, 2.3, 2.3, 2.3, 2.3)
    assert nothing.low is None
    assert "lengthen the window" in nothing.reason


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two and three bits make the weights NaN, as those of MobileNet-v2 become."""
    attach = range_test_module.attach

    def breaking(model: nn.Sequential, plan: Plan, **options: Any) -> Any:
        if next(iter(plan.all_schedules.values())).highest <= 3:
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))  # type: ignore[operator]
        return attach(model, plan, **options)

    monkeypatch.setattr(range_test_module, "attach", breaking)


@pytest.mark.usefixtures("fragile")
def test_a_width_that_breaks_the_weights_harms_no_other() -> None:
    """The window before all widths, at two bits, breaks as well."""
    model, batches = planted(5)
    result = range_test(model, adam(model), batches, nn.functional.cross_entropy)
    assert result.low == 5, result.reason
    assert [width.is_finite for width in result.widths] == [False, False, *[True] * 5]
    assert "2, 3: the loss was no longer finite" in result.reason
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def quadratic() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A linear regression whose Hessian is twice the identity: gradient descent diverges at rates above 1.

    The inputs are a Hadamard matrix, which any width represents exactly, and so are the weights that solve it.
    """
    inputs = torch.ones(1, 1)
    for _ in range(4):
        inputs = torch.cat([torch.cat([inputs, inputs], 1), torch.cat([inputs, -inputs], 1)])
    model = nn.Linear(16, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, [(inputs, inputs.sum(1, keepdim=True))]


class Clones(list[Any]):
    """The same batch, made anew each time, as tasks of graphs make theirs."""

    def __iter__(self) -> Iterator[Any]:
        return ((inputs.clone(), target.clone()) for inputs, target in super().__iter__())


@pytest.mark.parametrize("kind", [list, Clones])
def test_the_rate_is_lowered_until_the_model_learns_in_its_own_precision(kind: type[list[Any]]) -> None:
    """At a rate of 1.5 the error doubles with each step; at a quarter of it, it is divided by four."""
    model, batches = quadratic()
    batches = kind(batches)
    result = range_test(model, torch.optim.SGD(model.parameters(), lr=1.5), batches, nn.functional.mse_loss, window=8)
    assert (result.rate, result.window) == (0.25, 8)
    assert len(result.losses) == 8 * result.window
    assert "In its own precision the model does not learn in 8 steps at the peak rate" in result.reason


def test_the_window_is_lengthened_until_the_model_learns_in_its_own_precision() -> None:
    """At a rate of 0.003 the loss falls by a factor of 0.994 squared a step: by 20 % after 18 steps.

    The level is that of the second half of all steps, as for the widths: by 19 % after 24 steps, by 25 % after 32.
    """
    model, batches = quadratic()
    result = range_test(model, torch.optim.SGD(model.parameters(), lr=0.003), batches, nn.functional.mse_loss, window=8)
    assert (result.rate, result.window) == (1.0, 32)
    assert "windows have 32 steps" in result.reason


def test_a_recipe_that_does_not_learn_is_said_to_be_so() -> None:
    model, batches = quadratic()
    result = range_test(model, torch.optim.SGD(model.parameters(), lr=1e-9), batches, nn.functional.mse_loss, window=8)
    assert (result.low, result.widths) == (None, ())
    assert "in its own precision the training loss does not fall by 10% within 64 steps" in result.reason


@pytest.mark.parametrize("low", [2, 3, 4, 5])
def test_the_answer_does_not_depend_on_where_the_test_starts(low: int) -> None:
    model, batches = planted(5)
    result = range_test(model, adam(model), batches, nn.functional.cross_entropy, low=low, window=24)
    whole = range_test(model, adam(model), batches, nn.functional.cross_entropy, window=24)
    assert result.low == whole.low == 5
    assert result.widths == whole.widths[low - 2 :]


@pytest.mark.parametrize("high", [5, 6])
def test_the_answer_does_not_depend_on_where_the_test_ends(high: int) -> None:
    """Gradients keep 8 bits: with the highest width of the test, their error would decide."""
    model, batches = planted(5)
    result = range_test(model, adam(model), batches, nn.functional.cross_entropy, high=high, window=24)
    whole = range_test(model, adam(model), batches, nn.functional.cross_entropy, window=24)
    assert result.low == whole.low == 5
    assert result.widths == whole.widths[: high - 1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"low": 1}, "2 to 16"),
        ({"low": 6, "high": 4}, "the lowest first"),
        ({"window": 2}, "at least 4"),
        ({"threshold": 5}, "a share between 0 and 1"),
        ({"batches": []}, "no batch"),
        ({"batches": iter([1])}, "only once"),
        ({"batches": [torch.zeros(3)]}, "is \\(inputs, target\\)"),
    ],
)
def test_mistakes_are_sentences(options: dict[str, Any], sentence: str) -> None:
    model, batches = planted(5)
    arguments: dict[str, Any] = {"batches": batches, "loss": nn.functional.cross_entropy, **options}
    with pytest.raises(PlanError, match=sentence):
        range_test(model, adam(model), **arguments)
