from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitplan.errors import PlanError
from bitplan.plans import QuantizerSpec, Rule, closest, compile_match, unmatched_message
from bitplan.plans.regex import BoundedExpression

PATHS = ["", "conv1", "layer1", "layer1.0", "layer1.0.conv1", "layer1.0.bn1", "layer10", "layer10.conv1", "head.fc"]


def rule_of(*match: str, op: tuple[str, ...] = (), where: str = "") -> Rule:
    return Rule(match, op, (("weight", QuantizerSpec("bf16")),), where=where)


def matched(*match: str) -> list[str]:
    matches = compile_match(rule_of(*match))
    return [path for path in PATHS if matches(path, "conv2d")]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layer1", ["layer1", "layer1.0", "layer1.0.conv1", "layer1.0.bn1"]),
        ("layer1.0.conv1", ["layer1.0.conv1"]),
        ("layer", []),
        ("conv1", ["conv1"]),
        ("*", PATHS),
        ("", PATHS),
        ("*.conv1", ["layer1.0.conv1", "layer10.conv1"]),
        ("*conv1", ["conv1", "layer1.0.conv1", "layer10.conv1"]),
        ("layer1.*", ["layer1.0", "layer1.0.conv1", "layer1.0.bn1"]),
        ("layer1.*.?n1", ["layer1.0.bn1"]),
        ("layer?", ["layer1", "layer1.0", "layer1.0.conv1", "layer1.0.bn1"]),
        ("layer[0-9]*.conv[12]", ["layer1.0.conv1", "layer10.conv1"]),
        ("re:layer1", ["layer1"]),
        (r"re:layer1(\..*)?", ["layer1", "layer1.0", "layer1.0.conv1", "layer1.0.bn1"]),
        (r"re:.*\.(conv1|fc)", ["layer1.0.conv1", "layer10.conv1", "head.fc"]),
        ("re:", [""]),
        ("LAYER1", []),
        ("head.f.", []),
    ],
)
def test_a_pattern_means(pattern: str, expected: list[str]) -> None:
    assert matched(pattern) == expected


def test_a_list_means_any_of_them() -> None:
    assert matched("conv1", "head") == ["conv1", "head.fc"]


@pytest.mark.parametrize(
    ("ops", "op", "fits"),
    [
        ((), "anything", True),
        (("linear",), "linear", True),
        (("linear",), "bilinear", False),
        (("conv*", "linear"), "conv_transpose2d", True),
        (("conv?d",), "conv2d", True),
        (("re:(b?mm|matmul)",), "bmm", True),
        (("re:(b?mm|matmul)",), "matmul.3", True),
        ((r"re:relu\.1",), "relu.1", True),
        ((r"re:relu\.1",), "relu.2", False),
        (("relu",), "relu.1", True),
        (("relu.1",), "relu.1", True),
        (("relu.1",), "relu.0", False),
        (("relu.1",), "relu.10", False),
    ],
)
def test_operations_are_matched_by_the_same_patterns(ops: tuple[str, ...], op: str, fits: bool) -> None:
    assert compile_match(rule_of("*", op=ops))("layer1", op) is fits


def test_module_and_operation_must_both_fit() -> None:
    matches = compile_match(rule_of("layer1", op=("conv2d",)))
    assert matches("layer1.0", "conv2d")
    assert not matches("layer1.0", "add")
    assert not matches("layer2.0", "conv2d")


@given(st.text("ab.", max_size=8), st.text("ab.", max_size=8))
def test_a_plain_path_matches_itself_and_what_begins_with_it_and_a_dot(pattern: str, path: str) -> None:
    expected = path == pattern or path.startswith(pattern + ".") or not pattern
    assert compile_match(rule_of(pattern))(path, "add") is expected


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_text_is_a_pattern_unless_it_is_a_broken_regular_expression(pattern: str, path: str) -> None:
    if pattern.startswith("re:"):
        return
    assert compile_match(rule_of(pattern))(path, "add") in (True, False)


@given(st.text(max_size=30))
def test_a_regular_expression_compiles_or_is_refused(pattern: str) -> None:
    try:
        rule_of(f"re:{pattern}")
    except PlanError as error:
        assert "is not a regular expression" in str(error)  # noqa: PT017


def test_the_closest_names_come_first_and_signs_of_patterns_do_not_count() -> None:
    assert closest("layr1.0.conv1", PATHS)[0] == "layer1.0.conv1"
    assert closest("*.conv1*", PATHS)[0] == "conv1"
    assert closest("re:^head\\.fcc$", PATHS)[0] == "head.fc"
    assert closest("zzz", PATHS) == []


def test_a_module_that_does_not_exist_is_answered_with_the_closest_also_among_parents() -> None:
    message = unmatched_message(rule_of("layr1", where="p.yaml:3: rules[1]"), ["layer1.conv1", "head"], ["conv2d"])
    assert message == (
        "p.yaml:3: rules[1]: the rule matches nothing: no module fits 'layr1'; the closest are layer1, layer1.conv1."
    )


def test_an_operation_that_does_not_exist_is_answered_with_the_closest() -> None:
    message = unmatched_message(rule_of("layer1", op=("conv2",)), PATHS, ["conv2d", "add", "relu"])
    assert message == "the rule matches nothing: no operation fits 'conv2'; the closest are conv2d."


def test_where_nothing_is_close_some_names_are_shown() -> None:
    message = unmatched_message(rule_of("zzz"), [f"m{i}" for i in range(20)], [])
    assert message.endswith("there are m0, m1, m2, m3, m4, m5, m6, m7, ....")


def test_a_module_and_an_operation_that_never_meet() -> None:
    message = unmatched_message(rule_of("head", op=("conv2d",)), PATHS, ["conv2d", "linear"])
    assert "no such operation runs in such a module" in message


# --- regular expressions in bounded time ---


LONG_PATH = "model.decoder.layers.11.self_attn.out_proj"


@pytest.mark.parametrize(
    "source",
    [
        r"(\w+\.?)+",
        ".*" * 20,
        r"(\w|\d|\.)*",
        "(" * 30 + r"[\w.]+" + ")+" * 30,
        r"((\w?){40}\.?){40}",
        r"([a-z_.]|\d)*\b",
    ],
)
def test_no_expression_hangs_on_an_ordinary_path(source: str) -> None:
    """Each of them takes Python's own matcher minutes, or for ever, to refuse the path."""
    assert compile_match(rule_of(f"re:{source}"))(LONG_PATH, "linear")
    assert not compile_match(rule_of(f"re:{source}!"))(LONG_PATH, "linear")


@pytest.mark.parametrize("source", [r"(a)\1", "(?>a)b", "a*+b", "(a)?(?(1)b|c)"])
def test_what_cannot_be_matched_in_bounded_time_is_refused(source: str) -> None:
    with pytest.raises(PlanError, match="regular expression"):
        rule_of(f"re:{source}")


def expressions() -> st.SearchStrategy[str]:
    characters = st.sampled_from(["a", "b", r"\.", ".", "[ab]", r"\w", "[^a]", "1", r"\b", "^", "$"])
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?", "+?"])
    return st.recursive(
        characters,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
            st.tuples(inner, repeats).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
            st.tuples(st.sampled_from(["?=", "?!", "?i:"]), inner).map(lambda pair: f"({pair[0]}{pair[1]})"),
            st.tuples(st.sampled_from(["?<=", "?<!"]), characters).map(lambda pair: f"({pair[0]}{pair[1]})"),
        ),
        max_leaves=6,
    )


@given(expressions(), st.text("abA.1", max_size=6))
def test_bounded_matching_agrees_with_python(source: str, text: str) -> None:
    expected = re.compile(source).fullmatch(text) is not None
    expression = BoundedExpression(source)
    assert expression.fullmatch(text) == expected
    assert pickle.loads(pickle.dumps(expression)) == expression
