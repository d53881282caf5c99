from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from bitplan.errors import FormatError
from bitplan.lab.report.formats_picture import drawable_formats, formats_svg
from bitplan.numerics.formats import NAMED, get_format

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*names: str) -> ElementTree.Element:
    return ElementTree.fromstring(formats_svg([get_format(name) for name in names]))


def row_of(picture: ElementTree.Element, name: str) -> ElementTree.Element:
    (row,) = [g for g in picture.iter(f"{SVG}g") if g.findtext(f"{SVG}title", "").startswith(f"{name}:")]
    return row


def tick_places(row: ElementTree.Element, *styles: str) -> list[float]:
    paths = [path.get("d", "") for path in row.iter(f"{SVG}path") if path.get("class") in styles]
    return [float(x) for path in paths for x in re.findall(r"M([\d.]+) ", path)]


@pytest.mark.parametrize("name", ["e5m2", "e4m3", "e3m4", "e2m1", "int8", "int2", "uint4", "e4m3ns", "e4m3b4"])
def test_each_positive_value_has_exactly_one_tick_at_its_logarithm(name: str) -> None:
    row = row_of(drawn(name, "e5m2b0"), name)
    values = [value for value in get_format(name).values() if value > 0]
    places = tick_places(row, "float", "subnormal", "int")
    assert len(places) == len(values)
    assert places == sorted(places)
    if len(values) > 1:
        per_octave = (places[-1] - places[0]) / math.log2(values[-1] / values[0])
        expected = [places[0] + per_octave * math.log2(value / values[0]) for value in values]
        assert places == pytest.approx(expected, abs=0.02)


def test_rows_share_one_axis() -> None:
    picture = drawn("e4m3", "int4", "e2m1")
    ones = set()
    for name in ("e4m3", "int4", "e2m1"):
        values = [value for value in get_format(name).values() if value > 0]
        ones.add(tick_places(row_of(picture, name), "subnormal", "float", "int")[values.index(1.0)])
    assert len(ones) == 1


def test_subnormals_are_told_apart() -> None:
    row = row_of(drawn("e4m3"), "e4m3")
    assert len(tick_places(row, "subnormal")) == 7
    assert tick_places(row_of(drawn("e4m3ns"), "e4m3ns"), "subnormal") == []


def test_the_picture_stands_alone_and_has_text_alternatives() -> None:
    text = formats_svg(drawable_formats(map(get_format, NAMED)))
    picture = ElementTree.fromstring(text)
    assert picture.get("role") == "img"
    assert picture.get("aria-labelledby") == "title desc"
    assert picture.findtext(f"{SVG}title")
    assert "e4m3: 126 positive values from 0.00195312 to 448" in picture.findtext(f"{SVG}desc", "")
    assert "prefers-color-scheme:dark" in text
    assert re.findall(r"(?:href|src|url\(|@import|<script)", text) == []
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


def test_everything_lies_inside_the_picture() -> None:
    picture = drawn(*(drawable_format.name for drawable_format in drawable_formats(map(get_format, NAMED))))
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    for element in picture.iter():
        for key, limit in (("x", width), ("x1", width), ("x2", width), ("y", height), ("y1", height), ("y2", height)):
            assert 0 <= float(element.get(key, 0)) <= limit


def test_the_named_formats_of_up_to_eight_bits_can_be_drawn() -> None:
    names = [drawable_format.name for drawable_format in drawable_formats(map(get_format, NAMED))]
    assert names == ["e5m2", "e4m3", "e3m4", "e3m2", "e2m3", "e2m1", "int8", "int6", "int4", "int3", "int2", "nf4"]


def test_a_picture_of_very_distant_formats_still_has_few_labels() -> None:
    labels = [t for t in drawn("e7m0b200none", "e7m0b-200none").iter(f"{SVG}text") if t.get("class") == "exponent"]
    assert 4 <= len(labels) <= 40


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["e4m3", "fp16"], "fp16 has 16 bits, and only formats of up to 8 bits can be drawn"),
        (["mxfp4"], "draw its elements, e2m1, instead"),
        ([], "there is no format to draw"),
    ],
)
def test_what_cannot_be_drawn_is_said_not_left_out(names: list[str], sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        drawn(*names)
