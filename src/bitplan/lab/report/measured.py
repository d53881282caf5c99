"""What was measured, as files tell it: a run's ``measurements.jsonl``, or a file of ``bitplan measure -o``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitplan.analysis.measure import Measurement
from bitplan.errors import RunError
from bitplan.lab.train.folder import RunFolder, read_lines

#: What ``bitplan measure -o FOLDER`` calls its file.
FILE = "measurement.json"


@dataclass(frozen=True)
class MeasuredCell:
    """One candidate in one pass of one product."""

    product: str
    pass_: str
    candidate: str
    median: float
    #: The median times the root of the sums' length, which is fair between products.
    level: float
    p99: float
    sqnr: float
    underflow: float
    overflow: float
    #: Of the left and of the right operand.
    kurtosis: tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """One look at all products."""

    #: In words, such as ``after 40 steps``.
    when: str
    cells: tuple[MeasuredCell, ...]
    #: Sentences, in the order of time.
    alarms: tuple[str, ...] = ()


def measured_in_run(path: Path) -> Measured | None:
    """The last look at a run; None where nobody looked."""
    file = RunFolder(path).measurements_file
    lines = read_lines(file)
    if not lines:
        return None
    try:
        alarms = tuple(str(line["alarm"]["sentence"]) for line in lines if line["alarm"])
        cells = tuple(map(_cell, lines[-1]["rows"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} is damaged: restore it, or leave that run out.") from error
    return Measured(_when(int(lines[-1]["step"])), cells, alarms)


def measured_in_file(measurement: Measurement) -> list[Measured]:
    """Every stage of a measurement."""
    found = []
    for stage in measurement.stages:
        rows = measurement.select(stage=stage)
        when = "as it is" if stage == "now" else f"{stage}, {_when(rows[0].step)}"
        found.append(Measured(when, tuple(_cell(row.to_dict()) for row in rows)))
    return found


def of_pass(cells: Iterable[MeasuredCell]) -> dict[tuple[str, str], dict[str, MeasuredCell]]:
    """(product, pass) -> candidate -> figures."""
    found: dict[tuple[str, str], dict[str, MeasuredCell]] = {}
    for cell in cells:
        found.setdefault((cell.product, cell.pass_), {})[cell.candidate] = cell
    return found


def _when(step: int) -> str:
    return f"after {step} step{'' if step == 1 else 's'}"


def _cell(row: Mapping[str, Any]) -> MeasuredCell:
    median = float(row["median"])
    return MeasuredCell(
        *(str(row["product"]), str(row["pass"]), str(row["candidate"]), median),
        level=median * math.sqrt(max(float(row["nonzero"]), 1.0)),
        p99=float(row["p99"]),
        sqnr=float(row["sqnr"]),
        underflow=float(row["underflow"]),
        overflow=float(row["overflow"]),
        kurtosis=(float(row["left"]["kurtosis"]), float(row["right"]["kurtosis"])),
    )
