"""The names of formats: a small grammar, a table of well-known names, and the parser.

::

    eXmY[bZ][ieee|fn|none][ns]      any float: X exponent bits, Y mantissa bits, additional bias Z,
                                    special codes, "ns" for no subnormals
    fp32 tf32 bf16 fp16             e8m23, e8m10, e8m7, e5m10
    intN, uintN                     symmetric (N = 2..16) and unsigned affine (N = 1..16)
    mxfp8 mxfp8e5m2 mxfp6 mxfp6e3m2 mxfp4 mxint8 nvfp4

What a name leaves out is fixed: with ``bZ`` there are no special codes (the floats of Lee et al.
2023: ``e4m3b4`` tops at 30, ``e5m2b0`` at 114688); e4m3 is OCP's ``fn``; e2m3, e3m2 and e2m1 are
OCP's and have none; every other float is IEEE-like. Printing leaves out exactly what parsing
fills in, so the two round-trip.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import cast

from bitplan.errors import FormatError, nearest_names
from bitplan.numbers.formats import BlockFormat, FloatFormat, Format, IntFormat, Specials
from bitplan.tracing import is_traced

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
#: Longer spellings of names in the table.
_BLOCK_SPELLINGS = {"mxfp8e4m3": "mxfp8", "mxfp6e2m3": "mxfp6", "mxfp4e2m1": "mxfp4"}

#: The names a newcomer should know, in the order tables show them.
NAMED: tuple[str, ...] = (
    *("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3", "e3m4", "e3m2", "e2m3", "e2m1"),
    *("int16", "int12", "int8", "int6", "int4", "int3", "int2"),
    *_BLOCKS,
)

_FLOAT = re.compile(r"e(?P<x>\d+)m(?P<y>\d+)(?:b(?P<bias>-?\d+))?(?P<specials>ieee|fn|none)?(?P<flush>ns)?")
_INT = re.compile(r"(?P<affine>u?)int(?P<bits>\d+)")


def format(name: str | Format) -> Format:
    """The format a name stands for; a format is returned as it is.

    >>> format("e4m3").max, format("e8m7").name, format("e4m3b4").max
    (448.0, 'bf16', 30.0)
    """
    if isinstance(name, (FloatFormat, IntFormat, BlockFormat)):
        return name
    if not isinstance(name, str):
        raise FormatError(f"a format is given by its name, such as 'e4m3' or 'int8', not by {name!r}.")
    return _parse(name) if is_traced() else _parse_once(name)  # Dynamo warns of caches, which it sees through


def _parse(name: str) -> Format:
    text = name.strip().lower()
    if text in _FLOAT_ALIASES:
        return _FLOAT_ALIASES[text]
    block = _BLOCKS.get(_BLOCK_SPELLINGS.get(text, text))
    if block is not None:
        return block
    if found := _INT.fullmatch(text):
        return IntFormat(int(found["bits"]), affine=bool(found["affine"]))
    if found := _FLOAT.fullmatch(text):
        x, y = int(found["x"]), int(found["y"])
        specials = cast("Specials | None", found["specials"]) or _default_specials(x, y, found["bias"] is not None)
        return FloatFormat(x, y, int(found["bias"] or 0), specials, subnormals=not found["flush"])
    known = [*NAMED, "int5", "int7", "uint8", "e4m3b4", "e5m2b0", "e6m9b0"]
    raise FormatError(f"there is no number format {name!r}; {nearest_names(text, known)}")


#: Attaching a plan to a model asks a hundred thousand times.
_parse_once = lru_cache(maxsize=1024)(_parse)


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
