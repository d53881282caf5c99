"""``bitplan sites``: every tensor of one training step, by the name that plans match."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from bitplan.analysis.sites import Site, list_sites
from bitplan.analysis.targets import running
from bitplan.capture.recording import scripted_modules
from bitplan.cli.arguments import TargetArgument
from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.files import byte_text
from bitplan.lab.targets import load_target
from bitplan.plans import ROLES


def register(app: typer.Typer) -> None:
    app.command("sites")(sites)


def sites(
    target: TargetArgument,
    slots: Annotated[
        bool, typer.Option("--slots", help="Also show the operand slots of products (--json always has them).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List every tensor of one training step, in the order it is made.

    The model runs on fake tensors: shapes and types, no data. With --json: a list of objects.
    """
    with command_output(as_json) as output:
        chosen = load_target(target, shapes_only=True)
        with running(target):
            found = list_sites(chosen.model, chosen.batch, chosen.loss)
        for path in scripted_modules(chosen.model):
            output.note(f"{path or 'the model'} is scripted: nothing inside it is seen.")
        output.document([site_record(site) for site in found])
        if not as_json:
            _print([site for site in found if slots or site.role in ROLES], output)
            output.console.print(_summary(found), soft_wrap=True)


def site_record(site: Site) -> dict[str, Any]:
    """What JSON says about a site."""
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


def _print(shown: Iterable[Site], output: Output) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("dtype")
    table.add_column("size", justify="right", no_wrap=True)
    for site in shown:
        table.add_row(site.name, shape_text(site), dtype_name(site), byte_text(site.bytes))
    output.console.print(table)


def _summary(found: list[Site]) -> str:
    parts = []
    for role in ROLES:
        own = [site for site in found if site.role == role]
        parts.append(f"{len(own)} {role} ({byte_text(sum(site.bytes for site in own))})")
    return f"{', '.join(parts)}."
