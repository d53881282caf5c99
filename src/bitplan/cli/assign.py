"""``bitplan assign``: a plan that keeps precision where it matters and memory under a ratio or a budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bitplan.analysis.memory.step import OPTIMIZER_NAMES, OptimizerChoice
from bitplan.analysis.targets import Target, batch_size, move_target, target_errors
from bitplan.cli.arguments import SettingsOption, TargetArgument
from bitplan.cli.output import FittedTable, JsonOption, Output, command_output
from bitplan.errors import MemoryEstimateError, TargetError, nearest_names
from bitplan.files import byte_text
from bitplan.lab.models.built_in import sized_target
from bitplan.lab.targets import load_target_and_task
from bitplan.lab.tasks.task import Task
from bitplan.planners.assign.assign import AssignRequest, choose_formats, make_assignment
from bitplan.planners.assign.assignment import BASELINES, REMARKS, Assignment
from bitplan.planners.assign.levels import FORMATS, ORDERS
from bitplan.planners.assign.probe import BATCHES, WARMUP_STEPS


def register(app: typer.Typer) -> None:
    app.command("assign")(assign_command)


def _completing(names: tuple[str, ...]) -> Any:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


#: Shared with ``bitplan train --assign``.
OrderOption = Annotated[
    str,
    typer.Option(
        help=f"Which groups go down first: {', '.join(ORDERS)}. Sensitivity runs the model to measure damage.",
        autocompletion=_completing(ORDERS),
    ),
]
FormatsOption = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(FORMATS)}, or levels of your own such as bf16/8/4. By default paper; with a budget "
        f"bf16/e4m3+e5m2.",
        autocompletion=_completing(tuple(FORMATS)),
        show_default=False,
    ),
]


def assign_command(
    target: TargetArgument,
    ratio: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="The share of all values that is to be low, 0 to 1.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="What the peak of a packed step may be: 6GiB, or 70% of the peak without a plan."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help=f"Instead of an assignment, one of {', '.join(BASELINES)}.", autocompletion=_completing(BASELINES)
        ),
    ] = None,
    formats: FormatsOption = None,
    levels: Annotated[
        str | None,
        typer.Option(help="The same as a list, the highest precision first: bf16,8,6,4.", show_default=False),
    ] = None,
    order: OrderOption = "largest",
    seed: Annotated[int, typer.Option(help="Of the order random, and of the weights that sensitivity sees.")] = 0,
    classes: Annotated[int | None, typer.Option(min=2, help="Of a built-in network for small images.")] = None,
    width: Annotated[float | None, typer.Option(min=0.01, help="The same.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step, if not the target's own number.")] = None,
    optimizer: Annotated[
        str, typer.Option(help="What a budget counts in: sgd (with momentum), adamw or none.")
    ] = "sgd",
    compile: Annotated[bool, typer.Option("--compile", help="The budget is for the model compiled.")] = False,
    promotion: Annotated[
        float | None,
        typer.Option(
            help="The share of overflowing values from which on a tensor is promoted; 0: none is. By default 0.01 with "
            "--ratio (0.05 of values that become zero, where there are scales), and none with --budget.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="With a budget: measure where needed, which runs the step.")
    ] = True,
    settings: SettingsOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show groups, sizes, order and the cut.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan there (default: print it).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a plan for TARGET in which some tensors are low: as many as --ratio or --budget ask for.

    Only --order sensitivity and a --budget in per cent run the target: the peak without a plan is measured if it fits
    this machine (--no-check estimates it). With --json: one object, the figures and the plan.
    """
    with command_output(as_json) as output:
        request = AssignRequest(ratio, budget, baseline, order, seed, True if promotion is None else promotion or False)
        if optimizer not in OPTIMIZER_NAMES:
            raise MemoryEstimateError(
                f"there is no optimizer {optimizer!r} here; {nearest_names(optimizer, OPTIMIZER_NAMES)}"
            )
        low_formats = choose_formats(
            request, formats, None if levels is None else [name for name in levels.split(",") if name]
        )
        is_probed = order == "sensitivity" and baseline is None
        is_checked = compile and check and budget is not None
        if is_probed:
            torch.manual_seed(seed)
        shapes_only = not (is_probed or is_checked)
        loaded, task = _target_and_task(target, classes, width, shapes_only, settings or (), seed)
        model = move_target(loaded, torch.device("cpu"), batch)
        batches, make = _warm_up(target, task, output) if is_probed else (None, None)

        def with_values() -> tuple[torch.nn.Module, Any]:
            values, _ = _target_and_task(target, classes, width, False, settings or (), seed)
            real = move_target(values, torch.device("cpu"), batch)
            return real.model, real.batch

        with target_errors(target):
            result = make_assignment(
                *(model.model, model.batch, model.loss, request, low_formats),
                optimizer=make or optimizer,
                compile=compile,
                device="cpu",
                batches=batches,
                report=output.note,
                check_peak=is_checked or (None if check and not compile else False),
                make_values=None if not shapes_only or not check else with_values,
            )
        plan = result.plan
        output.document(
            {
                "target": target,
                "batch": batch_size(model.batch),
                **result.facts(),
                **{key: value for key, value in result.provenance.items() if key not in result.facts()},
                **({"order_of_groups": result.rows()} if explain else {}),
                "plan": plan.to_dict(),
            }
        )
        if out is not None:
            plan.save(out)
            output.note(f"wrote {out}. {plan.description}")
        if as_json:
            return
        if explain:
            _explain(result, output)
        elif out is None:
            typer.echo(plan.to_yaml(), nl=False)


def _target_and_task(
    text: str, classes: int | None, width: float | None, shapes_only: bool, settings: Sequence[str], seed: int
) -> tuple[Target, Task | None]:
    if classes is None and width is None:
        return load_target_and_task(text, shapes_only=shapes_only, settings=settings, seed=seed)
    if settings:
        raise TargetError(
            f"--classes and --width are of networks, and --set {settings[0]} is of a task: drop one or the other."
        )
    with torch.device("meta") if shapes_only else nullcontext():
        return sized_target(text, classes, width), None


def _warm_up(target: str, task: Task | None, output: Output) -> tuple[list[Any] | None, OptimizerChoice]:
    """Batches and optimizer for measuring sensitivity: a task has both, other targets only their batch."""
    if task is None:
        output.note(f"{target} comes with random data: its sensitivity says little about real training. Name a task.")
        return None, None
    return [task.batch(step) for step in range(WARMUP_STEPS + BATCHES)], task.optimizer


def _explain(result: Assignment, output: Output) -> None:
    facts = result.facts()
    table = FittedTable()
    table.add_column("group", "number")
    table.add_column("begins at", "name")
    table.add_column("tensors", "number", is_optional=True)
    table.add_column("values", "number")
    for heading in ("share", "together"):
        table.add_column(heading, "number")
    table.add_column("level")
    together, is_cut = 0.0, False
    for row in result.rows():
        if result.group_levels is not None and not row["is_low"] and not is_cut:
            is_cut = True
            table.add_section()
        together += row["share"]
        cells = (str(row["group"]), row["start"], str(row["tensors"]), f"{row['elements']:,}")
        table.add_row(*cells, f"{row['share']:.1%}", f"{together:.1%}", row["level"])
    table.print(output.console)
    name = result.provenance.get("baseline")
    if name is not None:
        output.console.print(
            f"baseline {name}{f' ({REMARKS[name]})' if name in REMARKS else ''}: {result.plan.description}"
        )
    else:
        output.console.print(
            f"order {result.provenance['order']}: {facts['demoted']} of {facts['groups']} groups lie above the cut and "
            f"are low, {facts['selection_ratio']:.1%} of all values. Against all-{result.formats.levels[0]}, the "
            f"tensors of a step take {1 - facts['reported_ratio'] / 2:.1%} of the bits."
        )
    if "peak_predicted" in result.provenance:
        output.console.print(
            f"peak: {byte_text(result.provenance['peak_predicted'])} estimated, packed, of a budget of "
            f"{byte_text(result.provenance['budget_bytes'])}; without a plan "
            f"{byte_text(result.provenance['peak_today'])}, {result.provenance['peak_today_from']}."
        )
