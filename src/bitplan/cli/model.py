"""``bitplan sites``, ``cost`` and ``memory``: the tensors of a training step, their cost and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from bitplan.analysis.cost import Cost, estimate_cost
from bitplan.analysis.explain import explain
from bitplan.analysis.memory.fit import LADDER, PlanEstimate, estimate_plans, free_memory
from bitplan.analysis.memory.measure import measure_memory
from bitplan.analysis.memory.ranks import Traffic, parse_bandwidths
from bitplan.analysis.memory.step import OPTIMIZER_NAMES, Memory, resolve_optimizer
from bitplan.analysis.sharding import DTYPES, Sharding
from bitplan.analysis.sites import Site, list_sites
from bitplan.analysis.targets import batch_size, move_target, target_errors
from bitplan.analysis.wire import wire_bytes
from bitplan.capture.recording import scripted_modules
from bitplan.cli.arguments import (
    MatchOption,
    PlanOption,
    RoundedOption,
    SettingsOption,
    TargetArgument,
    complete_plan,
)
from bitplan.cli.output import FittedTable, JsonOption, Output, command_output
from bitplan.compiler.torch_private import tree_leaves
from bitplan.errors import MemoryEstimateError, PlanError, TargetError, nearest_names
from bitplan.files import byte_text, read_bytes
from bitplan.lab.models.built_in import BUILT_IN
from bitplan.lab.targets import load_target
from bitplan.plans import ROLES
from bitplan.plans.execution import EXECUTIONS
from bitplan.plans.loading import find_plan
from bitplan.plans.match import ancestors, closest, compile_pattern
from bitplan.progress import announced


def register(app: typer.Typer) -> None:
    app.command("models")(models)
    app.command("sites")(sites)
    app.command("cost")(cost)
    app.command("memory")(memory)


# --- models


def models(as_json: JsonOption = False) -> None:
    """List the built-in models, which every command takes as TARGET, with their parameters and batches.

    A model of your own is named as file.py:make. With --json: a list of objects.
    """
    with command_output(as_json) as output:
        records = [_model_record(name) for name in BUILT_IN]
        output.document(records)
        if not as_json:
            table = FittedTable()
            table.add_column("name", "name", style="bold")
            table.add_column("kind")
            table.add_column("parameters", "number")
            table.add_column("batch", "text")
            for record in records:
                table.add_row(record["name"], record["kind"], f"{record['parameters']:,}", record["batch"])
            table.print(output.console)
            output.console.print("A model of your own is file.py:make, where make() returns model, batch and loss.")


def _model_record(name: str) -> dict[str, Any]:
    target = load_target(name, shapes_only=True)
    first = next(leaf for leaf in tree_leaves(target.batch) if isinstance(leaf, torch.Tensor))
    return {
        "name": name,
        "kind": type(target.model).__name__,
        "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
        "batch": f"{str(first.dtype).removeprefix('torch.')} {'x'.join(map(str, first.shape))}",
    }


# --- sites


def sites(
    target: TargetArgument,
    slots: Annotated[
        bool, typer.Option("--slots", help="Also show the operand slots of products (--json always has them).")
    ] = False,
    match: MatchOption = None,
    plan: PlanOption = None,
    rounded: RoundedOption = False,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """List every tensor of one training step, in the order it is made.

    The model runs on fake tensors: shapes and types, no data. With --plan and --rounded: those that the plan rounds.
    With --json: a list of objects.
    """
    with command_output(as_json) as output:
        if rounded and plan is None:
            raise PlanError("--rounded asks what a plan rounds: name one with --plan.")
        loaded = load_target(target, shapes_only=True, settings=settings or ())
        with target_errors(target):
            listed: Sequence[Site] = list_sites(loaded.model, loaded.batch, loaded.loss)
            if rounded and plan is not None:
                explained = explain(loaded.model, plan, loaded.batch, loaded.loss)
                planned = {row.site.name for row in explained if row.quantizer is not None}
                listed = [site for site in listed if site.name in planned]
                slots = True
        listed = matching(listed, match)
        for path in scripted_modules(loaded.model):
            output.note(f"{path or 'the model'} is scripted: nothing inside it is seen.")
        output.document([site_record(site) for site in listed])
        if not as_json:
            _print_sites([site for site in listed if slots or site.role in ROLES], output)
            output.console.print(f"{len(listed)} are rounded." if rounded else _sites_summary(listed))


def matching(sites: Sequence[Site], pattern: str | None) -> list[Site]:
    """The sites of modules that a pattern fits; an error where there is none."""
    if pattern is None:
        return list(sites)
    fits = compile_pattern(pattern)
    chosen = [site for site in sites if any(fits(path) for path in (site.module, *ancestors(site.module)))]
    if not chosen:
        modules = dict.fromkeys(path for site in sites for path in (site.module, *ancestors(site.module)) if path)
        near = closest(pattern, modules)
        advice = f"; the closest are {', '.join(near)}" if near else ""
        raise TargetError(f"no module fits {pattern!r}{advice}.")
    return chosen


def site_record(site: Site) -> dict[str, Any]:
    """A site as JSON."""
    return {
        "name": site.name,
        "module": site.module,
        "op": site.op,
        "role": site.role,
        "shape": list(site.shape),
        "dtype": dtype_name(site),
        "bytes": site.bytes,
        "producer": site.producer,
        "consumers": list(site.consumers),
        "parameter": site.parameter,
    }


def dtype_name(site: Site) -> str:
    return str(site.dtype).removeprefix("torch.")


def shape_text(site: Site) -> str:
    return "x".join(map(str, site.shape)) or "scalar"


def _print_sites(listed: Iterable[Site], output: Output) -> None:
    table = FittedTable()
    table.add_column("name", "name", style="bold")
    table.add_column("shape")
    table.add_column("dtype", is_optional=True)
    table.add_column("size", "number")
    for site in listed:
        table.add_row(site.name, shape_text(site), dtype_name(site), byte_text(site.bytes))
    table.print(output.console)


def _sites_summary(listed: Sequence[Site]) -> str:
    parts = []
    for role in ROLES:
        own = [site for site in listed if site.role == role]
        parts.append(f"{len(own)} {role} ({byte_text(sum(site.bytes for site in own))})")
    return f"{', '.join(parts)}."


# --- cost


def cost(
    target: TargetArgument,
    plan: Annotated[
        str,
        typer.Option(
            "--plan", "-p", help="A plan's file or a preset.", autocompletion=complete_plan, show_default=False
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="The cost of a run of this many steps, each at its own bits."),
    ] = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the cost of one training step of TARGET under a plan: bit operations, bytes, mean bits.

    Bytes are those of all tensors of a step, not a peak. With --json: one object.
    """
    with command_output(as_json) as output:
        loaded = load_target(target, shapes_only=True, settings=settings or ())
        with target_errors(target):
            whole = estimate_cost(loaded.model, plan, loaded.batch, loaded.loss, steps)
            communication = find_plan(plan).declared_communication
            wire = None if communication is None else wire_bytes(loaded.model, communication)
        sent = {} if wire is None else {"wire": asdict(wire)}
        output.document({"plan": plan, "target": target, **whole.to_dict(), **sent})
        if not as_json:
            _print_cost(whole, plan, output)
            if wire is not None:
                output.console.print(
                    f"On the wire, for several processes: weights gathered once {byte_text(wire.gathered)}, "
                    f"{wire.gathered_per_parameter:.3f} bytes a parameter; gradients reduced once "
                    f"{byte_text(wire.reduced)}, {wire.reduced_per_parameter:.3f}."
                )


def _print_cost(whole: Cost, plan: str, output: Output) -> None:
    table = FittedTable()
    table.add_column(f"{whole.steps} step" + "s" * (whole.steps > 1), "name", style="bold")
    for heading in (plan, "FP32", "BF16"):
        table.add_column(heading, "number")
    for quantity, *values in whole.rows():
        table.add_row(quantity, *(f"{value:,.3f}" for value in values))
    table.print(output.console)
    output.console.print(
        f"{whole.relative:.1%} of FP32's bit operations, {whole.effective_macs:,.0f} effective MACs of "
        f"{whole.forward_macs:,} forward ones."
    )


# --- memory


#: Share of the free memory that a measurement may use: it copies the model first, and other processes need some.
_USABLE_SHARE = 0.8


def memory(
    target: TargetArgument,
    plans: Annotated[
        list[str] | None,
        typer.Option(
            "--plan", "-p", help="A plan's file or a preset; repeat to compare.", autocompletion=complete_plan
        ),
    ] = None,
    execution: Annotated[
        str | None,
        typer.Option(help="emulate, packed or native (default: as the plan says, else emulate; packed with --budget)."),
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
    estimate_only: Annotated[
        bool, typer.Option("--estimate-only", help="Do not measure, which runs the model.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="Such as fsdp=64,tp=8: of one process where the model is split over so many (axes: ddp, fsdp, tp).",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="AXES",
            help="With --shard, bytes a second that a process sends, such as fsdp=50GB,tp=450GB: gives seconds.",
        ),
    ] = None,
    param_dtype: Annotated[
        str | None, typer.Option(help="With --shard, FSDP's dtype of gathered weights: fp32, bf16 or fp16.")
    ] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="With --shard, FSDP's dtype of reduced gradients.")] = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the memory of a training step of TARGET by class, estimated without running it and measured.

    With --budget: will it fit, and with what plan? With --shard: one process of many, and the bytes that it sends. Both
    are answered without running the model. With --json: one object.
    """
    with command_output(as_json) as output:
        where = _device(device)
        _check_memory_options(plans, execution, optimizer, budget)
        sharding = _sharding(shard, param_dtype, reduce_dtype, bandwidth, compile, where)
        bandwidths = {} if bandwidth is None else parse_bandwidths(bandwidth)
        if optimizer is None:
            optimizer = str(resolve_optimizer("default", *map(find_plan, plans or ())))
        limit = None if budget is None else read_bytes(budget)
        precision = torch.bfloat16 if autocast else None
        shapes = move_target(load_target(target, shapes_only=True, settings=settings or ()), where, batch)
        tried_choices: list[PlanEstimate] = []
        tried: Sequence[str | None] = plans or (LADDER if limit is not None else (None,))
        step = "steps" if len(tried) > 1 else "step"
        with target_errors(target), announced(f"predicting {len(tried)} {step} from shapes.", len(tried)) as advance:
            for choice in estimate_plans(
                *(shapes, tried, execution, optimizer, limit),
                compile=compile,
                autocast=precision,
                device=where,
                sharding=sharding,
            ):
                advance()
                tried_choices.append(choice)
                output.note(f"{_choice_name(choice)}: a peak of {byte_text(choice.estimated.peak)}, estimated.")
                if choice.fits and not plans:
                    break  # later plans only save fewer bits
        measured: list[Memory | None] = [None] * len(tried_choices)
        free = free_memory(where)
        if limit is None and not estimate_only and sharding is None and _has_room(tried_choices, free, output):
            real = move_target(load_target(target, settings=settings or ()), where, batch)
            with target_errors(target), announced("measuring what was predicted.", len(tried_choices)) as advance:
                measured = [
                    measure_memory(
                        *(real.model, real.batch, real.loss, optimizer, choice.plan),
                        None if choice.is_declared else choice.execution,
                        compile,
                        autocast=precision,
                    )
                    for choice in tried_choices
                ]
        rows = [
            {
                **choice.to_dict(),
                "measured": None if measurement is None else measurement.to_dict(),
                **({} if sharding is None else _traffic_record(choice.traffic, bandwidths)),
            }
            for choice, measurement in zip(tried_choices, measured, strict=True)
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
                **({} if sharding is None else {"shard": sharding.axes, "processes": sharding.world}),
                **rows[0],
                "choices": rows,
            }
        )
        if not as_json:
            _print_memory(tried_choices, measured, output)
            if sharding is not None:
                _print_traffic(tried_choices, sharding, bandwidths, output)
                if limit is None:  # nothing to compare with: this machine's memory is not the rank's
                    return
            output.console.print(_verdict(target, tried_choices, limit, free, is_search=not plans))


def _sharding(
    shard: str | None,
    param_dtype: str | None,
    reduce_dtype: str | None,
    bandwidth: str | None,
    compile: bool,
    device: torch.device,
) -> Sharding | None:
    if shard is None:
        if any(option is not None for option in (param_dtype, reduce_dtype, bandwidth)):
            raise TargetError(
                "--bandwidth, --param-dtype and --reduce-dtype describe a split model: give --shard, too."
            )
        return None
    if compile:
        raise MemoryEstimateError("a split model is estimated uncompiled: drop --compile or --shard.")
    if device.type != "cpu":
        raise MemoryEstimateError("--shard estimates on the CPU, for any device: drop --device.")
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    for name in dtypes.values():
        if name is not None and name not in DTYPES:
            raise TargetError(f"there is no dtype {name!r} here; {nearest_names(name, DTYPES)}")
    return Sharding.parse(shard, **{option: DTYPES[name] for option, name in dtypes.items() if name is not None})


def _traffic_record(traffic: Sequence[Traffic], bandwidths: dict[str, int]) -> dict[str, Any]:
    """What one process sends in a step, as JSON."""
    seconds = [part.seconds(bandwidths) for part in traffic]
    return {
        "traffic": {
            "bytes": sum(part.bytes for part in traffic),
            "seconds": None if None in seconds else sum(part for part in seconds if part is not None),
            "collectives": [part.to_dict(bandwidths) for part in traffic],
        }
    }


def _print_traffic(tried: list[PlanEstimate], sharding: Sharding, bandwidths: dict[str, int], output: Output) -> None:
    table = FittedTable()
    table.add_column("sent in a step by", "name", style="bold")
    for heading in ("axis", "collective"):
        table.add_column(heading)
    for heading in ("calls", "bytes", "seconds"):
        table.add_column(heading, "number")
    for choice in tried:
        for part in choice.traffic:
            seconds = part.seconds(bandwidths)
            cells = (str(part.calls), byte_text(part.bytes), "" if seconds is None else f"{seconds:.3g}")
            table.add_row(_choice_name(choice), part.axis, part.collective, *cells)
    table.print(output.console)
    output.console.print(f"One of {sharding.world} processes ({sharding}); seconds do not overlap with computation.")


def _check_memory_options(
    plans: list[str] | None, execution: str | None, optimizer: str | None, budget: str | None
) -> None:
    for plan in plans or ():
        find_plan(plan)
    if execution is not None and execution not in EXECUTIONS:
        raise PlanError(f"there is no execution {execution!r}; {nearest_names(execution, EXECUTIONS)}")
    if execution == "packed" and not plans and budget is None:
        raise PlanError("packed execution saves the tensors that a plan rounds as codes: name a plan with --plan.")
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
        raise MemoryEstimateError(f"memory is estimated and measured on cpu and cuda, not on {name}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MemoryEstimateError(
            "this machine has no CUDA device: run with --device cpu, whose figures differ little."
        )
    return device


def _has_room(tried: list[PlanEstimate], free: int | None, output: Output) -> bool:
    needed = max(choice.estimated.peak + choice.estimated.weights + choice.estimated.frozen for choice in tried)
    if free is None or needed <= _USABLE_SHARE * free:
        return True
    output.note(
        f"not measured: a step with a copy of the model takes {byte_text(needed)}, and {byte_text(free)} are free."
    )
    return False


def _choice_name(choice: PlanEstimate) -> str:
    return "no plan" if choice.plan is None else f"{choice.plan}, {choice.execution}"


def _print_memory(tried: list[PlanEstimate], measured: list[Memory | None], output: Output) -> None:
    if len(tried) == 1:
        _print_classes(tried[0], measured[0], output)
        return
    table = FittedTable()
    table.add_column("plan", "name", style="bold")
    is_measured = any(measurement is not None for measurement in measured)
    headings = ["kept", "peak"] + ["kept, measured", "peak, measured"] * is_measured
    for heading in headings:
        table.add_column(heading, "number")
    if tried[0].fits is not None:
        table.add_column("fits")
    for choice, measurement in zip(tried, measured, strict=True):
        figures = [choice.estimated, *([measurement] if measurement is not None else [])]
        cells = [byte_text(count) for figure in figures for count in (figure.activations, figure.peak)]
        table.add_row(_choice_name(choice), *cells, *([] if choice.fits is None else ["yes" if choice.fits else "no"]))
    table.print(output.console)


def _print_classes(choice: PlanEstimate, measurement: Memory | None, output: Output) -> None:
    table = FittedTable()
    table.add_column(_choice_name(choice), "name", style="bold")
    for heading in ("estimated", "measured")[: 1 + (measurement is not None)]:
        table.add_column(heading, "number")
    table.add_column("what it is", "text")
    for name, count, meaning in choice.estimated.rows():
        cells = [byte_text(count)] + ([] if measurement is None else [byte_text(getattr(measurement, name))])
        table.add_row(name, *cells, meaning)
    table.print(output.console)


def _verdict(target: str, tried: list[PlanEstimate], limit: int | None, free: int | None, is_search: bool) -> str:
    if limit is None:
        peak = tried[0].estimated.peak
        if free is None or peak <= free:
            return f"The step fits: {byte_text(free)} are free." if free is not None else ""
        return (
            f"The step does not fit into the {byte_text(free)} that are free: "
            f"`bitplan memory {target} --budget {byte_text(free).replace(' ', '')}` looks for a plan that does."
        )
    fitting = [choice for choice in tried if choice.fits]
    if not fitting:
        least = min(tried, key=lambda choice: choice.estimated.peak)
        return (
            f"Nothing here fits into {byte_text(limit)}: the least is {byte_text(least.estimated.peak)}, with "
            f"{_choice_name(least)}. Of that {_largest(least.estimated)}"
        )
    best = fitting[0]
    if best.plan is None:
        return f"It fits into {byte_text(limit)} as it is, with a peak of {byte_text(best.estimated.peak)}."
    lead = "The plainest of these that fits" if is_search else "The first of these that fits"
    return f"{lead} into {byte_text(limit)}: {_choice_name(best)}, with a peak of {byte_text(best.estimated.peak)}."


def _largest(held: Memory) -> str:
    """Advice on the class that takes most."""
    advice: dict[str, Any] = {
        "weights": "weights are most: only a smaller model, or one sharded over devices, takes less.",
        "optimizer": "the optimizer's state is most: a plan with optimizer: {state: int8} holds a quarter of adamw's.",
        "gradients": "gradients are most: only a smaller model, or one sharded over devices, takes less.",
        "activations": "activations are most: a smaller --batch, or activation checkpointing, takes less.",
        "other": "tensors on their way are most: a smaller --batch takes less.",
    }
    return str(advice[max(advice, key=lambda name: getattr(held, name))])
