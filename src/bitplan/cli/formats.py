"""``bitplan formats``: what the number formats can hold, as a table, as JSON, as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bitplan.cli.output import JsonOption, Output, command_output, write_file
from bitplan.lab.report.formats_picture import drawable_formats, formats_svg
from bitplan.numerics.formats import MAX_LISTED_BITS, NAMED, BlockFormat, FloatFormat, Format, IntFormat, get_format


def register(app: typer.Typer) -> None:
    app.command("formats")(formats)


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
        chosen = [get_format(name) for name in names or NAMED]
        records = [format_record(each, values and _listable(each)) for each in chosen]
        output.document(records[0] if names and len(names) == 1 else records)
        if not as_json:
            print_table(chosen, output.console)
        if values:
            _list_values(chosen, output)
        if svg is not None:
            write_file(svg, formats_svg(chosen if names else drawable_formats(chosen)))
            output.note(f"wrote {svg}")


def format_record(each: Format, with_values: bool = False) -> dict[str, Any]:
    """What JSON says about a format: the numbers every kind has, then the fields that define it."""
    record: dict[str, Any] = {
        "name": each.name,
        "kind": each.kind,
        "bits": each.bits,
        "bits_per_value": each.bits_per_value,
        "max": each.max,
        "min_normal": each.min_normal,
        "min_subnormal": each.min_subnormal,
        "epsilon": each.epsilon,
        "overflow": each.default_overflow,
        "special_codes": special_codes(each),
    }
    if isinstance(each, FloatFormat):
        record |= {
            "exponent_bits": each.exponent_bits,
            "mantissa_bits": each.mantissa_bits,
            "bias": each.bias,
            "specials": each.specials,
            "subnormals": each.subnormals,
        }
    elif isinstance(each, IntFormat):
        record |= {"min": each.min, "affine": each.affine}
    else:
        record |= {
            "element": each.element.name,
            "block_size": each.size,
            "scale_format": each.scale,
            "unit": each.unit,
        }
    if with_values:
        record["values"] = each.values()
    return record


def special_codes(each: Format) -> list[str]:
    """The codes that are not numbers, in words: of an element, or for a block of its scale."""
    has_infinities = isinstance(each, FloatFormat) and each.specials == "ieee"
    return ["inf"] * has_infinities + ["NaN"] * each.has_nan_code


def print_table(chosen: Iterable[Format], console: Console) -> None:
    """The formats as a table, one row each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("kind")
    for heading in ("bits", "max", "min normal", "min subnormal", "epsilon"):
        table.add_column(heading, justify="right")
    table.add_column("overflow")
    table.add_column("special codes")
    for each in chosen:
        table.add_row(
            each.name,
            _kind(each),
            f"{each.bits_per_value:g}",
            _number(each.max),
            _number(each.min_normal),
            _number(each.min_subnormal),
            _number(each.epsilon),
            each.default_overflow,
            ", ".join(special_codes(each)) or "none",
        )
    console.print(table)


def _kind(each: Format) -> str:
    return f"block of {each.size}" if isinstance(each, BlockFormat) else each.kind


def _number(value: float) -> str:
    """Short and exact: a power of two beyond everyday size as such, what has few digits in full, else rounded."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 1 <= value <= 4096:
        return f"2^{exponent - 1}"
    return f"{value:.6g}"


def _listable(each: Format) -> bool:
    return each.bits <= MAX_LISTED_BITS


def _list_values(chosen: Sequence[Format], output: Output) -> None:
    for each in chosen:
        if not _listable(each):
            output.note(f"{each.name} has {each.bits} bits, too many values to list (the most is {MAX_LISTED_BITS}).")
        elif not output.as_json:
            listed = " ".join(f"{value:g}" for value in each.values())
            output.console.print(f"{each.name}: {listed}", soft_wrap=True)
