"""``bitplan memory``: what a training step holds, predicted beside measured, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from bitplan.analysis.memory.fit import LADDER, Choice, choices, free_memory
from bitplan.analysis.memory.measure import measure_memory
from bitplan.analysis.memory.step import MEANINGS, OPTIMIZER_NAMES, Memory, chosen_optimizer
from bitplan.analysis.targets import batch_size, placed, running
from bitplan.cli.arguments import TargetArgument, complete_plan
from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.errors import MemoryEstimateError, PlanError, nearest_names
from bitplan.files import byte_text, read_bytes
from bitplan.lab.targets import load_target
from bitplan.plans.execution import EXECUTIONS
from bitplan.plans.loading import find_plan

#: Measuring copies the model first, and a machine has other things to do.
_USABLE_SHARE = 0.8


def register(app: typer.Typer) -> None:
    app.command("memory")(memory)


def memory(
    target: TargetArgument,
    plans: Annotated[
        list[str] | None,
        typer.Option(
            "--plan", "-p", help="A plan's file or a preset; repeat to compare.", autocompletion=complete_plan
        ),
    ] = None,
    execution: Annotated[
        str | None, typer.Option(help="emulate (the default), or packed (the default with --budget).")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Of the model compiled.")] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step, if not the target's own number.")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd (with momentum), adamw or none. By default sgd; adamw if a plan has optimizer: in it."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Such as 6GiB: say what fits into it, without running. Without --plan, look for a plan."),
    ] = None,
    autocast: Annotated[bool, typer.Option("--autocast", help="Under BF16 autocast.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    predict_only: Annotated[
        bool, typer.Option("--predict-only", help="Do not run the model (nor where it would hardly fit).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a training step of TARGET holds in memory, by class: predicted without running it, and measured.

    With --budget: will it fit, and with what plan? That is answered without running the model. With --json: one object.
    """
    with command_output(as_json) as output:
        where = _device(device)
        _check(plans, execution, optimizer, budget)
        if optimizer is None:
            optimizer = str(chosen_optimizer("default", *map(find_plan, plans or ())))
        limit = None if budget is None else read_bytes(budget)
        how = execution or ("packed" if limit is not None else "emulate")
        precision = torch.bfloat16 if autocast else None
        shapes = placed(load_target(target, shapes_only=True), where, batch)
        found: list[Choice] = []
        tried: Sequence[str | None] = plans or (LADDER if limit is not None else (None,))
        with running(target):
            for choice in choices(
                *(shapes, tried, how, optimizer, limit), compile=compile, autocast=precision, device=where
            ):
                found.append(choice)
                output.note(f"{_name(choice)}: a peak of {byte_text(choice.predicted.peak)}, predicted.")
                if choice.fits and not plans:
                    break  # those that follow only keep fewer bits
        measured: list[Memory | None] = [None] * len(found)
        free = free_memory(where)
        if limit is None and not predict_only and _has_room(found, free, output):
            real = placed(load_target(target), where, batch)
            with running(target):
                measured = [
                    measure_memory(
                        *(real.model, real.batch, real.loss, optimizer, choice.plan, choice.execution, compile),
                        autocast=precision,
                    )
                    for choice in found
                ]
        rows = [
            {**choice.to_dict(), "measured": None if seen is None else seen.to_dict()}
            for choice, seen in zip(found, measured, strict=True)
        ]
        output.document(
            {
                "target": target,
                "batch": batch_size(shapes.batch),
                "optimizer": optimizer,
                "compile": compile,
                "autocast": autocast,
                "device": device,
                "budget": limit,
                **rows[0],
                "choices": rows,
            }
        )
        if not as_json:
            _print(found, measured, output)
            output.console.print(_verdict(target, found, limit, free, is_search=not plans), soft_wrap=True)


def _check(plans: list[str] | None, execution: str | None, optimizer: str | None, budget: str | None) -> None:
    for plan in plans or ():
        find_plan(plan)
    if execution is not None and execution not in EXECUTIONS:
        raise PlanError(f"there is no execution {execution!r}; {nearest_names(execution, EXECUTIONS)}")
    if execution == "packed" and not plans and budget is None:
        raise PlanError("packed execution keeps what a plan has rounded: name a plan with --plan.")
    if optimizer is not None and optimizer not in OPTIMIZER_NAMES:
        raise MemoryEstimateError(
            f"there is no optimizer {optimizer!r} here; {nearest_names(optimizer, OPTIMIZER_NAMES)}"
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise MemoryEstimateError(f"there is no device {name!r}: use cpu or cuda.") from error
    if device.type not in ("cpu", "cuda"):
        raise MemoryEstimateError(f"memory is predicted and measured on cpu and cuda, not on {name}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MemoryEstimateError(
            "this machine has no CUDA device: run with --device cpu, whose figures differ little."
        )
    return device


def _has_room(found: list[Choice], free: int | None, output: Output) -> bool:
    needed = max(choice.predicted.peak + choice.predicted.weights for choice in found)
    if free is None or needed <= _USABLE_SHARE * free:
        return True
    output.note(
        f"not measured: a step with a copy of the model takes {byte_text(needed)}, and {byte_text(free)} are free."
    )
    return False


def _name(choice: Choice) -> str:
    return "no plan" if choice.plan is None else f"{choice.plan}, {choice.execution}"


def _print(found: list[Choice], measured: list[Memory | None], output: Output) -> None:
    if len(found) == 1:
        _print_classes(found[0], measured[0], output)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", style="bold", no_wrap=True)
    is_measured = any(seen is not None for seen in measured)
    headings = ["kept", "peak"] + ["kept, measured", "peak, measured"] * is_measured
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    if found[0].fits is not None:
        table.add_column("fits")
    for choice, seen in zip(found, measured, strict=True):
        figures = [choice.predicted, *([seen] if seen is not None else [])]
        cells = [byte_text(count) for figure in figures for count in (figure.activations, figure.peak)]
        table.add_row(_name(choice), *cells, *([] if choice.fits is None else ["yes" if choice.fits else "no"]))
    output.console.print(table)


def _print_classes(choice: Choice, seen: Memory | None, output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(_name(choice), style="bold", no_wrap=True)
    for heading in ("predicted", "measured")[: 1 + (seen is not None)]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what it is")
    for name, count, meaning in choice.predicted.rows():
        cells = [byte_text(count)] + ([] if seen is None else [byte_text(getattr(seen, name))])
        table.add_row(name, *cells, meaning)
    assert table.row_count == len(MEANINGS)
    output.console.print(table)


def _verdict(target: str, found: list[Choice], limit: int | None, free: int | None, is_search: bool) -> str:
    if limit is None:
        peak = found[0].predicted.peak
        if free is None or peak <= free:
            return f"The step fits: {byte_text(free)} are free." if free is not None else ""
        return (
            f"The step does not fit into the {byte_text(free)} that are free: "
            f"`bitplan memory {target} --budget {byte_text(free).replace(' ', '')}` looks for a plan that does."
        )
    fitting = [choice for choice in found if choice.fits]
    if not fitting:
        least = min(found, key=lambda choice: choice.predicted.peak)
        return (
            f"Nothing here fits into {byte_text(limit)}: the least is {byte_text(least.predicted.peak)}, with "
            f"{_name(least)}. Of that {_largest(least.predicted)}"
        )
    best = fitting[0]
    if best.plan is None:
        return f"It fits into {byte_text(limit)} as it is, with a peak of {byte_text(best.predicted.peak)}."
    lead = "The plainest of these that fits" if is_search else "The first of these that fits"
    return f"{lead} into {byte_text(limit)}: {_name(best)}, with a peak of {byte_text(best.predicted.peak)}."


def _largest(held: Memory) -> str:
    """What to do about the class that holds most."""
    advice: dict[str, Any] = {
        "weights": "weights are most: only a smaller model, or one sharded over devices, takes less.",
        "optimizer": "the optimizer's state is most: a plan with optimizer: {state: int8} holds a quarter of adamw's.",
        "gradients": "gradients are most: only a smaller model, or one sharded over devices, takes less.",
        "activations": "activations are most: a smaller --batch, or activation checkpointing, takes less.",
        "other": "tensors on their way are most: a smaller --batch takes less.",
    }
    return str(advice[max(advice, key=lambda name: getattr(held, name))])
