"""The precision range test: the lowest width at which a model still learns.

Every width is tried for a window of steps, on copies of the model and the optimizer, from the same state and with the
same batches and random numbers. It is sufficient if the training loss falls by more than a threshold below the level
before. The bound must also fall by it below what the same window reaches with the targets of other batches: that needs
nothing of the inputs, such as unlearning a wrong bias. Widths do not see each other's steps: one that destroys the
weights harms no other, and the answer does not depend on which width the test begins with.

The recipe is tried in the model's own precision first, and windows are lengthened, and the learning rate lowered, until
the model learns in the same sense: at its peak rate and without a warm-up, MobileNet-v2 does not within 40 steps.

Before the widths the model is trained for a window in its own precision with the targets of other batches, so that
little is left to learn that needs nothing of the inputs, such as class frequencies. Where there are no other targets,
it is trained with its own at two bits or, if that breaks the weights, in its own precision. If neither lowers the loss,
the widths start from the untrained model.

Fu et al. 2021 (arXiv 2101.09868) use the change of the training accuracy, averaged over a window. Their code has
neither the window nor the threshold, so both are parameters here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.capture.recording import call_arguments
from bitplan.compiler.torch_private import tree_leaves
from bitplan.errors import PlanError
from bitplan.numerics.noise import preserve_rng_state
from bitplan.planners.cpt import cpt_plan
from bitplan.plans import Plan
from bitplan.plans.schedules import RunPoint, Schedule, Static, StepList
from bitplan.runtime.attach import attach

#: Steps of a window.
WINDOW = 40
#: Required relative decrease of the loss.
THRESHOLD = 0.1
#: The width of the window before all others, where there are no other targets.
WARM_UP_BITS = 2
#: The least bits of gradients in the default plan: coarser ones break models at widths that are sufficient, and the
#: answer would depend on the highest width of the test.
GRADIENT_BITS = 8
#: Learning rates that are tried, relative to the optimizer's, and the most windows, until the model learns in its own
#: precision.
RATES = (1.0, 1 / 4, 1 / 16)
MAX_WINDOWS = 8
#: The level of a window is the mean loss of this share at its end.
_EVALUATED_SHARE = 0.5


@dataclass(frozen=True)
class WidthResult:
    """The window of a width."""

    bits: int
    #: Mean training loss of the window's second half.
    level: float
    #: The level before; of the bound, or that of the same window with other targets, if it is lower.
    before: float
    #: Whether it fell by more than the threshold, and by more than chance.
    learns: bool

    @property
    def is_finite(self) -> bool:
        """Whether the loss stayed finite throughout the evaluated part of the window."""
        return math.isfinite(self.level)

    @property
    def change(self) -> float:
        """The relative decrease from the level before; negative if the loss rose, to infinity where it broke."""
        return (self.before - self.level) / self.before if self.before else 0.0


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test."""

    #: The lowest width at which the model learns; None if there is none.
    low: int | None
    #: The highest width of the test, a default for the upper end of a schedule.
    high: int
    reason: str
    widths: tuple[WidthResult, ...]
    #: The training loss of every step: of the window before all widths, then of each width. After a loss that is not
    #: finite no more steps are made in a window.
    losses: tuple[float, ...]
    window: int
    threshold: float
    #: The learning rate, relative to the optimizer's.
    rate: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "low": self.low,
            "high": self.high,
            "reason": self.reason,
            "window": self.window,
            "threshold": self.threshold,
            "rate": self.rate,
            "widths": [
                {
                    "bits": result.bits,
                    "before": result.before,
                    "level": result.level,
                    "change": result.change,
                    "learns": result.learns,
                }
                for result in self.widths
            ],
            "losses": list(self.losses),
        }


def range_test(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Callable[..., Tensor],
    *,
    plan: Plan | None = None,
    low: int = 2,
    high: int = 8,
    window: int = WINDOW,
    threshold: float = THRESHOLD,
    seed: int = 0,
    on_step: Callable[[int, int], None] | None = None,
) -> RangeTest:
    """Test the widths `low` to `high` on copies of `model` and `optimizer`.

    :param batches: (inputs, target) pairs, repeated if there are too few.
    :param loss: a function of the model's output and the target.
    :param plan: a plan with scheduled bits; the test replaces the schedules by constant widths. By default the plan of
        cyclic precision training (:func:`bitplan.planners.cpt_plan`).
    :param window: steps for each width; more where the model does not learn in as many in its own precision.
    :param threshold: the relative decrease of the training loss that counts as learning.
    :param on_step: called with (steps done, steps known to be needed).
    """
    _check(low, high, window, threshold)
    if isinstance(batches, Iterator):
        raise PlanError("batches is an iterator, which can be read only once: give a list or a DataLoader.")
    with preserve_rng_state():
        # One copy of both, so that the optimizer's parameters are those of the model.
        model, optimizer = copy.deepcopy((model, optimizer))
        torch.manual_seed(seed)
        source = _Batches(batches)
        if plan is None:
            rising = StepList((WARM_UP_BITS, high), (RunPoint(step=1),)) if high > WARM_UP_BITS else Static(high)
            gradient_bits = max(high, GRADIENT_BITS)
            plan = cpt_plan(model, source.first(1)[0], loss, schedule=rising, gradient_bits=gradient_bits)
        progress = _Progress(on_step)
        trial = _Trial(model, optimizer, loss, plan, seed, progress)
        untrained = trial.state()
        before = _level(trial.losses_without_steps(source.first(window)))
        recipe = _find_recipe(trial, untrained, before, source, window, threshold)
        if recipe is None:
            reason = (
                f"in its own precision the training loss does not fall by {threshold:.0%} within "
                f"{MAX_WINDOWS * window} steps: lengthen the window, or check the recipe."
            )
            return RangeTest(None, high, reason, (), (), window, threshold)
        trial.rate, length = recipe.rate, recipe.length
        progress.expect(length * (high - low + 3))
        drawn = source.first(2 * length)
        warm_up_batches, test_batches = drawn[:length], drawn[length:]
        start, reference, warm_up = untrained, before, list[float]()
        others = _with_other_targets(warm_up_batches)
        for bits, pairs in ((None, others),) if others else ((WARM_UP_BITS, warm_up_batches), (None, warm_up_batches)):
            trial.load(untrained)
            warm_up = trial.train(bits, pairs)
            if _level(warm_up).mean < reference.mean and trial.is_finite():
                start, reference = trial.state(), _level(warm_up)
                break
        other_batches = _with_other_targets(test_batches)
        by_width, controls, is_found = dict[int, list[float]](), dict[int, list[float]](), False
        for width in range(low, high + 1):
            trial.load(start)
            by_width[width] = trial.train(width, test_batches)
            if other_batches is not None and not is_found:
                if _learns(reference, _level(by_width[width]), threshold):
                    trial.load(start)
                    controls[width] = trial.train(width, other_batches)
                is_found = _width_result(width, by_width, controls, reference, threshold).learns
    result = evaluate_losses(reference, warm_up, by_width, length, threshold, controls)
    return replace(result, rate=recipe.rate, reason=f"{result.reason}{recipe.remark(window)}")


class Recipe(NamedTuple):
    """A learning rate and a number of steps with which the model learns in its own precision."""

    #: Relative to the optimizer's.
    rate: float
    length: int

    def remark(self, window: int) -> str:
        """What differs from the peak rate and the window that were asked for, as a sentence."""
        changes = [f"windows have {self.length} steps"] if self.length != window else []
        changes += [f"the learning rate is {self.rate:g} of its peak"] if self.rate != 1 else []
        if not changes:
            return ""
        return (
            f" In its own precision the model does not learn in {window} steps at the peak rate: {', '.join(changes)}."
        )


def _find_recipe(
    trial: _Trial, untrained: _State, before: Level, source: _Batches, window: int, threshold: float
) -> Recipe | None:
    """The fewest windows, and for these the highest rate, with which the loss falls by twice the threshold.

    After the most windows, falling by the threshold is enough.
    """
    runs = {rate: _OwnPrecision(trial, rate, untrained) for rate in RATES}
    controls = {rate: _OwnPrecision(trial, rate, untrained) for rate in RATES}
    clearly = min(2 * threshold, 0.9)  # so that the widths differ by more than chance

    def learns(rate: float, count: int, share: float) -> bool:
        """Whether the loss of a rate falls below the untrained model's, and below that without the right targets."""
        level = _level(runs[rate].losses)
        if not _learns(before, level, share):
            return False
        batches = source.first(count * window)
        others = _with_other_targets(batches)
        if others is None:
            return True
        control = controls[rate]
        while control.windows < count:
            control.train(others[control.windows * window :][:window])
        return _learns(min(before, _level(control.losses)), level, share)

    for count in range(1, MAX_WINDOWS + 1):
        batches = source.first(count * window)[-window:]
        for rate, run in runs.items():
            if run.is_finite:
                run.train(batches)
                if learns(rate, count, clearly):
                    return Recipe(rate, count * window)
    best = min(RATES, key=lambda rate: _level(runs[rate].losses).mean)
    return Recipe(best, MAX_WINDOWS * window) if learns(best, MAX_WINDOWS, threshold) else None


class _OwnPrecision:
    """Training at a rate in the model's own precision, window by window."""

    def __init__(self, trial: _Trial, rate: float, untrained: _State) -> None:
        self.trial, self.rate, self.state = trial, rate, untrained
        self.windows = 0
        #: Of all windows, so that the level is that of a width's window of this length.
        self.losses: list[float] = []

    @property
    def is_finite(self) -> bool:
        return not self.losses or math.isfinite(self.losses[-1])

    def train(self, batches: Sequence[Any]) -> None:
        trial = self.trial
        trial.rate = self.rate
        trial.load(self.state)
        trial.progress.expect(len(batches))
        self.losses += trial.train(None, batches)
        self.state = trial.state()
        self.windows += 1


def _learns(before: Level, after: Level, threshold: float) -> bool:
    """Whether the loss fell by more than the threshold, and by two standard errors, which excludes chance."""
    decrease = before.mean - after.mean
    return decrease > threshold * before.mean and decrease > 2 * math.hypot(before.error, after.error)


class _Progress:
    """Counts the steps of all windows."""

    def __init__(self, on_step: Callable[[int, int], None] | None) -> None:
        self.on_step, self.done, self.total = on_step, 0, 0

    def expect(self, steps: int) -> None:
        self.total = self.done + steps

    def add(self) -> None:
        self.done += 1
        if self.on_step is not None:
            self.on_step(self.done, max(self.total, self.done))


class _Batches:
    """Batches, read once and kept, so that every width has the same ones."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._source, self._kept = _repeat(batches), list[Any]()

    def first(self, count: int) -> list[Any]:
        while len(self._kept) < count:
            self._kept.append(next(self._source))
        return self._kept[:count]


#: The states of a model and an optimizer.
_State = tuple[dict[str, Any], dict[str, Any]]


class _Trial:
    """A model and an optimizer that are trained for windows, each from a given state."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[..., Tensor],
        plan: Plan,
        seed: int,
        progress: _Progress,
    ) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.plan, self.seed, self.progress = plan, seed, progress
        #: The learning rate relative to the optimizer's own.
        self.rate = 1.0
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        model.train()

    def state(self) -> _State:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, state: _State) -> None:
        model, optimizer = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.rate

    def is_finite(self) -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in self.model.state_dict().values() if is_number(tensor))

    def losses_without_steps(self, batches: Sequence[Any]) -> list[float]:
        """The losses of the model as it is, in its own precision."""
        torch.manual_seed(self.seed)
        with torch.no_grad():
            return [float(self._loss_of(batch)) for batch in batches]

    def train(self, bits: int | None, batches: Sequence[Any]) -> list[float]:
        """The losses of a window at a width, or in the model's own precision.

        From the first loss that is not finite on, no step is made.
        """
        torch.manual_seed(self.seed)
        if bits is None:
            return self._steps(batches, lambda: None)
        plan = _with_schedule(self.plan, Static(bits))
        with attach(self.model, plan, steps=len(batches), example=batches[0][0], seed=self.seed) as run:
            return self._steps(batches, run.step)

    def _steps(self, batches: Sequence[Any], after_step: Callable[[], None]) -> list[float]:
        losses: list[float] = []
        for batch in batches:
            self.progress.add()
            if losses and not math.isfinite(losses[-1]):
                losses.append(math.nan)
                continue
            self.optimizer.zero_grad(set_to_none=True)
            value = self._loss_of(batch)
            losses.append(float(value.detach()))
            if math.isfinite(losses[-1]):
                value.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                after_step()
        return losses

    def _loss_of(self, batch: Any) -> Tensor:
        inputs, target = batch
        args, kwargs = call_arguments(inputs)
        return self.loss(self.model(*args, **kwargs), target)


def _with_other_targets(batches: Sequence[Any]) -> list[Any] | None:
    """Inputs with the targets of the batch before; None where all are the same (those of a graph), or shapes differ."""
    shapes = [[leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] for batch in batches]
    if any(shape != shapes[0] for shape in shapes):
        return None
    targets = [[leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor)] for _, target in batches]
    if all(torch.equal(leaf, first) for target in targets for leaf, first in zip(target, targets[0], strict=True)):
        return None
    return [(inputs, batches[number - 1][1]) for number, (inputs, _) in enumerate(batches)]


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Level(NamedTuple):
    """Mean loss at the end of a window, and its standard error; infinity if a loss is not finite."""

    mean: float
    error: float


def evaluate_losses(
    reference: Level,
    warm_up: list[float],
    by_width: Mapping[int, list[float]],
    window: int,
    threshold: float,
    controls: Mapping[int, list[float]] | None = None,
) -> RangeTest:
    """Evaluate the training losses of the windows of all widths.

    :param reference: the level before them.
    :param controls: of some widths, the losses of the same window with the targets of other batches.
    """
    results = [_width_result(bits, by_width, controls or {}, reference, threshold) for bits in by_width]
    lowest = next((result for result in results if result.learns), None)
    return RangeTest(
        None if lowest is None else lowest.bits,
        results[-1].bits,
        _explain(lowest, results, window, threshold),
        tuple(results),
        (*warm_up, *(loss for losses in by_width.values() for loss in losses)),
        window,
        threshold,
    )


def _width_result(
    bits: int,
    by_width: Mapping[int, list[float]],
    controls: Mapping[int, list[float]],
    reference: Level,
    threshold: float,
) -> WidthResult:
    level = _level(by_width[bits])
    before = min(reference, _level(controls[bits])) if bits in controls else reference
    return WidthResult(bits, level.mean, before.mean, _learns(before, level, threshold))


def _explain(lowest: WidthResult | None, results: list[WidthResult], window: int, threshold: float) -> str:
    if lowest is None:
        return (
            f"at no width up to {results[-1].bits} bits did the training loss fall by {threshold:.0%} "
            f"within {window} steps: lengthen the window, or check that the recipe learns without a plan."
        )
    below = [result for result in results if result.bits < lowest.bits]
    lower = f"; with {', '.join(str(result.bits) for result in below)} it did not" if below else ""
    broken = [str(result.bits) for result in below if not result.is_finite]
    lower += f" ({', '.join(broken)}: the loss was no longer finite)" if broken else ""
    return (
        f"{lowest.bits} bits: the lowest width with which the training loss fell by more than {threshold:.0%} within "
        f"{window} steps, from {lowest.before:.3g} to {lowest.level:.3g}{lower}."
    )


def _level(losses: list[float]) -> Level:
    end = np.array(losses[-max(2, round(len(losses) * _EVALUATED_SHARE)) :], dtype=np.float64)
    if not np.isfinite(end).all():
        return Level(math.inf, 0.0)
    return Level(float(end.mean()), float(end.std(ddof=1) / math.sqrt(len(end))))


def _check(low: int, high: int, window: int, threshold: float) -> None:
    if not 2 <= low <= high <= 16:
        raise PlanError(f"widths go from {low} to {high}: give 2 to 16 bits, the lowest first.")
    if window < 4:
        raise PlanError(f"window is {window}; it must be at least 4 steps.")
    if not 0 < threshold < 1:
        raise PlanError(f"threshold is {threshold:g}; it must be a share between 0 and 1, such as {THRESHOLD}.")


def _with_schedule(plan: Plan, schedule: Schedule) -> Plan:
    if not plan.followed or plan.switches:
        raise PlanError(
            "the plan has no bits that follow a schedule: set bits of a quantizer to the name of a schedule."
        )
    return replace(plan.flattened(), schedules=dict.fromkeys(plan.all_schedules, schedule))


def _repeat(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise PlanError("a batch of the range test is (inputs, target).")
            yield batch
        if is_empty:
            raise PlanError("there is no batch to test with.")
