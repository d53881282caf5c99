"""Levels: what the tensors of a group get, from the highest precision down.

A level gives four quantizers, one for each role. A *set of formats* is two levels or more, with where gradients round
and whether the loss is opened up, so that its log-softmax is rounded as well.

==================  ===========================================================================================
``paper``           FP(6,9,0) / FP(4,3,4) with FP(5,2,0) for gradients (Lee, Sharma & Aiken 2023, arXiv
                    2301.13464): no scales, ties away from zero, forward overflow saturates and backward overflow
                    becomes infinity, each branch of a gradient rounded by itself, master weights in evaluation.
                    Train it with a loss scale.
``bf16/e4m3+e5m2``  BF16 / FP8 with a scale per tensor
``bf16/mxfp8``      BF16 / MXFP8: 32 neighbours share a power of two
==================  ===========================================================================================

A level's name is one or two formats, ``forward+backward``, or a number of bits for which one is chosen here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bitplan.analysis.cost import stored_bits
from bitplan.errors import PlanError, nearest_names
from bitplan.numerics.formats import BlockFormat, FloatFormat, get_format
from bitplan.planners.assign.groups import Group
from bitplan.plans import QuantizerSpec
from bitplan.plans.match import GradAt

#: What a number of bits stands for. From 6 bits down a scale for a whole tensor leaves too little range.
_BY_BITS = {
    "32": "fp32",
    "16": "bf16",
    "8": "e4m3+e5m2",
    "6": "mxfp6+mxfp6e3m2",
    "4": "mxfp4",
}
#: A format with at least so many bits needs no scale.
_UNSCALED_BITS = 16
#: A parameter's gradient is read once, by the optimizer, and is small beside the activations: it gets 16 bits.
_GRAD_WEIGHT = QuantizerSpec("bf16")


@dataclass(frozen=True)
class Level:
    """What the four roles of a tensor get at one precision; None leaves it as it is."""

    name: str
    weight: QuantizerSpec | None
    activation: QuantizerSpec | None
    grad_activation: QuantizerSpec | None
    grad_weight: QuantizerSpec | None

    def bits(self, role: str) -> float:
        """Bits of a stored value, its share of a block's scale included; 32 where nothing is rounded."""
        spec: QuantizerSpec | None = getattr(self, role)
        return 32.0 if spec is None else stored_bits(spec)

    @property
    def nominal(self) -> float:
        """Bits of an activation, by which levels are ranked."""
        return self.bits("activation")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Formats:
    """Levels from the highest precision down, and how they are used."""

    name: str
    levels: tuple[Level, ...]
    grad_at: GradAt = "producer"
    #: Whether a cross-entropy is written out, so that what lies between its two halves is rounded too.
    opens_loss: bool = False
    #: Whether gradients have no scale of their own, so that the loss has to be scaled.
    wants_loss_scale: bool = False

    def __post_init__(self) -> None:
        if len(self.levels) < 2:
            raise PlanError("an assignment chooses between levels: give two or more, the highest precision first.")
        for higher, lower in zip(self.levels, self.levels[1:], strict=False):
            if lower.nominal >= higher.nominal:
                raise PlanError(
                    f"the level {lower} keeps as many bits as {higher} before it: give levels from the highest "
                    f"precision down, such as bf16, 8, 4."
                )

    @property
    def low(self) -> int:
        """The number of the lowest level."""
        return len(self.levels) - 1

    def gain(self, level: int) -> float:
        """The share of the greatest possible saving that a level makes: 0 at the highest, 1 at the lowest."""
        high, low = self.levels[0].nominal, self.levels[-1].nominal
        return (high - self.levels[level].nominal) / (high - low)


def _paper_level(name: str, forward: str, backward: str) -> Level:
    kept = QuantizerSpec(forward, rounding="nearest-away", overflow="saturate")
    return Level(
        name,
        weight=replace(kept, eval="off"),
        activation=kept,
        grad_activation=QuantizerSpec(backward, rounding="nearest-away", overflow="special"),
        grad_weight=QuantizerSpec("e6m9b0", rounding="nearest-away", overflow="special"),
    )


PAPER = Formats(
    "paper",
    (_paper_level("FP(6,9,0)", "e6m9b0", "e6m9b0"), _paper_level("FP(4,3,4)+FP(5,2,0)", "e4m3b4", "e5m2b0")),
    grad_at="consumer",
    opens_loss=True,
    wants_loss_scale=True,
)


def level(text: str | Level) -> Level:
    """The level that a text means: ``e4m3+e5m2`` forward and backward, ``mxfp8`` for both, ``8`` by its bits.

    >>> str(level("8").activation), str(level("8").grad_activation), level("fp32").activation
    ('e4m3 tensor', 'e5m2 tensor', None)
    """
    if isinstance(text, Level):
        return text
    named = str(text).strip().lower()
    forward, _, backward = _BY_BITS.get(named, named).partition("+")
    first, second = _quantizer(forward), _quantizer(backward or forward)
    wide = first is None or first.target.bits >= _UNSCALED_BITS
    return Level(named, first, first, second, second if wide else _GRAD_WEIGHT)


def _quantizer(name: str) -> QuantizerSpec | None:
    if name == "fp32":
        return None
    target = get_format(name)
    if isinstance(target, BlockFormat) or target.bits >= _UNSCALED_BITS:
        return QuantizerSpec(target.name)
    # A float with a bias of its own is meant to do without a scale.
    if isinstance(target, FloatFormat) and "b" in target.name.removeprefix("bf"):
        return QuantizerSpec(target.name)
    return QuantizerSpec(target.name, scale="tensor")


_HARDWARE = (("bf16", "e4m3+e5m2"), ("bf16", "mxfp8"))
#: Sets of formats by name.
FORMATS: Mapping[str, Formats] = {
    "paper": PAPER,
    **{"/".join(names): Formats("/".join(names), tuple(map(level, names))) for names in _HARDWARE},
}


def formats_of(
    formats: str | Formats | None = None,
    levels: Sequence[str | Level] | None = None,
    low: str | Level | None = None,
    high: str | Level | None = None,
) -> Formats:
    """The set that was asked for: by its name, as a list of levels, or as its lowest and its highest."""
    if levels is not None and (low is not None or high is not None):
        raise PlanError("levels say which is low and which is high: give levels, or low and high.")
    if isinstance(formats, Formats):
        return formats
    if formats is not None and (levels is not None or low is not None or high is not None):
        raise PlanError("formats name the levels: give formats, or levels, or low and high.")
    if levels is None and low is None and high is None:
        return _named(formats or PAPER.name)
    if levels is None:
        levels = (PAPER.levels[0] if high is None else high, PAPER.levels[-1] if low is None else low)
    chosen = tuple(map(level, levels))
    wants = any(_has_no_scale(each.grad_activation) for each in chosen)
    return Formats("/".join(each.name for each in chosen), chosen, wants_loss_scale=wants)


def _has_no_scale(spec: QuantizerSpec | None) -> bool:
    """Whether small values are lost in a narrow format, for nothing brings them into its range."""
    if spec is None or spec.scale is not None or isinstance(spec.target, BlockFormat):
        return False
    return spec.target.bits < _UNSCALED_BITS


def _named(name: str) -> Formats:
    if name in FORMATS:
        return FORMATS[name]
    if "/" in name:
        return formats_of(levels=name.split("/"))
    raise PlanError(
        f"there are no formats {name!r}; {nearest_names(name, FORMATS)} (Levels of your own are given as bf16/8/4.)"
    )


# --- In which order groups are given a lower precision: a list of moves, of which a cut makes an assignment


ORDERS = ("largest", "smallest", "random", "sensitivity")


@dataclass(frozen=True)
class Move:
    """A group goes down to a level."""

    group: int
    level: int


def moves_of(order: str, groups: Sequence[Group], lowest: int, seed: int = 0) -> list[Move]:
    """All moves, level by level: every group goes down to the first, then every group to the next.

    >>> groups = [Group(0, "input", 5, 1), Group(1, "a/linear.0", 9, 1), Group(2, "b/linear.0", 9, 1)]
    >>> [move.group for move in moves_of("largest", groups, 1)]
    [1, 2, 0]
    """
    require_order(order)
    numbers = [group.number for group in groups]
    sizes = {group.number: group.size for group in groups}
    if order == "largest":
        numbers.sort(key=lambda number: (-sizes[number], number))
    elif order == "smallest":
        numbers.sort(key=lambda number: (sizes[number], number))
    elif order == "random":
        random.Random(seed).shuffle(numbers)
    else:
        raise PlanError("the order sensitivity needs the damage of every move, which a probe measures.")
    return [Move(number, level) for level in range(1, lowest + 1) for number in numbers]


def moves_by_damage(damages: Mapping[Move, float], savings: Mapping[Move, float]) -> list[Move]:
    """Least damage per byte saved first. A group goes down level by level, so a move waits for the one before it.

    :param damages: of having made the move; what a further one adds is the difference.

    >>> moves = [Move(0, 1), Move(1, 1)]
    >>> moves_by_damage(dict(zip(moves, (3.0, 1.0))), dict.fromkeys(moves, 2.0))[0]
    Move(group=1, level=1)
    """
    waiting = sorted(damages, key=lambda move: (move.level, move.group))
    ordered: list[Move] = []
    reached: dict[int, int] = {}
    while waiting:
        ready = [move for move in waiting if move.level == reached.get(move.group, 0) + 1]
        best = min(ready, key=lambda move: (_added(move, damages) / max(savings[move], 1.0), move.level, move.group))
        ordered.append(best)
        reached[best.group] = best.level
        waiting.remove(best)
    return ordered


def _added(move: Move, damages: Mapping[Move, float]) -> float:
    before = damages.get(Move(move.group, move.level - 1), 0.0)
    return max(damages[move] - before, 0.0) if before < damages[move] else 0.0


def require_order(order: str) -> None:
    if order not in ORDERS:
        raise PlanError(f"there is no order {order!r}; {nearest_names(order, ORDERS)}")
