"""What is seen while a plan rounds: statistics and ranges against numpy on the same tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small import attached
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bitplan
from bitplan.runtime.attach import Attachment
from bitplan.runtime.statistics import COLUMNS, MOMENTUM, Observed, Statistics, blank_record, fold, observe_rounding

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two layers without biases, with operations between them that other modules do not have."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.checkpointed = checkpointed

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * 3

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.between, x, use_reentrant=False) if self.checkpointed else self.between(x)
        return self.last(y)


def measured(x: Tensor, target: str) -> tuple[float, float, float, float, float]:
    """(overflow, underflow, amax, mean squared error, mean square)"""
    before = x.detach().numpy().astype(np.float64)
    after = bitplan.quantize(x.detach(), target).numpy().astype(np.float64)
    largest = bitplan.get_format(target).max  # type: ignore[union-attr]
    overflow = (np.abs(before) > largest).mean()
    underflow = ((after == 0) & (before != 0)).mean()
    return overflow, underflow, np.abs(before).max(), ((after - before) ** 2).mean(), (before**2).mean()


def summed(steps: list[tuple[float, ...]]) -> Statistics:
    overflow, underflow, amax, error, power = zip(*steps, strict=True)
    relative = float((sum(error) / sum(power)) ** 0.5)
    return Statistics(len(steps), np.mean(overflow), np.mean(underflow), max(amax), relative)  # type: ignore[arg-type]


def assert_close(actual: Statistics, expected: Statistics) -> None:
    assert actual.steps == expected.steps
    for name in ("overflow", "underflow", "amax", "error"):
        assert getattr(actual, name) == pytest.approx(getattr(expected, name), rel=1e-4), name


RULE = {"match": "*", "weight": "e2m1", "activation": "e2m1", "grad_activation": "e3m2", "grad_weight": "e2m1"}
#: Large enough to overflow, with small numbers enough to vanish.
BATCHES = [X * 4, X * 0.5, X * 9]


def tapped() -> dict[str, list[tuple[float, ...]]]:
    """By hand, step by step, what each rounding was given."""
    model = Net()
    w1, w2 = (bitplan.quantize(layer.weight.detach(), "e2m1") for layer in (model.first, model.last))
    result: dict[str, list[tuple[float, ...]]] = {}

    def tap(name: str, x: Tensor, target: str) -> Tensor:
        result.setdefault(name, []).append(measured(x, target))
        return bitplan.quantize(x.detach(), target)

    for x in BATCHES:
        tap("first/linear.0:weight", model.first.weight, "e2m1")
        tap("last/linear.0:weight", model.last.weight, "e2m1")
        first = tap("first/linear.0:activation", x @ w1.T, "e2m1")
        tanh = torch.tanh(first)
        bent = tap("/tanh.0:activation", tanh, "e2m1")
        scaled = tap("/mul.0:activation", bent * 3, "e2m1")
        y = tap("last/linear.0:activation", scaled @ w2.T, "e2m1")
        dy = tap("last/linear.0:grad_activation", 2 * y, "e3m2")
        tap("last/linear.0:grad_weight", dy.T @ scaled, "e2m1")
        back = tap("/mul.0:grad_activation", dy @ w2, "e3m2")
        back = tap("/tanh.0:grad_activation", back * 3, "e3m2")
        back = tap("first/linear.0:grad_activation", back * (1 - tanh * tanh), "e3m2")
        tap("first/linear.0:grad_weight", back.T @ x, "e2m1")
    return result


def train(model: nn.Module, run: Attachment, called: Any = None, restless: bool = False) -> dict[str, Statistics]:
    for x in BATCHES:
        (model if called is None else called)(x).square().sum().backward()
        run.step()
        if restless:
            with torch.no_grad():
                model(x * 100)
            model.eval()
            model(x * 100).sum().backward()
            model.train()
    return run.stats()


@pytest.mark.parametrize("example", [None, X])
def test_statistics_equal_those_of_the_tapped_tensors(example: Tensor | None) -> None:
    model = Net()
    with attached(model, RULE, stats=True, example=example) as run:
        actual = train(model, run)
    expected = {name: summed(steps) for name, steps in tapped().items()}
    assert actual.keys() == expected.keys()
    for name, seen in actual.items():
        assert_close(seen, expected[name])
    assert actual["first/linear.0:activation"].overflow > 0.01
    assert actual["first/linear.0:activation"].underflow > 0.01
    assert actual["first/linear.0:grad_activation"].underflow > 0.01


@pytest.mark.parametrize("how", ["compiled", "checkpointed", "evaluated"])
def test_compilation_recomputation_and_evaluation_change_no_statistic(how: str) -> None:
    torch._dynamo.reset()
    model = Net(checkpointed=how == "checkpointed")
    with attached(model, RULE, stats=True, example=X) as run:
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else None
        actual = train(model, run, called, restless=how == "evaluated")
    expected = {name: summed(steps) for name, steps in tapped().items()}
    assert actual.keys() == expected.keys()
    for name, seen in actual.items():
        assert_close(seen, expected[name])


def test_statistics_are_off_unless_asked_for() -> None:
    model = Net()
    with attached(model, RULE) as run:
        model(X)
        assert not [name for name, _ in model.named_buffers() if "record" in name]
        with pytest.raises(bitplan.errors.PlanError, match="stats=True"):
            run.stats()


def test_a_run_without_statistics_goes_on_with_them() -> None:
    model = Net()
    with attached(model, {"match": "*", "weight": "e4m3"}, example=X) as run:
        model(X).sum().backward()
        run.step()
        state = run.state_dict()
    with attached(model, {"match": "*", "weight": "e4m3"}, stats=True) as run:
        run.load_state_dict(state)
        model(X).sum().backward()
        run.step()
        assert run.stats()["first/linear.0:weight"].amax == model.first.weight.abs().max().item()


def test_of_several_weights_or_results_the_largest_is_observed() -> None:
    model, recurrent = nn.Linear(6, 8), nn.LSTM(6, 4)
    nn.init.constant_(model.bias, 1e-9)
    rule = {"match": "*", "weight": "e2m1", "grad_weight": "e2m1"}
    with attached(model, rule, stats=True) as run:
        (model(X) * X[0, 0]).sum().backward()
        run.step()
        seen = run.stats()
    assert_close(seen["/linear.0:weight"], summed([measured(model.weight, "e2m1")]))
    assert_close(seen["/linear.0:grad_weight"], summed([measured(X[0, 0] * X.sum(0).expand(8, 6), "e2m1")]))
    out, (last, cell) = recurrent(X[:, None])
    with attached(recurrent, {"match": "*", "activation": "e2m1"}, stats=True) as run:
        seen_out, (_, seen_cell) = recurrent(X[:, None])
        run.step()
        assert_close(run.stats()["/lstm.0:activation"], summed([measured(out, "e2m1")]))
    assert torch.equal(seen_out, bitplan.quantize(out, "e2m1"))
    assert torch.equal(seen_cell, bitplan.quantize(cell, "e2m1"))
    assert last.numel() == cell.numel() < out.numel()


def test_evaluation_gives_each_of_several_weights_a_range_that_is_not_anothers() -> None:
    model = nn.Linear(6, 8)
    nn.init.constant_(model.bias, 100.0)
    rule = {"match": "*", "weight": {"format": "int8", "scale": "tensor", "eval": "ema"}}
    with attached(model, rule) as run:
        trained = model(X)
        run.step()
        torch.testing.assert_close(model.eval()(X), trained)


def test_a_step_that_is_not_finite_spoils_no_statistic() -> None:
    model = nn.Linear(6, 8, bias=False)
    rule = {"match": "*", "activation": {"format": "int8", "scale": "tensor", "eval": "ema"}, "grad_activation": "e3m2"}
    seen = []
    for factors in ((1.0, 1.0), (1.0, float("inf"), 1.0)):
        with attached(model, rule, stats=True) as run:
            for factor in factors:
                (model(X * factor).sum() * factor).backward()
                run.step()
            seen.append((run.stats(), model.eval()(X).tolist()))
            model.train()
    assert seen[0] == seen[1]
    assert seen[0][0]["/linear.0:grad_activation"].steps == 2


def test_a_scaled_format_does_not_overflow() -> None:
    model = nn.Tanh()
    rule = {"match": "*", "activation": {"format": "int4", "scale": "tensor"}}
    with attached(model, rule, stats=True) as run:
        model(X)
        run.step()
        (seen,) = run.stats().values()
    assert seen.overflow == 0
    after = bitplan.quantize(torch.tanh(X), "int4", scale="tensor")
    assert seen.error == pytest.approx(float((after - X.tanh()).norm() / X.tanh().norm()), rel=1e-5)


# --- evaluation with the running mean of ranges ---


@pytest.mark.parametrize(
    ("quantizer", "affine"), [({"format": "int4"}, False), ({"format": "int4", "range": "minmax"}, True)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_uses_the_running_mean_of_the_ranges_of_training(
    quantizer: dict[str, Any], affine: bool, compiled: bool
) -> None:
    torch._dynamo.reset()
    model = nn.Tanh()
    batches = [X * 0.3, X * 0.6 + 0.2, X * 0.1]
    rule = {"match": "*", "activation": {**quantizer, "scale": "tensor", "eval": "ema"}}
    with attached(model, rule, example=X) as run:
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        low = span = None
        for batch in batches:
            for part in batch.chunk(2):  # the range of a step is that of all its micro-batches
                called(part)
            run.step()
            least, largest = float(batch.tanh().min()), float(batch.tanh().max())
            low = least if low is None else MOMENTUM * low + (1 - MOMENTUM) * least
            span = largest - least if span is None else MOMENTUM * span + (1 - MOMENTUM) * (largest - least)
        model.eval()
        seen = called(X)
        assert torch.equal(called(X), seen)
    assert low is not None
    assert span is not None
    exact = torch.tanh(X).clamp(low, low + span)
    if affine:
        scale = span / 15
        expected = torch.round((exact - low) / scale) * scale + low
    else:
        scale = max(abs(low), abs(low + span)) / 7
        expected = torch.round(exact / scale).clamp(-7, 7) * scale
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
    own = {"range": "minmax"} if affine else {}
    assert not torch.allclose(seen, bitplan.quantize(torch.tanh(X), "int4", scale="tensor", **own), atol=1e-3)


def test_the_running_mean_of_ranges_has_a_momentum_of_nine_tenths() -> None:
    """The plan reference promises 0.9: it is written out here, so that another one fails."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = {"match": "0", "activation": {"format": "int8", "scale": "tensor", "eval": "ema"}}
    with bitplan.attach(model, bitplan.Plan.from_dict({"version": 1, "rules": [rule]})) as run:
        for amax in (4.0, 12.0):
            model(torch.tensor([[-amax], [amax]])).sum().backward()
            optimizer.step()
            run.step()
        mean = 0.9 * 4.0 + (1 - 0.9) * 12.0
        x = torch.linspace(-20.0, 20.0, 101)[:, None]
        evaluated = model.eval()(x)
    scale = mean / 127
    torch.testing.assert_close(evaluated, torch.round(x / scale).clamp(-127, 127) * scale, rtol=1e-5, atol=1e-5)
    assert float(evaluated.detach().max()) == pytest.approx(4.8, rel=1e-5)


def test_evaluation_before_any_training_uses_the_values_own_range() -> None:
    model = nn.Tanh().eval()
    with attached(model, {"match": "*", "activation": {"format": "int4", "scale": "tensor", "eval": "ema"}}):
        assert torch.equal(model(X), bitplan.quantize(torch.tanh(X), "int4", scale="tensor"))


# --- folding ---


def folded(row: list[float], step: int) -> list[float]:
    """One row after a step, in single numbers, by the words of :mod:`bitplan.runtime.statistics`."""
    after, single = list(row), np.float32
    if row[0] > 0 and np.isfinite(row[:6]).all():
        after[6:12] = [float(single(then) + single(now)) for then, now in zip(row[6:12], row[:6], strict=True)]
        after[9] = max(row[9], row[3])
    after[0] = 0.0
    low, span = single(row[12]), single(row[13]) - single(row[12])
    if np.isfinite(low) and np.isfinite(span) and span >= 0:
        after[14] = 1.0
        for column, now in ((15, low), (16, span)):
            mean = single(MOMENTUM) * single(row[column]) + single(1 - MOMENTUM) * now
            after[column] = float(mean if row[14] else now)
    after[12:14] = [np.inf, -np.inf]
    sign = single(row[17]) / single(row[18])
    if sign >= row[19] and not row[20]:
        after[20:22] = [float(step), float(sign)]
    after[17:19] = [0.0, 0.0]
    if row[22] > 0 and np.isfinite(row[22]):
        after[25:] = [row[22], *row[25:-1]]
    after[22] = 0.0
    return after


def records_of_all_kinds() -> Tensor:
    """Rows with and without each thing that may have been written, some of it not finite."""
    own = torch.Generator().manual_seed(5)
    rows = blank_record(64, torch.device("cpu"))
    rows[:, 6:12] = torch.rand(64, 6, generator=own)
    rows[::2, :6] = torch.rand(32, 6, generator=own)
    rows[::2, 0] = 1.0
    rows[4, 2], rows[6, 3] = torch.nan, torch.inf
    rows[::3, 12:14] = torch.randn(22, 2, generator=own).sort(1).values
    rows[3, 12], rows[9, 13], rows[12, 12:14], rows[15, 12:14] = -torch.inf, torch.inf, torch.nan, torch.inf
    rows[18, 12:14] = torch.tensor([-3e38, 3e38])
    rows[::4, 14], rows[::4, 15:17] = 1.0, torch.rand(16, 2, generator=own)
    rows[::5, 17:19], rows[::5, 19] = torch.rand(13, 2, generator=own), 0.5
    rows[::10, 20:22] = torch.tensor([3.0, 0.7])
    rows[::7, 22] = torch.rand(10, generator=own)
    rows[7, 22], rows[14, 22] = torch.inf, torch.nan
    rows[:, 25:] = torch.rand(64, COLUMNS - 25, generator=own)
    return rows


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_folding_does_to_each_row_what_is_written_of_it() -> None:
    rows = records_of_all_kinds()
    expected = torch.tensor([folded(row, 8) for row in rows.tolist()])
    fold(rows, 8, Observed(True, True, True, True))
    assert torch.equal(rows.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("part", ["rounding", "ranges", "signals", "amax"])
def test_what_is_not_watched_is_left_as_it_is(part: str) -> None:
    columns = {
        "rounding": range(12),
        "ranges": range(12, 17),
        "signals": range(17, 22),
        "amax": (22, *range(25, COLUMNS)),
    }
    alone, whole, before = (records_of_all_kinds() for _ in range(3))
    fold(alone, 8, Observed(**{part: True}))
    fold(whole, 8, Observed(True, True, True, True))
    mine = torch.tensor([column in columns[part] for column in range(COLUMNS)])
    expected = torch.where(mine, whole, before)
    assert torch.equal(alone.view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(whole, expected)


def test_a_step_asks_little_of_torch() -> None:
    """On a GPU each operation is a launch, and takes longer on the host than all that it computes."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(20)))
    noisy = {"format": "int4", "scale": "tensor", "rounding": "stochastic"}
    rule = {"match": "*", "activation": {"format": "int4", "scale": "tensor", "eval": "ema"}, "grad_activation": noisy}
    with attached(model, rule, example=X) as run, Operations() as operations:
        for _ in range(3):
            model(X).sum().backward()
            operations.names.clear()
            run.step()
    assert operations.names.count("aten._foreach_copy_.default") == 2
    assert len(operations.names) < 30


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_that_observes_nothing_adds_nothing() -> None:
    """A module that a step does not call leaves the measures of its last call in the record."""
    record = blank_record(1, torch.device("cpu"))
    observe_rounding(record[0], torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]), 4.0)
    fold(record, 1, Observed(rounding=True))
    once = record.clone()
    fold(record, 2, Observed(rounding=True))
    assert torch.equal(record, once)
    assert once[0, 6] == 1
