"""The result of a measurement: rows of metrics, with a JSON file format."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitplan.analysis.measure.candidate import PLANNED, Candidate
from bitplan.analysis.measure.pass_metrics import OperandMetrics, PassMetrics, ReductionLength
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
    """The metrics of a candidate in a pass of a product at a stage of training."""

    #: Module path and numbered operation: ``layer1.0.conv1/conv2d.0``.
    product: str
    #: fprop, dgrad or wgrad.
    pass_: str
    candidate: str
    stage: str
    #: Training steps before the measurement.
    step: int
    #: Sampled terms, all terms, and average number of nonzero terms of a sum.
    k: int
    length: int
    nonzero: float
    #: Backward error of the sampled elements.
    median: float
    mean: float
    p99: float
    #: Of the product, in decibels.
    sqnr: float
    #: Of the values of both operands.
    underflow: float
    overflow: float
    #: With only one operand quantised.
    left: OperandMetrics
    right: OperandMetrics
    #: The fused operation that contains the product, such as ``scaled_dot_product_attention``.
    inside: str | None = None
    #: Metrics of the user's own, by name.
    own: Mapping[str, float] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return self.product.rpartition("/")[0]

    @property
    def level(self) -> float:
        """The median error times the square root of the nonzero terms, comparable between reduction lengths."""
        return self.median * math.sqrt(max(self.nonzero, 1.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``pass_`` has the key ``pass``."""
        values = {("pass" if key == "pass_" else key): value for key, value in asdict(self).items()}
        return values if self.own else {key: value for key, value in values.items() if key != "own"}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Row:
        names = {field.name for field in fields(cls)}
        values = {("pass_" if key == "pass" else key): value for key, value in content.items()}
        values = {key: value for key, value in values.items() if key in names}
        for side in ("left", "right"):
            values[side] = OperandMetrics(**_parse_floats(values[side], OperandMetrics))
        return cls(**_parse_floats(values, cls))


def make_row(
    product: str,
    pass_: str,
    reduction: ReductionLength,
    metrics: PassMetrics,
    stage: str,
    step: int,
    inside: str | None,
) -> Row:
    names = ("median", "mean", "p99", "sqnr", "underflow", "overflow", "left", "right")
    return Row(
        product,
        pass_,
        str(metrics.candidate),
        stage,
        step,
        reduction.k,
        reduction.length,
        reduction.nonzero,
        **{name: getattr(metrics, name) for name in names},
        inside=inside,
        own=metrics.own,
    )


@dataclass(frozen=True)
class Measurement:
    """All rows, and the products that were skipped."""

    rows: tuple[Row, ...]
    #: Product -> why it has no rows.
    skipped: Mapping[str, str] = field(default_factory=dict)
    #: The name of the measured target.
    target: str | None = None
    #: The command that repeats the measurement.
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

    @property
    def own_metrics(self) -> list[str]:
        """The names of the user's own metrics."""
        return list(dict.fromkeys(name for row in self.rows for name in row.own))

    def select(self, **criteria: str) -> list[Row]:
        """The rows with these values: ``measurement.select(pass_="wgrad", candidate="e4m3 tensor")``."""
        if criteria.get("candidate", PLANNED) != PLANNED:
            criteria["candidate"] = str(Candidate.of(criteria["candidate"]))
        return [row for row in self.rows if all(getattr(row, name) == value for name, value in criteria.items())]

    def table(self) -> Table[Row]:
        """All rows with their main columns; :meth:`to_dict` has all metrics."""
        return Table(self.rows, _columns(self), empty="no products were measured")

    def to_pandas(self) -> pandas.DataFrame:
        """One line per row, with the columns of :meth:`table`."""
        return self.table().to_pandas()

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        counts = {"product": len(self.products), "candidate": len(self.candidates), "stage": len(self.stages)}
        listed = ", ".join(f"{count} {noun}{'s' * (count != 1)}" for noun, count in counts.items())
        return f"<Measurement{f' of {self.target}' if self.target else ''}: {listed}>"

    def _repr_html_(self) -> str:
        """Products and passes down, candidates across: the median backward errors."""
        return self.comparison()._repr_html_()

    def comparison(self) -> Table[list[Row]]:
        """Products, passes and stages down, candidates across: the median backward error of each."""
        groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row.stage, row.product, row.pass_), []).append(row)

        def median(candidate: str) -> Callable[[list[Row]], float | None]:
            return lambda rows: next((row.median for row in rows if row.candidate == candidate), None)

        columns: dict[str, Callable[[list[Row]], Any]] = {
            **({"stage": lambda rows: rows[0].stage} if len(self.stages) > 1 else {}),
            "product": lambda rows: rows[0].product,
            "pass": lambda rows: rows[0].pass_,
            **{candidate: median(candidate) for candidate in self.candidates},
        }
        return Table(groups.values(), columns, empty="no products were measured")

    def __add__(self, other: Measurement) -> Measurement:
        """The rows of both, such as several stages of a model."""
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
        """Read a file that :meth:`save` has written."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise MetricError(f"cannot read {path} ({error.strerror}): name a file of bitplan measure -o.") from error
        except ValueError as error:
            raise MetricError(f"{path} is no JSON file: name one that bitplan measure -o has written.") from error
        if not isinstance(content, dict):
            raise MetricError(f"{path} is no measurement: name a file that bitplan measure -o has written.")
        return cls.from_dict(content)


def _columns(measurement: Measurement) -> dict[str, Callable[[Row], Any]]:
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
    if len(measurement.stages) <= 1:
        del columns["stage"]
    for name in measurement.own_metrics:
        columns[name] = lambda row, name=name: row.own.get(name)  # type: ignore[misc]
    return columns


def average_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Merge the rows of several batches; every metric is the mean over batches."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.product, row.pass_, row.candidate, row.stage), []).append(row)
    merged = [group[0] if len(group) == 1 else _mean_row(group) for group in groups.values()]
    # In the order of the forward pass, not of the gradients.
    order = {name: number for number, name in enumerate(dict.fromkeys(row.product for row in merged))}
    passes = list(PASSES)
    return tuple(sorted(merged, key=lambda row: (order[row.product], passes.index(row.pass_))))


def _mean_row(group: Sequence[Row]) -> Row:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def average(select: Callable[[Row], Any]) -> dict[str, Any]:
        first = select(group[0])
        return {
            field.name: mean([getattr(select(row), field.name) for row in group])
            if isinstance(getattr(first, field.name), float)
            else getattr(first, field.name)
            for field in fields(first)
        }

    values = average(lambda row: row)
    for side in ("left", "right"):
        values[side] = OperandMetrics(**average(lambda row, side=side: getattr(row, side)))  # type: ignore[misc]
    values["own"] = {name: mean([row.own[name] for row in group]) for name in group[0].own}
    return Row(**values)


def _parse_floats(content: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """JSON has values that are not finite as text, which ``float`` parses."""
    floats = {field.name for field in fields(kind) if field.type == "float"}
    return {key: float(value) if key in floats else value for key, value in content.items()}
