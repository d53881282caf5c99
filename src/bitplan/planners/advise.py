"""Advice: a plan with reasons, based on measured errors (after Rasquinha & Tabak 2023, arXiv 2408.02897).

For each pass of each product: the cheapest pair of formats whose backward error is below tau. Errors are multiplied by
the square root of the reduction length, so that short and long reductions have the same threshold. The default tau is a
constant: the level of a configuration that is known to train, E4M3 for all operands with a scale per tensor, on healthy
models. It does not depend on the model at hand, so that a layer with outliers cannot raise it for all others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from itertools import product as cartesian_product
from typing import Any, Literal, get_args

from torch import Tensor, nn

from bitplan.analysis.cost import stored_bits
from bitplan.analysis.measure import DEFAULT_CANDIDATES, Candidate, Measurement, measure
from bitplan.analysis.measure.candidate import PLANNED
from bitplan.analysis.measure.measure import MAX_BATCHES
from bitplan.analysis.measure.pass_metrics import OperandMetrics
from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.selectors import plan_for_model
from bitplan.errors import PlanError, nearest_names
from bitplan.gemm.macs import RECURRENT
from bitplan.numerics.formats import IntFormat
from bitplan.numerics.wire_format import OPERAND_OF_SLOT, ROLES
from bitplan.planners.assign.budget import Step
from bitplan.planners.combining import (
    ScheduledSlots,
    SlotNeed,
    fewest_bits,
    keep_budget,
    origin_of,
    widths_to_measure,
)
from bitplan.plans import Plan, QuantizerSpec, Rule
from bitplan.plans.loading import find_plan
from bitplan.plans.match import OPERANDS, PASSES, REGEX_PREFIX
from bitplan.plans.schedules import Schedule

# --- Cost of a pair of quantizers: bit operations, memory, or time on matrix units


CostKind = Literal["bitops", "memory", "time"]

#: Operands of at most this many bits are multiplied faster than 16-bit ones.
_FAST_BITS = 8


def parse_cost(kind: str) -> CostKind:
    for name in get_args(CostKind):
        if kind == name:
            return name  # type: ignore[no-any-return]
    raise PlanError(f"there is no cost {kind!r}; {nearest_names(kind, get_args(CostKind))}")


def rank_by_cost(kind: CostKind, slots: tuple[Slot, Slot], pair: tuple[Option, Option]) -> tuple[float, ...]:
    """The sort key of a pair: its cost, then tie-breakers."""
    specs = [option.spec for option in pair]
    level = math.hypot(*(option.level for option in pair))
    return (
        _pair_cost(kind, slots, specs),
        float(sum(spec.scale == "vector" for spec in specs)),
        float(sum(spec.rounding == "stochastic" for spec in specs)),
        float(sum(not isinstance(spec.target, IntFormat) for spec in specs)),
        level,
    )


def _pair_cost(kind: CostKind, slots: tuple[Slot, Slot], specs: list[QuantizerSpec]) -> float:
    if kind == "bitops":
        return float(specs[0].target.bits * specs[1].target.bits)
    if kind == "memory":
        copies = [2 if spec.scale == "vector" else 1 for spec in specs]
        return sum(
            slot.elements * stored_bits(spec) * count for slot, spec, count in zip(slots, specs, copies, strict=True)
        )
    is_mixed = isinstance(specs[0].target, IntFormat) != isinstance(specs[1].target, IntFormat)
    return 2.0 if is_mixed or any(spec.target.bits > _FAST_BITS for spec in specs) else 1.0


# --- Measured options of each operand slot: the worst stage of every candidate quantizer


#: A configuration that is known to train.
REFERENCE = Candidate.of("e4m3 tensor")
#: The default tau. Nine of ten products of the reference stay below 0.050 to 0.070 on each of seven models with and
#: without training (ResNets, a GPT, LSTMs, GCNs); 0.06 is the median of these. Gaussian operands have 0.04.
TAU = 0.06


@dataclass(frozen=True)
class Option:
    """A quantizer in an operand slot."""

    spec: QuantizerSpec
    #: The median backward error with only this operand quantised, times the square root of the reduction length.
    level: float
    metrics: OperandMetrics


@dataclass(frozen=True)
class Slot:
    """An operand slot of a product, or of all products of a recurrent layer, and its options."""

    #: Such as ``layer3.0.conv1/conv2d.0``; for a recurrent layer ``rnn/lstm``.
    product: str
    slot: str
    options: tuple[Option, ...]
    #: The fused operation that contains the product.
    inside: str | None = None

    @property
    def elements(self) -> int:
        return self.options[0].metrics.elements

    def option(self, spec_text: str) -> Option | None:
        """The option whose quantizer has this text, if it was measured."""
        return next((option for option in self.options if str(option.spec) == spec_text), None)


#: Both slots of a pass.
Pair = tuple[Slot, Slot]


def collect_pairs(measurement: Measurement) -> list[Pair]:
    """The two slots of every pass of every product, with the worst stage of each quantizer."""
    collected: dict[tuple[str, str], tuple[dict[str, Option], dict[str, Option]]] = {}
    insides: dict[str, str | None] = {}
    for row in measurement.rows:
        if row.candidate == PLANNED:  # measured for people; an option is a quantizer that is alone in its product
            continue
        product = f"{row.module}/{row.inside}" if row.inside in RECURRENT else row.product
        insides[product] = row.inside
        sides = collected.setdefault((product, row.pass_), ({}, {}))
        for side, spec, metrics in zip(
            sides, Candidate.of(row.candidate).specs(row.pass_), (row.left, row.right), strict=True
        ):
            option = Option(spec, metrics.median * math.sqrt(max(row.nonzero, 1.0)), metrics)
            worst = side.get(metrics.quantizer)
            if worst is None or not option.level <= worst.level:  # NaN counts as worst
                side[metrics.quantizer] = option
    pairs = []
    for (product, pass_), sides in collected.items():
        left, right = (
            Slot(product, slot, tuple(side.values()), insides[product])
            for slot, side in zip(PASSES[pass_], sides, strict=True)
        )
        pairs.append((left, right))
    return pairs


def products_above(measurement: Measurement, tau: float) -> dict[str, float]:
    """The products in which the reference exceeds tau, and by how many times at the worst pass and stage."""
    worst: dict[str, float] = {}
    for row in measurement.rows:
        if row.candidate == str(REFERENCE) and not row.level <= tau:  # NaN counts as above
            share = row.level / tau if math.isfinite(row.level) else math.inf
            worst[row.product] = max(worst.get(row.product, 0.0), share)
    return dict(sorted(worst.items(), key=lambda item: -item[1]))


# --- The choice for each pass of each product, and its reasons


#: The quantizer of slots for which no measured option is good enough.
FALLBACK = QuantizerSpec("bf16")
#: Excess kurtosis above which a tail is called heavy (a Laplace distribution has 3).
HEAVY_TAIL_KURTOSIS = 3.0
#: Underflow is mentioned from this share of values on.
_UNDERFLOW = 0.02


@dataclass(frozen=True)
class SlotAdvice:
    """The advised quantizer of an operand slot."""

    product: str
    slot: str
    spec: QuantizerSpec
    #: As :attr:`Option.level`; 0 for the fallback.
    level: float
    #: The reason, for people.
    why: str
    #: The fused operation that contains the product.
    inside: str | None = None
    #: The fewest integer bits with an error that is small enough, together with the other operand's; None for floats.
    need: int | None = None

    @property
    def where(self) -> str:
        """Such as ``wgrad.dy of layer3.0.conv1``, see :func:`describe_product`."""
        return f"{self.slot} of {describe_product(self.product)}"

    def __str__(self) -> str:
        return f"{self.where}: {self.spec}: {self.why}"


def describe_product(name: str) -> str:
    """The product's module, with the operation unless the module can have no other product.

    >>> [describe_product(name) for name in ("layer1.0.conv1/conv2d.0", "attention/matmul.1", "/linear.0")]
    ['layer1.0.conv1', 'attention/matmul.1', 'the model']
    """
    module, _, op = name.rpartition("/")
    is_only_product = op.endswith(".0") and op.startswith(("conv", "linear"))
    return (module or "the model") if is_only_product else name


def choose_pair(pair: Pair, tau: float, cost: CostKind) -> tuple[SlotAdvice, SlotAdvice]:
    """Choose the cheapest options of both slots whose combined error is below tau."""
    options = [[*_usable(slot), _fallback(slot)] for slot in pair]
    acceptable = [
        choice for choice in cartesian_product(*options) if math.hypot(choice[0].level, choice[1].level) <= tau
    ]
    best = min(acceptable, key=lambda choice: rank_by_cost(cost, pair, (choice[0], choice[1])))
    needs = _needed_bits(pair, (best[0], best[1]), tau)
    advice = [
        SlotAdvice(
            *(slot.product, slot.slot, option.spec, option.level),
            *(explain_choice(slot, option, other, tau), slot.inside, need),
        )
        for slot, option, other, need in zip(pair, best, reversed(best), needs, strict=True)
    ]
    return advice[0], advice[1]


def _needed_bits(pair: Pair, selected: tuple[Option, Option], tau: float) -> list[int | None]:
    """The fewest bits of both slots at which their combined error is below tau, where they are integers.

    They fall and grow together under a schedule, so that both needs hold at once. A cost that does not count bits may
    have chosen more than that.
    """

    def narrower(slot: Slot, option: Option) -> list[Option]:
        if not isinstance(option.spec.target, IntFormat):
            return [option]
        same = (option.spec.scale, option.spec.rounding)
        integers = [other for other in _usable(slot) if isinstance(other.spec.target, IntFormat)]
        return [other for other in integers if (other.spec.scale, other.spec.rounding) == same]

    choices = cartesian_product(*(narrower(slot, option) for slot, option in zip(pair, selected, strict=True)))
    acceptable = [choice for choice in choices if _pair_level(choice[0], choice[1]) <= tau]
    fewest = min(acceptable, key=lambda choice: rank_by_cost("bitops", pair, (choice[0], choice[1])))
    return [option.spec.target.bits if isinstance(option.spec.target, IntFormat) else None for option in fewest]


def _usable(slot: Slot) -> list[Option]:
    return [option for option in slot.options if math.isfinite(option.level)]


def _fallback(slot: Slot) -> Option:
    return Option(FALLBACK, 0.0, slot.options[0].metrics)


def explain_choice(slot: Slot, selected: Option, other: Option, tau: float) -> str:
    """The reason as text: a comparison with the nearest alternative, and properties of the tensor."""
    if selected.spec == FALLBACK:
        usable = sorted(_usable(slot), key=lambda option: option.level)
        if not usable:
            return "none of its errors is finite, so it stays in 16 bits"
        best = usable[0]
        share = _relative_to_tau(_pair_level(best, other), tau)
        message = f"nothing stays under tau, the best is {best.spec} at {share} of it"
        return ", ".join([message, *explain_error(best.metrics)])
    share = f"the product's error {_relative_to_tau(_pair_level(selected, other), tau)} of tau"
    alternative = _find_alternative(slot, selected)
    if alternative is None:
        return share
    is_worse_integer = alternative.level > selected.level and isinstance(alternative.spec.target, IntFormat)
    causes = explain_error(alternative.metrics) if is_worse_integer else []
    return ", ".join([compare_options(selected, alternative), *causes, share])


def compare_options(selected: Option, alternative: Option) -> str:
    """Such as ``INT8 4.0x worse than E4M3``."""
    worse, better = (selected, alternative) if selected.level > alternative.level else (alternative, selected)
    names = [_format_name(option, selected, alternative) for option in (worse, better)]
    if better.level == 0:
        return f"{names[1]} loses nothing, {names[0]} does"
    ratio = worse.level / better.level
    if ratio < 1.1:
        return f"{names[0]} and {names[1]} equally good"
    return f"{names[0]} {ratio:.1f}x worse than {names[1]}"


def explain_error(metrics: OperandMetrics) -> list[str]:
    """Properties of the tensor that increase the error of integer formats."""
    phrases = []
    if metrics.kurtosis > HEAVY_TAIL_KURTOSIS:
        phrases.append(f"heavy tail, kurtosis {metrics.kurtosis:.0f}")
    if metrics.underflow > _UNDERFLOW:
        phrases.append(f"{metrics.underflow:.0%} of its values vanish")
    return phrases


def _find_alternative(slot: Slot, selected: Option) -> Option | None:
    """The option to compare with: 8 bits of the other kind with the same scales, or 8 bits of the same kind."""
    names = ["e4m3"] if isinstance(selected.spec.target, IntFormat) else ["int8"]
    names += ["e4m3" if selected.spec.target.name == "e5m2" else "int8"]
    for name in names:
        alternative_spec = replace(selected.spec.with_target(QuantizerSpec(name).target), rounding="nearest")
        alternative = slot.option(str(alternative_spec))
        if alternative is not None and alternative is not selected and math.isfinite(alternative.level):
            return alternative
    return None


def _format_name(option: Option, *both: Option) -> str:
    """The format in capitals, with its scale if the two options differ in it."""
    name = option.spec.target.name.upper()
    if len({candidate.spec.scale for candidate in both}) > 1 and option.spec.scale:
        name += f" per {option.spec.scale}"
    return f"{name} (stochastic)" if option.spec.rounding == "stochastic" else name


def _pair_level(option: Option, other: Option) -> float:
    return math.hypot(option.level, other.level)


def _relative_to_tau(level: float, tau: float) -> str:
    return f"{level / tau:.0%}" if tau else "all"


def count_quantizers(slots: Sequence[SlotAdvice]) -> dict[str, int]:
    """The number of slots for each quantizer, in descending order."""
    return dict(Counter(str(slot.spec) for slot in slots).most_common())


# --- Advice as a plan


#: (key of a rule, name of its quantizer).
Keys = tuple[tuple[str, str], ...]


def make_plan(
    slots: Sequence[SlotAdvice],
    made_by: Mapping[str, Any] | None = None,
    base: Plan | None = None,
    schedule: Schedule | None = None,
) -> Plan:
    """The plan with a rule for every advised slot.

    :param base: a plan whose rules come first, such as an assignment. Operands that it already rounds to as few bits,
        and operations that it does not decompose, get no rule.
    :param schedule: the schedule that the bits of integer formats follow.
    """
    advised = [slot for slot in slots if base is None or not _is_left_to_base(base, slot)]
    quantizers: dict[str, QuantizerSpec] = {}
    by_product: dict[str, dict[str, str]] = {}
    scheduled = None
    if schedule is not None:
        needs = [SlotNeed(slot.where, slot.need) for slot in advised if slot.need is not None]
        scheduled = ScheduledSlots(schedule, needs, () if base is None else base.all_schedules)
    for slot in advised:
        spec = slot.spec if scheduled is None else scheduled.follow(slot.spec, slot.need)
        name = _quantizer_name(spec)
        quantizers[name] = spec
        by_product.setdefault(slot.product, {})[slot.slot] = name
    products = list(dict.fromkeys(slot.product for slot in slots))
    rules = _make_rules(by_product, products)
    schedules = {} if scheduled is None else scheduled.used
    flat = Plan() if base is None else base.flattened()
    # The advice may override the base's rules for operands everywhere, which is no mistake here.
    lenient = (replace(rule, strict=rule.strict and _rounds_classes_only(rule)) for rule in flat.rules)
    return replace(
        flat,
        rules=(*lenient, *rules),
        quantizers={**flat.quantizers, **quantizers},
        schedules={**flat.schedules, **schedules},
        made_by=None if made_by is None else dict(made_by),
        name=None,
        origin=None,
    )


def _rounds_classes_only(rule: Rule) -> bool:
    return all(key in ROLES for key, _ in rule.quantizers)


def _is_left_to_base(base: Plan, advice: SlotAdvice) -> bool:
    """Whether the base rounds the operand to as few bits, so that a second rounding would only add error, or does not
    decompose the operation that contains it."""
    role = {"w": "weight", "dy": "grad_activation"}.get(OPERAND_OF_SLOT[advice.slot].tensor)
    module, _, op = advice.product.rpartition("/")
    if advice.inside is not None and not is_decomposed(base, module, advice.inside):
        return True
    base_quantizer = None if role is None else base.decide(module, op)[role].quantizer
    return base_quantizer is not None and base_quantizer.target.bits <= advice.spec.target.bits


def find_below_need(slots: Sequence[SlotAdvice], base: Plan) -> dict[str, str]:
    """Slots that are left to the base although it has, or at times has, fewer bits than they need -> in words."""
    below = {}
    for slot in slots:
        role = {"w": "weight", "dy": "grad_activation"}.get(OPERAND_OF_SLOT[slot.slot].tensor)
        if role is None or not _is_left_to_base(base, slot):
            continue
        bits = fewest_bits(base, *split_product(slot.product), role)
        needed = slot.spec.target.bits if slot.need is None else slot.need
        if bits is not None and bits < needed:
            below[slot.where] = f"{bits:g} bits in the base, and {needed} are needed"
    return below


def split_product(product: str) -> tuple[str, str]:
    """The module and the operation of a product."""
    module, _, op = product.rpartition("/")
    return module, op


def _quantizer_name(spec: QuantizerSpec) -> str:
    """A name for a quantizer that no format can have: ``tensor-e4m3``, ``vector-int8-stochastic``."""
    parts = [spec.scale or "plain", f"{spec.format}-{spec.bits}" if isinstance(spec.bits, str) else spec.format]
    return "-".join(parts + ["stochastic"] * (spec.rounding == "stochastic"))


def _make_rules(by_product: Mapping[str, Mapping[str, str]], products: Sequence[str]) -> list[Rule]:
    """One rule for all products with the same quantizers."""
    collected: dict[tuple[str, Keys], list[str]] = {}
    for product, slots in by_product.items():
        module, _, op = product.rpartition("/")
        collected.setdefault((_op_pattern(product, op, products), _rule_keys(slots)), []).append(
            _module_pattern(module, products)
        )
    return [
        Rule(tuple(dict.fromkeys(modules)), (op,), tuple((key, name) for key, name in keys))
        for (op, keys), modules in collected.items()
    ]


def _rule_keys(slots: Mapping[str, str]) -> Keys:
    """Slots, or the tensor (``x``, ``w``, ``dy``) where both of its slots can share a rounded copy."""
    keys = dict(slots)
    for operand, pair in OPERANDS.items():
        names = {keys.get(slot) for slot in pair}
        (name, *others) = names
        if not others and name is not None and not name.startswith("vector"):
            for slot in pair:
                del keys[slot]
            keys[operand] = name
    return tuple(keys.items())


def _module_pattern(module: str, products: Sequence[str]) -> str:
    """A pattern that matches the module and none of its submodules that have products."""
    has_inner = any(other.startswith(f"{module}.") for other in products) or not module
    is_glob = any(character in module for character in "*?[")
    return f"{REGEX_PREFIX}{re.escape(module)}" if has_inner or is_glob else module


def _op_pattern(product: str, op: str, products: Sequence[str]) -> str:
    """The operation, with its number if the module has several of that name."""
    name = op.partition(".")[0]
    if name in RECURRENT:
        return name
    module = product.rpartition("/")[0]
    same_name = [other for other in products if other.startswith(f"{module}/{name}.")]
    return op if len(same_name) > 1 else name


#: Effects that the advice does not take into account.
UNSEEN = (
    "bias against variance: stochastic rounding looks about 1.4 times worse than nearest, and may train better",
    "propagation: errors are those of single products, not of what the layers behind them make of them",
    "the optimizer: Adam divides by small numbers, and small errors of small gradients may count",
    "everything that is no product: norms, softmax, residual sums, the weights' update",
)


@dataclass(frozen=True)
class Advice:
    """A plan with its reasons."""

    plan: Plan
    slots: tuple[SlotAdvice, ...]
    #: The largest accepted level, see :attr:`Option.level`.
    tau: float
    #: The origin of tau, for people.
    tau_from: str
    cost: CostKind
    measurement: Measurement

    @property
    def reasons(self) -> list[str]:
        return [str(slot) for slot in self.slots]

    @property
    def counts(self) -> dict[str, int]:
        """The number of slots for each quantizer."""
        return count_quantizers(self.slots)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tau": self.tau,
            "tau_from": self.tau_from,
            "cost": self.cost,
            "slots": [
                {
                    "product": slot.product,
                    "slot": slot.slot,
                    "quantizer": str(slot.spec),
                    "level": slot.level,
                    "need": slot.need,
                    "why": slot.why,
                }
                for slot in self.slots
            ],
            "counts": self.counts,
            "skipped": dict(self.measurement.skipped),
            "unseen": list(UNSEEN),
            "plan": self.plan.to_dict(),
        }


def advise(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor] | None = None,
    candidates: Iterable[str | Candidate] | None = None,
    *,
    tau: float | None = None,
    cost: str = "bitops",
    base: Plan | str | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> Advice:
    """Measure `model` and choose a format for each operand of each product.

    `batches`, `loss`, `candidates` and further options are those of :func:`bitplan.measure`.

    :param tau: the largest accepted error level; by default that of E4M3 with a scale per tensor on healthy models.
    :param cost: the cost that is minimised: ``bitops``, ``memory`` or ``time``.
    :param base: a plan that the advice is added to.
    :param schedule: a schedule that the bits of integer operands follow, each down to the bits that it needs; the
        error is measured at all widths of the schedule.
    """
    if base is not None:
        base = find_plan(base)
        batches = list(islice(batches, MAX_BATCHES))
        base = plan_for_model(base, model, batches[0], loss) if batches and base.has_selectors else base
    measurement = measure(model, batches, loss, widths_to_measure(add_reference(candidates), schedule), **options)
    advice = advise_on(measurement, tau=tau, cost=cost, base=base, schedule=schedule)
    if base is None:
        return advice
    return replace(advice, plan=keep_budget(advice.plan, base, Step(model, next(iter(batches)), loss)))


def add_reference(candidates: Iterable[str | Candidate] | None) -> tuple[Candidate, ...]:
    """The candidates and the reference, which :func:`products_above` compares with tau."""
    requested = DEFAULT_CANDIDATES if candidates is None else tuple(map(Candidate.of, candidates))
    return tuple(dict.fromkeys((*requested, REFERENCE)))


def advise_on(
    measurement: Measurement,
    *,
    tau: float | None = None,
    cost: str = "bitops",
    base: Plan | str | None = None,
    schedule: Schedule | None = None,
) -> Advice:
    """Advice for a measurement of one or more stages of training.

    :param tau: the largest accepted level: median backward error times the square root of the reduction length; None:
        :data:`TAU`.
    :param cost: the cost that is minimised: ``bitops``, ``memory`` or ``time``.
    :param base: a plan that the advice is added to, such as an assignment for a memory budget. Its rules stay. Operands
        that it rounds to as few bits get no rule, and fused operations that it does not decompose stay fused, because
        decomposed ones save more tensors. A base with selectors must be expanded for the model before
        (:func:`bitplan.capture.selectors.plan_for_model`).
    :param schedule: the schedule of the bits of integer slots, such as ``bitplan.schedule("CR", low=4, high=8)``. No
        slot ever has fewer bits than the narrowest measured integer whose error is small enough.
    """
    kind = parse_cost(cost)
    if not measurement.rows:
        raise PlanError("nothing was measured: there is nothing to advise on.")
    if tau is not None and not tau > 0:
        raise PlanError(f"tau is {tau:g}; it must be above 0.")
    limit = TAU if tau is None else tau
    tau_source = f"the level of {REFERENCE} on healthy models" if tau is None else "as given"
    slots = tuple(slot for pair in collect_pairs(measurement) for slot in choose_pair(pair, limit, kind))
    made_by: dict[str, Any] = {
        "planner": "advise",
        **({} if measurement.target is None else {"target": measurement.target}),
        **({} if measurement.command is None else {"measured_by": measurement.command}),
        "tau": round(limit, 6),
        "tau_from": tau_source,
        "cost": kind,
        **({} if schedule is None else {"schedule": str(schedule)}),
    }
    base_plan = None if base is None else find_plan(base)
    below = {} if base_plan is None else find_below_need(slots, base_plan)
    if base_plan is not None:
        made_by |= {**origin_of(base_plan), **({"below_need": below} if below else {})}
    made_by |= {"unseen": list(UNSEEN), "why": _reasons_by_product(slots)}
    return Advice(make_plan(slots, made_by, base_plan, schedule), slots, limit, tau_source, kind, measurement)


def _reasons_by_product(slots: tuple[SlotAdvice, ...]) -> dict[str, dict[str, str]]:
    """product -> slot -> reason, for the plan file."""
    reasons: dict[str, dict[str, str]] = {}
    for slot in slots:
        reasons.setdefault(describe_product(slot.product), {})[slot.slot] = f"{slot.spec}: {slot.why}"
    return reasons
