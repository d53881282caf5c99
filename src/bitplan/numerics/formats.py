"""Number formats as frozen values, and their names.

There are four kinds, all available by name through :func:`bitplan.get_format`:

* :class:`FloatFormat`: sign, exponent, mantissa. With ``X`` exponent bits, ``Y`` mantissa bits and an
  additional bias ``b`` a normal code means ``(-1)^s * 2^(E - (2^(X-1) - 1) - b) * (1 + f / 2^Y)``.
* :class:`IntFormat`: whole numbers, symmetric about zero (``int8``: -127..127) or unsigned and affine
  (``uint8``: 0..255 steps above a minimum).
* :class:`BlockFormat`: small elements sharing one stored scale per block: OCP MX and NVFP4.
* :class:`CodebookFormat`: any list of up to 256 numbers; NF4 is one, :func:`register_format` makes others.

This module has data and closed formulas only; :mod:`bitplan.numerics.rounding` rounds tensors to a format.

Sources: IEEE 754-2019; OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling
Formats (MX) 1.0; Lee, Sharma & Aiken 2023 (arXiv 2301.13464) for the additional bias; Dettmers et al.
2023 (QLoRA, arXiv 2305.14314, appendix E) for NF4.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, cast

import torch

from bitplan.compiler.tracing import is_traced
from bitplan.errors import FormatError, nearest_names
from bitplan.extensions import FORMATS, find_entry_point

#: Which codes of the all-ones exponent are not numbers: ``ieee`` infinities and NaNs, ``fn`` one NaN
#: per sign (OCP), ``none`` nothing: the binade is an ordinary one.
Specials = Literal["ieee", "fn", "none"]

#: What a value beyond the largest becomes: the largest (``saturate``), or infinity / NaN (``special``).
Overflow = Literal["saturate", "special"]

#: Formats of up to this many bits can list all their values.
MAX_LISTED_BITS = 10

#: Exponents stay well inside float64, so that every property below is exact as a Python float.
_MAX_EXTRA_BIAS = 256


@dataclass(frozen=True)
class FloatFormat:
    """A signed binary floating-point format.

    >>> FloatFormat(4, 3, specials="fn").max
    448.0
    >>> FloatFormat(4, 3, bias=4, specials="none").max
    30.0
    """

    exponent_bits: int
    mantissa_bits: int
    #: Additional bias b: every value is multiplied by 2^-b.
    bias: int = 0
    specials: Specials = "ieee"
    #: Without subnormals nothing lies between zero and :attr:`min_normal`.
    subnormals: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.exponent_bits <= 8 or not 0 <= self.mantissa_bits <= 23:
            raise FormatError(
                f"a float needs 1 to 8 exponent bits and 0 to 23 mantissa bits, not "
                f"{self.exponent_bits} and {self.mantissa_bits}: write a name such as e4m3."
            )
        if abs(self.bias) > _MAX_EXTRA_BIAS:
            raise FormatError(f"the additional bias must lie within +-{_MAX_EXTRA_BIAS}, not {self.bias}.")
        if self.specials not in ("ieee", "fn", "none"):
            raise FormatError(f"special codes are 'ieee', 'fn' or 'none', not {self.specials!r}.")
        if self.max <= 0:
            raise FormatError(
                f"e{self.exponent_bits}m{self.mantissa_bits} with {self.specials} special codes has no "
                f"value but zero: add a bit, or give it special codes 'none'."
            )

    @property
    def name(self) -> str:
        """The canonical name; ``bitplan.get_format(f.name) == f`` for every format."""

        return float_name(self)

    @property
    def kind(self) -> Literal["float"]:
        return "float"

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bits_per_value(self) -> float:
        return float(self.bits)

    @property
    def exponent_bias(self) -> int:
        """The whole bias: the standard 2^(X-1) - 1 and the additional one."""
        return (1 << (self.exponent_bits - 1)) - 1 + self.bias

    @property
    def min_exponent(self) -> int:
        """log2 of the smallest normal, and of the binade whose spacing the subnormals continue."""
        return 1 - self.exponent_bias

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)), but never under :attr:`min_exponent`."""
        return max(self.min_exponent, math.frexp(self.max)[1] - 1)

    @property
    def max(self) -> float:
        top_field = (1 << self.exponent_bits) - 1
        top_mantissa = (1 << self.mantissa_bits) - 1
        if self.specials == "ieee":
            top_field -= 1
        elif self.specials == "fn":
            if top_mantissa:
                top_mantissa -= 1
            else:  # with no mantissa bits the NaN takes the whole binade
                top_field -= 1
        return self._magnitude(top_field, top_mantissa)

    @property
    def overflow_threshold(self) -> float:
        """The magnitude from which on :attr:`max` is no longer the nearest value, if the grid continued beyond it."""
        return self.max + 2.0 ** (self.max_exponent - self.mantissa_bits - 1)

    @property
    def min_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value; equal to :attr:`min_normal` where there are no subnormals."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits) if self.subnormals else self.min_normal

    @property
    def epsilon(self) -> float:
        """Spacing relative to the binade: 2^-Y, the distance from 1 to the next value where 1 is in range."""
        return 2.0**-self.mantissa_bits

    @property
    def default_overflow(self) -> Overflow:
        """Saturate up to 8 bits and where no special code exists; IEEE's infinity in the wider formats."""
        return "saturate" if self.bits <= 8 or self.specials == "none" else "special"

    @property
    def overflow_value(self) -> float:
        """What ``overflow="special"`` yields: NaN where NaN is the only special code, else infinity.

        A format without special codes also yields infinity: it cannot be packed, but the
        backward pass of Lee et al. wants exactly this so that loss scaling notices.
        """
        return math.nan if self.specials == "fn" else math.inf

    @property
    def has_nan_code(self) -> bool:
        # IEEE codes with no mantissa bits have room for the infinities only.
        return self.specials == "fn" or (self.specials == "ieee" and self.mantissa_bits > 0)

    def decode(self, code: int) -> float:
        """The value of one code, sign bit on top. The definition that packing and tests follow."""
        sign = -1.0 if code >> (self.bits - 1) & 1 else 1.0
        field = code >> self.mantissa_bits & ((1 << self.exponent_bits) - 1)
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        if field == (1 << self.exponent_bits) - 1:
            if self.specials == "ieee":
                return math.nan if mantissa else sign * math.inf
            if self.specials == "fn" and mantissa == (1 << self.mantissa_bits) - 1:
                return math.nan
        return sign * self._magnitude(field, mantissa)

    def values(self) -> tuple[float, ...]:
        """Every finite value once, ascending (zero has one entry)."""
        return _listed(self.name, self.bits, [self.decode(code) for code in range(1 << min(self.bits, 11))])

    def _magnitude(self, field: int, mantissa: int) -> float:
        if field > 0:
            return 2.0 ** (field - self.exponent_bias) * (1.0 + mantissa / (1 << self.mantissa_bits))
        return self.min_normal * mantissa / (1 << self.mantissa_bits) if self.subnormals else 0.0

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class IntFormat:
    """Whole numbers. Symmetric: -(2^(n-1)-1) .. 2^(n-1)-1; affine: 0 .. 2^n - 1 steps above a minimum.

    The code -2^(n-1), unused by the symmetric range, stands for NaN when packed.
    """

    bits: int
    affine: bool = False

    def __post_init__(self) -> None:
        least = 1 if self.affine else 2
        if not least <= self.bits <= 16:
            sign = "unsigned affine" if self.affine else "symmetric"
            raise FormatError(f"a {sign} integer needs {least} to 16 bits, not {self.bits}.")

    @property
    def name(self) -> str:
        return f"{'u' if self.affine else ''}int{self.bits}"

    @property
    def kind(self) -> Literal["int"]:
        return "int"

    @property
    def bits_per_value(self) -> float:
        return float(self.bits)

    @property
    def max(self) -> float:
        return float((1 << self.bits) - 1 if self.affine else (1 << (self.bits - 1)) - 1)

    @property
    def overflow_threshold(self) -> float:
        """From here on magnitudes are nearer to the integer after :attr:`max` than to it."""
        return self.max + 0.5

    @property
    def min(self) -> float:
        return 0.0 if self.affine else -self.max

    @property
    def min_normal(self) -> float:
        return 1.0

    @property
    def min_subnormal(self) -> float:
        return 1.0

    @property
    def epsilon(self) -> float:
        """The spacing, everywhere: 1."""
        return 1.0

    @property
    def default_overflow(self) -> Overflow:
        return "saturate"

    @property
    def has_nan_code(self) -> bool:
        return not self.affine

    def values(self) -> tuple[float, ...]:
        """Every value, ascending."""
        span = range(int(self.min), int(self.max) + 1) if self.bits <= MAX_LISTED_BITS else range(0)
        return _listed(self.name, self.bits, [float(v) for v in span])

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class BlockFormat:
    """Elements of a small format that share one *stored* scale per `size` neighbours.

    ``e8m0`` scale (OCP MX 1.0, section 6.3, the floor rule): 2^(floor(log2 amax) - emax), emax the exponent
    of the element's largest value. ``e4m3`` scale (NVFP4): amax / 6 in units of one further float32
    scale per tensor, itself amax_tensor / (448 * 6).
    """

    name: str
    element: FloatFormat | IntFormat
    size: int
    scale: Literal["e8m0", "e4m3"]
    #: The factor of an element's code: 1, but 2^-6 for MXINT8.
    unit: float = 1.0

    @property
    def kind(self) -> Literal["block"]:
        return "block"

    @property
    def bits(self) -> int:
        """Bits of one element, without its share of the scale."""
        return self.element.bits

    @property
    def bits_per_value(self) -> float:
        """Bits of one element with its share of the block's 8-bit scale."""
        return self.element.bits + 8 / self.size

    @property
    def element_max(self) -> float:
        return self.element.max * self.unit

    @property
    def max(self) -> float:
        """The largest element under the largest scale (for NVFP4 with a tensor scale of 1)."""
        return self.element_max * (2.0**127 if self.scale == "e8m0" else 448.0)

    @property
    def min_normal(self) -> float:
        """That of the element, at a scale of 1."""
        return self.element.min_normal * self.unit

    @property
    def min_subnormal(self) -> float:
        """That of the element, at a scale of 1."""
        return self.element.min_subnormal * self.unit

    @property
    def epsilon(self) -> float:
        return self.element.epsilon * (self.unit if isinstance(self.element, IntFormat) else 1.0)

    @property
    def default_overflow(self) -> Overflow:
        return "saturate"

    @property
    def has_nan_code(self) -> bool:
        """A block's scale can be NaN, so NaN always survives."""
        return True

    def values(self) -> tuple[float, ...]:
        """Every value of one element under a scale of 1, ascending."""
        return tuple(value * self.unit for value in self.element.values())

    def __str__(self) -> str:
        return self.name


#: The fewest and the most values of a code book.
FEWEST_CODES, MOST_CODES = 2, 256


@dataclass(frozen=True)
class CodebookFormat:
    """A list of numbers, ascending; the code of a number is its position.

    >>> CodebookFormat("three", (-1.0, 0.0, 1.0)).bits
    2
    """

    name: str
    #: Each is rounded to float32, in which the arithmetic is done.
    book: tuple[float, ...]

    def __post_init__(self) -> None:
        try:
            book = tuple(struct.unpack("<f", struct.pack("<f", value))[0] + 0.0 for value in self.book)
        except (struct.error, OverflowError, TypeError):
            raise FormatError(f"the values of {self.name} must be numbers that float32 can represent.") from None
        if not FEWEST_CODES <= len(book) <= MOST_CODES:
            raise FormatError(f"{self.name} needs {FEWEST_CODES} to {MOST_CODES} values, not {len(book)}.")
        if not all(map(math.isfinite, book)):
            raise FormatError(f"the values of {self.name} must be finite.")
        if any(low >= high for low, high in pairwise(book)):
            raise FormatError(f"the values of {self.name} must be distinct and ascending.")
        object.__setattr__(self, "book", book)

    @property
    def kind(self) -> Literal["codebook"]:
        return "codebook"

    @property
    def bits(self) -> int:
        return (len(self.book) - 1).bit_length()

    @property
    def bits_per_value(self) -> float:
        return float(self.bits)

    @property
    def max(self) -> float:
        """The largest magnitude, to which an amax scale maps the amax."""
        return max(abs(self.book[0]), abs(self.book[-1]))

    @property
    def min(self) -> float:
        return self.book[0]

    @property
    def overflow_threshold(self) -> float:
        """The largest magnitude and half of the distance to its neighbour."""
        gap = self.book[-1] - self.book[-2] if self.book[-1] == self.max else self.book[1] - self.book[0]
        return self.max + gap / 2

    @property
    def min_normal(self) -> float:
        """The smallest magnitude that is not zero."""
        return min(abs(value) for value in self.book if value)

    @property
    def min_subnormal(self) -> float:
        return self.min_normal

    @property
    def epsilon(self) -> float:
        """The smallest distance between neighbours."""
        return min(high - low for low, high in pairwise(self.book))

    @property
    def default_overflow(self) -> Overflow:
        return "saturate"

    @property
    def has_nan_code(self) -> bool:
        return False

    def values(self) -> tuple[float, ...]:
        """Every value, ascending."""
        return self.book

    def __str__(self) -> str:
        return self.name


Format = FloatFormat | IntFormat | BlockFormat | CodebookFormat
#: Formats of single elements, which may have a scale.
ElementFormat = FloatFormat | IntFormat | CodebookFormat


def _listed(name: str, bits: int, decoded: list[float]) -> tuple[float, ...]:
    if bits > MAX_LISTED_BITS:
        raise FormatError(
            f"{name} has {bits} bits, too many values to list: values() serves formats of up to "
            f"{MAX_LISTED_BITS} bits, max, min_normal and epsilon serve every format."
        )
    return tuple(sorted({value + 0.0 for value in decoded if math.isfinite(value)}))


# --- Names of formats: a table and a parser


#: Special codes of a plain eXmY name where they are not IEEE's.
_PLAIN_SPECIALS: dict[tuple[int, int], Specials] = {(4, 3): "fn", (2, 3): "none", (3, 2): "none", (2, 1): "none"}

#: Names that are not of the form eXmY.
_FLOAT_ALIASES: dict[str, FloatFormat] = {
    "fp32": FloatFormat(8, 23),
    "tf32": FloatFormat(8, 10),
    "bf16": FloatFormat(8, 7),
    "fp16": FloatFormat(5, 10),
}

_ALIAS_OF = {value: name for name, value in _FLOAT_ALIASES.items()}

_E4M3 = FloatFormat(4, 3, specials="fn")
_E5M2 = FloatFormat(5, 2)
_E3M2 = FloatFormat(3, 2, specials="none")
_E2M3 = FloatFormat(2, 3, specials="none")
_E2M1 = FloatFormat(2, 1, specials="none")

_BLOCKS: dict[str, BlockFormat] = {
    block.name: block
    for block in (
        BlockFormat("mxfp8", _E4M3, 32, "e8m0"),
        BlockFormat("mxfp8e5m2", _E5M2, 32, "e8m0"),
        BlockFormat("mxfp6", _E2M3, 32, "e8m0"),
        BlockFormat("mxfp6e3m2", _E3M2, 32, "e8m0"),
        BlockFormat("mxfp4", _E2M1, 32, "e8m0"),
        BlockFormat("mxint8", IntFormat(8), 32, "e8m0", unit=2.0**-6),
        BlockFormat("nvfp4", _E2M1, 16, "e4m3"),
    )
}
#: NormalFloat of 4 bits: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero. The published
#: values are those of float32.
_NF4 = CodebookFormat(
    "nf4",
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
_CODEBOOKS: dict[str, CodebookFormat] = {_NF4.name: _NF4}

#: Longer spellings of names in the table.
_BLOCK_SPELLINGS = {"mxfp8e4m3": "mxfp8", "mxfp6e2m3": "mxfp6", "mxfp4e2m1": "mxfp4"}

#: The common names, in the order of tables.
NAMED: tuple[str, ...] = (
    *("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3", "e3m4", "e3m2", "e2m3", "e2m1"),
    *("int16", "int12", "int8", "int6", "int4", "int3", "int2"),
    *_BLOCKS,
    *_CODEBOOKS,
)

_FLOAT = re.compile(r"e(?P<x>\d+)m(?P<y>\d+)(?:b(?P<bias>-?\d+))?(?P<specials>ieee|fn|none)?(?P<flush>ns)?")

_INT = re.compile(r"(?P<affine>u?)int(?P<bits>\d+)")


#: Names that say a width only -> the formats that are meant.
SEVERAL_FORMATS = {
    "fp8": "e4m3 for weights and activations, e5m2 for gradients",
    "float8": "e4m3 for weights and activations, e5m2 for gradients",
    "fp6": "e2m3 or e3m2",
    "fp4": "e2m1, with blocks and their scales mxfp4 or nvfp4, or nf4 for frozen weights",
    "float4": "e2m1, with blocks and their scales mxfp4 or nvfp4, or nf4 for frozen weights",
}


def get_format(name: str | Format) -> Format:
    """The format of that name; a format is returned as it is.

    >>> get_format("e4m3").max, get_format("e8m7").name, get_format("e4m3b4").max
    (448.0, 'bf16', 30.0)
    """
    if isinstance(name, (FloatFormat, IntFormat, BlockFormat, CodebookFormat)):
        return name
    if not isinstance(name, str):
        raise _not_a_name(name)
    return _parse(name) if is_traced() else _parse_once(name)  # Dynamo warns of caches


def _not_a_name(value: object) -> FormatError:
    actual = str(value) if isinstance(value, (int, float, torch.dtype)) else f"a {type(value).__name__}"
    advice = f": whole numbers of {value} bits are int{value}" if type(value) is int else ""
    return FormatError(f"a format is given by its name, such as 'e4m3' or 'int8', not by {actual}{advice}.")


def _parse(name: str) -> Format:
    text = name.strip().lower()
    if text in _FLOAT_ALIASES:
        return _FLOAT_ALIASES[text]
    block = _BLOCKS.get(_BLOCK_SPELLINGS.get(text, text))
    if block is not None:
        return block
    if text in _CODEBOOKS:
        return _CODEBOOKS[text]
    if text in _REGISTERED:
        return _REGISTERED[text]
    if match := _INT.fullmatch(text):
        return IntFormat(int(match["bits"]), affine=bool(match["affine"]))
    if match := _FLOAT.fullmatch(text):
        x, y = int(match["x"]), int(match["y"])
        specials = cast("Specials | None", match["specials"]) or _default_specials(x, y, match["bias"] is not None)
        return FloatFormat(x, y, int(match["bias"] or 0), specials, subnormals=not match["flush"])
    values = find_entry_point(FORMATS, text)
    if values is not None:
        return register_format(text, values() if callable(values) else values)
    if text in SEVERAL_FORMATS:
        raise FormatError(f"there is no number format {name!r}, because there are several: {SEVERAL_FORMATS[text]}.")
    suggestions = [*NAMED, *_REGISTERED, "int5", "int7", "uint8", "e4m3b4", "e5m2b0", "e6m9b0"]
    raise FormatError(f"there is no number format {name!r}; {nearest_names(text, suggestions)}")


#: Cached: attaching a plan to a model parses names a hundred thousand times.
_parse_once = lru_cache(maxsize=1024)(_parse)


# --- Formats of the user's own


#: Name -> format, of :func:`register_format`. A name never changes its meaning: compiled code knows formats by name.
_REGISTERED: dict[str, CodebookFormat] = {}
#: Not names that stand for something else in plans, or that look like formats that their names define.
OWN_NAME_PATTERN = r"^(?!(keep|int|float|(e[0-9]+m|u?int|mxfp|mxint|nvfp)[0-9].*)$)[a-z_][a-z0-9_-]*$"


def check_own_name(name: str) -> None:
    """Raise unless a format of the user's own may have that name."""
    if not isinstance(name, str) or not re.fullmatch(OWN_NAME_PATTERN, name):
        raise FormatError(
            f"{name!r} cannot name a format of your own: use small letters, digits, - and _, and a name that does not "
            f"look like a built-in one."
        )


def register_format(name: str, values: Iterable[float]) -> CodebookFormat:
    """Make a list of up to 256 numbers a format, which is known by `name` in plans and everywhere else in this process.

    :param values: in any order, each rounded to float32. A scale maps the amax to the largest magnitude.

    >>> register_format("thirds", [-1, -1 / 3, 1 / 3, 1]).bits
    2
    >>> get_format("thirds").max
    1.0
    """
    check_own_name(name)
    try:
        numbers = sorted(map(float, values))
    except (TypeError, ValueError):
        raise FormatError(f"the values of {name} must be a list of numbers.") from None
    made, known = CodebookFormat(name, tuple(numbers)), _REGISTERED.get(name) or _built_in(name)
    if known is not None and known != made:
        kind = "registered with other values" if name in _REGISTERED else "a built-in format"
        raise FormatError(f"{name!r} is {kind} already: choose another name.")
    if known is None:
        _REGISTERED[name] = made
    return made


def registered_format(name: str) -> CodebookFormat | None:
    """The format that was registered by that name."""
    return _REGISTERED.get(name)


def _built_in(name: str) -> Format | None:
    return _FLOAT_ALIASES.get(name) or _BLOCKS.get(_BLOCK_SPELLINGS.get(name, name)) or _CODEBOOKS.get(name)


def float_name(value: FloatFormat) -> str:
    """The shortest name that parses back to `value`."""
    if value in _ALIAS_OF:
        return _ALIAS_OF[value]
    x, y = value.exponent_bits, value.mantissa_bits
    plain = _default_specials(x, y, has_bias=False)
    show_bias = value.bias != 0 or (value.specials == "none" and plain != "none")
    shown_specials = "" if value.specials == _default_specials(x, y, show_bias) else value.specials
    bias = f"b{value.bias}" if show_bias else ""
    return f"e{x}m{y}{bias}{shown_specials}{'' if value.subnormals else 'ns'}"


def _default_specials(x: int, y: int, has_bias: bool) -> Specials:
    return "none" if has_bias else _PLAIN_SPECIALS.get((x, y), "ieee")
