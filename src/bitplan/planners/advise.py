"""Advice: a plan with reasons, from what was measured (after Rasquinha & Tabak 2023, arXiv 2408.02897).

For each pass of each product: the cheapest pair of formats whose backward error stays under tau. Errors are compared
after multiplying by the root of the sums' length, so that short and long sums are held to one level. tau is, unless
given, the level of a configuration that is known to train: E4M3 everywhere, with a scale per tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as cartesian_product
from typing import Any, Literal, get_args

from torch import Tensor, nn

from bitplan.analysis.cost import stored_bits
from bitplan.analysis.measure import DEFAULT_CANDIDATES, Candidate, Measurement, Row, measure
from bitplan.analysis.measure.figures import OperandFigures
from bitplan.capture.decompositions import is_decomposed
from bitplan.errors import PlanError, nearest_names
from bitplan.numerics.formats import IntFormat
from bitplan.numerics.wire_format import OPERAND_OF_SLOT, ROLES
from bitplan.plans import Plan, QuantizerSpec, Rule
from bitplan.plans.loading import find_plan
from bitplan.plans.match import OPERANDS, PASSES, REGEX_PREFIX
from bitplan.plans.schedules import Schedule

# --- What a pair of quantizers costs: in bit operations, in memory, or in time on today's matrix units


CostKind = Literal["bitops", "memory", "time"]

#: The least bits that matrix units multiply faster than 16.
_FAST_BITS = 8


def checked_cost(kind: str) -> CostKind:
    for known in get_args(CostKind):
        if kind == known:
            return known  # type: ignore[no-any-return]
    raise PlanError(f"there is no cost {kind!r}; {nearest_names(kind, get_args(CostKind))}")


def price(kind: CostKind, slots: tuple[Slot, Slot], pair: tuple[Option, Option]) -> tuple[float, ...]:
    """What is compared, the first number first."""
    specs = [option.spec for option in pair]
    level = math.hypot(*(option.level for option in pair))
    return (
        _main_price(kind, slots, specs),
        float(sum(spec.scale == "vector" for spec in specs)),
        float(sum(spec.rounding == "stochastic" for spec in specs)),
        float(sum(not isinstance(spec.target, IntFormat) for spec in specs)),
        level,
    )


def _main_price(kind: CostKind, slots: tuple[Slot, Slot], specs: list[QuantizerSpec]) -> float:
    if kind == "bitops":
        return float(specs[0].target.bits * specs[1].target.bits)
    if kind == "memory":
        copies = [2 if spec.scale == "vector" else 1 for spec in specs]
        return sum(
            slot.elements * stored_bits(spec) * count for slot, spec, count in zip(slots, specs, copies, strict=True)
        )
    is_mixed = isinstance(specs[0].target, IntFormat) != isinstance(specs[1].target, IntFormat)
    return 2.0 if is_mixed or any(spec.target.bits > _FAST_BITS for spec in specs) else 1.0


# --- What a measurement says of each operand slot: how every quantizer that was tried does there, at its worst stage


#: A configuration that is known to train: its measured level is what others are held to.
REFERENCE = Candidate.of("e4m3 tensor")
#: Of the reference's levels over all products, the share that lies below the default tau.
REFERENCE_SHARE = 0.9
#: Fused operations that a plan rounds as a whole.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Option:
    """One quantizer in one slot."""

    spec: QuantizerSpec
    #: The median backward error with this operand alone quantised, times the root of the sums' length.
    level: float
    figures: OperandFigures


@dataclass(frozen=True)
class Slot:
    """One operand slot of one product, or of all products in a recurrent layer."""

    #: Such as ``layer3.0.conv1/conv2d.0``; of a recurrent layer ``rnn/lstm``.
    product: str
    slot: str
    options: tuple[Option, ...]
    #: The fused operation that it lies in.
    inside: str | None = None

    @property
    def elements(self) -> int:
        return self.options[0].figures.elements

    def option(self, spec_text: str) -> Option | None:
        """The quantizer of these words, if it was tried."""
        return next((option for option in self.options if str(option.spec) == spec_text), None)


#: Both slots of one pass.
Pair = tuple[Slot, Slot]


def pairs_of(measurement: Measurement) -> list[Pair]:
    """The two slots of every pass of every product; of several stages the worst of each quantizer counts."""
    gathered: dict[tuple[str, str], tuple[dict[str, Option], dict[str, Option]]] = {}
    insides: dict[str, str | None] = {}
    for row in measurement.rows:
        product = f"{row.module}/{row.inside}" if row.inside in RECURRENT else row.product
        insides[product] = row.inside
        sides = gathered.setdefault((product, row.pass_), ({}, {}))
        for level, spec, figures in zip(
            sides, Candidate.of(row.candidate).specs(row.pass_), (row.left, row.right), strict=True
        ):
            option = Option(spec, figures.median * math.sqrt(max(row.nonzero, 1.0)), figures)
            before = level.get(figures.quantizer)
            if before is None or not option.level <= before.level:  # NaN is worst of all
                level[figures.quantizer] = option
    pairs = []
    for (product, pass_), sides in gathered.items():
        left, right = (
            Slot(product, slot, tuple(side.values()), insides[product])
            for slot, side in zip(PASSES[pass_], sides, strict=True)
        )
        pairs.append((left, right))
    return pairs


def default_tau(measurement: Measurement) -> float:
    """The level below which the reference stays in nine of ten products, passes and stages."""
    levels = sorted(row.level for row in reference_rows(measurement.rows) if math.isfinite(row.level))
    if not levels:
        raise PlanError(f"tau follows from {REFERENCE}, which was not measured: measure it, too, or give tau.")
    return levels[min(math.ceil(REFERENCE_SHARE * len(levels)), len(levels)) - 1]


def reference_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.candidate == str(REFERENCE)]


# --- The choice: for each pass of each product the cheapest pair of quantizers whose error stays under tau, and why


#: What a slot gets where nothing that was measured is good enough.
FALLBACK = QuantizerSpec("bf16")
#: Excess kurtosis above which a tail is called heavy (a Laplace distribution has 3).
HEAVY = 3.0
#: The share of values that may vanish before it is worth a word.
_UNDERFLOW = 0.02


@dataclass(frozen=True)
class SlotAdvice:
    """What one slot should get."""

    product: str
    slot: str
    spec: QuantizerSpec
    #: Error with this operand alone quantised, times the root of the sums' length; 0 for the fallback.
    level: float
    #: In words.
    why: str
    #: The fused operation that the product lies in.
    inside: str | None = None

    @property
    def where(self) -> str:
        """``wgrad.dy of layer3.0.conv1``, with the operation where the module has several."""
        return f"{self.slot} of {place_words(self.product)}"

    def __str__(self) -> str:
        return f"{self.where}: {self.spec}: {self.why}"


def place_words(name: str) -> str:
    """A product in words: its module, and its operation if that is not the only one there can be.

    >>> place_words("layer1.0.conv1/conv2d.0"), place_words("attention/matmul.1"), place_words("/linear.0")
    ('layer1.0.conv1', 'attention/matmul.1', 'the model')
    """
    module, _, op = name.rpartition("/")
    is_alone = op.endswith(".0") and op.startswith(("conv", "linear"))
    return (module or "the model") if is_alone else name


def chosen(pair: Pair, tau: float, cost: CostKind) -> tuple[SlotAdvice, SlotAdvice]:
    """The cheapest options of both slots whose errors together stay under tau."""
    options = [[*_usable(slot), _fallback(slot)] for slot in pair]
    able = [choice for choice in cartesian_product(*options) if math.hypot(choice[0].level, choice[1].level) <= tau]
    best = min(able, key=lambda choice: price(cost, pair, (choice[0], choice[1])))
    made = [
        SlotAdvice(slot.product, slot.slot, option.spec, option.level, reason(slot, option, other, tau), slot.inside)
        for slot, option, other in zip(pair, best, reversed(best), strict=True)
    ]
    return made[0], made[1]


def _usable(slot: Slot) -> list[Option]:
    return [option for option in slot.options if math.isfinite(option.level)]


def _fallback(slot: Slot) -> Option:
    return Option(FALLBACK, 0.0, slot.options[0].figures)


# --- reasons ---


def reason(slot: Slot, taken: Option, other: Option, tau: float) -> str:
    """Why, in words: against the nearest rival, and what in the tensor makes it so."""
    if taken.spec == FALLBACK:
        usable = sorted(_usable(slot), key=lambda option: option.level)
        if not usable:
            return "no figure of it is finite, so that it stays in 16 bits"
        best = usable[0]
        message = f"nothing stays under tau, the best is {best.spec} at {_times(_with(best, other), tau)} of it"
        return ", ".join([message, *causes(best.figures)])
    share = f"the product's error {_times(_with(taken, other), tau)} of tau"
    rival = _rival(slot, taken)
    if rival is None:
        return share
    why = causes(rival.figures) if rival.level > taken.level and isinstance(rival.spec.target, IntFormat) else []
    return ", ".join([compared(taken, rival), *why, share])


def compared(taken: Option, rival: Option) -> str:
    """``INT8 4.0x worse than E4M3``, the worse one first."""
    worse, better = (taken, rival) if taken.level > rival.level else (rival, taken)
    names = [_name(option, taken, rival) for option in (worse, better)]
    if better.level == 0:
        return f"{names[1]} loses nothing, {names[0]} does"
    ratio = worse.level / better.level
    if ratio < 1.1:
        return f"{names[0]} and {names[1]} equally good"
    return f"{names[0]} {ratio:.1f}x worse than {names[1]}"


def causes(figures: OperandFigures) -> list[str]:
    """What in the tensor an integer may stumble over."""
    phrases = []
    if figures.kurtosis > HEAVY:
        phrases.append(f"heavy tail, kurtosis {figures.kurtosis:.0f}")
    if figures.underflow > _UNDERFLOW:
        phrases.append(f"{figures.underflow:.0%} of its values vanish")
    return phrases


def _rival(slot: Slot, taken: Option) -> Option | None:
    """What the slot might have got instead: the other kind of 8 bits with the same scales, and if 8 bits were beaten by
    fewer, those 8."""
    names = ["e4m3"] if isinstance(taken.spec.target, IntFormat) else ["int8"]
    names += ["e4m3" if taken.spec.target.name == "e5m2" else "int8"]
    for name in names:
        rival_spec = replace(taken.spec.with_target(QuantizerSpec(name).target), rounding="nearest")
        rival = slot.option(str(rival_spec))
        if rival is not None and rival is not taken and math.isfinite(rival.level):
            return rival
    return None


def _name(option: Option, *both: Option) -> str:
    """The format in capitals; with its scale where that is what differs."""
    name = option.spec.target.name.upper()
    if len({candidate.spec.scale for candidate in both}) > 1 and option.spec.scale:
        name += f" per {option.spec.scale}"
    return f"{name} (stochastic)" if option.spec.rounding == "stochastic" else name


def _with(option: Option, other: Option) -> float:
    return math.hypot(option.level, other.level)


def _times(level: float, tau: float) -> str:
    return f"{level / tau:.0%}" if tau else "all"


def summary_counts(slots: Sequence[SlotAdvice]) -> dict[str, int]:
    """How many slots get each quantizer, the commonest first."""
    counts: dict[str, int] = {}
    for slot in slots:
        counts[str(slot.spec)] = counts.get(str(slot.spec), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


# --- Advice as a plan: rules for slots, alone or together with an assignment's rules and a schedule


#: The name of a schedule in the plan.
SCHEDULE = "advised"

#: Key of a rule -> its quantizer.
Keys = tuple[tuple[str, str], ...]


def plan_of(
    slots: Sequence[SlotAdvice],
    made_by: Mapping[str, Any] | None = None,
    base: Plan | None = None,
    schedule: Schedule | None = None,
) -> Plan:
    """The plan that gives every slot what it should get.

    :param base: a plan whose rules come first, such as an assignment; what it rounds already to as few bits, and what
        lies in operations that it does not open, is left to it.
    :param schedule: what the bits of integers follow, instead of being fixed.
    """
    kept = [slot for slot in slots if base is None or not _is_left_to_base(base, slot)]
    quantizers: dict[str, QuantizerSpec] = {}
    by_product: dict[str, dict[str, str]] = {}
    for slot in kept:
        spec = _moved(slot.spec, schedule)
        name = _quantizer_name(spec)
        quantizers[name] = spec
        by_product.setdefault(slot.product, {})[slot.slot] = name
    products = list(dict.fromkeys(slot.product for slot in slots))
    rules = _rules(by_product, products)
    follows = schedule is not None and any(spec.bits == SCHEDULE for spec in quantizers.values())
    schedules = {SCHEDULE: schedule} if follows and schedule is not None else {}
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
    """Whether the base rounds that operand to as few bits before it comes to the slot, so that rounding it again would
    only add error; or leaves the operation closed that the slot lies in."""
    role = {"w": "weight", "dy": "grad_activation"}.get(OPERAND_OF_SLOT[advice.slot].tensor)
    module, _, op = advice.product.rpartition("/")
    if advice.inside is not None and not is_decomposed(base, module, advice.inside):
        return True
    base_quantizer = None if role is None else base.decide(module, op)[role].quantizer
    return base_quantizer is not None and base_quantizer.target.bits <= advice.spec.target.bits


def _moved(spec: QuantizerSpec, schedule: Schedule | None) -> QuantizerSpec:
    if schedule is None or not isinstance(spec.target, IntFormat):
        return spec
    return QuantizerSpec("int", bits=SCHEDULE, scale=spec.scale, rounding=spec.rounding)


def _quantizer_name(spec: QuantizerSpec) -> str:
    """A name for a quantizer that no format can have: ``tensor-e4m3``, ``vector-int8-stochastic``."""
    parts = [spec.scale or "plain", f"{spec.format}-{spec.bits}" if isinstance(spec.bits, str) else spec.format]
    return "-".join(parts + ["stochastic"] * (spec.rounding == "stochastic"))


def _rules(by_product: Mapping[str, Mapping[str, str]], products: Sequence[str]) -> list[Rule]:
    """Products that get the same share a rule; modules above others come first, so that later rules decide."""
    gathered: dict[tuple[str, Keys], list[str]] = {}
    for product, slots in by_product.items():
        module, _, op = product.rpartition("/")
        gathered.setdefault((_op_pattern(product, op, products), _keys(slots)), []).append(_pattern(module, products))
    return [
        Rule(tuple(dict.fromkeys(modules)), (op,), tuple((key, name) for key, name in keys))
        for (op, keys), modules in gathered.items()
    ]


def _keys(slots: Mapping[str, str]) -> Keys:
    """Slots, or the operand where both of its slots can share one rounded copy: one that every product could use."""
    keys = dict(slots)
    for operand, pair in OPERANDS.items():
        names = {keys.get(slot) for slot in pair}
        (name, *others) = names
        if not others and name is not None and not name.startswith("vector"):
            for slot in pair:
                del keys[slot]
            keys[operand] = name
    return tuple(keys.items())


def _pattern(module: str, products: Sequence[str]) -> str:
    """The module alone: where others with products lie beneath it, it is named exactly."""
    beneath = any(other.startswith(f"{module}.") for other in products) or not module
    special = any(sign in module for sign in "*?[")
    return f"{REGEX_PREFIX}{re.escape(module)}" if beneath or special else module


def _op_pattern(product: str, op: str, products: Sequence[str]) -> str:
    """The operation, with its number where the module has more than one of its kind."""
    bare = op.partition(".")[0]
    if bare in RECURRENT:
        return bare
    module = product.rpartition("/")[0]
    alike = [other for other in products if other.startswith(f"{module}/{bare}.")]
    return op if len(alike) > 1 else bare


#: What the advice is blind to, in words.
UNSEEN = (
    "bias against variance: stochastic rounding looks about 1.4 times worse than nearest, and may train better",
    "propagation: errors are those of single products, not of what the layers behind them make of them",
    "the optimizer: Adam divides by small numbers, and small errors of small gradients may count",
    "everything that is no product: norms, softmax, residual sums, the weights' update",
)


@dataclass(frozen=True)
class Advice:
    """A plan, and why it is so."""

    plan: Plan
    slots: tuple[SlotAdvice, ...]
    #: The level (error times the root of the sums' length) that every product stays under.
    tau: float
    #: Where tau comes from, in words.
    tau_from: str
    cost: CostKind
    measurement: Measurement

    @property
    def reasons(self) -> list[str]:
        return [str(slot) for slot in self.slots]

    @property
    def counts(self) -> dict[str, int]:
        """How many slots get each quantizer."""
        return summary_counts(self.slots)

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
    """Measure `model` as it is, and advise on a format for each operand of each product.

    `batches`, `loss`, `candidates` and further options are those of :func:`bitplan.measure`.

    :param tau: the largest error level that is accepted; by default the one that E4M3 with a scale per tensor reaches.
    :param cost: what is minimised: ``bitops``, ``memory`` or ``time``.
    :param base: a plan that the advice is added to.
    :param schedule: a schedule that the bits of integer operands follow.
    """
    with_references = with_reference(candidates)
    measurement = measure(model, batches, loss, with_references, **options)
    return advise_on(measurement, tau=tau, cost=cost, base=base, schedule=schedule)


def with_reference(candidates: Iterable[str | Candidate] | None) -> tuple[Candidate, ...]:
    """The candidates, and the one that tau follows from."""
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
    """The advice that follows from a measurement, of one stage of training or of several.

    :param tau: the most that a product's median backward error, times the root of its sums' length, may be.
    :param cost: what is to be small: ``bitops``, ``memory`` or ``time``.
    :param base: a plan that the advice is added to, such as an assignment under a budget of memory: its rules stay,
        operands that it keeps in as few bits are left to it, and fused operations that it does not open stay closed,
        because opened ones keep more tensors.
    :param schedule: what the bits of integer slots follow, such as ``bitplan.schedule("CR", low=4, high=8)``.
    """
    kind = checked_cost(cost)
    if not measurement.rows:
        raise PlanError("nothing was measured, so that there is nothing to advise on.")
    if tau is not None and not tau > 0:
        raise PlanError(f"tau is {tau:g}; it must be above 0.")
    limit = default_tau(measurement) if tau is None else tau
    tau_source = f"the level of {REFERENCE} in nine of ten products" if tau is None else "as given"
    slots = tuple(slot for pair in pairs_of(measurement) for slot in chosen(pair, limit, kind))
    made_by = {
        "planner": "advise",
        **({} if measurement.target is None else {"target": measurement.target}),
        **({} if measurement.command is None else {"measured_by": measurement.command}),
        "tau": round(limit, 6),
        "tau_from": tau_source,
        "cost": kind,
        "unseen": list(UNSEEN),
        "why": _by_place(slots),
    }
    base_plan = None if base is None else find_plan(base)
    return Advice(plan_of(slots, made_by, base_plan, schedule), slots, limit, tau_source, kind, measurement)


def _by_place(slots: tuple[SlotAdvice, ...]) -> dict[str, dict[str, str]]:
    """Reasons as a plan's file holds them: product, slot, sentence."""
    quantizers: dict[str, dict[str, str]] = {}
    for slot in slots:
        quantizers.setdefault(place_words(slot.product), {})[slot.slot] = f"{slot.spec}: {slot.why}"
    return quantizers
