"""``bitplan error``: what formats do to products of random matrices with heavy and light tails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bitplan.analysis.error_study import DEFAULT_FORMATS, StudyRow, StudyScale, study
from bitplan.cli.output import JsonOption, command_output
from bitplan.numerics.formats import NAMED
from bitplan.numerics.reference import ROUNDINGS, Rounding

_BAR_COLUMNS = 48


def register(app: typer.Typer) -> None:
    app.command("error")(error)


def _complete_format(incomplete: str) -> list[str]:
    return [name for name in NAMED if name.startswith(incomplete)]


def error(
    # An option takes one value: the words behind it arrive as arguments. Numbers belong to --nu, names to --formats.
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORD", show_default=False, hidden=True, autocompletion=_complete_format),
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
            autocompletion=_complete_format,
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
        found: list[StudyRow] = []
        for each in dict.fromkeys([*(nu or ()), *more_nus]) or [math.inf]:
            found += study(
                distribution,
                each,
                size,
                cast(StudyScale, scale),
                [*(formats or ()), *more_formats] or DEFAULT_FORMATS,
                cast(Rounding, rounding),
                draws,
                seed,
                rows=rows,
            )
        output.document([asdict(row) for row in found])
        if not as_json:
            _print_table(found, output.console)
            plain = not output.console.encoding.lower().startswith("utf")
            if len({row.nu for row in found}) > 1:
                for line in drawing(found, plain):
                    output.console.print(line, no_wrap=True, overflow="ignore", crop=False)
            output.console.print(
                f"Backward error, a scale per {scale}, {rounding} rounding, sums of {size} terms, {draws} draws. It is "
                f"smaller for longer sums: compare equal sizes.",
                soft_wrap=True,
            )


def split_words(words: Sequence[str]) -> tuple[list[float], list[str]]:
    """Degrees of freedom and formats among words; no format's name reads as a number.

    >>> split_words(["3", "inf", "e4m3"])
    ([3.0, inf], ['e4m3'])
    """
    numbers: list[float] = []
    names: list[str] = []
    for word in words:
        try:
            numbers.append(float(word))
        except ValueError:
            names.append(word)
    return numbers, names


def drawing(rows: Sequence[StudyRow], plain: bool = False) -> list[str]:
    """The medians as bars on a logarithmic scale from the power of ten below the least. `plain`: in ASCII."""
    shown = [row.median for row in rows if row.median > 0 and math.isfinite(row.median)]
    if not shown:
        return []
    low = math.floor(math.log10(min(shown)))
    high = max(math.ceil(math.log10(max(shown))), low + 1)
    widest = max(len(row.format) for row in rows)
    lines = [f"median, bars from 1e{low} to 1e{high}, logarithmic"]
    before: float | None = None
    for row in rows:
        heading = "" if row.nu == before else f"nu {row.nu:g}"
        before = row.nu
        share = (math.log10(row.median) - low) / (high - low) if row.median in shown else 0.0
        bar = ("#" if plain else "█") * max(round(share * _BAR_COLUMNS), int(row.median in shown))
        lines.append(f"{heading:<8} {row.format:<{widest}} {bar} {row.median:.1e}")
    return lines


def _print_table(rows: Sequence[StudyRow], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("nu", justify="right")
    table.add_column("format", style="bold", no_wrap=True)
    for heading in ("median", "mean", "p99"):
        table.add_column(heading, justify="right")
    table.add_column("")
    least = {row.nu: min(other.median for other in rows if other.nu == row.nu) for row in rows}
    for row in rows:
        figures = [f"{figure:.2e}" for figure in (row.median, row.mean, row.p99)]
        table.add_row(f"{row.nu:g}", row.format, *figures, "least" if row.median == least[row.nu] else "")
    console.print(table)
