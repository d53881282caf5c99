"""The choice: for each pass of each product the cheapest pair of quantizers whose error stays under tau, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from bitplan.measure.figures import OperandFigures
from bitplan.numbers.formats import IntFormat
from bitplan.plan.spec import QuantizerSpec
from bitplan.planners.advise.prices import CostKind, price
from bitplan.planners.advise.slots import Option, Pair, Slot

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
    able = [each for each in product(*options) if math.hypot(each[0].level, each[1].level) <= tau]
    best = min(able, key=lambda each: price(cost, pair, (each[0], each[1])))
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
        words = f"nothing stays under tau, the best is {best.spec} at {_times(_with(best, other), tau)} of it"
        return ", ".join([words, *causes(best.figures)])
    share = f"the product's error {_times(_with(taken, other), tau)} of tau"
    rival = _rival(slot, taken)
    if rival is None:
        return share
    why = causes(rival.figures) if rival.level > taken.level and isinstance(rival.spec.target, IntFormat) else []
    return ", ".join([compared(taken, rival), *why, share])


def compared(taken: Option, rival: Option) -> str:
    """``INT8 4.0x worse than E4M3``, the worse one first."""
    worse, better = (taken, rival) if taken.level > rival.level else (rival, taken)
    names = [_name(each, taken, rival) for each in (worse, better)]
    if better.level == 0:
        return f"{names[1]} loses nothing, {names[0]} does"
    ratio = worse.level / better.level
    if ratio < 1.1:
        return f"{names[0]} and {names[1]} equally good"
    return f"{names[0]} {ratio:.1f}x worse than {names[1]}"


def causes(figures: OperandFigures) -> list[str]:
    """What in the tensor an integer may stumble over."""
    words = []
    if figures.kurtosis > HEAVY:
        words.append(f"heavy tail, kurtosis {figures.kurtosis:.0f}")
    if figures.underflow > _UNDERFLOW:
        words.append(f"{figures.underflow:.0%} of its values vanish")
    return words


def _rival(slot: Slot, taken: Option) -> Option | None:
    """What the slot might have got instead: the other kind of 8 bits with the same scales, and if 8 bits were beaten by
    fewer, those 8."""
    names = ["e4m3"] if isinstance(taken.spec.target, IntFormat) else ["int8"]
    names += ["e4m3" if taken.spec.target.name == "e5m2" else "int8"]
    for name in names:
        wanted = replace(taken.spec.with_target(QuantizerSpec(name).target), rounding="nearest")
        found = slot.option(str(wanted))
        if found is not None and found is not taken and math.isfinite(found.level):
            return found
    return None


def _name(option: Option, *both: Option) -> str:
    """The format in capitals; with its scale where that is what differs."""
    name = option.spec.target.name.upper()
    if len({each.spec.scale for each in both}) > 1 and option.spec.scale:
        name += f" per {option.spec.scale}"
    return f"{name} (stochastic)" if option.spec.rounding == "stochastic" else name


def _with(option: Option, other: Option) -> float:
    return math.hypot(option.level, other.level)


def _times(level: float, tau: float) -> str:
    return f"{level / tau:.0%}" if tau else "all"


def summary_counts(slots: Sequence[SlotAdvice]) -> dict[str, int]:
    """How many slots get each quantizer, the commonest first."""
    counts: dict[str, int] = {}
    for each in slots:
        counts[str(each.spec)] = counts.get(str(each.spec), 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
