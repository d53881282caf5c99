"""Quantizers and rules as a plan writes them: frozen values that check themselves when they are made.

A :class:`QuantizerSpec` is words, not a function: it says ``scale: channel`` and leaves open which axis that is,
because the role decides (a weight's output channels, an activation's features). :meth:`QuantizerSpec.resolve` turns
it into a :class:`bitplan.numerics.quantizer.Quantizer` once the axis is known.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from bitplan.errors import BitplanError, FormatError, PlanError, nearest_names
from bitplan.numerics.formats import (
    NAMED,
    BlockFormat,
    FloatFormat,
    Format,
    IntFormat,
    Overflow,
    get_format,
    registered_format,
)
from bitplan.numerics.mutable_format import MutableFormat
from bitplan.numerics.quantizer import Quantizer, make_quantizer
from bitplan.numerics.reference import Rounding
from bitplan.numerics.rotation import ROTATION_SIZES
from bitplan.numerics.scaling import LONGEST_HISTORY, MOST_MARGIN, BlockShape, Granularity, Range, as_pair
from bitplan.plans.code import CodeReference
from bitplan.plans.fields import Kind, Record, Schema
from bitplan.plans.frozen import FrozenUse
from bitplan.plans.match import CONFLICTS, KEYS, NOT, SELECTIONS, GradAt, compile_match
from bitplan.plans.schedules import Schedule
from bitplan.plans.tree import Node

if TYPE_CHECKING:
    from bitplan.plans.quantizer_use import Use


# --- Promotion: a tensor that its format serves badly gets a better one, alone, for the rest of the run


#: What can be watched, and what is reached when a tensor is promoted.
MEASURES = ("overflow", "underflow", "error")
#: The paper's share of values that overflow.
DEFAULT_OVERFLOW = 0.01


@dataclass(frozen=True)
class Promotion:
    """``promote: {to: high, underflow: 0.05}``: the sign to watch, and what the tensor becomes.

    >>> Promotion("high").measure, Promotion("high").limit
    ('overflow', 0.01)
    """

    #: The quantizer of a promoted tensor, or its name; ``keep`` leaves it alone from then on.
    to: Use
    #: Share of values at or over the format's overflow threshold.
    overflow: float | None = None
    #: Share of values that are not zero and become zero.
    underflow: float | None = None
    #: Root of (mean squared error / mean square).
    error: float | None = None
    #: What `to` stands for, alone in a tuple, once the plan has looked it up.
    found: tuple[QuantizerSpec | None, ...] = ()

    def __post_init__(self) -> None:
        set_measures = [name for name in MEASURES if getattr(self, name) is not None]
        if len(set_measures) > 1:
            raise PlanError(f"a promotion watches one sign, not {' and '.join(set_measures)}: drop all but one.")
        if not set_measures:
            object.__setattr__(self, "overflow", DEFAULT_OVERFLOW)
        if isinstance(self.limit, bool) or not isinstance(self.limit, (int, float)) or not 0 < self.limit <= 1:
            raise PlanError(f"{self.measure} is a share above 0, at most 1, not {self.limit!r}.")
        object.__setattr__(self, self.measure, float(self.limit))

    @property
    def measure(self) -> str:
        """The sign that is watched: one of :data:`MEASURES`."""
        return next(name for name in MEASURES if getattr(self, name) is not None)

    @property
    def limit(self) -> float:
        """A tensor is promoted where the sign reaches this."""
        limit: float = getattr(self, self.measure)
        return limit

    @property
    def target(self) -> QuantizerSpec | None:
        """What the tensor becomes; None where it is left alone from then on."""
        if not self.found:
            raise PlanError(f"what {self.to!r} stands for is not looked up yet: ask the plan for its quantizers.")
        return self.found[0]

    def require_can_fire(self, *, scaled: bool) -> None:
        """Raise where the sign can never be seen."""
        if self.measure == "overflow" and scaled:
            raise PlanError(
                "a scale that follows the data leaves nothing to overflow, so that this promotion could never fire: "
                "watch underflow or error, such as promote: {to: bf16, underflow: 0.05}."
            )

    def looked_up(self, low: QuantizerSpec, target: QuantizerSpec | None) -> Promotion:
        """The same with what `to` stands for; `low` is the quantizer that is promoted."""
        if target is not None:
            if target.promote is not None:
                raise PlanError("a promoted tensor is not promoted again: promote to a quantizer without promote.")
            if target.function is not None:
                raise PlanError("a promoted tensor is rounded by a format: promote to a quantizer without function.")
            if target.history is not None:
                raise PlanError("a promoted tensor has no past: promote to a quantizer without history.")
            if isinstance(target.bits, str) or target.moved_by is not None:
                raise PlanError("a promoted tensor keeps its format: promote to a quantizer that follows no schedule.")
            if not isinstance(low.bits, str) and low.target.bits_per_value > target.target.bits_per_value:
                raise PlanError(
                    f"{target.target.name} has fewer bits than {low.target.name}: promote to a quantizer with more."
                )
            if replace(low, promote=None) == target:
                raise PlanError("this promotes to the same quantizer: name another one.")
        return replace(self, found=(target,))

    def to_data(self) -> dict[str, Any]:
        """As a plan writes it."""
        to = self.to if isinstance(self.to, str) else self.to.to_data()
        return {"to": to, self.measure: self.limit}

    def __str__(self) -> str:
        to = "unrounded" if self.found == (None,) else str(self.found[0] if self.found else self.to)
        return f"to {to} at {self.measure} {self.limit:g}"


# --- What a plan says of the optimizer: the bits that its state, Adam's two moments, is kept in between steps


#: What state can be kept in, as torchao's optimizers serve it.
STATE_FORMATS = ("int8", "int4", "e4m3")


@dataclass(frozen=True)
class OptimizerRule:
    """``optimizer: {state: int8}``.

    >>> OptimizerRule("int3")
    Traceback (most recent call last):
    bitplan.errors.PlanError: optimizer state can be kept as int8, int4 or e4m3 (or keep), not as 'int3'.
    """

    #: One of :data:`STATE_FORMATS`; ``keep`` leaves the state alone, whatever an extended plan said.
    state: str
    #: File, line and field.
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.state not in (*STATE_FORMATS, KEEP):
            *others, last = STATE_FORMATS
            raise PlanError(
                f"optimizer state can be kept as {', '.join(others)} or {last} (or {KEEP}), not as {self.state!r}."
            )

    def to_data(self) -> dict[str, str]:
        return {"state": self.state}


@dataclass(frozen=True)
class _State(Kind[str]):
    def read(self, node: Node) -> str:
        if not isinstance(node.value, str):
            raise node.error(f"this must be one of {', '.join((*STATE_FORMATS, KEEP))}, not {node.describe()}.")
        try:
            return OptimizerRule(node.value).state
        except PlanError as error:
            raise node.error(str(error)) from None

    def shape(self) -> Schema:
        return {"enum": [*STATE_FORMATS, KEEP]}


OPTIMIZER = Record(
    "The optimizer's state.",
    {"state": _State("What the moments of Adam and AdamW are kept in between steps; keep: in full.")},
    required=("state",),
)


@dataclass(frozen=True)
class Optimizing(Kind[OptimizerRule]):
    """The mapping under the plan's key ``optimizer``."""

    def read(self, node: Node) -> OptimizerRule:
        return OptimizerRule(OPTIMIZER.read(node)["state"], where=node.where)

    def shape(self) -> Schema:
        return OPTIMIZER.shape()


#: What evaluation does: the same as training; ranges from a running mean (EMA) of those seen in training; no rounding;
#: the highest bits that its schedule ever gives it (its only ones, where none moves it).
Evaluation = Literal["same", "ema", "off", "top"]

#: Formats that leave their width to ``bits``, so that a schedule can move it.
FAMILIES: tuple[str, ...] = ("int", "float")
#: A float of a family has as many exponent bits as float32, unless it says otherwise: 16 bits are then bf16.
DEFAULT_EXPONENT_BITS = 8

#: In the place of a quantizer: leave this place alone, whatever earlier rules said.
KEEP = "keep"

QUANTIZER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
#: Texts that want to be a format's name, whether or not such a format exists.
LIKE_A_FORMAT = "|".join([*NAMED, "e[0-9]+m[0-9]+.*", "u?int[0-9]+", "mx(fp|int)[0-9]+.*"])
#: What cannot name a quantizer, because it stands, or may one day stand, for something else.
RESERVED_NAMES = "|".join([KEEP, *FAMILIES, LIKE_A_FORMAT])


@dataclass(frozen=True)
class QuantizerSpec:
    """What a plan says about rounding one tensor.

    >>> QuantizerSpec("int8", scale="tensor").to_data()
    {'format': 'int8', 'scale': 'tensor'}
    """

    #: A format's name, printed canonically; or a family, ``int`` or ``float``, whose width is in `bits`.
    format: str
    #: All bits of a value, sign included, or the name of the schedule that moves them; families only.
    bits: int | str | None = None
    #: Of the family ``float``: how many of the bits are the exponent's (8 if not given).
    exponent_bits: int | None = None
    scale: Granularity | None = None
    axis: int | None = None
    #: How many neighbours share a scale: along one axis, or rows and columns of the operand seen as a matrix.
    block: BlockShape | None = None
    range: Range | None = None
    power_of_two: bool = False
    #: Both operands of a product are rotated before they are rounded, rotate_size values of the summed axis together.
    rotate: Literal["hadamard"] | None = None
    rotate_size: int = 16
    #: The scale comes from the largest magnitudes of so many past steps rather than from the tensor itself.
    history: int | None = None
    #: It makes room for 2^margin times as much.
    margin: int = 0
    rounding: Rounding = "nearest"
    overflow: Overflow | None = None
    eval: Evaluation = "same"
    #: When a tensor gets a better quantizer, and which.
    promote: Promotion | None = None
    #: Code of the user's own that rounds instead, called with the tensor and this quantizer.
    function: CodeReference | None = None
    #: What moves the bits, once the plan has looked it up; `bits` are then the highest.
    moved_by: Schedule | None = None
    #: The most bits it ever has in the run, where `bits` are those of a moment.
    top_bits: int | None = None

    def __post_init__(self) -> None:
        if is_family(self.format):
            object.__setattr__(self, "format", self.format.strip().lower())
            self._check_family()
        else:
            if self.bits is not None or self.exponent_bits is not None:
                raise PlanError(f"{self.format!r} fixes its bits: drop bits, or write format: int or format: float.")
            try:
                object.__setattr__(self, "format", get_format(self.format).name)
            except ValueError as error:  # a FormatError, or numbers of thousands of digits
                raise PlanError(str(error)) from None
        if self.eval not in get_args(Evaluation):
            raise PlanError(f"there is no eval {self.eval!r}; {nearest_names(str(self.eval), get_args(Evaluation))}")
        if self.eval == "ema" and self.scale != "tensor":
            raise PlanError("eval: ema averages the range of a whole tensor: it needs scale: tensor.")
        self._check_block()
        self._check_rotation()
        self._check_history()
        if self.function is not None:
            object.__setattr__(self, "function", CodeReference.of(self.function))
            if self.promote is not None:
                raise PlanError("what a function returns is not watched for a promotion: drop promote or function.")
        if self.promote is not None:
            self.promote.require_can_fire(scaled=self.scale is not None or self._is_block)
        for width in self._widths():
            try:
                width.resolve(axis_default=0)
            except BitplanError as error:
                raise PlanError(str(error)) from None

    def _check_block(self) -> None:
        object.__setattr__(self, "block", as_pair(self.block))
        if isinstance(self.block, tuple) and self.axis is not None:
            raise PlanError("a block of rows and columns lies along the summed axis and the other one: drop axis.")

    def _check_rotation(self) -> None:
        if self.rotate not in (None, "hadamard"):
            raise PlanError(f"rotate is hadamard, or not given; not {self.rotate!r}.")
        if self.rotate is None:
            if self.rotate_size != 16:
                raise PlanError("rotate_size is the size of a rotation: give rotate: hadamard, too.")
            return
        if self.rotate_size not in ROTATION_SIZES:
            raise PlanError(
                f"rotate_size is a power of two from {ROTATION_SIZES[0]} to {ROTATION_SIZES[-1]}, "
                f"not {self.rotate_size!r}."
            )
        if self.promote is not None or self.function is not None:
            other = "function" if self.promote is None else "promote"
            raise PlanError(
                f"rotate applies to both operands of a product alike, whatever one of them needs: drop {other}."
            )

    def _check_history(self) -> None:
        if self.history is None:
            if self.margin:
                raise PlanError("margin makes room beyond the past's largest magnitudes: give history, too.")
            return
        if not 1 <= self.history <= LONGEST_HISTORY:
            raise PlanError(f"history is 1 to {LONGEST_HISTORY} steps, not {self.history}.")
        if not 0 <= self.margin <= MOST_MARGIN:
            raise PlanError(f"margin is 0 to {MOST_MARGIN}, not {self.margin}.")
        if self.scale != "tensor":
            raise PlanError("history remembers the largest magnitude of a whole tensor: it needs scale: tensor.")
        is_affine = not is_family(self.format) and getattr(self.target, "affine", False)
        if self.range == "minmax" or is_affine:
            raise PlanError("history remembers largest magnitudes, not ranges: it needs range: amax.")
        if self.eval == "ema":
            raise PlanError("history and eval: ema both decide the range of evaluation: drop one of them.")

    @property
    def _is_block(self) -> bool:
        return self.format not in FAMILIES and isinstance(self.target, BlockFormat)

    def _widths(self) -> list[QuantizerSpec]:
        """The quantizer with every width that it may have; with any, where its schedule is not known yet."""
        if isinstance(self.bits, str):
            exponent_bits = DEFAULT_EXPONENT_BITS if self.exponent_bits is None else self.exponent_bits
            return [self.with_bits(8 if self.format == "int" else exponent_bits + 3)]
        if self.moved_by is not None:
            return [self.with_bits(bits) for bits in range(self.moved_by.lowest, self.moved_by.highest + 1)]
        return [self]

    def with_bits(self, bits: int, top_bits: int | None = None) -> QuantizerSpec:
        """The same quantizer at one width; `top_bits` are the most that it ever has, if it has others."""
        return replace(self, bits=bits, moved_by=None, top_bits=top_bits)

    @property
    def without_width(self) -> tuple[Any, ...]:
        """What two quantizers of one kind have in common that differ only in their widths, or in what moves these."""
        others = (f.name for f in fields(self) if f.name not in ("format", "bits", "moved_by", "top_bits"))
        return self.stored(self.target).kind, *(getattr(self, name) for name in others)

    def at_the_top(self) -> QuantizerSpec | None:
        """What ``eval: top`` evaluates with, where that is another width than the one of the moment."""
        highest = self.top_bits if self.moved_by is None else self.moved_by.highest
        return None if highest is None else self.with_bits(highest)

    def follows(self, schedule: Schedule) -> QuantizerSpec:
        """The same quantizer with its bits moved by `schedule`."""
        return replace(self, bits=schedule.highest, moved_by=schedule)

    def _check_family(self) -> None:
        if self.bits is None:
            raise PlanError(f"format: {self.format} needs bits, such as bits: {16 if self.format == 'float' else 8}.")
        if self.format == "int" and self.exponent_bits is not None:
            raise PlanError("exponent_bits belong to format: float, not to format: int.")

    @property
    def target(self) -> Format:
        """The number format itself.

        >>> QuantizerSpec("float", bits=16).target.name, QuantizerSpec("float", bits=8, exponent_bits=4).target.name
        ('bf16', 'e4m3')
        """
        if self.format not in FAMILIES:
            return get_format(self.format)
        if not isinstance(self.bits, int):
            raise PlanError(f"the schedule {self.bits!r} is not looked up yet: ask the plan for its quantizers.")
        if self.format == "int":
            return get_format(f"int{max(self.bits, 0)}")
        exponent_bits = DEFAULT_EXPONENT_BITS if self.exponent_bits is None else self.exponent_bits
        mantissa_bits = self.bits - 1 - exponent_bits
        if exponent_bits < 1 or mantissa_bits < 0:
            least = 1 + max(exponent_bits, 1)
            raise FormatError(
                f"a float with {exponent_bits} exponent bits has {least} to {least + 23} bits, not {self.bits}: "
                f"change bits or exponent_bits."
            )
        return get_format(f"e{exponent_bits}m{mantissa_bits}")

    def holds_every_value_of(self, dtype: torch.dtype) -> bool:
        """Whether every value of a dtype is one of the format's, so that rounding changes nothing.

        >>> [QuantizerSpec(name).holds_every_value_of(torch.float32) for name in ("fp32", "bf16")]
        [True, False]
        """
        if self.scale is not None or self.bits is not None or self.overflow == "saturate":
            return False
        if self.function is not None or self.rotate is not None:
            return False
        target, info = self.target, torch.finfo(dtype)
        return (
            isinstance(target, FloatFormat)
            and target.specials == "ieee"
            and target.epsilon <= info.eps
            and target.max >= info.max
            and target.min_subnormal <= info.smallest_normal * info.eps
        )

    @property
    def axis_meaning(self) -> Literal["kept", "summed"] | None:
        """Which axis :meth:`resolve` wants as its default.

        ``kept``: the one that has a scale per index (``scale: channel``). ``summed``: the one a product sums over,
        along which vectors and blocks lie. None: there is no axis to choose, or the plan names it.
        """
        if self.axis is not None:
            return None
        if isinstance(self.block, tuple):
            return "summed"
        if self.scale == "channel":
            return "kept"
        if self.scale is None:
            return "summed" if isinstance(self.target, BlockFormat) else None
        return "summed" if self.scale in ("vector", "block") else None

    def stored(self, target: Format) -> Format:
        """What `target` is under this quantizer's range: min-max counts the integers from zero."""
        if isinstance(target, IntFormat) and self.range == "minmax":
            return IntFormat(target.bits, affine=True)
        return target

    def with_target(self, target: Format) -> QuantizerSpec:
        """The same quantizer with another number format."""
        return replace(self, format=target.name, bits=None, exponent_bits=None, moved_by=None, top_bits=None)

    def live(self) -> MutableFormat:
        """The format as parameters that may change while a run goes on."""
        return MutableFormat(self.stored(self.target), overflow=self.overflow)

    def resolve(
        self, *, axis_default: int | tuple[int, int] | None = None, live: MutableFormat | None = None
    ) -> Quantizer:
        """The quantizer; `axis_default` is the axis where the plan names none (see :attr:`axis_meaning`).

        A block of rows and columns takes the axes of both, and without them the last two.

        :param live: the format as parameters in a tensor, in place of constants.
        """
        axis = axis_default if self.axis_meaning else self.axis
        return make_quantizer(
            self.target if live is None else live,
            self.rounding,
            self.scale,
            axis=None if isinstance(self.block, tuple) and not isinstance(axis, tuple) else axis,
            block=self.block,
            range=self.range,
            power_of_two=self.power_of_two,
            overflow=self.overflow if live is None else None,
        )

    def to_data(self) -> str | dict[str, Any]:
        """As a plan writes it: a mapping without what is default, or only the format's name."""
        non_defaults = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        non_defaults = {key: value for key, value in non_defaults.items() if key not in ("moved_by", "top_bits")}
        if isinstance(self.block, tuple):
            non_defaults["block"] = list(self.block)
        if self.promote is not None:
            non_defaults["promote"] = self.promote.to_data()
        if self.function is not None:
            non_defaults["function"] = self.function.name
        return self.format if set(non_defaults) == {"format"} else non_defaults

    def __str__(self) -> str:
        """One line for tables, such as ``int8 tensor minmax stochastic`` or ``int CR 3-8 x8 channel minmax``."""
        parts: list[str] = [self._width_words()]
        block = "x".join(map(str, self.block)) if isinstance(self.block, tuple) else self.block
        for value in (self.scale, block, self.range, None if self.rounding == "nearest" else self.rounding):
            parts += [] if value is None else [str(value)]
        parts += [] if self.axis is None else [f"axis={self.axis}"]
        parts += ["power-of-two"] if self.power_of_two else []
        parts += [f"{self.rotate} {self.rotate_size}"] if self.rotate else []
        parts += [f"of {self.history} steps"] if self.history is not None else []
        parts += [f"margin={self.margin}"] if self.margin else []
        parts += [self.overflow] if self.overflow else []
        parts += [f"eval={self.eval}"] if self.eval != "same" else []
        parts += [f"(promoted {self.promote})"] if self.promote is not None else []
        parts += [f"by {self.function}"] if self.function is not None else []
        return " ".join(parts)

    def _width_words(self) -> str:
        if self.moved_by is None:
            return f"{self.format} {self.bits}" if isinstance(self.bits, str) else self.target.name
        family = self.format if self.format == "int" else f"e{self.exponent_bits or DEFAULT_EXPONENT_BITS} float"
        return f"{family} {self.moved_by}"


def is_family(text: object) -> bool:
    """Whether a text names formats of any width."""
    return isinstance(text, str) and text.strip().lower() in FAMILIES


def check_name(name: str, what: str = "schedule") -> None:
    """Names are plain words."""
    if not QUANTIZER_NAME.fullmatch(name):
        raise PlanError(f"{name!r} cannot name a {what}: use letters, digits, - and _, and start with a letter or _.")


def check_quantizer_name(name: str) -> None:
    """A name must not be mistaken for a format, now or when formats grow."""
    check_name(name, "quantizer")
    is_registered = registered_format(name.strip().lower()) is not None
    if is_registered or re.fullmatch(RESERVED_NAMES, name, re.IGNORECASE):
        kind = (
            "a number format"
            if is_registered or re.fullmatch(LIKE_A_FORMAT, name, re.IGNORECASE)
            else "something else in plans"
        )
        raise PlanError(f"{name!r} is the name of {kind} and cannot name a quantizer: choose another name.")


def any_case(pattern: str) -> str:
    """The pattern as JSON Schema wants it: for whole texts, capitals or not, perhaps with spaces around.

    >>> any_case("bf[0-9]+")
    '^\\\\s*([bB][fF][0-9]+)\\\\s*$'
    """
    either = re.sub("[a-z]", lambda letter: f"[{letter[0]}{letter[0].upper()}]", pattern)
    return rf"^\s*({either})\s*$"


def is_format(text: str) -> bool:
    """Whether a text names a number format."""
    try:
        get_format(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Rule:
    """Which operations in which modules, and what is rounded there.

    >>> Rule(("layer1",), quantizers=(("x", QuantizerSpec("e4m3")),)).to_data()
    {'match': 'layer1', 'x': 'e4m3'}
    """

    match: tuple[str, ...]
    #: Nothing here means every operation.
    op: tuple[str, ...] = ()
    #: As written, shorthands and names unresolved; brought into the order of :data:`bitplan.plans.match.KEYS`.
    quantizers: tuple[tuple[str, Use], ...] = ()
    #: Where grad_activation rounds; None where the rule has no grad_activation.
    grad_at: GradAt | None = None
    keep: bool = False
    #: Whether it is an error that the rule matches nothing (a warning otherwise).
    strict: bool = True
    #: Whether constants (positions, rotary angles, ...) are rounded like activations.
    constants: bool = False
    #: What the tensor must be in the model's graph, all of it; see :data:`bitplan.plans.match.SELECTORS`.
    select: tuple[str, ...] = ()
    #: Bounds on the number of elements of the tensor.
    min_elements: int | None = None
    max_elements: int | None = None
    #: What weights that are not trained are stored in, or ``keep``; None: the rule says nothing of them.
    frozen: FrozenUse | None = None
    #: File, line and field, for messages.
    where: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.match:
            raise PlanError("match is empty: give a module path or a pattern; '*' is everything.")
        self._check_selection()
        compile_match(self)  # a broken regular expression is noticed now
        quantizers = dict(self.quantizers)
        for key in quantizers:
            if key not in KEYS:
                raise PlanError(f"there is no place {key!r} to round; {nearest_names(key, KEYS)}")
        if len(quantizers) != len(self.quantizers):
            raise PlanError("a place is given twice.")
        for first, second in CONFLICTS:
            if first in quantizers and second in quantizers:
                place = next(place for place in KEYS[first] if place in KEYS[second])
                raise PlanError(f"{first!r} and {second!r} both say what {place} gets: drop one of them.")
        if self.keep and quantizers:
            raise PlanError(
                f"keep: true leaves the place alone, so {next(iter(quantizers))!r} cannot be given beside it."
            )
        if self.keep and self.frozen is not None:
            raise PlanError("keep: true leaves frozen weights alone, so frozen cannot be given beside it.")
        if not self.keep and not quantizers and self.frozen is None:
            raise PlanError("the rule says nothing: give a quantizer for a role or slot, or keep: true.")
        if self.frozen is not None and self.has_selectors:
            raise PlanError("frozen weights are chosen by match: give frozen a rule without select or bounds.")
        if self.constants and self.keep:
            raise PlanError("keep: true leaves constants alone, so constants: true cannot be given beside it.")
        if "grad_activation" not in quantizers:
            if self.grad_at is not None:
                raise PlanError("grad_at says where grad_activation rounds: give grad_activation too.")
        elif self.grad_at is None:
            object.__setattr__(self, "grad_at", "producer")
        elif self.grad_at not in get_args(GradAt):
            raise PlanError(f"grad_at is 'producer' or 'consumer', not {self.grad_at!r}.")
        object.__setattr__(self, "quantizers", tuple((key, quantizers[key]) for key in KEYS if key in quantizers))

    @property
    def has_selectors(self) -> bool:
        """Whether it chooses tensors by what they are, which only the operations of a model tell."""
        return bool(self.select) or self.min_elements is not None or self.max_elements is not None

    @property
    def selection(self) -> str:
        """What the tensors must be, for messages."""
        bounds = {"min_elements": self.min_elements, "max_elements": self.max_elements}
        return ", ".join([*self.select, *(f"{key}: {bound}" for key, bound in bounds.items() if bound is not None)])

    def _check_selection(self) -> None:
        for name in self.select:
            if name not in SELECTIONS:
                raise PlanError(f"there is no selector {name!r}; {nearest_names(name, SELECTIONS)}")
            if f"{NOT}{name}" in self.select:
                raise PlanError(f"no tensor is both {name!r} and {NOT + name!r}: drop one of them.")
        if (self.min_elements or 0) > (self.max_elements or math.inf):
            raise PlanError(f"min_elements is {self.min_elements} and max_elements is {self.max_elements}: swap them.")

    def to_data(self) -> dict[str, Any]:
        """As a plan writes it, without what is default."""
        data: dict[str, Any] = {}
        if not self.has_selectors or self.match != ("*",):
            data["match"] = _one_or_list(self.match)
        if self.op:
            data["op"] = _one_or_list(self.op)
        if self.select:
            data["select"] = _one_or_list(self.select)
        for name in ("min_elements", "max_elements"):
            if getattr(self, name) is not None:
                data[name] = getattr(self, name)
        for key, use in self.quantizers:
            data[key] = use if isinstance(use, str) else use.to_data()
        if self.frozen is not None:
            data["frozen"] = self.frozen if isinstance(self.frozen, str) else self.frozen.to_data()
        if self.grad_at == "consumer":
            data["grad_at"] = self.grad_at
        if self.keep:
            data["keep"] = True
        if not self.strict:
            data["strict"] = False
        if self.constants:
            data["constants"] = True
        return data


def _one_or_list(texts: tuple[str, ...]) -> str | list[str]:
    return texts[0] if len(texts) == 1 else list(texts)
