"""``bitplan formats`` and ``error``: what number formats can hold, and their error on products of random matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from bitplan.analysis.error_study import DEFAULT_FORMATS, StudyRow, StudyScale, study
from bitplan.cli.output import FittedTable, JsonOption, Output, command_output, write_file
from bitplan.lab.report.formats_picture import drawable_formats, formats_svg
from bitplan.numerics.formats import (
    MAX_LISTED_BITS,
    NAMED,
    BlockFormat,
    CodebookFormat,
    FloatFormat,
    Format,
    IntFormat,
    get_format,
)
from bitplan.numerics.reference import ROUNDINGS, Rounding


def register(app: typer.Typer) -> None:
    app.command("formats")(formats)
    app.command("error")(error)


# --- formats


def _complete_name(incomplete: str) -> list[str]:
    return [name for name in NAMED if name.startswith(incomplete)]


def formats(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Formats to show, such as e4m3, e4m3b4 or int8. Default: all well-known ones.",
            autocompletion=_complete_name,
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    values: Annotated[
        bool, typer.Option("--values", help=f"Also list every value, of formats of up to {MAX_LISTED_BITS} bits.")
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Also draw the formats of up to 8 bits.", show_default=False),
    ] = None,
) -> None:
    """Show the number formats: bits, range, spacing, overflow and special codes.

    With --json: one object for one name, a list of objects otherwise.
    """
    with command_output(as_json) as output:
        selected = [get_format(name) for name in names or NAMED]
        records = [format_record(number_format, values and _listable(number_format)) for number_format in selected]
        output.document(records[0] if names and len(names) == 1 else records)
        if not as_json:
            print_table(selected, output.console)
        if values:
            _list_values(selected, output)
        if svg is not None:
            write_file(svg, formats_svg(selected if names else drawable_formats(selected)))
            output.note(f"wrote {svg}")


def format_record(number_format: Format, with_values: bool = False) -> dict[str, Any]:
    """A format as JSON: the figures that every kind has, then the fields that define it."""
    record: dict[str, Any] = {
        "name": number_format.name,
        "kind": number_format.kind,
        "bits": number_format.bits,
        "bits_per_value": number_format.bits_per_value,
        "max": number_format.max,
        "min_normal": number_format.min_normal,
        "min_subnormal": number_format.min_subnormal,
        "epsilon": number_format.epsilon,
        "overflow": number_format.default_overflow,
        "special_codes": special_codes(number_format),
    }
    if isinstance(number_format, FloatFormat):
        record |= {
            "exponent_bits": number_format.exponent_bits,
            "mantissa_bits": number_format.mantissa_bits,
            "bias": number_format.bias,
            "specials": number_format.specials,
            "subnormals": number_format.subnormals,
        }
    elif isinstance(number_format, IntFormat):
        record |= {"min": number_format.min, "affine": number_format.affine}
    elif isinstance(number_format, CodebookFormat):
        record |= {"min": number_format.min, "codes": len(number_format.book)}
    else:
        record |= {
            "element": number_format.element.name,
            "block_size": number_format.size,
            "scale_format": number_format.scale,
            "unit": number_format.unit,
        }
    if with_values:
        record["values"] = number_format.values()
    return record


def special_codes(number_format: Format) -> list[str]:
    """The codes that are not numbers: of an element, or of a block's scale."""
    has_infinities = isinstance(number_format, FloatFormat) and number_format.specials == "ieee"
    return ["inf"] * has_infinities + ["NaN"] * number_format.has_nan_code


def print_table(selected: Iterable[Format], console: Console) -> None:
    """The formats as a table, one row each."""
    table = FittedTable()
    table.add_column("name", "name", style="bold")
    table.add_column("kind", is_optional=True)
    for heading in ("bits", "max", "min normal", "min subnormal", "epsilon"):
        table.add_column(heading, "number")
    table.add_column("overflow")
    table.add_column("special codes", is_optional=True)
    for number_format in selected:
        table.add_row(
            number_format.name,
            _kind(number_format),
            f"{number_format.bits_per_value:g}",
            _number(number_format.max),
            _number(number_format.min_normal),
            _number(number_format.min_subnormal),
            _number(number_format.epsilon),
            number_format.default_overflow,
            ", ".join(special_codes(number_format)) or "none",
        )
    table.print(console)


def _kind(number_format: Format) -> str:
    return f"block of {number_format.size}" if isinstance(number_format, BlockFormat) else number_format.kind


def _number(value: float) -> str:
    """Short and exact: a power of two beyond everyday size as such, what has few digits in full, else rounded."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 1 <= value <= 4096:
        return f"2^{exponent - 1}"
    return f"{value:.6g}"


def _listable(number_format: Format) -> bool:
    return number_format.bits <= MAX_LISTED_BITS


def _list_values(selected: Sequence[Format], output: Output) -> None:
    for number_format in selected:
        if not _listable(number_format):
            output.note(
                f"{number_format.name} has {number_format.bits} bits, too many values to list "
                f"(the most is {MAX_LISTED_BITS})."
            )
        elif not output.as_json:
            listed = " ".join(f"{value:g}" for value in number_format.values())
            output.console.print(f"{number_format.name}: {listed}")


# --- error


_BAR_COLUMNS = 48


def error(
    # An option takes one value: further ones arrive as arguments. Numbers belong to --nu, names to --formats.
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORD", show_default=False, hidden=True, autocompletion=_complete_name),
    ] = None,
    distribution: Annotated[str, typer.Option(help="Of the entries: student-t.")] = "student-t",
    nu: Annotated[
        list[float] | None,
        typer.Option(
            "--nu",
            metavar="NU...",
            help="Degrees of freedom: the fewer, the heavier the tails; inf is the Gaussian. Default: inf.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="How many terms each element of a product sums.")] = 512,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of x and columns of w. Default: as many as --size.", show_default=False),
    ] = None,
    scale: Annotated[
        str, typer.Option(metavar="vector|tensor", help="One scale for each vector that is summed, or each tensor.")
    ] = "vector",
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--formats",
            metavar="FORMAT...",
            help=f"Formats of both operands. Default: {' '.join(DEFAULT_FORMATS)}.",
            autocompletion=_complete_name,
            show_default=False,
        ),
    ] = None,
    rounding: Annotated[str, typer.Option(help=f"{', '.join(ROUNDINGS)}.")] = "nearest",
    draws: Annotated[int, typer.Option(min=1, help="Pairs of random matrices.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Decides the draws.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure the backward error of products of random matrices in several formats.

    |x w - q(x) q(w)| / (|x| |w|), element by element. Several --nu are also drawn. With --json: a list of objects with
    format, nu, scale, median, mean and p99.
    """
    with command_output(as_json) as output:
        more_nus, more_formats = split_words(more or ())
        study_rows: list[StudyRow] = []
        for degrees in dict.fromkeys([*(nu or ()), *more_nus]) or [math.inf]:
            study_rows += study(
                distribution,
                degrees,
                size,
                cast(StudyScale, scale),
                [*(formats or ()), *more_formats] or DEFAULT_FORMATS,
                cast(Rounding, rounding),
                draws,
                seed,
                rows=rows,
            )
        output.document([asdict(row) for row in study_rows])
        if not as_json:
            _print_errors(study_rows, output.console)
            plain = not output.console.encoding.lower().startswith("utf")
            if len({row.nu for row in study_rows}) > 1:
                for line in drawing(study_rows, plain):
                    output.console.print(line, no_wrap=True, overflow="ignore", crop=False)
            output.console.print(
                f"Backward error, a scale per {scale}, {rounding} rounding, sums of {size} terms, {draws} draws. It is "
                f"smaller for longer sums: compare equal sizes."
            )


def split_words(arguments: Sequence[str]) -> tuple[list[float], list[str]]:
    """Degrees of freedom and formats among words; no format's name reads as a number.

    >>> split_words(["3", "inf", "e4m3"])
    ([3.0, inf], ['e4m3'])
    """
    numbers: list[float] = []
    names: list[str] = []
    for word in arguments:
        try:
            numbers.append(float(word))
        except ValueError:
            names.append(word)
    return numbers, names


def drawing(rows: Sequence[StudyRow], plain: bool = False) -> list[str]:
    """The medians as bars on a logarithmic scale from the power of ten below the least. `plain`: in ASCII."""
    medians = [row.median for row in rows if row.median > 0 and math.isfinite(row.median)]
    if not medians:
        return []
    low = math.floor(math.log10(min(medians)))
    high = max(math.ceil(math.log10(max(medians))), low + 1)
    widest = max(len(row.format) for row in rows)
    lines = [f"median, bars from 1e{low} to 1e{high}, logarithmic"]
    before: float | None = None
    for row in rows:
        heading = "" if row.nu == before else f"nu {row.nu:g}"
        before = row.nu
        share = (math.log10(row.median) - low) / (high - low) if row.median in medians else 0.0
        bar = ("#" if plain else "█") * max(round(share * _BAR_COLUMNS), int(row.median in medians))
        lines.append(f"{heading:<8} {row.format:<{widest}} {bar} {row.median:.1e}")
    return lines


def _print_errors(rows: Sequence[StudyRow], console: Console) -> None:
    table = FittedTable()
    table.add_column("nu", "number")
    table.add_column("format", "name", style="bold")
    for heading in ("median", "mean", "p99"):
        table.add_column(heading, "number")
    table.add_column("")
    least = {row.nu: min(other.median for other in rows if other.nu == row.nu) for row in rows}
    for row in rows:
        figures = [f"{figure:.2e}" for figure in (row.median, row.mean, row.p99)]
        table.add_row(f"{row.nu:g}", row.format, *figures, "least" if row.median == least[row.nu] else "")
    table.print(console)
