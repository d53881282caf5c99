"""The published JSON Schema of plans, for editors and other tools; a copy lies in ``docs/plan.schema.json``.

Fields and their kinds come from the tables that the loader reads by (:mod:`bitplan.plans.grammar`), conflicts between
keys from :mod:`bitplan.plans.match`. Added here is what goes with what inside a quantizer; a test lets the schema and
the loader judge the same random plans. Six things only the loader knows: whether a name or a file exists, whether a
regular expression is one, whether a schedule's numbers fit together and fit their quantizers, whether selectors and
sizes of a rule exclude each other, whether both operands of a product are rotated alike, and a few floats that fit the
pattern but have no value but zero or too large a bias.
"""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

from bitplan.numerics.formats import NAMED, OWN_NAME_PATTERN, BlockFormat, CodebookFormat, FloatFormat, get_format
from bitplan.plans.fields import Schema
from bitplan.plans.frozen import FROZEN
from bitplan.plans.grammar import (
    APPLIES_BY,
    CHOOSING,
    GRAD_QUANTIZER,
    PLAN,
    PROMOTION,
    QUANTIZER,
    RULE,
    SWITCH,
    schedule_schema,
)
from bitplan.plans.match import CONFLICTS, KEYS
from bitplan.plans.spec import DEFAULT_EXPONENT_BITS, MEASURES, QuantizerSpec, any_case, is_format

_SYMMETRIC = r"int0*([2-9]|1[0-6])"
_AFFINE = r"uint0*([1-9]|1[0-6])"
_BUILT_FLOAT = r"e0*[1-8]m0*([0-9]|1[0-9]|2[0-3])(b-?[0-9]+)?(ieee|fn|none)?(ns)?"


def plan_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a plan, as plain values."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "bitplan plan",
        **PLAN.schema(),
        "$defs": {
            "quantizer": _quantizer(QUANTIZER.schema()),
            "grad_quantizer": _quantizer(GRAD_QUANTIZER.schema()),
            "switch": SWITCH.schema(),
            "choosing": CHOOSING.schema(),
            "promotion": _promotion(),
            "schedule": schedule_schema(),
            "frozen": _frozen(),
            "rule": _rule(),
        },
    }


def schema_text() -> str:
    """What ``docs/plan.schema.json`` holds."""
    return json.dumps(plan_schema(), indent=2) + "\n"


def _quantizer(shape: Schema) -> Schema:
    floats, blocks = "|".join([*_named_floats(), _BUILT_FLOAT]), "|".join(_block_names())
    books = "|".join(name for name in NAMED if isinstance(get_format(name), CodebookFormat))
    every = "|".join(["int", "float", floats, _SYMMETRIC, _AFFINE, blocks, books])
    shape["properties"]["format"]["anyOf"] = [{"pattern": any_case(every)}, {"pattern": OWN_NAME_PATTERN}]
    shape["dependentRequired"] = {"range": ["scale"]}
    sized = {"required": ["rotate_size"], "properties": {"rotate_size": {"not": {"const": 16}}}}
    tile = {"required": ["block"], "properties": {"block": {"type": "array"}}}
    shape["allOf"] = [
        _if(_fits("format", "int"), _bits(2, 16) | _without("exponent_bits")),
        _if(_fits("format", "float"), {"allOf": [_float_bits(bits) for bits in range(1, 9)]}),
        _if({"not": _fits("format", "int|float")}, _without("bits", "exponent_bits")),
        _if(_fits("format", blocks), _without("scale") | _only("overflow", "saturate")),
        _if(_fits("format", books), _only("overflow", "saturate")),
        _if(_fits("format", _AFFINE), {"required": ["scale"]}),
        _if(_fits("format", f"int|{_SYMMETRIC}|{_AFFINE}"), _only("overflow", "saturate"), _only("range", "amax")),
        _if(_is("scale", "block"), {"required": ["block"]}, {"anyOf": [_without("block"), _fits("format", blocks)]}),
        _if({"allOf": [_fits("format", blocks), {"required": ["block"]}]}, tile),
        _if(tile, _without("axis")),
        _if(sized, {"required": ["rotate"]}),
        _if({"required": ["rotate"]}, _without("promote", "function")),
        _if(_is("scale", "tensor"), _without("axis")),
        _if({"not": {"anyOf": [{"required": ["scale"]}, _fits("format", blocks)]}}, _without("axis")),
        _if(_is("power_of_two", True), {"required": ["scale"]}),
        _if(_is("eval", "ema"), _is("scale", "tensor")),
        _if({"required": ["history"]}, _is("scale", "tensor") | _amax_of_steps()),
        _if({"required": ["margin"], "properties": {"margin": {"minimum": 1}}}, {"required": ["history"]}),
        _if({"anyOf": [{"required": ["scale"]}, _fits("format", blocks)]}, _promotes_by("underflow", "error")),
    ]
    return shape


def _amax_of_steps() -> Schema:
    """What a history of largest magnitudes does not go with."""
    ranged = {"required": ["range"], "properties": {"range": {"const": "minmax"}}}
    return {"not": {"anyOf": [ranged, _fits("format", _AFFINE), _is("eval", "ema")]}}


def _promotes_by(*measures: str) -> Schema:
    """If the quantizer promotes, it watches one of these."""
    return {"properties": {"promote": {"anyOf": [{"required": [measure]} for measure in measures]}}}


def _promotion() -> Schema:
    shape = PROMOTION.schema()
    shape["allOf"] = [{"not": {"required": list(pair)}} for pair in combinations(MEASURES, 2)]
    return shape


def _rule() -> Schema:
    shape = RULE.schema()
    keeps = {"required": ["keep"], "properties": {"keep": {"const": True}}}
    shape["dependentRequired"] = {"grad_at": ["grad_activation"]}
    has_at = {"type": "object", "required": ["at"]}
    nested_at = {"required": ["grad_activation"], "properties": {"grad_activation": has_at}}
    shape["anyOf"] = [{"required": [key]} for key in APPLIES_BY]
    shape["allOf"] = [
        *({"not": {"required": [first, second]}} for first, second in CONFLICTS),
        _if(keeps, _without(*KEYS, "frozen"), {"anyOf": [{"required": [key]} for key in (*KEYS, "frozen")]}),
        _if({"required": ["frozen"]}, _without("select", "min_elements", "max_elements")),
        _if(nested_at, _without("grad_at")),
    ]
    return shape


def _frozen() -> Schema:
    shape = FROZEN.schema()
    shape["allOf"] = [
        _if({"required": ["block"]}, _is("scale", "block")),
        _if(_is("power_of_two", True), _is("scale", "block")),
    ]
    return shape


def _named_floats() -> list[str]:
    return [n for n in NAMED if isinstance(get_format(n), FloatFormat) and not re.fullmatch(r"e\d+m\d+", n)]


def _block_names() -> list[str]:
    """The block formats, each also with its element's name behind it where that is a spelling (mxfp8e4m3)."""
    blocks = [block for block in map(get_format, NAMED) if isinstance(block, BlockFormat)]
    longer = [f"{block.name}{block.element.name}" for block in blocks]
    return [*(block.name for block in blocks), *filter(is_format, longer)]


def _float_bits(exponent_bits: int) -> Schema:
    """Which bits the family ``float`` may have with that many exponent bits."""
    possible = [bits for bits in range(1, 33) if _makes_a_float(bits, exponent_bits)]
    chosen = _is("exponent_bits", exponent_bits)
    if exponent_bits == DEFAULT_EXPONENT_BITS:
        chosen = {"anyOf": [chosen, _without("exponent_bits")]}
    return _if(chosen, _bits(possible[0], possible[-1]))


def _makes_a_float(bits: int, exponent_bits: int) -> bool:
    try:
        QuantizerSpec("float", bits=bits, exponent_bits=exponent_bits)
    except ValueError:
        return False
    return True


def _bits(least: int, most: int) -> Schema:
    return {"required": ["bits"], "properties": {"bits": {"minimum": least, "maximum": most}}}


def _if(condition: Schema, then: Schema, otherwise: Schema | None = None) -> Schema:
    clause = {"if": condition, "then": then}
    return clause if otherwise is None else {**clause, "else": otherwise}


def _is(key: str, value: Any) -> Schema:
    return {"required": [key], "properties": {key: {"const": value}}}


def _fits(key: str, pattern: str) -> Schema:
    return {"required": [key], "properties": {key: {"pattern": any_case(pattern)}}}


def _only(key: str, value: str) -> Schema:
    """If the key is given, it has this value."""
    return {"properties": {key: {"const": value}}}


def _without(*keys: str) -> Schema:
    return {"not": {"anyOf": [{"required": [key]} for key in keys]}}
