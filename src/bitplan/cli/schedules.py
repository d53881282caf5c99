"""``bitplan schedules`` and ``range-test``: precision over time, and the lowest bits that a schedule may use."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from bitplan.analysis.targets import target_errors
from bitplan.cli.arguments import TaskArgument, TaskSettingsOption
from bitplan.cli.output import FittedTable, JsonOption, Output, command_output, make_folder, write_file
from bitplan.errors import ScheduleError
from bitplan.lab.task_planners import range_test_of_task
from bitplan.lab.tasks.registry import find_task
from bitplan.planners.range_test import THRESHOLD, WINDOW, RangeTest
from bitplan.plans.loading import find_plan
from bitplan.plans.schedules import SCHEDULE_NAMES, TEN, Schedule, ScheduleSummary, schedule
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES, PROFILE_WORDS
from bitplan.plans.schedules.evidence import recommend
from bitplan.plans.schedules.named import (
    GROUPS,
    GROUPS_EXPLAINED,
    PAPERS_WORDS,
    SCHEDULE_NEEDS,
    SCHEDULE_OPTIONS,
    group_of,
)
from bitplan.plans.schedules.plots import drawing, sparkline


def register(app: typer.Typer) -> None:
    app.command("schedules")(schedules)
    app.command("range-test")(range_test_command)


# --- schedules


#: Schedules that a range of bits describes.
_SHOWN = tuple(name for name in SCHEDULE_NAMES if SCHEDULE_NEEDS[name] == ("low", "high"))

_BITS = re.compile(r"\s*([0-9]{1,3})\s*-\s*([0-9]{1,3})\s*")


def read_bits(text: str) -> tuple[int, int]:
    """The range in ``3-8``."""
    match = _BITS.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is no range of bits: write the lowest and the highest, such as 3-8.")
    return int(match[1]), int(match[2])


PeriodOption = Annotated[
    str | None,
    typer.Option(
        help="The length of a cycle: exact (T/n), published (int(T/n) + 1, as in most of the authors' code) or "
        "truncated (int(T/n), as in the rest).",
        show_default=False,
    ),
]
GradientBitsOption = Annotated[
    int | None,
    typer.Option(min=2, max=32, help="Bits of gradients (default: the highest bits).", show_default=False),
]


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
    steps: Annotated[int, typer.Option(min=1, max=100_000_000, help="Steps of the whole run.")] = 64_000,
    cycles: Annotated[int, typer.Option(min=1, help="Cycles; of triangular ones, half triangles.")] = DEFAULT_CYCLES,
    period: PeriodOption = None,
    saving: Annotated[
        float | None,
        typer.Option(
            help="Recommend a plan, static or not, that saves this share of the bit operations of the highest bits, "
            "such as 0.4.",
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
    same, the reason, the measured difference to the highest bits with its interval, and what is unknown; a list of
    objects otherwise. relative_cost is against static at the highest bits, with the backward pass at the highest bits.
    """
    with command_output(as_json) as output:
        low, high = read_bits(bits)
        if saving is not None:
            if name is not None:
                raise ScheduleError(f"--saving chooses a schedule by itself: drop {name}, or --saving.")
            advice = recommend(saving, low, high, steps, cycles)
            _write_plot(plot, [advice.schedule], steps, output)
            evidence = None if advice.difference is None else advice.difference.to_dict()
            output.document(
                {
                    **asdict(advice.schedule.summary(steps)),
                    "relative_cost": 1 - advice.saving,
                    "reason": advice.reason,
                    "difference": evidence,
                    "unknown": list(advice.unknown),
                }
            )
            if not as_json:
                if advice.name != "static":
                    _print_schedule(advice.schedule, steps, output)
                output.console.print(advice.reason)
                for sentence in advice.unknown:
                    output.console.print(f"Not known: {sentence}.")
        elif name is not None:
            selected = _made(name, low, high, cycles, period)
            _write_plot(plot, [selected], steps, output)
            output.document(asdict(selected.summary(steps)))
            if not as_json:
                _print_schedule(selected, steps, output)
        else:
            ten = {cyclic: _made(cyclic, low, high, cycles, period) for cyclic in TEN}
            _write_plot(plot, [ten[cyclic] for names in GROUPS.values() for cyclic in names], steps, output)
            records: list[dict[str, Any]] = [
                {**asdict(cyclic.summary(steps)), "group": group_of(cyclic.name)} for cyclic in ten.values()
            ]
            output.document(records)
            if not as_json:
                _print_ten(ten, steps, output)


def _write_plot(page: Path | None, drawn: list[Schedule], steps: int, output: Output) -> None:
    if page is None:
        return
    from bitplan.lab.report.page import schedules_page_html

    text = schedules_page_html(drawn, steps)
    make_folder(page.parent)
    write_file(page, text)
    output.note(f"wrote {page}")


def _made(name: str, low: int, high: int, cycles: int, period: str | None = None) -> Schedule:
    canonical = name if name in SCHEDULE_NAMES else name.upper()
    if canonical in SCHEDULE_NAMES and canonical not in _SHOWN:
        raise ScheduleError(f"{name} is more than a range of bits: write it in a plan's schedules.")
    options: dict[str, Any] = {"low": low, "high": high}
    if "cycles" in SCHEDULE_OPTIONS.get(canonical, ()):
        options["cycles"] = cycles
        options |= {} if period is None else {"period": period}
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
        table = FittedTable(f"{group} (the papers: {PAPERS_WORDS[group]})")
        table.add_column("name", "name", style="bold")
        table.add_column("bits over the run")
        for heading in _HEADINGS:
            table.add_column(heading, "number")
        for name in names:
            line = sparkline(ten[name], steps, min(40, output.console.width - 46), _is_plain(output))
            table.add_row(name, line, *_figures(ten[name].summary(steps)))
        table.print(output.console)
    first = next(iter(ten.values()))
    output.console.print(
        f"{first.lowest}-{first.highest} bits over {steps:,} steps. Relative cost: bit operations against "
        f"{first.highest} bits throughout, with the backward pass at {first.highest} bits. {GROUPS_EXPLAINED}"
    )
    letters = "; ".join(f"{letter} {meaning}" for letter, meaning in PROFILE_WORDS.items())
    output.console.print(
        f"Names: {letters}. Then R repeated, or T triangular (falls, then grows), whose falls mirror the growth "
        f"vertically (V) or in time (H)."
    )


def _print_schedule(selected: Schedule, steps: int, output: Output) -> None:
    summary, group = selected.summary(steps), group_of(selected.name)
    output.console.print(f"{selected}{f', {group}' if group else ''}, over {steps:,} steps")
    for line in drawing(selected, steps, plain=_is_plain(output)):
        output.console.print(line, no_wrap=True, overflow="ignore", crop=False)
    for heading, figure in zip(_HEADINGS, _figures(summary), strict=True):
        output.console.print(f"{heading}: {figure}")


# --- range-test


#: Characters of the longest bar.
_BAR = 40


def range_test_command(
    task: TaskArgument,
    bits: Annotated[str, typer.Option(metavar="LOW-HIGH", help="The widths to try.")] = "2-8",
    window: Annotated[int, typer.Option(min=4, help="Steps for each width.")] = WINDOW,
    threshold: Annotated[
        float, typer.Option(help="The share by which the training loss has to fall in a window.")
    ] = THRESHOLD,
    plan: Annotated[
        str | None,
        typer.Option(
            help="A plan whose bits follow a schedule (default: that of cyclic precision training).",
            show_default=False,
        ),
    ] = None,
    settings: TaskSettingsOption = None,
    seed: Annotated[int, typer.Option(help="Of the weights, the data and the random bits.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Find the lowest bits for a schedule: a short run at each width, at the recipe's peak learning rate.

    All start from the same state, with the same batches. The lowest width at which the training loss falls by more than
    the threshold is the bound. With --json: one object.
    """
    with command_output(as_json) as output:
        low, high = read_bits(bits)
        loaded_task = find_task(task, settings or (), seed)
        loaded_plan = None if plan is None else find_plan(plan)
        with Progress(console=output.console, transient=True, disable=not output.console.is_terminal) as progress:
            bar = progress.add_task("testing")
            with target_errors(task):
                result = range_test_of_task(
                    loaded_task,
                    plan=loaded_plan,
                    low=low,
                    high=high,
                    window=window,
                    threshold=threshold,
                    on_step=lambda step, total: progress.update(bar, completed=step, total=total),
                )
        output.document({"task": task, **result.to_dict()})
        if not as_json:
            _print_range_test(result, output)


def _print_range_test(result: RangeTest, output: Output) -> None:
    table = FittedTable()
    table.add_column("bits", "number", style="bold")
    table.add_column("training loss", "number")
    table.add_column("change", "number")
    table.add_column("learns")
    table.add_column("")
    top = max((width.level for width in result.widths if width.level != float("inf")), default=0.0)
    mark = "█" if output.console.encoding.lower().startswith("utf") else "#"
    longest = min(_BAR, output.console.width - 48)
    for width in result.widths:
        length = round(longest * width.level / top) if top and width.is_finite else 0
        table.add_row(
            str(width.bits),
            f"{width.level:.4g}" if width.is_finite else "not finite",
            f"{-width.change:+.1%}" if width.is_finite else "-",
            "yes" if width.learns else "no: may be chance" if width.change > result.threshold else "no",
            mark * length,
        )
    table.print(output.console)
    verdict = "no bound found" if result.low is None else f"lowest bits: {result.low}"
    output.console.print(f"{verdict} ({result.reason})")
