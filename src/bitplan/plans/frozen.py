"""The key ``frozen`` of a rule: what weights that are not trained are stored in.

Such a weight is rounded once, when the plan is attached, and stays rounded: ``frozen`` is no quantizer of an operand,
and has no schedule, history or rounding mode.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

from bitplan.errors import BitplanError, PlanError, nearest_names
from bitplan.numerics.formats import NAMED, BlockFormat, CodebookFormat, Format, IntFormat, get_format
from bitplan.numerics.frozen_codec import FrozenCodec
from bitplan.plans.fields import Choice, Flag, Kind, Record, Schema, Text, Whole
from bitplan.plans.tree import Node

#: What shares a scale: the whole weight, a row (one output feature), a block of neighbours in a row.
FrozenScale = Literal["tensor", "channel", "block"]
#: The size of a block where a plan does not say: that of QLoRA.
DEFAULT_BLOCK = 64
LARGEST_BLOCK = 1 << 16

#: Leaves frozen weights as they are, whatever earlier rules said.
KEEP = "keep"


@dataclass(frozen=True)
class FrozenSpec:
    """``frozen: {format: nf4, scale: block, block: 64}``.

    Without a scale, FP8 has one for the tensor, int8 one for each channel, and smaller formats have blocks.

    >>> str(FrozenSpec("nf4")), str(FrozenSpec("e4m3")), str(FrozenSpec("mxfp4"))
    ('nf4 block 64', 'e4m3 tensor', 'mxfp4')
    """

    format: str
    scale: FrozenScale | None = None
    block: int | None = None
    #: Round block scales up to powers of two, which are stored as exponents.
    power_of_two: bool = False

    def __post_init__(self) -> None:
        try:
            target = get_format(self.format)
        except ValueError as error:
            raise PlanError(str(error)) from None
        object.__setattr__(self, "format", target.name)
        if self.scale not in (None, *get_args(FrozenScale)):
            names = get_args(FrozenScale)
            raise PlanError(f"frozen weights have no scale {self.scale!r}; {nearest_names(str(self.scale), names)}")
        if isinstance(target, BlockFormat):
            if self.scale is not None or self.block is not None or self.power_of_two:
                raise PlanError(f"{target.name} brings its own block scales: drop scale, block and power_of_two.")
        elif self.scale is None:
            if self.block is not None:
                raise PlanError("block belongs to scale: block: add it.")
            object.__setattr__(self, "scale", _default_scale(target))
        if self.scale == "block" and self.block is None:
            object.__setattr__(self, "block", DEFAULT_BLOCK)
        if self.block is not None and (self.scale != "block" or not 2 <= self.block <= LARGEST_BLOCK):
            raise PlanError(f"block is 2 to {LARGEST_BLOCK} neighbours that share a scale, with scale: block.")
        if self.power_of_two and self.scale != "block":
            raise PlanError("power_of_two is for block scales: give scale: block, too.")
        try:
            self.codec((2, LARGEST_BLOCK))
        except BitplanError as error:
            raise PlanError(str(error)) from None

    @cached_property
    def target(self) -> Format:
        return get_format(self.format)

    def codec(self, shape: tuple[int, ...]) -> FrozenCodec:
        """How a weight of that shape is stored."""
        return FrozenCodec(self.target, tuple(shape), self.scale, self.block, self.power_of_two)

    def to_data(self) -> str | dict[str, Any]:
        """As a plan writes it."""
        if self == FrozenSpec(self.format):
            return self.format
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) not in (None, False)}

    def __str__(self) -> str:
        parts = [self.format, self.scale, self.block, "power-of-two" if self.power_of_two else None]
        return " ".join(str(part) for part in parts if part is not None)


def _default_scale(target: Format) -> FrozenScale:
    if target.bits < 8:
        return "block"
    return "channel" if isinstance(target, (IntFormat, CodebookFormat)) else "tensor"


#: What stands for ``frozen`` in a rule; the text is :data:`KEEP`.
FrozenUse = FrozenSpec | str

FROZEN = Record(
    "How weights that are not trained are stored.",
    {
        "format": Text("A number format of up to 8 bits, such as nf4, int4, int8, e4m3 or mxfp4."),
        "scale": Choice(
            "What shares a scale: the weight, a row of it, or a block of neighbours.", get_args(FrozenScale)
        ),
        "block": Whole(f"How many neighbours share a scale ({DEFAULT_BLOCK} if not given).", 2, LARGEST_BLOCK),
        "power_of_two": Flag("Round block scales up to powers of two."),
    },
    required=("format",),
)


@dataclass(frozen=True)
class Freezing(Kind[FrozenUse]):
    """A format's name, ``keep``, or a mapping."""

    def read(self, node: Node) -> FrozenUse:
        try:
            if isinstance(node.value, str):
                return KEEP if node.value == KEEP else FrozenSpec(node.value)
            if not isinstance(node.value, dict):
                raise PlanError(f"frozen is a format name, keep or a mapping, not {node.describe()}.")
        except PlanError as error:
            raise node.error(str(error)) from None
        values = FROZEN.read(node)
        try:
            return FrozenSpec(**values)
        except PlanError as error:
            raise node.error(str(error)) from None

    def shape(self) -> Schema:
        names = [name for name in NAMED if _is_possible(name)]
        return {"anyOf": [{"type": "string", "minLength": 1, "examples": [KEEP, *names]}, {"$ref": "#/$defs/frozen"}]}


def _is_possible(name: str) -> bool:
    try:
        FrozenSpec(name)
    except PlanError:
        return False
    return True
