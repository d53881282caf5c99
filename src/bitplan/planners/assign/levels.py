"""Precision levels, named sets of them, and the order in which groups are demoted.

A level has four quantizers, one for each role. A *set of formats* is two or more levels, the place where gradients are
rounded, and whether the loss is decomposed, so that its log-softmax is rounded as well.

==================  ===========================================================================================
``paper``           FP(6,9,0) / FP(4,3,4) with FP(5,2,0) for gradients (Lee, Sharma & Aiken 2023, arXiv
                    2301.13464): no scales, ties away from zero, forward overflow saturates and backward overflow
                    becomes infinity, each branch of a gradient is rounded separately, evaluation uses master
                    weights. Needs a loss scale.
``bf16/e4m3+e5m2``  BF16 / FP8 with a scale per tensor
``bf16/mxfp8``      BF16 / MXFP8: blocks of 32 values share a power-of-two scale
==================  ===========================================================================================

A level's name is one or two formats, ``forward+backward``, or a number of bits.
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

#: Formats for a number of bits. With 6 bits or fewer, one scale for a whole tensor leaves too little range.
_BY_BITS = {"32": "fp32", "16": "bf16", "8": "e4m3+e5m2", "6": "mxfp6+mxfp6e3m2", "4": "mxfp4"}
#: Formats of at least this many bits need no scale.
_UNSCALED_BITS = 16
#: Parameter gradients are read once, by the optimizer, and are small compared with activations: 16 bits.
_GRAD_WEIGHT = QuantizerSpec("bf16")


@dataclass(frozen=True)
class Level:
    """The quantizers of the four roles at one precision; None: not rounded."""

    name: str
    weight: QuantizerSpec | None
    activation: QuantizerSpec | None
    grad_activation: QuantizerSpec | None
    grad_weight: QuantizerSpec | None

    def bits(self, role: str) -> float:
        """Bits of a stored value, with its share of the block scale; 32 if it is not rounded."""
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
    """A set of formats: levels from the highest precision down, and how they are used."""

    name: str
    levels: tuple[Level, ...]
    grad_at: GradAt = "producer"
    #: Whether a cross-entropy is decomposed, so that its log-softmax is rounded too.
    decompose_loss: bool = False
    #: Whether gradients are unscaled in a narrow format, so that the loss has to be scaled.
    needs_loss_scale: bool = False

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
        """The index of the lowest level."""
        return len(self.levels) - 1

    def gain(self, level: int) -> float:
        """The saving of a level relative to that of the lowest: 0 at the highest level, 1 at the lowest."""
        high, low = self.levels[0].nominal, self.levels[-1].nominal
        return (high - self.levels[level].nominal) / (high - low)


def _paper_level(name: str, forward: str, backward: str) -> Level:
    rounded = QuantizerSpec(forward, rounding="nearest-away", overflow="saturate")
    return Level(
        name,
        weight=replace(rounded, eval="off"),
        activation=rounded,
        grad_activation=QuantizerSpec(backward, rounding="nearest-away", overflow="special"),
        grad_weight=QuantizerSpec("e6m9b0", rounding="nearest-away", overflow="special"),
    )


PAPER = Formats(
    "paper",
    (_paper_level("FP(6,9,0)", "e6m9b0", "e6m9b0"), _paper_level("FP(4,3,4)+FP(5,2,0)", "e4m3b4", "e5m2b0")),
    grad_at="consumer",
    decompose_loss=True,
    needs_loss_scale=True,
)


def parse_level(text: str | Level) -> Level:
    """Parse ``e4m3+e5m2`` (forward and backward), ``mxfp8`` (both) or ``8`` (a number of bits).

    >>> str(parse_level("8").activation), str(parse_level("8").grad_activation), parse_level("fp32").activation
    ('e4m3 tensor', 'e5m2 tensor', None)
    """
    if isinstance(text, Level):
        return text
    name = str(text).strip().lower()
    forward, _, backward = _BY_BITS.get(name, name).partition("+")
    first, second = _make_quantizer(forward), _make_quantizer(backward or forward)
    is_wide = first is None or first.target.bits >= _UNSCALED_BITS
    return Level(name, first, first, second, second if is_wide else _GRAD_WEIGHT)


def _make_quantizer(name: str) -> QuantizerSpec | None:
    if name == "fp32":
        return None
    target = get_format(name)
    if isinstance(target, BlockFormat) or target.bits >= _UNSCALED_BITS:
        return QuantizerSpec(target.name)
    # Float formats with an explicit bias are meant to be used without a scale.
    if isinstance(target, FloatFormat) and "b" in target.name.removeprefix("bf"):
        return QuantizerSpec(target.name)
    return QuantizerSpec(target.name, scale="tensor")


_HARDWARE = (("bf16", "e4m3+e5m2"), ("bf16", "mxfp8"))
#: Sets of formats by name.
FORMATS: Mapping[str, Formats] = {
    "paper": PAPER,
    **{"/".join(names): Formats("/".join(names), tuple(map(parse_level, names))) for names in _HARDWARE},
}


def resolve_formats(
    formats: str | Formats | None = None,
    levels: Sequence[str | Level] | None = None,
    low: str | Level | None = None,
    high: str | Level | None = None,
) -> Formats:
    """Resolve a set of formats: by name, as a list of levels, or by its lowest and highest level."""
    if levels is not None and (low is not None or high is not None):
        raise PlanError("levels say which is low and which is high: give levels, or low and high.")
    if isinstance(formats, Formats):
        return formats
    if formats is not None and (levels is not None or low is not None or high is not None):
        raise PlanError("formats name the levels: give formats, or levels, or low and high.")
    if levels is None and low is None and high is None:
        return _formats_by_name(formats or PAPER.name)
    if levels is None:
        levels = (PAPER.levels[0] if high is None else high, PAPER.levels[-1] if low is None else low)
    parsed = tuple(map(parse_level, levels))
    needs_loss_scale = any(_is_narrow_unscaled(level.grad_activation) for level in parsed)
    return Formats("/".join(level.name for level in parsed), parsed, needs_loss_scale=needs_loss_scale)


def is_scaled(spec: QuantizerSpec) -> bool:
    return spec.scale is not None or isinstance(spec.target, BlockFormat)


def _is_narrow_unscaled(spec: QuantizerSpec | None) -> bool:
    """Whether small values underflow, because a narrow format has no scale."""
    return spec is not None and not is_scaled(spec) and spec.target.bits < _UNSCALED_BITS


def _formats_by_name(name: str) -> Formats:
    if name in FORMATS:
        return FORMATS[name]
    if "/" in name:
        return resolve_formats(levels=name.split("/"))
    raise PlanError(
        f"there are no formats {name!r}; {nearest_names(name, FORMATS)} (Levels of your own are given as bf16/8/4.)"
    )


# --- Moves: the order of demotion. An assignment makes the first moves of the list.


ORDERS = ("largest", "smallest", "random", "sensitivity")


@dataclass(frozen=True)
class Move:
    """Demote a group to a level."""

    group: int
    level: int


def order_moves(order: str, groups: Sequence[Group], lowest: int, seed: int = 0) -> list[Move]:
    """List all moves, level by level: every group to the first lower level, then every group to the next.

    >>> groups = [Group(0, "input", 5, 1), Group(1, "a/linear.0", 9, 1), Group(2, "b/linear.0", 9, 1)]
    >>> [move.group for move in order_moves("largest", groups, 1)]
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
        raise PlanError("the order sensitivity needs a measured sensitivity for every move.")
    return [Move(number, level) for level in range(1, lowest + 1) for number in numbers]


def order_moves_by_sensitivity(sensitivities: Mapping[Move, float], savings: Mapping[Move, float]) -> list[Move]:
    """Sort moves by gradient error for each byte saved. A group is demoted level by level.

    :param sensitivities: the gradient error of a group at a level; a further move adds the difference.

    >>> moves = [Move(0, 1), Move(1, 1)]
    >>> order_moves_by_sensitivity(dict(zip(moves, (3.0, 1.0))), dict.fromkeys(moves, 2.0))[0]
    Move(group=1, level=1)
    """
    waiting = sorted(sensitivities, key=lambda move: (move.level, move.group))
    ordered: list[Move] = []
    reached: dict[int, int] = {}
    while waiting:
        ready = [move for move in waiting if move.level == reached.get(move.group, 0) + 1]
        best = min(
            ready,
            key=lambda move: (_added_error(move, sensitivities) / max(savings[move], 1.0), move.level, move.group),
        )
        ordered.append(best)
        reached[best.group] = best.level
        waiting.remove(best)
    return ordered


def _added_error(move: Move, sensitivities: Mapping[Move, float]) -> float:
    before = sensitivities.get(Move(move.group, move.level - 1), 0.0)
    return max(sensitivities[move] - before, 0.0) if before < sensitivities[move] else 0.0


def require_order(order: str) -> None:
    if order not in ORDERS:
        raise PlanError(f"there is no order {order!r}; {nearest_names(order, ORDERS)}")
