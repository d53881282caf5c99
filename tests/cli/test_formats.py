from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bitplan.numerics.formats import NAMED, get_format

Bitplan = Callable[..., Any]

#: What every record has, whatever its kind.
KEYS = {
    *("name", "kind", "bits", "bits_per_value", "max", "min_normal", "min_subnormal", "epsilon", "overflow"),
    "special_codes",
}


def cells(out: str, name: str) -> list[str]:
    (row,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
    return row.split()


def test_the_table_has_one_row_for_each_well_known_format(bitplan: Bitplan) -> None:
    ran = bitplan("formats")
    assert (ran.code, ran.err) == (0, "")
    first_words = [line.split()[0] for line in ran.out.splitlines() if line.split()]
    assert [word for word in first_words if word in NAMED] == list(NAMED)
    assert "\x1b[" not in ran.out


def test_the_tables_numbers(bitplan: Bitplan) -> None:
    out = bitplan("formats").out
    assert cells(out, "e4m3") == ["e4m3", "float", "8", "448", "2^-6", "2^-9", "2^-3", "saturate", "NaN"]
    assert cells(out, "fp16") == ["fp16", "float", "16", "65504", "2^-14", "2^-24", "2^-10", "special", "inf,", "NaN"]
    assert cells(out, "e2m1") == ["e2m1", "float", "4", "6", "1", "2^-1", "2^-1", "saturate", "none"]
    assert cells(out, "int8") == ["int8", "int", "8", "127", "1", "1", "1", "saturate", "NaN"]
    assert cells(out, "nvfp4")[:6] == ["nvfp4", "block", "of", "16", "4.5", "2688"]


def test_only_the_named_formats_are_shown_in_the_order_asked_for(bitplan: Bitplan) -> None:
    out = bitplan("formats", "int5", "e4m3b4").out
    names = [line.split()[0] for line in out.splitlines() if line.split()][2:]
    assert names == ["int5", "e4m3b4"]


def test_json_of_one_float_is_one_object_with_its_definition(bitplan: Bitplan) -> None:
    record = bitplan("formats", "e4m3", "--json").json
    assert record == {
        "name": "e4m3",
        "kind": "float",
        "bits": 8,
        "bits_per_value": 8.0,
        "max": 448.0,
        "min_normal": 2.0**-6,
        "min_subnormal": 2.0**-9,
        "epsilon": 0.125,
        "overflow": "saturate",
        "special_codes": ["NaN"],
        "exponent_bits": 4,
        "mantissa_bits": 3,
        "bias": 0,
        "specials": "fn",
        "subnormals": True,
    }


def test_json_of_an_integer_and_of_a_block_has_their_definitions(bitplan: Bitplan) -> None:
    integer, block = bitplan("formats", "uint4", "nvfp4", "--json").json
    assert {key: integer[key] for key in integer.keys() - KEYS} == {"min": 0.0, "affine": True}
    assert {key: block[key] for key in block.keys() - KEYS} == {
        "element": "e2m1",
        "block_size": 16,
        "scale_format": "e4m3",
        "unit": 1.0,
    }


@pytest.mark.parametrize("names", [[], ["e4m3", "int8"], ["e4m3", "e4m3"]])
def test_json_of_none_or_several_names_is_a_list(bitplan: Bitplan, names: list[str]) -> None:
    ran = bitplan("formats", *names, "--json")
    assert [record["name"] for record in ran.json] == (names or list(NAMED))
    assert all(record.keys() >= KEYS for record in ran.json)
    assert ran.err == ""


def test_json_uses_the_canonical_name(bitplan: Bitplan) -> None:
    assert bitplan("formats", "E8M7", "--json").json["name"] == "bf16"


def test_values_are_listed_only_when_asked_for(bitplan: Bitplan) -> None:
    assert "values" not in bitplan("formats", "e2m1", "--json").json
    listed = bitplan("formats", "e2m1", "--json", "--values").json["values"]
    assert listed == list(get_format("e2m1").values())


def test_values_of_a_wide_format_are_left_out_with_a_word_about_it(bitplan: Bitplan) -> None:
    ran = bitplan("formats", "fp16", "e2m1", "--json", "--values")
    assert [("values" in record) for record in ran.json] == [False, True]
    assert ran.err == "bitplan: fp16 has 16 bits, too many values to list (the most is 10).\n"


def test_values_are_listed_for_people_too(bitplan: Bitplan) -> None:
    assert "int3: -3 -2 -1 0 1 2 3\n" in bitplan("formats", "int3", "--values").out


def test_svg_draws_just_the_named_formats(bitplan: Bitplan, tmp_path: Path) -> None:
    picture = tmp_path / "two.svg"
    ran = bitplan("formats", "e4m3", "int4", "--svg", picture, "--json")
    assert len(ran.json) == 2
    assert ran.err == f"bitplan: wrote {picture}\n"
    text = {element.text for element in ElementTree.parse(picture).iter()}
    assert {"e4m3", "int4"} <= text
    assert "e5m2" not in text


def test_svg_without_names_draws_what_can_be_drawn(bitplan: Bitplan, tmp_path: Path) -> None:
    assert bitplan("formats", "--svg", tmp_path / "all.svg").code == 0
    assert "e5m2" in (tmp_path / "all.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["e4m4x"], "there is no number format 'e4m4x'; did you mean"),
        (["e4m3", "int17"], "a symmetric integer needs 2 to 16 bits, not 17."),
        (["fp16", "--svg", "x.svg"], "fp16 has 16 bits, and only formats of up to 8 bits can be drawn."),
        (["e4m3", "--svg", "absent/x.svg"], "cannot write absent/x.svg (No such file or directory)"),
    ],
)
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_mistake_is_one_sentence_on_stderr(
    bitplan: Bitplan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
    json_flag: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = bitplan("formats", *arguments, *json_flag)
    assert ran.code == 2
    assert ran.err.startswith(f"bitplan: {sentence}")
    assert ran.err.count("\n") == 1
    if json_flag:
        assert ran.out == ""
