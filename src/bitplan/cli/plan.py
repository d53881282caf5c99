"""``bitplan plan``: list, show, check and explain plans."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from bitplan.analysis.explain import Explanation
from bitplan.analysis.explain import explain as explained
from bitplan.analysis.targets import running
from bitplan.cli.arguments import OptionalTargetArgument, PlanArgument, SettingsOption, TargetArgument
from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.cli.schedules import complete_schedule, read_bits
from bitplan.cli.sites import shape_text, site_record
from bitplan.errors import BitplanWarning
from bitplan.lab.targets import load_target
from bitplan.planners import cpt_plan
from bitplan.plans import ROLES, Plan, plan_schema, preset_names, preset_text
from bitplan.plans.loading import find_plan

group = typer.Typer(help="List, show, check, explain and make plans.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="plan")


@group.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the plans that come with bitplan."""
    with command_output(as_json) as output:
        presets = {name: Plan.preset(name) for name in preset_names()}
        output.document([{"name": name, "description": plan.description} for name, plan in presets.items()])
        if not as_json:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("name", style="bold", no_wrap=True)
            table.add_column("description")
            for name, plan in presets.items():
                table.add_row(name, plan.description)
            output.console.print(table)


@group.command("show")
def show(
    plan: PlanArgument,
    flat: Annotated[bool, typer.Option("--flat", help="With what the plan extends written into it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a plan as YAML; with --json as JSON."""
    with command_output(as_json) as output:
        found = find_plan(plan)
        shown = found.flattened() if flat else found
        output.document(shown.to_dict())
        if not as_json:
            # A preset's own text has its reasons in comments.
            text = preset_text(plan) if plan in preset_names() and not flat else shown.to_yaml()
            typer.echo(text, nl=False)


@group.command("schema")
def schema() -> None:
    """Print the JSON Schema of plan files, for editors."""
    typer.echo(json.dumps(plan_schema(), indent=2))


@group.command("check")
def check(plan: PlanArgument, target: OptionalTargetArgument = None, as_json: JsonOption = False) -> None:
    """Check a plan by itself and, with a TARGET, that every rule finds something there to round.

    Exit code 2, and one sentence, if something is wrong.
    """
    with command_output(as_json) as output:
        found = find_plan(plan)
        record: dict[str, Any] = {"plan": plan, "ok": True, "rules": len(found.all_rules)}
        sentence = f"{plan} is fine: {len(found.all_rules)} rules"
        if target is not None:
            with _warnings_as_notes(output):
                sites = _explained(found, target)
            rounded = sum(site.quantizer is not None for site in sites)
            record |= {"target": target, "sites": len(sites), "rounded": rounded}
            sentence += f" that round {rounded} of the {len(sites)} tensors and operands of {target}"
        output.document(record)
        if not as_json:
            output.console.print(f"{sentence}.", soft_wrap=True)


@group.command("explain")
def explain(
    plan: PlanArgument, target: TargetArgument, settings: SettingsOption = None, as_json: JsonOption = False
) -> None:
    """Show what every tensor of TARGET gets under PLAN, and which rule said so.

    With --json: a list of objects, operand slots included.
    """
    with command_output(as_json) as output:
        found = find_plan(plan)
        with _warnings_as_notes(output):
            sites = _explained(found, target, settings or ())
        output.document([explanation_record(site) for site in sites])
        if not as_json:
            # A slot that no rule speaks of takes the tensor as it comes: nothing to tell.
            _print([site for site in sites if site.site.role in ROLES or site.rule is not None], output)
            rule = found.optimizer_rule
            if rule is not None:
                output.console.print(f"optimizer state: {rule.state} ({rule.where or 'optimizer'})", soft_wrap=True)


@group.command("cpt")
def cpt(
    target: TargetArgument,
    schedule: Annotated[
        str,
        typer.Option(help="One of those that bitplan schedules shows.", autocompletion=complete_schedule),
    ] = "CR",
    bits: Annotated[str, typer.Option(metavar="LOW-HIGH", help="The range of bits.")] = "3-8",
    cycles: Annotated[int, typer.Option(min=1, help="Cycles; of triangular schedules, half triangles.")] = 8,
    settings: SettingsOption = None,
    quantized_aggregation: Annotated[
        bool,
        typer.Option(
            "--quantized-aggregation", "--q-agg", help="Of graph networks: round what neighbour sums are of, too."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan there (default: print it).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the plan of cyclic precision training for TARGET: the papers' quantiser, and what they leave alone.

    Weights and activations follow the schedule, gradients have the highest bits. With --json: the plan as JSON.
    """
    with command_output(as_json) as output:
        low, high = read_bits(bits)
        chosen = load_target(target, shapes_only=True, settings=settings or ())
        with running(target):
            plan = cpt_plan(
                *(chosen.model, chosen.batch, chosen.loss),
                schedule=schedule,
                low=low,
                high=high,
                cycles=cycles,
                quantized_aggregation=quantized_aggregation,
            )
        output.document(plan.to_dict())
        if out is not None:
            plan.save(out)
            output.note(f"wrote {out}. {plan.description}")
        elif not as_json:
            typer.echo(plan.to_yaml(), nl=False)


def explanation_record(explanation: Explanation) -> dict[str, Any]:
    """What JSON says about a site under a plan."""
    return {
        **site_record(explanation.site),
        "quantizer": explanation.words,
        "rule": explanation.rule,
        "where": explanation.where or None,
        "warning": explanation.warning,
    }


def _explained(plan: Plan, target: str, settings: Sequence[str] = ()) -> list[Explanation]:
    chosen = load_target(target, shapes_only=True, settings=settings)
    with running(target):
        return explained(chosen.model, plan, chosen.batch, chosen.loss)


@contextmanager
def _warnings_as_notes(output: Output) -> Iterator[None]:
    """What a rule with ``strict: false`` warns of, as sentences on stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, BitplanWarning):
            output.note(str(warning.message))


def _print(shown: list[Explanation], output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("quantizer", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    for each in shown:
        quantizer = each.words or "-"
        rule = "-" if each.rule is None else each.where or f"rules[{each.rule}]"
        table.add_row(each.site.name, shape_text(each.site), quantizer, rule)
    output.console.print(table)
    rounded = sum(each.quantizer is not None for each in shown)
    output.console.print(f"{rounded} of {len(shown)} are rounded.")
    for each in shown:
        if each.warning is not None:
            output.console.print(f"{each.site.name}: {each.warning}", soft_wrap=True)
