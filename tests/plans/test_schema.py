"""The schema and the loader judge the same plans alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitplan.errors import PlanError
from bitplan.numerics.formats import NAMED, OWN_NAME_PATTERN
from bitplan.plans import KEYS, Plan, plan_schema, preset_names
from bitplan.plans.schema import schema_text
from bitplan.plans.spec import is_format

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, which the dev extra installs")

PUBLISHED = Path(__file__).parents[2] / "docs" / "plan.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(plan_schema())


def loads(data: Any) -> bool:
    try:
        Plan.from_dict(data)
    except PlanError:
        return False
    return True


def with_rule(**keys: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": "*", **keys}]}


def test_the_published_schema_is_the_present_one() -> None:
    assert PUBLISHED.read_text(encoding="utf-8") == schema_text(), "write bitplan.plans.schema.schema_text() there"


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(plan_schema())
    json.dumps(plan_schema(), allow_nan=False)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_also_with_everything_spelt_out(name: str) -> None:
    assert VALIDATOR.is_valid(Plan.preset(name).to_dict())


@pytest.mark.parametrize(
    "data",
    [
        {"version": 1},
        with_rule(weight="e3m2", activation={"format": "int8", "scale": "tensor"}),
        with_rule(keep=True, strict=False),
        with_rule(select=["saved", "not gate"], min_elements=1, max_elements=10, activation="e4m3"),
        {"version": 1, "rules": [{"select": "residual", "activation": "bf16"}, {"max_elements": 9, "keep": True}]},
        with_rule(grad_activation={"format": "e5m2", "at": "consumer"}),
        with_rule(grad_activation="e5m2", grad_at="consumer"),
        with_rule(x="keep", op=["conv*"]),
        {"version": 1, "quantizers": {"low": "bf16"}, "made_by": {"tool": [1, None]}, "name": "n", "description": "d"},
        {"version": 1.0},
        {"version": 1, "schedules": {}},
        {"version": 1, "schedules": {"cpt": {"name": "CR", "low": 3, "high": 8, "cycles": 8}}},
        {"version": 1, "schedules": {"a": {"name": "late", "low": 3, "high": 8, "last": " 12.5 %"}}},
        {"version": 1, "schedules": {"a": {"name": "deficit", "low": 3, "high": 8, "start": 0, "end": 0.25}}},
        {
            "version": 1,
            "schedules": {"a": {"name": "pieces", "at": [10], "pieces": [{"name": "static", "bits": 8}] * 2}},
        },
        {
            "version": 1,
            "formats": {"third": [-1, 0, 0.5]},
            "quantizers": {"low": {"format": "third", "scale": "tensor"}},
        },
        with_rule(weight={"format": "e4m3", "function": "my_module:rounded"}),
        {"version": 1, "schedules": {"a": {"name": "function", "function": "m.n:f", "low": 3, "high": 8}}},
        with_rule(weight={"format": "e4m3", "promote": {"to": "bf16"}}),
        with_rule(weight={"format": "e4m3", "promote": {"to": {"format": "e5m10"}, "overflow": 1}}),
        with_rule(weight={"format": "e4m3", "scale": "tensor", "promote": {"to": "keep", "error": 0.1}}),
        with_rule(weight={"until": "90%", "use": {"format": "e4m3", "scale": "vector"}, "then": "keep"}),
        with_rule(weight={"until": 5, "use": {"until": "50%", "use": "e4m3", "then": "e5m2"}, "then": "bf16"}),
        {
            **with_rule(
                weight={"format": "int", "bits": "cpt"},
                x={"by": "cpt", "choose": {"3": "e2m1", "8": {"format": "e4m3"}}},
            ),
            "schedules": {"cpt": {"name": "RTH", "low": 3, "high": 8}},
        },
    ],
)
def test_both_accept(data: Any) -> None:
    assert loads(data)
    assert VALIDATOR.is_valid(data), list(VALIDATOR.iter_errors(data))


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        {"version": 2},
        {"version": True},
        {"version": "1"},
        {"version": 1, "rule": []},
        {"version": 1, "rules": {}},
        {"version": 1, "schedules": []},
        {"version": 1, "schedules": {"a": {"name": "XX", "low": 3, "high": 8}}},
        {"version": 1, "schedules": {"a": {"low": 3, "high": 8}}},
        {"version": 1, "schedules": {"a": {"name": "CR", "low": 3}}},
        {"version": 1, "schedules": {"a": {"name": "CR", "low": 0, "high": 8}}},
        {"version": 1, "schedules": {"a": {"name": "CR", "low": 3, "high": 8, "last": "10%"}}},
        {"version": 1, "schedules": {"a": {"name": "late", "low": 3, "high": 8, "last": "101%"}}},
        {"version": 1, "schedules": {"a": {"name": "late", "low": 3, "high": 8, "last": -1}}},
        {"version": 1, "schedules": {"a": {"name": "steps", "bits": 8, "at": []}}},
        {"version": 1, "schedules": {"a b": {"name": "static", "bits": 8}}},
        {"version": 1, "name": ""},
        {"version": 1, "formats": {"e4m3": [0, 1]}},
        {"version": 1, "formats": {"third": ["a", "b"]}},
        {"version": 1, "schedules": {"a": {"name": "function", "function": "a function", "low": 3, "high": 8}}},
        with_rule(weight={"format": "e4m3", "function": "my module"}),
        {"version": 1, "made_by": 3},
        {"version": 1, "quantizers": {"e4m3": "bf16"}},
        {"version": 1, "quantizers": {"Int99": "bf16"}},
        {"version": 1, "quantizers": {"keep": "bf16"}},
        {"version": 1, "quantizers": {"a b": "bf16"}},
        {"version": 1, "rules": [{"weight": "bf16"}]},
        with_rule(),
        with_rule(match=[]),
        with_rule(select=[], weight="bf16"),
        with_rule(select="gates", weight="bf16"),
        with_rule(select="not  gate", weight="bf16"),
        with_rule(min_elements=0, weight="bf16"),
        with_rule(max_elements="many", weight="bf16"),
        with_rule(match=3, weight="bf16"),
        with_rule(keep=False),
        with_rule(keep=True, weight="bf16"),
        with_rule(weight=None),
        with_rule(weight="int"),
        with_rule(weight={"format": "e4m3", "at": "consumer"}),
        with_rule(weight={"scale": "tensor"}),
        with_rule(weight={"format": "e4m3", "promote": {}}),
        with_rule(weight={"format": "e4m3", "promote": "bf16"}),
        with_rule(weight={"format": "e4m3", "promote": {"to": "bf16", "overflow": 0}}),
        with_rule(weight={"format": "e4m3", "promote": {"to": "bf16", "overflow": 0.1, "error": 0.1}}),
        with_rule(weight={"format": "e4m3", "scale": "tensor", "promote": {"to": "bf16"}}),
        with_rule(weight={"format": "mxfp8", "promote": {"to": "bf16", "overflow": 0.1}}),
        with_rule(weight={"until": "90%", "use": "e4m3"}),
        with_rule(weight={"until": "ninety", "use": "e4m3", "then": "bf16"}),
        with_rule(weight={"until": "90%", "use": "int", "then": "bf16"}),
        with_rule(weight={"until": "90%", "use": "e4m3", "then": "bf16", "scale": "tensor"}),
        with_rule(weight={"by": "cpt", "choose": {}}),
        with_rule(weight={"by": "cpt", "choose": {"0": "e4m3"}}),
        with_rule(weight={"format": "int", "bits": "8 bits"}),
        with_rule(weight="bf16", grad_at="consumer"),
        with_rule(grad_activation={"format": "e5m2", "at": "consumer"}, grad_at="consumer"),
        with_rule(x="e4m3", **{"fprop.x": "bf16"}),
        with_rule(fprop="e4m3", w="bf16"),
    ],
)
def test_both_reject(data: Any) -> None:
    assert not loads(data)
    assert not VALIDATOR.is_valid(data)


FORMATS = st.one_of(
    st.sampled_from([*NAMED, "int", "float", "uint8", "uint1", "mxfp8e4m3", " E4M3 ", "Int", "FLOAT", "mxint8int8"]),
    st.from_regex(r"e0?[0-9]{1,2}m[0-9]{1,2}(b-?[0-9]{1,2})?(ieee|fn|none)?(ns)?", fullmatch=True).filter(
        # Floats of one exponent bit may have no value but zero: only the loader computes that.
        lambda name: not name.startswith(("e1m", "e01m", "e001m"))
    ),
    st.from_regex(r"u?int0?[0-9]{1,2}", fullmatch=True),
    st.text("e4m3int", max_size=5),
)
#: Drawn a few at a time.
OPTIONS = (
    *("bits", "scale", "block", "axis", "range", "overflow", "eval", "history", "margin", "rotate", "rotate_size"),
)
QUANTIZERS = st.fixed_dictionaries(
    {"format": FORMATS},
    optional={
        "bits": st.integers(0, 40),
        "exponent_bits": st.integers(0, 10),
        "rounding": st.sampled_from(["nearest", "stochastic", "up"]),
        "scale": st.sampled_from(["tensor", "channel", "vector", "block", "row"]),
        "axis": st.integers(-2, 2),
        "block": st.one_of(st.integers(0, 33), st.lists(st.integers(0, 33), min_size=1, max_size=3)),
        "range": st.sampled_from(["amax", "minmax"]),
        "rotate": st.just("hadamard"),
        "rotate_size": st.sampled_from([16, 32, 12, 0]),
        "power_of_two": st.booleans(),
        "history": st.integers(0, 40),
        "margin": st.integers(-1, 20),
        "overflow": st.sampled_from(["saturate", "special"]),
        "eval": st.sampled_from(["same", "ema", "off", "top"]),
    },
)


@st.composite
def sparse_quantizers(draw: st.DrawFn) -> dict[str, Any]:
    """Few options at a time, so that many are valid."""
    whole = draw(QUANTIZERS)
    kept = draw(
        st.lists(
            st.sampled_from(OPTIONS),
            max_size=3,
        )
    )
    family = str(whole["format"]).strip().lower() in ("int", "float")
    kept += ["bits", "exponent_bits"] if family and draw(st.booleans()) else []
    return {key: value for key, value in whole.items() if key == "format" or key in kept}


@given(st.one_of(QUANTIZERS, sparse_quantizers()))
@settings(max_examples=1500, suppress_health_check=[HealthCheck.too_slow])
def test_the_loader_and_the_schema_agree_on_quantizers(quantizer: dict[str, Any]) -> None:
    data = with_rule(wgrad=quantizer)
    is_unknown = re.fullmatch(OWN_NAME_PATTERN, quantizer["format"]) and not is_format(quantizer["format"])
    assert (
        VALIDATOR.is_valid(data) == loads(data) or is_unknown
    )  # which formats of one's own there are, no schema knows


@given(
    st.dictionaries(st.sampled_from([*KEYS]), st.sampled_from(["e4m3", "keep", {"format": "int8"}]), max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "keep": st.booleans(),
            "grad_at": st.sampled_from(["producer", "consumer"]),
            "strict": st.booleans(),
            "select": st.sampled_from(["gate", ["saved", "not gate"], "not", "gates", [], 3]),
            "max_elements": st.sampled_from([0, 1, 2**62, 2**63, 1.5, "9"]),
        },
    ),
    st.booleans(),
)
@settings(max_examples=600)
def test_the_loader_and_the_schema_agree_on_rules(places: dict[str, Any], more: dict[str, Any], matches: bool) -> None:
    data = with_rule(**places, **more)
    if not matches:
        del data["rules"][0]["match"]
    assert VALIDATOR.is_valid(data) == loads(data)


@given(
    st.from_regex(r"[A-Za-z_0-9-]{1,8}", fullmatch=True) | st.sampled_from([*NAMED, "BF16", "mxgrad", "e4m3x", "low"])
)
@settings(max_examples=300)
def test_the_loader_and_the_schema_agree_on_names(name: str) -> None:
    data = {"version": 1, "quantizers": {name: "bf16"}}
    assert VALIDATOR.is_valid(data) == loads(data)
