"""``bitplan crossover``: from which size on low-precision GEMMs pay on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from bitplan.cli.output import FittedTable, JsonOption, Output, command_output
from bitplan.errors import BitplanError, nearest_names
from bitplan.executions.native.backends import backends_of
from bitplan.executions.native.crossover import NEVER, Crossing, cache_file, crossover_tables
from bitplan.executions.native.paths import NativeTerms
from bitplan.lab.train.loop import chosen_device

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def register(app: typer.Typer) -> None:
    app.command("crossover")(crossover)


def crossover(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the model: float32, bfloat16 or float16.")] = "float32",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure again, on an idle machine, and replace the stored table.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print from which size on native execution is faster than the model's own precision on this machine.

    The table is measured at its first use and stored. Runs record it and resume with it, whatever is measured later.
    With --json: one object.
    """
    with command_output(as_json) as output:
        if dtype not in _DTYPES:
            raise BitplanError(f"there is no dtype {dtype!r} here; {nearest_names(dtype, _DTYPES)}")
        chosen = chosen_device(device)
        backends = [backend.name for backend in backends_of(chosen)]
        if not backends:
            output.document({"device": str(chosen), "backends": []})
            if not as_json:
                output.console.print(f"{chosen} has no low-precision units: native execution emulates everything.")
            return
        tables = crossover_tables(chosen, _DTYPES[dtype], measure)
        terms = tables.terms(backends)
        record = {"linear": [asdict(row) for row in tables.linear], "im2col": [asdict(row) for row in tables.im2col]}
        output.document({"device": str(chosen), "backends": backends, **record, **terms.crossover_record()})
        if not as_json:
            _print(tables.linear, "GEMM of size", output)
            _print(tables.im2col, "3x3 convolution of channels", output)
            for sentence in _sentences(terms):
                output.console.print(sentence)
            where = f"stored in {cache_file()}" if tables.is_stored else "not stored, because the machine is busy"
            output.console.print(f"{where}; bitplan crossover --measure measures it again.")


def _print(rows: list[Crossing], heading: str, output: Output) -> None:
    table = FittedTable()
    table.add_column("unit")
    for name in (heading, "plain, ms", "native, ms"):
        table.add_column(name, "number")
    for row in rows:
        table.add_row(row.unit, str(row.size), f"{row.plain:.3f}", f"{row.native:.3f}")
    table.print(output.console)


def _sentences(terms: NativeTerms) -> list[str]:
    def sentence(backend: str, size: int, unit: str) -> str:
        return f"{backend} never pays here" if size >= NEVER else f"{backend} pays from {size:,} {unit} on"

    pairs: list[tuple[Any, str]] = [
        (terms.min_macs_by_backend, "multiply-accumulates"),
        (terms.min_channels_by_backend, "channels of a convolution larger than 1x1"),
    ]
    return [sentence(backend, size, unit) for sizes, unit in pairs for backend, size in sizes]
