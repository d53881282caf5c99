"""Time series: columns of numbers from a CSV file, or from the files of statsmodels and vega_datasets."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from bitplan.errors import TaskError
from bitplan.lab.sources.files import read_text

#: The columns of the ETT files (Zhou et al. 2021, arXiv 2012.07436).
ETT_COLUMNS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
#: Their published split: months of 30 days.
ETT_MONTHS = (12, 4, 4)
#: The usual split of other series: training and test; the rest between them is for the validation.
SHARES = (0.7, 0.2)

#: Cities of vega_datasets with hourly temperatures.
CITIES = ("seattle", "sf")
#: The file of statsmodels with Victoria's demand, one of those that its own tests need.
DEMAND = "tsa/stl/tests/results/mstl_elec_vic.csv"


@dataclass(frozen=True)
class Series:
    """Rows at equal intervals, (rows, channels), standardised by the training rows."""

    values: Tensor
    #: The first row after the training rows, after those of the validation, and after those of the test.
    borders: tuple[int, int, int]

    @classmethod
    def of(cls, columns: dict[str, list[float]]) -> Series:
        rows = len(next(iter(columns.values())))
        borders = _borders(tuple(columns), rows)
        values = torch.tensor(list(columns.values()), dtype=torch.float64).t()
        training = values[: borders[0]]
        deviation = training.std(0, correction=0)
        # A constant channel has no variance, and must not be divided by zero.
        standard = (values - training.mean(0)) / torch.where(deviation > 0, deviation, 1.0)
        return cls(standard.float().contiguous(), borders)


def _borders(names: Sequence[str], rows: int) -> tuple[int, int, int]:
    """The published borders of the ETT files, hourly or of 15 minutes; of other files by :data:`SHARES`."""
    if tuple(names) == ETT_COLUMNS:
        months = list(accumulate(ETT_MONTHS))
        for rows_per_hour in (4, 1):
            training, validation, test = (30 * 24 * rows_per_hour * month for month in months)
            if rows >= test:
                return training, validation, test
    training_share, test_share = SHARES
    return int(rows * training_share), rows - int(rows * test_share), rows


def read_series(path: Path) -> Series:
    """The columns of numbers in a CSV file (``.gz`` is accepted); a first column of dates is left out."""
    if not path.exists():
        raise TaskError(
            f"there is no file {path}: set data= to {' or '.join(INSTALLED)}, or to a CSV file with column names."
        )
    return Series.of(_columns(path))


def demand() -> Series:
    """The electricity demand of Victoria, Australia, for 150 days from January 2012, hour by hour."""
    return Series.of(_columns(_file_of("statsmodels", DEMAND)))


def temperatures() -> Series:
    """The hourly temperatures of two cities through a year: climate normals, means over many years, without weather."""
    return Series.of({city: _columns(_file_of("vega_datasets", f"_data/{city}-temps.csv"))["temp"] for city in CITIES})


#: Name -> a series that comes with the extra ``forecast``, and its channels.
INSTALLED: dict[str, tuple[Callable[[], Series], int]] = {"demand": (demand, 1), "temperatures": (temperatures, 2)}


def _file_of(package: str, name: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec = find_spec(package)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / name
    if path is None or not path.exists():
        state = "which is not installed" if path is None else f"but the installed one has no {name}"
        raise TaskError(
            f"this series is in the package {package}, {state}: run \"pip install 'bitplan[forecast]'\", or set data= "
            f"to a CSV file."
        )
    return path


def _columns(path: Path) -> dict[str, list[float]]:
    lines = list(csv.reader(read_text(path).splitlines()))
    if len(lines) < 2:
        raise TaskError(f"{path} has no rows: set data= to a CSV file with a line of column names.")
    names, rows = lines[0], [line for line in lines[1:] if line]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise TaskError(f"{path}, line {number}, has {len(row)} columns instead of {len(names)}: repair it.")
    columns: dict[str, list[float]] = {}
    for position, name in enumerate(names):
        texts = [row[position] for row in rows]
        if _number(texts[0]) is None and _looks_like_date(texts[0]):
            continue
        values = [_number(text) for text in texts]
        for number, value in enumerate(values, start=2):
            if value is None:
                raise TaskError(
                    f"{path}, line {number}: {name} is {texts[number - 2][:40]!r}, which is not a finite number: "
                    f"fill the gap, or remove the column."
                )
        columns[name] = [value for value in values if value is not None]
    if not columns:
        raise TaskError(f"{path} has no column of numbers: set data= to a file that has one.")
    return columns


def _looks_like_date(text: str) -> bool:
    """Whether a text has the digits and separators of dates and times."""
    return any(mark in text for mark in "-/:") and text[:1].isdigit()


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
