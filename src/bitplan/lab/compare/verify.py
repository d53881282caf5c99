"""Checking advice by training: the advised plan beside all-E4M3, all-INT8 and the task's own precision.

Advice that does not train is made again with half of tau, see :func:`verified_advice`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitplan.lab.compare.compare import compare, slug
from bitplan.lab.compare.folder import Choice
from bitplan.lab.compare.workers import Update
from bitplan.lab.train import RunFolder, Summary
from bitplan.planners.advise import Advice, describe_product, make_plan, products_above
from bitplan.plans import Plan, QuantizerSpec

#: Default number of steps of each run.
STEPS = 100
#: The last share of a run whose mean training loss counts, since the losses of single batches vary.
_END = 0.25

#: A plan does not train if it loses more than this share of what high precision gains in the same steps.
LOST_SHARE = 0.25
#: How often tau is halved at most.
MAX_ROUNDS = 3

HIGH, ADVICE = "high precision", "advice"
#: Baselines: one format for every operand that the advice covers, with a scale per tensor.
RIVALS = {"all E4M3": "e4m3", "all INT8": "int8"}


@dataclass(frozen=True)
class Verified:
    """The result of one plan, mean over seeds."""

    label: str
    #: Mean training loss of the last quarter of the steps.
    loss: float
    #: Loss above that of high precision.
    gap: float
    #: The task's metric after the last step.
    metric: float
    #: Bit operations as a share of FP32's.
    cost: float
    diverged: int
    #: Whether it keeps at least three quarters of what high precision gains; None where that gains nothing.
    trains: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__}


def verify(
    task: str,
    advice: Advice,
    folder: Path,
    *,
    settings: Sequence[str] = (),
    steps: int = STEPS,
    seeds: Iterable[int] = (0,),
    device: str = "cpu",
    on_update: Callable[[Update], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Verified]:
    """Train `task` for `steps` steps under the advice, its rivals and no plan, and return the final losses.

    :param task: as the command line names it.
    :param folder: where the runs are kept: a comparison, as :func:`bitplan.lab.compare.compare` makes it.
    """
    numbers = tuple(seeds)
    choices = [Choice(HIGH, None), Choice(ADVICE, advice.plan)]
    choices += [Choice(label, uniform_plan(advice, name)) for label, name in RIVALS.items()]
    summaries = compare(
        *(task, choices),
        folder=folder,
        seeds=numbers,
        settings=(*settings, f"steps={steps}"),
        device=device,
        on_update=on_update,
        stop=stop,
    )
    by_folder = {summary.folder: summary for summary in summaries}
    by_label = {
        choice.label: [
            by_folder[place] for seed in numbers if (place := folder / f"{slug(choice.label)}-s{seed}") in by_folder
        ]
        for choice in choices
    }
    high = _mean([final_loss(summary) for summary in by_label[HIGH]])
    gained = _mean([_first_loss(summary) for summary in by_label[HIGH]]) - high
    return [_verified(label, own, high, gained) for label, own in by_label.items() if own]


def uniform_plan(advice: Advice, name: str) -> Plan:
    """Every operand that the advice covers in one format, with a scale per tensor."""
    spec = QuantizerSpec(name, scale="tensor")
    return make_plan([replace(slot, spec=spec) for slot in advice.slots], {"planner": "advise", "uniform": name})


def final_loss(summary: Summary) -> float:
    """The mean training loss of a run's last quarter; not finite where it diverged."""
    if summary.status == "diverged":
        return math.inf
    lines = [line for line in RunFolder(summary.folder).metrics() if "loss" in line and "lr" in line]
    end = [float(line["loss"]) for line in lines if line["step"] > (1 - _END) * summary.step]
    return _mean(end)


def _first_loss(summary: Summary) -> float:
    lines = [line for line in RunFolder(summary.folder).metrics() if "loss" in line and "lr" in line]
    return float(lines[0]["loss"]) if lines else math.nan


def _verified(label: str, summaries: Sequence[Summary], high: float, gained: float) -> Verified:
    loss = _mean([final_loss(summary) for summary in summaries])
    metrics = [next(iter(summary.metrics.values()), math.nan) for summary in summaries]
    return Verified(
        label,
        loss,
        loss - high,
        _mean(metrics),
        _mean([summary.cost.get("relative_to_fp32", math.nan) for summary in summaries]),
        (diverged := sum(summary.status == "diverged" for summary in summaries)),
        (not diverged and loss - high <= LOST_SHARE * gained) if gained > 0 else None,
    )


@dataclass(frozen=True)
class VerifiedAdvice:
    """Advice, the runs that it was checked by, and what follows from them."""

    advice: Advice
    results: tuple[Verified, ...]
    conclusion: str

    @property
    def trains(self) -> bool | None:
        """Whether the advice trains; None where the task learns nothing in these steps."""
        return next((result.trains for result in self.results if result.label == ADVICE), None)


def verified_advice(
    advice: Advice,
    advise_again: Callable[[float], Advice],
    check: Callable[[Advice, int], Sequence[Verified]],
    report: Callable[[str], None],
) -> VerifiedAdvice:
    """Check advice by training; where it does not train, advise again with half of tau.

    :param advise_again: the advice for another tau.
    :param check: the runs of advice, in the round of that number.
    """
    first_tau = advice.tau
    for number in range(1, MAX_ROUNDS + 1):
        results = tuple(check(advice, number))
        verified = VerifiedAdvice(advice, results, _conclusion(advice, results, first_tau))
        if verified.trains is not False or number == MAX_ROUNDS:
            return verified
        report(f"the advice does not train with tau {advice.tau:.3g}: it is made again with {advice.tau / 2:.3g}.")
        advice = advise_again(advice.tau / 2)
    raise AssertionError("unreachable")


def _conclusion(advice: Advice, results: Sequence[Verified], first_tau: float) -> str:
    trains = {result.label: result.trains for result in results}
    if trains.get(ADVICE) is None:
        return "High precision learns nothing in these steps, so nothing follows: raise --verify-steps."
    sentences = []
    lowered = f" with tau {advice.tau:.3g} instead of {first_tau:.3g}" if advice.tau != first_tau else ""
    if trains[ADVICE]:
        sentences.append(f"The advice trains{lowered}.")
    else:
        sentences.append(
            f"The advice does not train, even with tau {advice.tau:.3g}: do not use it; keep the layers whose errors "
            f"are largest in 16 bits, by a rule with keep."
        )
    for label in RIVALS:
        if trains.get(label) is False:
            sentences.append(f"{label} does not train here{_culprits(advice) if 'E4M3' in label else ''}.")
    return " ".join(sentences)


def _culprits(advice: Advice) -> str:
    """The products in which E4M3 exceeds the level of healthy models."""
    above = products_above(advice.measurement, advice.tau)
    if not above:
        return ", though no product exceeds tau: errors add up, or arise outside of products"
    few = [f"{describe_product(name)} ({share:.1f} times tau)" for name, share in list(above.items())[:3]]
    more = f" and {len(above) - 3} more" if len(above) > 3 else ""
    return f": its error is above tau in {', '.join(few)}{more}, where the advice has other formats"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
