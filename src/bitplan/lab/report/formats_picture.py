"""A picture of the small formats: every positive value a tick, every format a row, one log2 axis for all.

A reader sees range (how far a row reaches) against density (how close its ticks are), where
subnormals thin out towards zero, and how integers crowd at the top. The SVG stands alone: no
script, no font file, its own light and dark colours, and text alternatives for each row.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from bitplan.errors import FormatError
from bitplan.numerics.formats import BlockFormat, ElementFormat, FloatFormat, Format, IntFormat, get_format

#: With more bits the ticks of a row would merge into a bar.
MAX_DRAWN_BITS = 8

_WIDTH = 1240
_PLOT_LEFT, _PLOT_RIGHT = 128, 936
_COLUMNS = {"bits": 990, "largest": 1062, "values": 1128, "per octave": 1216}
_HEADER_HEIGHT = 138
_ROW_HEIGHT, _TICK_HEIGHT = 40, 22
_GROUP_GAP = 34
_FOOTER_HEIGHT = 84
_LABEL_SPACE = 46
_LONG_NAME = 11

_LIGHT = {
    "paper": "#fdfdfc",
    "ink": "#1d2127",
    "quiet": "#59626d",
    "grid": "#e4e6ea",
    "one": "#a9b0b9",
    "float": "#1c5cb8",
    "subnormal": "#c4530f",
    "int": "#12775a",
}
_DARK = {
    "paper": "#13161b",
    "ink": "#eceef1",
    "quiet": "#a3acb8",
    "grid": "#2b3038",
    "one": "#5d6673",
    "float": "#7fb4ff",
    "subnormal": "#ffa866",
    "int": "#63d2a6",
}


@dataclass(frozen=True)
class Picture:
    """An SVG picture, which a notebook displays."""

    svg: str

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self.svg, encoding="utf-8")

    def __repr__(self) -> str:
        return f"<Picture: {len(self.svg):,} characters of SVG>"

    def _repr_svg_(self) -> str:
        return self.svg


def formats_picture(*formats: str | Format) -> Picture:
    """A picture of every positive value of some formats, by name or as objects.

    >>> formats_picture("e4m3", "int8")._repr_svg_()[:4]
    '<svg'
    """
    return Picture(formats_svg([get_format(item) if isinstance(item, str) else item for item in formats]))


def drawable_formats(formats: Iterable[Format]) -> list[Format]:
    """Those of `formats` that :func:`formats_svg` can draw."""
    return [number_format for number_format in formats if _why_not_drawable(number_format) is None]


def formats_svg(formats: Sequence[Format]) -> str:
    """The picture as SVG text; raises where it cannot draw a format."""
    for number_format in formats:
        if reason := _why_not_drawable(number_format):
            raise FormatError(reason)
    rows = [_Row.of(number_format) for number_format in formats if not isinstance(number_format, BlockFormat)]
    if not rows:
        raise FormatError("there is no format to draw: name at least one, such as e4m3.")
    axis = _Axis.over(rows)
    groups = [
        (heading, group) for heading, kind in _GROUPS if (group := [row for row in rows if row.format.kind == kind])
    ]
    bottom = _HEADER_HEIGHT + len(groups) * _GROUP_GAP + len(rows) * _ROW_HEIGHT
    body = [*_grid(axis, bottom), *_header()]
    y = float(_HEADER_HEIGHT)
    for heading, group in groups:
        body.append(_text(24, y + 22, heading, "group"))
        y += _GROUP_GAP
        for row in group:
            body += _drawn_row(row, axis, y + _ROW_HEIGHT / 2)
            y += _ROW_HEIGHT
    body += _footer(rows, bottom)
    height = bottom + _FOOTER_HEIGHT
    summary = "; ".join(row.sentence for row in rows)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img" aria-labelledby="title desc">',
            '<title id="title">Every positive value of the small number formats on one logarithmic axis</title>',
            f'<desc id="desc">{escape(summary)}.</desc>',
            f"<style>{_stylesheet()}</style>",
            f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="10"/>',
            *body,
            "</svg>",
            "",
        ]
    )


#: Heading and kind of the groups, from top to bottom.
_GROUPS = (
    ("Floating point", "float"),
    ("Integers, at a scale of 1", "int"),
    ("Code books, at a scale of 1", "codebook"),
)


def _why_not_drawable(number_format: Format) -> str | None:
    if isinstance(number_format, BlockFormat):
        return (
            f"{number_format.name} has a scale in every block, so its values have no fixed place to be drawn at: "
            f"draw its elements, {number_format.element.name}, instead."
        )
    if number_format.bits > MAX_DRAWN_BITS:
        return (
            f"{number_format.name} has {number_format.bits} bits, and only formats of up to {MAX_DRAWN_BITS} bits can "
            f"be drawn."
        )
    return None


@dataclass(frozen=True)
class _Row:
    """One format with its positive values."""

    format: ElementFormat
    values: tuple[float, ...]

    @classmethod
    def of(cls, number_format: ElementFormat) -> _Row:
        return cls(number_format, tuple(value for value in number_format.values() if value > 0))

    @property
    def sentence(self) -> str:
        low, high = self.values[0], self.values[-1]
        return f"{self.format.name}: {len(self.values)} positive values from {low:g} to {high:g}"

    @property
    def largest(self) -> str:
        full = f"{self.values[-1]:g}"
        return full if len(full) <= 7 else f"{self.values[-1]:.3g}"

    @property
    def density(self) -> str:
        """Values in one octave, [v, 2v): the same in every octave of a float, growing with v for integers."""
        if isinstance(self.format, FloatFormat):
            return str(1 << self.format.mantissa_bits)
        top = 1 << (int(self.values[-1]).bit_length() - 1)
        return f"1 to {top}" if top > 1 else "1"

    def split(self) -> tuple[list[float], list[float]]:
        """Subnormal and normal values."""
        least = self.format.min_normal
        return [v for v in self.values if v < least], [v for v in self.values if v >= least]


@dataclass(frozen=True)
class _Axis:
    """The log2 axis, from octave `low` to octave `high`."""

    low: int
    high: int

    @classmethod
    def over(cls, rows: Sequence[_Row]) -> _Axis:
        low = math.floor(math.log2(min(row.values[0] for row in rows)))
        high = math.ceil(math.log2(max(row.values[-1] for row in rows)))
        return cls(low - 1, high + 1)

    @property
    def octave_width(self) -> float:
        return (_PLOT_RIGHT - _PLOT_LEFT) / (self.high - self.low)

    def x(self, value: float) -> float:
        return _PLOT_LEFT + (math.log2(value) - self.low) * self.octave_width


def _grid(axis: _Axis, bottom: int) -> list[str]:
    """Lines and labels: powers of two below, powers of ten above."""
    top = _HEADER_HEIGHT
    parts = []
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if s * axis.octave_width >= _LABEL_SPACE)
    for power in _multiples(axis.low, axis.high, step):
        x = axis.x(2.0**power)
        parts.append(_line(x, top, x, bottom, "one" if power == 0 else "grid"))
        parts.append(_power(x, bottom + 20, 2, power))
    decade = axis.octave_width * math.log2(10)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200) if s * decade >= _LABEL_SPACE)
    first, last = axis.low / math.log2(10), axis.high / math.log2(10)
    for power in _multiples(math.ceil(first), math.floor(last), step):
        x = axis.x(10.0**power)
        parts.append(_line(x, top - 5, x, top, "tick"))
        plain = f"{10.0**power:g}" if -3 <= power <= 3 else None
        parts.append(_text(x, top - 12, plain, "label") if plain else _power(x, top - 12, 10, power))
    return parts


def _header() -> list[str]:
    swatches = (("float", "normal value"), ("subnormal", "subnormal value"), ("int", "integer"))
    parts = [
        _text(24, 40, "What the small number formats can hold", "title"),
        _text(24, 64, "One tick for every positive value: a long row has range, close ticks are precision.", ""),
    ]
    for place, (style, label) in enumerate(swatches):
        x = 24 + 150 * place
        parts.append(f'<path class="{style}" stroke-width="1.6" d="M{x} 78v14M{x + 5} 78v14M{x + 10} 78v14"/>')
        parts.append(_text(x + 19, 90, label, "quiet"))
    parts += [_text(x, _HEADER_HEIGHT - 12, heading, "end quiet") for heading, x in _COLUMNS.items()]
    return parts


def _footer(rows: Sequence[_Row], bottom: int) -> list[str]:
    unsigned = any(isinstance(row.format, IntFormat) and row.format.affine for row in rows)
    notes = (
        f"Negative values mirror these{' (uint formats have none)' if unsigned else ''}, and zero is in every format.",
        "A scale slides a row along the axis and changes neither its length nor its ticks.",
    )
    return [_text(24, bottom + 50 + 18 * line, note, "quiet") for line, note in enumerate(notes)]


def _drawn_row(row: _Row, axis: _Axis, middle: float) -> list[str]:
    subnormal, normal = row.split()
    kind = row.format.kind
    left, right = axis.x(row.values[0]), axis.x(row.values[-1])
    band = (
        f'<rect class="band-{kind}" x="{left - 4:.2f}" y="{middle - _TICK_HEIGHT / 2 - 3:.2f}" '
        f'width="{right - left + 8:.2f}" height="{_TICK_HEIGHT + 6}" rx="4"/>'
    )
    parts = ["<g>", f"<title>{escape(row.sentence)}</title>", band]
    for values, style in ((subnormal, "subnormal"), (normal, kind)):
        if values:
            parts.append(_ticks(values, axis.x, middle, style))
    name = row.format.name
    parts.append(_text(24, middle + 5, name, "name long" if len(name) > _LONG_NAME else "name"))
    columns = (str(row.format.bits), row.largest, str(len(row.values)), row.density)
    for x, text in zip(_COLUMNS.values(), columns, strict=True):
        parts.append(_text(x, middle + 5, text, "end number"))
    return [*parts, "</g>"]


def _ticks(values: Sequence[float], place: Callable[[float], float], middle: float, style: str) -> str:
    top = middle - _TICK_HEIGHT / 2
    paths = []
    for _, octave in itertools.groupby(values, lambda value: math.frexp(value)[1]):
        xs = [place(value) for value in octave]
        closest = min((b - a for a, b in itertools.pairwise(xs)), default=math.inf)
        # Thin enough that neighbours stay apart, thick enough to be seen at all.
        stroke = min(1.6, max(0.45, 0.42 * closest))
        ticks = "".join(f"M{x:.2f} {top:g}v{_TICK_HEIGHT}" for x in xs)
        paths.append(f'<path class="{style}" stroke-width="{stroke:.2f}" d="{ticks}"/>')
    return "".join(paths)


def _multiples(low: int, high: int, step: int) -> range:
    return range(math.ceil(low / step) * step, high + 1, step)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" class="{style}">{escape(text)}</text>'


def _power(x: float, y: float, base: int, power: int) -> str:
    """`base` to the `power` as two texts that meet at `x`: renderers disagree on centring shifted spans."""
    exponent = str(power).replace("-", "\N{MINUS SIGN}")
    return _text(x + 1, y, str(base), "end quiet") + _text(x + 2, y - 5, exponent, "exponent")


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" class="{style}"/>'


def _stylesheet() -> str:
    shapes = (
        "text{font:14px system-ui,'Segoe UI','Helvetica Neue',Arial,'DejaVu Sans',sans-serif}"
        ".title{font-size:22px;font-weight:600}.group{font-weight:600}"
        ".name{font-family:ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace;font-weight:600}"
        ".long{font-size:11px}.quiet,.label{font-size:13px}.exponent{font-size:9.5px}.label{text-anchor:middle}.end{text-anchor:end}"
        "path{fill:none}line{stroke-width:1}"
    )
    return f"{shapes}{_colours(_LIGHT)}@media (prefers-color-scheme:dark){{{_colours(_DARK)}}}"


def _colours(palette: dict[str, str]) -> str:
    strokes = "".join(f".{name}{{stroke:{palette[name]}}}" for name in ("grid", "one", "float", "subnormal", "int"))
    return (
        f".paper{{fill:{palette['paper']}}}text{{fill:{palette['ink']}}}"
        f".quiet,.label,.exponent{{fill:{palette['quiet']}}}.tick{{stroke:{palette['one']}}}{strokes}"
        f".band-float{{fill:{palette['float']};fill-opacity:.1}}.band-int{{fill:{palette['int']};fill-opacity:.1}}"
    )
