"""``bitplan schedules``: the ten cyclic schedules side by side, one of them drawn, or one for a saving."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from bitplan.cli.output import JsonOption, Output, command_output, make_folder, write_file
from bitplan.errors import ScheduleError
from bitplan.plans.schedules import SCHEDULE_NAMES, TEN, Schedule, ScheduleSummary, schedule
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES, PROFILE_WORDS
from bitplan.plans.schedules.named import (
    GROUPS,
    GROUPS_EXPLAINED,
    PAPERS_WORDS,
    SCHEDULE_NEEDS,
    SCHEDULE_OPTIONS,
    group_of,
    recommend,
)
from bitplan.plans.schedules.plots import drawing, sparkline

#: Schedules that a range of bits describes.
_SHOWN = tuple(name for name in SCHEDULE_NAMES if SCHEDULE_NEEDS[name] == ("low", "high"))

_BITS = re.compile(r"\s*([0-9]{1,3})\s*-\s*([0-9]{1,3})\s*")


def register(app: typer.Typer) -> None:
    app.command("schedules")(schedules)


def read_bits(text: str) -> tuple[int, int]:
    """The range in ``3-8``."""
    found = _BITS.fullmatch(text)
    if found is None:
        raise ScheduleError(f"{text!r} is no range of bits: write the lowest and the highest, such as 3-8.")
    return int(found[1]), int(found[2])


def complete_schedule(incomplete: str) -> list[str]:
    return [name for name in _SHOWN if name.startswith(incomplete)]


def schedules(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help=f"Draw this one: {', '.join(_SHOWN)}.",
            autocompletion=complete_schedule,
            show_default=False,
        ),
    ] = None,
    bits: Annotated[str, typer.Option(metavar="LOW-HIGH", help="The range of bits.")] = "3-8",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole run.")] = 64_000,
    cycles: Annotated[int, typer.Option(min=1, help="Cycles; of triangular ones, half triangles.")] = DEFAULT_CYCLES,
    saving: Annotated[
        float | None,
        typer.Option(
            help="Recommend one that saves this share of the bit operations of the highest bits, such as 0.4.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Also write a page that draws them (an .html file).", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the ten cyclic schedules side by side, or one of them drawn.

    With --json: one object for one NAME (name, first, last, mean_bits, share_at_max, relative_cost); with --saving the
    same and the reason; a list of objects otherwise. relative_cost is against static at the highest bits, with the
    backward pass at the highest bits.
    """
    with command_output(as_json) as output:
        low, high = read_bits(bits)
        if saving is not None:
            if name is not None:
                raise ScheduleError(f"--saving chooses a schedule by itself: drop {name}, or --saving.")
            advice = recommend(saving, low, high, steps, cycles)
            chosen = _made(advice.summary.name, low, high, cycles)
            _write_plot(plot, [chosen], steps, output)
            output.document({**asdict(advice.summary), "reason": advice.reason})
            if not as_json:
                _print_one(chosen, steps, output)
                output.console.print(advice.reason, soft_wrap=True)
        elif name is not None:
            chosen = _made(name, low, high, cycles)
            _write_plot(plot, [chosen], steps, output)
            output.document(asdict(chosen.summary(steps)))
            if not as_json:
                _print_one(chosen, steps, output)
        else:
            ten = {each: _made(each, low, high, cycles) for each in TEN}
            _write_plot(plot, [ten[each] for names in GROUPS.values() for each in names], steps, output)
            records: list[dict[str, Any]] = [
                {**asdict(each.summary(steps)), "group": group_of(each.name)} for each in ten.values()
            ]
            output.document(records)
            if not as_json:
                _print_ten(ten, steps, output)


def _write_plot(page: Path | None, shown: list[Schedule], steps: int, output: Output) -> None:
    if page is None:
        return
    from bitplan.lab.report.page import schedules_page_html

    text = schedules_page_html(shown, steps)
    make_folder(page.parent)
    write_file(page, text)
    output.note(f"wrote {page}")


def _made(name: str, low: int, high: int, cycles: int) -> Schedule:
    known = name if name in SCHEDULE_NAMES else name.upper()
    if known in SCHEDULE_NAMES and known not in _SHOWN:
        raise ScheduleError(f"{name} is more than a range of bits: write it in a plan's schedules.")
    options: dict[str, Any] = {"low": low, "high": high}
    if "cycles" in SCHEDULE_OPTIONS.get(known, ()):
        options["cycles"] = cycles
    return schedule(name, **options)


def _is_plain(output: Output) -> bool:
    return not output.console.encoding.lower().startswith("utf")


def _figures(summary: ScheduleSummary) -> list[str]:
    return [
        f"{summary.first}",
        f"{summary.last}",
        f"{summary.mean_bits:.2f}",
        f"{summary.share_at_max:.1%}",
        f"{summary.relative_cost:.3f}",
    ]


_HEADINGS = ("first", "last", "mean bits", "at the top", "relative cost")


def _print_ten(ten: dict[str, Schedule], steps: int, output: Output) -> None:
    for group, names in GROUPS.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{group} (the papers: {PAPERS_WORDS[group]})")
        table.title_justify = "left"
        table.add_column("name", style="bold", no_wrap=True)
        table.add_column("bits over the run", no_wrap=True)
        for heading in _HEADINGS:
            table.add_column(heading, justify="right")
        for name in names:
            line = sparkline(ten[name], steps, 40, _is_plain(output))
            table.add_row(name, line, *_figures(ten[name].summary(steps)))
        output.console.print(table)
    chosen = next(iter(ten.values()))
    output.console.print(
        f"{chosen.lowest}-{chosen.highest} bits over {steps:,} steps. Relative cost: bit operations against "
        f"{chosen.highest} bits throughout, with the backward pass at {chosen.highest} bits. {GROUPS_EXPLAINED}",
        soft_wrap=True,
    )
    letters = "; ".join(f"{letter} {words}" for letter, words in PROFILE_WORDS.items())
    output.console.print(
        f"Names: {letters}. Then R repeated, or T triangular (falls, then grows), whose falls mirror the growth "
        f"vertically (V) or in time (H).",
        soft_wrap=True,
    )


def _print_one(chosen: Schedule, steps: int, output: Output) -> None:
    summary, group = chosen.summary(steps), group_of(chosen.name)
    output.console.print(f"{chosen}{f', {group}' if group else ''}, over {steps:,} steps")
    for line in drawing(chosen, steps, plain=_is_plain(output)):
        output.console.print(line, no_wrap=True, overflow="ignore", crop=False)
    for heading, figure in zip(_HEADINGS, _figures(summary), strict=True):
        output.console.print(f"{heading}: {figure}")
