"""The commands of ``python benchmarks/run.py``: each runs one benchmark and prints it as a table or as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer

from benchmarks.attach import OWN_PLANS, Mode, bench_attach
from benchmarks.contenders import VARIANTS
from benchmarks.fit import LIMIT, WAYS, bench_fit
from benchmarks.fit import SHAPES as FIT_SHAPES
from benchmarks.formats import DEFAULT_FORMATS, Row, bench_formats
from benchmarks.measure import DEFAULT_TARGETS, bench_measure
from benchmarks.memory import OWN_PLANS as MEMORY_PLANS
from benchmarks.memory import bench_memory
from benchmarks.speed import SHAPES, bench_speed
from benchmarks.speed_variants import OWN_PLANS as SPEED_PLANS
from bitplan.cli import run_app
from bitplan.cli.output import FittedTable, JsonOption, Output, command_output, json_text, write_file
from bitplan.errors import BitplanError
from bitplan.files import byte_text
from bitplan.numerics.formats import get_format

JobsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Rows that compile at the same time, each in its own process (default: 4 on a GPU, else 1)."
    ),
]
OutputFile = Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON document here.")]

PROGRAM = "python benchmarks/run.py"

app = typer.Typer(
    help="Measure bitplan and every installed peer in one run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the benchmark that `arguments` name (default: the process's own arguments) and exit."""
    run_app(app, arguments, PROGRAM)


@app.command("formats")
def formats(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Option("--format", "-f", help="A float format; repeat for more.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    elements: Annotated[
        int | None, typer.Option(min=1, help="Numbers in the tensor (2^20 on a CPU, 2^28 on a GPU).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples; the best one counts.")] = 15,
    peers: Annotated[bool, typer.Option(help="Measure the installed peers too.")] = True,
    as_json: JsonOption = False,
    output_file: OutputFile = None,
) -> None:
    """Time rounding to float formats: nearest and stochastic, eager and compiled, against a plain copy."""
    with command_output(as_json) as output:
        chosen = tuple(get_format(name).name for name in names or DEFAULT_FORMATS)
        _require_device(device)
        document = bench_formats(chosen, device, elements, samples, peers, on_row=lambda row: _progress(output, row))
        _finish(context, output, document, output_file, as_json, _print_formats)


@app.command("attach")
def attach(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A built-in model, or file.py:make (which is run).")] = "resnet20",
    plans: Annotated[
        list[str] | None, typer.Option("--plan", "-p", help="unscaled, tensor-scaled, a preset or a file; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    modes: Annotated[list[str] | None, typer.Option("--mode", help="eager or compiled; repeat for both.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step, if not the model's own number.")] = None,
    autocast: Annotated[bool | None, typer.Option(help="BF16 autocast (by default on a GPU only).")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each variant; the best one counts.")] = 8,
    as_json: JsonOption = False,
    output_file: OutputFile = None,
) -> None:
    """Time training steps with every tensor rounded against the same model without a plan."""
    with command_output(as_json) as output:
        _require_device(device)
        chosen: list[Mode] = []
        for mode in modes or ("eager", "compiled"):
            if mode not in ("eager", "compiled"):
                raise BitplanError(f"a model runs eager or compiled, not {mode!r}: give one of these as --mode.")
            chosen.append("eager" if mode == "eager" else "compiled")
        document = bench_attach(
            *(model, plans or OWN_PLANS, device, chosen, batch, autocast, turns),
            on_row=lambda row: output.note(f"{row.mode}, {row.variant}: {row.milliseconds:.2f} ms, {row.ratio:.3f}x"),
        )
        _finish(context, output, document, output_file, as_json, _print_attach)


@app.command("memory")
def memory(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="resnet50, mobilenet-v2-imagenet, gpt-1024, another target, or file.py:make.")
    ] = "resnet20",
    variants: Annotated[
        list[str] | None,
        typer.Option("--variant", help=f"One of {', '.join(VARIANTS)}; repeatable (default: the compiled ones)."),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", "-p", help=f"{', '.join(MEMORY_PLANS)}, a preset or a file (default: by the model)."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step, if not the model's own number.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adamw (default: adamw for models of tokens).")] = None,
    autocast: Annotated[bool, typer.Option(help="BF16 autocast.")] = True,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each variant; the best one counts.")] = 5,
    loss_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps on real data (default: 1000 on a GPU, none on a CPU).")
    ] = None,
    loss_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of each of these steps (default: as measured).")
    ] = None,
    loss_jobs: Annotated[
        int, typer.Option(min=0, help="Processes that make these steps meanwhile (0: none, or one with --loss-batch).")
    ] = 0,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
    output_file: OutputFile = None,
) -> None:
    """Measure memory and speed of training: packed, and BF16 compiled, checkpointed and recomputed."""
    with command_output(as_json) as output:
        _require_device(device)
        document = bench_memory(
            *(model, variants, plan, device, batch, optimizer, autocast, turns, loss_steps, loss_batch, loss_jobs),
            jobs=jobs,
            on_news=output.note,
        )
        _finish(context, output, document, output_file, as_json, _print_memory)


@app.command("speed")
def speed(
    context: typer.Context,
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", help=f"One of {', '.join(SHAPES)}; repeatable.")
    ] = None,
    plans: Annotated[
        list[str] | None,
        typer.Option(
            "--plan",
            "-p",
            help=f"{', '.join(SPEED_PLANS)}, a preset, a file, or auto: what benchmarks/auto.py found; repeatable.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    turns: Annotated[int, typer.Option(min=1, help="Turns of each variant; the best one counts.")] = 8,
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Also measure every plan with each kind of recomputation."),
    ] = False,
    fast_accumulation: Annotated[
        bool,
        typer.Option("--fast-accumulation", help="Also measure FP8 plans with fast accumulation."),
    ] = False,
    regional: Annotated[
        bool,
        typer.Option("--regional", help="Also measure every plan with equal blocks compiled once."),
    ] = False,
    loss_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps on real text (default: 1000 on a GPU, none on a CPU).")
    ] = None,
    loss_batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch of these steps.")] = 1,
    switches: Annotated[bool, typer.Option(help="Measure changes of formats in the middle of a run, too.")] = True,
    sizes: Annotated[
        bool, typer.Option(help="Measure from which size on products pay on low-precision units, too.")
    ] = True,
    peers: Annotated[
        bool, typer.Option(help="Measure what torch itself offers, and torchao where it is installed.")
    ] = True,
    only_peers: Annotated[
        list[str] | None, typer.Option("--peer", help="Of these only those whose name contains this; repeatable.")
    ] = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
    output_file: OutputFile = None,
) -> None:
    """Time training on the machine's low-precision units, against BF16 and torchao."""
    with command_output(as_json) as output:
        _require_device(device)
        document = bench_speed(
            *(shapes or ("linear-1024",), plans or (), device, turns),
            recompute=recompute,
            fast_accumulation=fast_accumulation,
            regional=regional,
            loss_steps=loss_steps,
            loss_batch=loss_batch,
            switches=switches,
            sizes=sizes,
            peers=peers,
            only_peers=only_peers or (),
            jobs=jobs,
            on_news=output.note,
        )
        _finish(context, output, document, output_file, as_json, _print_speed)


@app.command("fit")
def fit(
    context: typer.Context,
    ways: Annotated[
        list[str] | None, typer.Option("--way", help=f"One of {', '.join(WAYS)}; repeatable (default: all).")
    ] = None,
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(FIT_SHAPES)}.")] = "llama-3-8b",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a batch (default: by the way).")] = None,
    layers: Annotated[int | None, typer.Option(min=2, help="Layers, if not the shape's own number.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens in a sequence, if not the shape's own.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each way, the compiled one included.")] = 8,
    limit: Annotated[float, typer.Option(min=0.1, help="GB (1e9 bytes) that a way may take from a GPU.")] = LIMIT / 1e9,
    limit_seconds: Annotated[float, typer.Option(min=1, help="Seconds after which a way is ended.")] = 240.0,
    compile_model: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile blocks and optimizer.")] = True,
    as_json: JsonOption = False,
    output_file: OutputFile = None,
) -> None:
    """Train all parameters of a Llama 3 8B within 80 GB of one GPU: memory and tokens a second."""
    with command_output(as_json) as output:
        _require_device(device)

        def write_so_far(document: dict[str, Any]) -> None:
            if output_file is not None:
                write_file(output_file, json_text({"command": _command_line(context), **document}) + "\n")

        document = bench_fit(
            *(ways or (), shape, device, batch, layers, tokens, steps, round(limit * 1e9), limit_seconds),
            compiled=compile_model,
            on_news=output.note,
            on_row=write_so_far,
        )
        _finish(context, output, document, output_file, as_json, _print_fit)


def _print_fit(output: Output, document: dict[str, Any]) -> None:
    table = FittedTable(document["shape"]["name"])
    table.add_column("way", "name")
    for heading in ("tokens/s", "peak, GB", "taken, GB", "weights", "optimizer", "gradients", "first step, s", "loss"):
        table.add_column(heading, "number")
    for row in document["rows"]:
        taken = ["" if row[key] is None else f"{row[key] / 1e9:.1f}" for key in ("allocated", "reserved")]
        parts = [byte_text(row[key]) for key in ("weights", "optimizer", "gradients")]
        first = row["seconds_to_first_step"]
        table.add_row(
            *(row["way"], "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.0f}", *taken),
            *(*parts, "" if first is None else f"{first:.0f}", f"{row['losses'][-1]:.4f}" if row["losses"] else ""),
        )
    table.print(output.console)
    for row in document["rows"]:
        if row["failed"] is not None:
            output.console.print(f"{row['way']} failed: {row['failed']}")
    if document["limit"] is not None:
        reached = [row["way"] for row in document["rows"] if row["aim_reached"]]
        output.console.print(f"Aim {'reached by ' + ', '.join(reached) if reached else 'MISSED'}.")


def _print_speed(output: Output, document: dict[str, Any]) -> None:
    for shape, rows in document["rows"].items():
        table = FittedTable(shape)
        table.add_column("variant", "name")
        for heading in ("ms", "times bf16", "peak", "loss gap", "emulated passes", "graphs", "first step, s"):
            table.add_column(heading, "number")
        for row in rows:
            peak = "" if row["peak"] is None else byte_text(row["peak"])
            gap = "" if row["loss_gap"] is None else f"{row['loss_gap']:+.4f}"
            table.add_row(
                *(row["variant"], f"{row['milliseconds']:.2f}", f"{row['ratio']:.3f}", peak, gap),
                *(str(row["fallbacks"]), str(row["graphs"]), f"{row['first_seconds']:.1f}"),
            )
        table.print(output.console)
        for name, reason in document["failed"].get(shape, {}).items():
            output.console.print(f"{name} failed: {reason}")
        _print_losses_and_aim(output, document["losses"].get(shape), document["aims"].get(shape))
    if document["switches"]:
        counts = ", ".join(f"{switch['to']} {switch['recompiles']}" for switch in document["switches"])
        output.console.print(f"Graphs compiled for each change of formats in a run: {counts}.")
    table = FittedTable("a linear layer's three products with their casts, square matrices")
    for heading in ("unit", "size", "ms plain", "ms native"):
        table.add_column(heading, "number")
    for row in document["crossover"]:
        table.add_row(row["unit"], str(row["size"]), f"{row['plain']:.3f}", f"{row['native']:.3f}")
    table.print(output.console)


def _print_losses_and_aim(output: Output, losses: dict[str, Any] | None, aim: dict[str, Any] | None) -> None:
    if losses is not None and losses["native_less_emulated"] is not None and losses["spread"] is not None:
        output.console.print(
            f"The last plan's loss differs from its emulation's by {losses['native_less_emulated']:+.4f}; reordering "
            f"the text changes BF16's by {losses['spread']:.4f}."
        )
    if aim is not None and aim["reached_by"] is not None:
        by = aim["reached_by"]
        output.console.print(f"Aim {'reached by ' + ', '.join(by) if by else 'MISSED'}.")


@app.command("measure")
def measure(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Option("--target", help=f"A model or a task; repeatable. Default: {', '.join(DEFAULT_TARGETS)}."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    turns: Annotated[int, typer.Option(min=1, help="Turns of each; the best one counts.")] = 3,
    as_json: JsonOption = False,
    output_file: OutputFile = None,
) -> None:
    """Time a probe of the default candidates (bitplan measure) against training steps of the same model."""
    with command_output(as_json) as output:
        _require_device(device)
        document = bench_measure(
            *(targets or DEFAULT_TARGETS, device, turns),
            on_row=lambda row: output.note(f"{row.target}: a probe takes {row.steps:.2f} steps"),
        )
        _finish(context, output, document, output_file, as_json, _print_measure)


def _print_measure(output: Output, document: dict[str, Any]) -> None:
    table = FittedTable()
    table.add_column("target", "name")
    for heading in ("products", "ms a step", "ms a probe", "steps a probe", f"at most {document['limit']:g}"):
        table.add_column(heading, "number")
    for row in document["rows"]:
        times = [f"{row[f'{what}_milliseconds']:.1f}" for what in ("step", "probe")]
        verdict = "reached" if row["reached"] else "MISSED"
        table.add_row(row["target"], str(row["products"]), *times, f"{row['steps']:.2f}", verdict)
    table.print(output.console)


def _print_memory(output: Output, document: dict[str, Any]) -> None:
    table = FittedTable()
    table.add_column("variant", "name")
    for heading in ("peak", "kept", "ms a step", "samples/s", "first steps, s", "loss", "gap to bf16"):
        table.add_column(heading, "number")
    for row in document["rows"]:
        losses = [
            "" if row[key] is None else f"{row[key]:{style}}" for key, style in (("loss", ".4f"), ("loss_gap", "+.4f"))
        ]
        table.add_row(
            *(row["variant"], byte_text(row["peak"]), byte_text(row["kept"]), f"{row['milliseconds']:.2f}"),
            *(f"{row['samples_per_second']:.1f}", f"{row['first_seconds']:.1f}", *losses),
        )
    table.print(output.console)
    for name, reason in document["failed"].items():
        output.console.print(f"{name} failed: {reason}")
    headline = document["headline"]
    if headline is not None:
        output.console.print(
            f"{headline['ours']} is {headline['times_smaller']:.2f} times smaller than {headline['smallest']}, the "
            f"smallest of the others, at {headline['times_as_fast_as_smallest']:.2f} times its speed; compared with "
            f"{headline['fastest']}, the fastest, it is {headline['times_smaller_than_fastest']:.2f} times smaller at "
            f"{headline['times_as_fast']:.2f} times its speed."
        )
    if document["loss_data"] is not None:
        output.console.print(
            f"Losses after {document['loss_steps']} steps of {document['loss_batch']} on {document['loss_data']}."
        )
    if document["aim"] is not None:
        reached = document["aim"]["reached_by"]
        output.console.print(f"Aim {'reached by ' + ', '.join(reached) if reached else 'MISSED'}.")


def _print_attach(output: Output, document: dict[str, Any]) -> None:
    table = FittedTable()
    for heading in ("mode", "plan"):
        table.add_column(heading)
    for heading in ("ms a step", "times no plan", "first step, s", "target"):
        table.add_column(heading, "number")
    for row in document["rows"]:
        verdict = "" if row["target"] is None else f"{row['target']:g} {'reached' if row['reached'] else 'MISSED'}"
        table.add_row(
            *(row["mode"], row["variant"]),
            *(f"{row['milliseconds']:.2f}", f"{row['ratio']:.3f}", f"{row['first_seconds']:.1f}", verdict),
        )
    table.print(output.console)


def _require_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise BitplanError("this machine has no CUDA device: run with --device cpu.")


def _finish(
    context: typer.Context,
    output: Output,
    document: dict[str, Any],
    output_file: Path | None,
    as_json: bool,
    show: Callable[[Output, dict[str, Any]], None],
) -> None:
    document = {"command": _command_line(context), **document}
    output.document(document)
    if not as_json:
        show(output, document)
    if output_file is not None:
        write_file(output_file, json_text(document) + "\n")
        output.note(f"wrote {output_file}")


def _command_line(context: typer.Context) -> str:
    """The command that repeats the measurement: all options that were given, except the output's."""
    arguments = [*PROGRAM.split(), str(context.info_name)]
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if source is None or source.name != "COMMANDLINE" or option.name in ("as_json", "output_file"):
            continue
        value = context.params[str(option.name)]
        if isinstance(value, bool):
            arguments.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                arguments += [option.opts[0], str(item.value if isinstance(item, Enum) else item)]
    return shlex.join(arguments)


def _progress(output: Output, row: Row) -> None:
    output.note(f"{row.who}, {row.format}, {row.rounding}, {row.mode}: {row.ns_per_element:.3f} ns")


def _verdict(row: dict[str, Any]) -> str:
    if not row["rounded"] and row["format"] != "fp32":
        return "did not round"
    if row["target"] is None:
        return ""
    return f"{row['target']:g} {'reached' if row['reached'] else 'MISSED'}"


def _print_formats(output: Output, document: dict[str, Any]) -> None:
    table = FittedTable()
    for heading in ("who", "format", "rounding", "mode"):
        table.add_column(heading)
    for heading in ("ns/element", "of copy", "TB/s", "target"):
        table.add_column(heading, "number")
    for row in document["rows"]:
        table.add_row(
            *(row["who"], row["format"], row["rounding"], row["mode"]),
            *(f"{row['ns_per_element']:.3f}", f"{row['share_of_copy']:.0%}", f"{row['terabytes_per_second']:.2f}"),
            _verdict(row),
        )
    table.print(output.console)
    ratios = ", ".join(f"{r['format']} {r['mode']} {r['ratio']:.2f}x" for r in document["torch_ratios"])
    output.console.print(f"A plain copy takes {document['copy_ns_per_element']:.3f} ns an element.")
    if ratios:
        output.console.print(f"Ours over torch's own conversion: {ratios}.")
