"""What a measurement found: rows of figures, which are written to a file and read back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.analysis.measure.candidate import PLANNED, Candidate
from bitplan.analysis.measure.figures import OperandFigures, PassFigures, Sums
from bitplan.errors import MetricError
from bitplan.files import json_text, write_whole
from bitplan.plans.match import PASSES
from bitplan.tables import Table

if TYPE_CHECKING:
    import pandas

#: The version of measurements' files that this package reads and writes.
VERSION = 1


@dataclass(frozen=True)
class Row:
    """One candidate in one pass of one product at one stage of training."""

    #: Module path, operation and its number there: ``layer1.0.conv1/conv2d.0``.
    product: str
    #: fprop, dgrad or wgrad.
    pass_: str
    candidate: str
    stage: str
    #: Steps that were made before.
    step: int
    #: Terms that were added up, terms there are, and terms that are not zero on average.
    k: int
    length: int
    nonzero: float
    #: Of the backward error of the sampled elements.
    median: float
    mean: float
    p99: float
    #: Of the product, in decibels.
    sqnr: float
    #: Of both operands' values together.
    underflow: float
    overflow: float
    #: Either operand quantised alone.
    left: OperandFigures
    right: OperandFigures
    #: The fused operation that the product lies in, such as ``scaled_dot_product_attention``.
    inside: str | None = None

    @property
    def module(self) -> str:
        return self.product.rpartition("/")[0]

    @property
    def level(self) -> float:
        """The median error times the root of the terms that are not zero: fair between sums of different lengths."""
        return self.median * math.sqrt(max(self.nonzero, 1.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ``pass`` among them."""
        content = asdict(self)
        return {("pass" if key == "pass_" else key): value for key, value in content.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Row:
        names = {field.name for field in fields(cls)}
        values = {("pass_" if key == "pass" else key): value for key, value in content.items()}
        values = {key: value for key, value in values.items() if key in names}
        for side in ("left", "right"):
            values[side] = OperandFigures(**_numbers(values[side], OperandFigures))
        return cls(**_numbers(values, cls))


def row_of(
    product: str, pass_: str, sums: Sums, figures: PassFigures, stage: str, step: int, inside: str | None
) -> Row:
    own = {name: getattr(figures, name) for name in ("median", "mean", "p99", "sqnr", "underflow", "overflow")}
    return Row(
        *(product, pass_, str(figures.candidate), stage, step, sums.k, sums.length, sums.nonzero),
        **own,
        left=figures.left,
        right=figures.right,
        inside=inside,
    )


@dataclass(frozen=True)
class Measurement:
    """All rows, and what the measurement could not see."""

    rows: tuple[Row, ...]
    #: Product -> why it is not among the rows.
    skipped: Mapping[str, str] = field(default_factory=dict)
    #: What was measured, as it was named.
    target: str | None = None
    #: What makes such a measurement.
    command: str | None = None

    @property
    def candidates(self) -> list[str]:
        return list(dict.fromkeys(row.candidate for row in self.rows))

    @property
    def products(self) -> list[str]:
        return list(dict.fromkeys(row.product for row in self.rows))

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(row.stage for row in self.rows))

    def select(self, **criteria: str) -> list[Row]:
        """The rows with these values: ``measurement.select(pass_="wgrad", candidate="e4m3 tensor")``."""
        if criteria.get("candidate", PLANNED) != PLANNED:
            criteria["candidate"] = str(Candidate.of(criteria["candidate"]))
        return [row for row in self.rows if all(getattr(row, name) == value for name, value in criteria.items())]

    def table(self) -> Table[Row]:
        """All rows, with their main columns; :meth:`to_dict` has every figure."""
        return Table(self.rows, _columns(len(self.stages) > 1), empty="no products were measured")

    def to_pandas(self) -> pandas.DataFrame:
        """One line per row, with the columns of :meth:`table`."""
        return self.table().to_pandas()

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __add__(self, other: Measurement) -> Measurement:
        """Both, as of one model at several stages."""
        return Measurement(
            (*self.rows, *other.rows), {**self.skipped, **other.skipped}, self.target, self.command or other.command
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "bitplan_measurement": VERSION,
            "target": self.target,
            "command": self.command,
            "skipped": dict(self.skipped),
            "rows": [row.to_dict() for row in self.rows],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Measurement:
        if content.get("bitplan_measurement") != VERSION:
            raise MetricError(
                f"this is no measurement of version {VERSION}: name a file that bitplan measure -o has written."
            )
        try:
            rows = tuple(map(Row.from_dict, content["rows"]))
            return cls(rows, dict(content["skipped"]), content["target"], content["command"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MetricError("the measurement is damaged: measure again.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that :meth:`load` reads."""
        try:
            write_whole(Path(path), json_text(self.to_dict()) + "\n")
        except OSError as error:
            raise MetricError(f"{path} cannot be written ({error.strerror}): name another file.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Measurement:
        """A measurement's file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise MetricError(f"cannot read {path} ({error.strerror}): name a file of bitplan measure -o.") from error
        except ValueError as error:
            raise MetricError(f"{path} is no JSON file: name one that bitplan measure -o has written.") from error
        if not isinstance(content, dict):
            raise MetricError(f"{path} is no measurement: name a file that bitplan measure -o has written.")
        return cls.from_dict(content)


def _columns(has_stages: bool) -> dict[str, Callable[[Row], Any]]:
    columns: dict[str, Callable[[Row], Any]] = {
        "product": lambda row: row.product,
        "pass": lambda row: row.pass_,
        "candidate": lambda row: row.candidate,
        "stage": lambda row: row.stage,
        "median": lambda row: row.median,
        "p99": lambda row: row.p99,
        "sqnr": lambda row: row.sqnr,
        "underflow": lambda row: row.underflow,
        "overflow": lambda row: row.overflow,
    }
    return {name: value for name, value in columns.items() if has_stages or name != "stage"}


def averaged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows of several batches as one each: every figure is the mean of its batches'."""
    gathered: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        gathered.setdefault((row.product, row.pass_, row.candidate, row.stage), []).append(row)
    made = [group[0] if len(group) == 1 else _mean_row(group) for group in gathered.values()]
    # By product in the order of the forward pass, rather than as gradients came back.
    order = {name: number for number, name in enumerate(dict.fromkeys(row.product for row in made))}
    passes = list(PASSES)
    return tuple(sorted(made, key=lambda row: (order[row.product], passes.index(row.pass_))))


def _mean_row(group: Sequence[Row]) -> Row:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def merged(of: Callable[[Row], Any]) -> dict[str, Any]:
        first = of(group[0])
        return {
            field.name: mean([getattr(of(row), field.name) for row in group])
            if isinstance(getattr(first, field.name), float)
            else getattr(first, field.name)
            for field in fields(first)
        }

    whole = merged(lambda row: row)
    for side in ("left", "right"):
        whole[side] = OperandFigures(**merged(lambda row, side=side: getattr(row, side)))  # type: ignore[misc]
    return Row(**whole)


def _numbers(content: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """JSON writes what is not finite as a text, which ``float`` reads back."""
    floats = {field.name for field in fields(kind) if field.type == "float"}
    return {key: float(value) if key in floats else value for key, value in content.items()}
