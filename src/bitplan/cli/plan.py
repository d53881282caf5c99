"""``bitplan plan``: list, show, check, explain, export and import plans."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from bitplan.analysis.explain import Explanation, explain_selections
from bitplan.analysis.explain import explain as explained
from bitplan.analysis.targets import target_errors
from bitplan.capture.selectors import Selection
from bitplan.cli.arguments import (
    TARGET_HELP,
    MatchOption,
    OptionalTargetArgument,
    PlanArgument,
    PlanOption,
    RoundedOption,
    SettingsOption,
    TargetArgument,
    complete_target,
    plan_and_target,
)
from bitplan.cli.model import matching, shape_text, site_record
from bitplan.cli.output import FittedTable, JsonOption, Output, command_output
from bitplan.cli.schedules import GradientBitsOption, PeriodOption, complete_schedule, read_bits
from bitplan.errors import BitplanWarning, PlanError
from bitplan.integrations.export import EXPORT_FORMATS, export_plan
from bitplan.integrations.import_plan import IMPORT_FORMATS, import_plan
from bitplan.lab.targets import load_target, load_target_and_task
from bitplan.planners import cpt_plan
from bitplan.planners.cpt import record_operations, saving_plan
from bitplan.plans import ROLES, Plan, plan_schema, preset_names, preset_text
from bitplan.plans.loading import find_plan

group = typer.Typer(help="List, show, check, explain, make, export and import plans.", no_args_is_help=True)


def _complete_to(incomplete: str) -> list[str]:
    return [name for name in EXPORT_FORMATS if name.startswith(incomplete)]


def _complete_from(incomplete: str) -> list[str]:
    return [name for name in IMPORT_FORMATS if name.startswith(incomplete)]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="plan")


@group.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the plans that come with bitplan."""
    with command_output(as_json) as output:
        presets = {name: Plan.preset(name) for name in preset_names()}
        output.document([{"name": name, "description": plan.description} for name, plan in presets.items()])
        if not as_json:
            table = FittedTable()
            table.add_column("name", "name", style="bold")
            table.add_column("description", "text")
            for name, plan in presets.items():
                table.add_row(name, plan.description or "")
            table.print(output.console)


@group.command("show")
def show(
    plan: PlanArgument,
    flat: Annotated[bool, typer.Option("--flat", help="Write out the plans that it extends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a plan as YAML; with --json as JSON."""
    with command_output(as_json) as output:
        loaded = find_plan(plan)
        printed = loaded.flattened() if flat else loaded
        output.document(printed.to_dict())
        if not as_json:
            # A preset's file gives reasons in comments.
            text = preset_text(plan) if plan in preset_names() and not flat else printed.to_yaml()
            typer.echo(text, nl=False)


@group.command("schema")
def schema() -> None:
    """Print the JSON Schema of plan files, for editors."""
    typer.echo(json.dumps(plan_schema(), indent=2))


@group.command("check")
def check(
    plan: PlanArgument,
    target: OptionalTargetArgument = None,
    plan_option: PlanOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a plan and, with a TARGET, that every rule matches something there.

    TARGET --plan PLAN says the same as PLAN TARGET. Exit code 2, and one sentence, if something is wrong.
    """
    with command_output(as_json) as output:
        plan, target = plan_and_target(plan, target, plan_option, "plan check")
        loaded = find_plan(plan)
        record: dict[str, Any] = {"plan": plan, "ok": True, "rules": len(loaded.all_rules)}
        sentence = f"{plan} is fine: {len(loaded.all_rules)} rules"
        if target is None and settings:
            raise PlanError(f"--set {settings[0]} changes the recipe of a task: name the task after {plan}, too.")
        if target is not None:
            with _warnings_as_notes(output):
                sites = _explained(loaded, target, settings or ())
            rounded = sum(site.quantizer is not None for site in sites)
            record |= {"target": target, "sites": len(sites), "rounded": rounded}
            sentence += f" that round {rounded} of the {len(sites)} tensors and operands of {target}"
        output.document(record)
        if not as_json:
            output.console.print(f"{sentence}.")


@group.command("explain")
def explain(
    plan: PlanArgument,
    target: OptionalTargetArgument = None,
    plan_option: PlanOption = None,
    rounded: RoundedOption = False,
    match: MatchOption = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="What the tensors get at this training step, from 0.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --step: the optimizer steps of the whole run (default: those of the task's recipe).",
            show_default=False,
        ),
    ] = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the format of every tensor of TARGET under PLAN, and the rule that sets it.

    TARGET --plan PLAN says the same as PLAN TARGET. Above the table are the tensors that each rule with select chooses.
    With --json: a list of objects, operand slots included; selected_by names the rules whose select chooses the
    operation.
    """
    with command_output(as_json) as output:
        plan, target = plan_and_target(plan, target, plan_option, "plan explain")
        if target is None:
            raise PlanError(f"name what {plan} is to be explained on: bitplan plan explain TARGET --plan {plan}")
        loaded = find_plan(plan)
        if steps is not None and step is None:
            raise PlanError("--steps is the length of the run that --step is of: give --step, too, or drop --steps.")
        with _warnings_as_notes(output):
            sites = _explained(loaded, target, settings or (), step, steps)
        chosen = matching([site.site for site in sites], match)
        sites = [site for site in sites if site.site in chosen]
        # An operand without a rule takes the tensor as it is: nothing to show.
        total = sum(site.site.role in ROLES or site.rule is not None for site in sites)
        sites = [site for site in sites if site.quantizer is not None or not rounded]
        selections = _selections(loaded, target, settings or ())
        output.document([explanation_record(site, selections) for site in sites])
        if not as_json:
            for selection in selections:
                tensors = ", ".join(selection.folded) or "nothing"
                output.console.print(
                    f"{selection.where or f'rules[{selection.rule}]'} ({selection.selection}): {tensors}"
                )
            _print([site for site in sites if site.site.role in ROLES or site.rule is not None], total, output)
            rule = loaded.optimizer_rule
            if rule is not None:
                output.console.print(f"optimizer state: {rule.state} ({rule.where or 'optimizer'})")


@group.command("cpt")
def cpt(
    target: TargetArgument,
    schedule: Annotated[
        str,
        typer.Option(help="One of those that bitplan schedules shows.", autocompletion=complete_schedule),
    ] = "CR",
    bits: Annotated[str, typer.Option(metavar="LOW-HIGH", help="The range of bits.")] = "3-8",
    cycles: Annotated[int, typer.Option(min=1, help="Cycles; of triangular schedules, half triangles.")] = 8,
    saving: Annotated[
        float | None,
        typer.Option(
            help="A static plan instead, that saves this share of the bit operations of the highest bits throughout.",
            show_default=False,
        ),
    ] = None,
    period: PeriodOption = None,
    gradient_bits: GradientBitsOption = None,
    settings: SettingsOption = None,
    quantized_aggregation: Annotated[
        bool,
        typer.Option(
            "--quantized-aggregation", "--q-agg", help="Of graph networks: round what neighbour sums are of, too."
        ),
    ] = False,
    as_published: Annotated[
        bool,
        typer.Option(
            "--as-published",
            help="Also round what the authors' code rounds beyond products: biases, the sum before a graph layer's "
            "bias, and attention along the last axis.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan there (default: print it).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the plan of cyclic precision training for TARGET, with the papers' quantizer and exceptions.

    Weights and activations follow the schedule, gradients have the highest bits. With --saving their bits are constant:
    one width, and one bit more in some layers. With --json: the plan as JSON.
    """
    with command_output(as_json) as output:
        low, high = read_bits(bits)
        loaded = load_target(target, shapes_only=True, settings=settings or ())
        with target_errors(target):
            if saving is not None:
                operations = record_operations(loaded.model, loaded.batch, loaded.loss)
                plan = saving_plan(operations, saving, high, name="static", quantized_aggregation=quantized_aggregation)
            else:
                plan = cpt_plan(
                    *(loaded.model, loaded.batch, loaded.loss),
                    schedule=schedule,
                    low=low,
                    high=high,
                    cycles=cycles,
                    period=period or "exact",
                    gradient_bits=gradient_bits,
                    quantized_aggregation=quantized_aggregation,
                    as_published=as_published,
                )
        output.document(plan.to_dict())
        if out is not None:
            plan.save(out)
            output.note(f"wrote {out}. {plan.description}")
        elif not as_json:
            typer.echo(plan.to_yaml(), nl=False)


@group.command("export")
def export(
    plan: PlanArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FORMAT", help=f"One of {', '.join(EXPORT_FORMATS)}.", autocompletion=_complete_to
        ),
    ],
    model: Annotated[str, typer.Option("--model", metavar="TARGET", help=TARGET_HELP, autocompletion=complete_target)],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the file there (default: print it).")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse, if FORMAT cannot express all of the plan.")] = False,
    target_version: Annotated[
        str | None,
        typer.Option("--target-version", metavar="VERSION", help="Of the framework (default: the newest known)."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FOLDER", help="compressed-tensors: also write the model, weights rounded."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Of a plan that changes over time: export this training step.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --step: the optimizer steps of the whole run.", show_default=False)
    ] = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write PLAN in the format of another framework, for the layers of a model.

    What FORMAT cannot express is printed on stderr, line by line. With --json: the text and these lines.
    """
    with command_output(as_json) as output:
        if steps is not None and step is None:
            raise PlanError("--steps is the length of the run that --step is of: give --step, too, or drop --steps.")
        loaded = load_target(model, shapes_only=weights is None, settings=settings or ())
        with target_errors(model), _warnings_as_notes(output):
            exported = export_plan(
                *(plan, to, loaded.model, loaded.batch, loaded.loss),
                strict=strict,
                version=target_version,
                weights=weights,
                step=step,
                steps=steps,
                target=model,
            )
        output.document(exported.to_dict() | {"file": out, "weights": weights})
        if out is not None:
            exported.save(out)
            output.note(f"wrote {out}: {exported.format}, {exported.layers} layers.")
        elif not as_json and weights is None:
            typer.echo(exported.text, nl=False)
        if weights is not None:
            output.note(f"wrote {weights}: {exported.format}, the weights of {exported.layers} layers rounded.")
        for line in exported.lines:
            output.note(f"not exported: {line}.")


@group.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A file; for torchao a recipe's name, or file.py:NAME, which is executed.",
            show_default=False,
        ),
    ],
    from_: Annotated[
        str,
        typer.Option(
            "--from", metavar="FORMAT", help=f"One of {', '.join(IMPORT_FORMATS)}.", autocompletion=_complete_from
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan there (default: print it).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a plan of another framework's config, to measure, price or compare it.

    What a plan cannot express is printed on stderr. With --json: the plan as JSON.
    """
    with command_output(as_json) as output:
        imported = import_plan(source, from_)
        output.document(imported.plan.to_dict())
        if out is not None:
            imported.plan.save(out)
            output.note(f"wrote {out}.")
        elif not as_json:
            typer.echo(imported.plan.to_yaml(), nl=False)
        for line in imported.notes:
            output.note(f"{line}.")


def explanation_record(explanation: Explanation, selections: Sequence[Selection] = ()) -> dict[str, Any]:
    """A site under a plan as JSON."""
    operation = f"{explanation.site.module}/{explanation.site.op}"
    return {
        **site_record(explanation.site),
        "quantizer": explanation.words,
        "reason": explanation.reason,
        "rule": explanation.rule,
        "where": explanation.where or None,
        "warning": explanation.warning,
        "selected_by": [selection.where for selection in selections if operation in selection.sites],
    }


def _explained(
    plan: Plan, target: str, settings: Sequence[str] = (), step: int | None = None, steps: int | None = None
) -> Sequence[Explanation]:
    loaded, task = load_target_and_task(target, shapes_only=True, settings=settings)
    if step is not None and steps is None and task is not None:
        steps = int(task.settings.all_steps)
    with target_errors(target):
        return explained(loaded.model, plan, loaded.batch, loaded.loss, step=step, steps=steps)


def _selections(plan: Plan, target: str, settings: Sequence[str]) -> Sequence[Selection]:
    loaded = load_target(target, shapes_only=True, settings=settings)
    with target_errors(target):
        return explain_selections(loaded.model, plan, loaded.batch, loaded.loss)


@contextmanager
def _warnings_as_notes(output: Output) -> Iterator[None]:
    """Warnings of rules with ``strict: false``, as sentences on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, BitplanWarning):
            output.note(str(warning.message))


def _print(explanations: Sequence[Explanation], total: int, output: Output) -> None:
    table = FittedTable()
    table.add_column("name", "name", style="bold")
    table.add_column("shape", is_optional=True)
    table.add_column("quantizer", "text")
    table.add_column("rule", "name")
    places: dict[str, set[str]] = {}
    for explanation in explanations:
        places.setdefault(explanation.where.rpartition(": ")[2], set()).add(explanation.where)
    for explanation in explanations:
        quantizer = explanation.words or ("-" if explanation.reason is None else explanation.treatment)
        rule = "-" if explanation.rule is None else explanation.where or f"rules[{explanation.rule}]"
        short = rule.rpartition(": ")[2]
        rule = short if len(places.get(short, ())) == 1 else rule  # plans that extend each other have rules[0] each
        table.add_row(explanation.site.name, shape_text(explanation.site), quantizer, rule)
    table.print(output.console)
    for short, (where, *others) in places.items():
        if short != where and not others:
            output.console.print(f"{short}: {where.rpartition(': ')[0]}")
    rounded = sum(explanation.quantizer is not None for explanation in explanations)
    output.console.print(f"{rounded} of {total} are rounded.")
    for kind, meaning in (
        ("constant", "depend on no parameter and no floating-point input (constants: true in a rule rounds them)"),
        ("mask", "have entries that stand for minus infinity"),
    ):
        count = sum(explanation.reason == kind for explanation in explanations)
        if count:
            output.console.print(f"{count} are left alone because they {meaning}.")
    for explanation in explanations:
        if explanation.warning is not None:
            output.console.print(f"{explanation.site.name}: {explanation.warning}")
