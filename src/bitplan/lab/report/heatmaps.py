"""Heat maps: the tensors of a plan by format or rounding error, and the products of a model by candidate format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bitplan.analysis.measure import Measurement
from bitplan.errors import BitplanError, RunError
from bitplan.lab.report.answer import counted, percent_text
from bitplan.lab.report.figures import CELL_INK, CELLS, Drawing, bare_layout, end_of, plotly, safe, start_of
from bitplan.lab.report.runs import Run, SiteRecord
from bitplan.lab.report.summaries import PlanSummary
from bitplan.lab.report.tables import Cell, Table
from bitplan.lab.train.folder import RunFolder, read_lines
from bitplan.numerics.formats import get_format
from bitplan.plans import PLACES, Plan

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Measure = Literal["format", "error"]
_Grid = Sequence[Sequence[Any]]

#: Smaller rounding errors, and none at all, have the colour of this one, which leaves the colours to the others.
_SMALLEST_ERROR = 1e-5
#: The same for the levels of measured products.
_SMALLEST_LEVEL = 1e-4


def heatmap(
    heats: _Grid,
    texts: _Grid,
    hovers: _Grid,
    columns: Sequence[str],
    rows: Sequence[str],
    value_range: tuple[float, float],
    ticks: Sequence[tuple[int, str]],
    space: int,
    colours: Sequence[str] = CELLS,
) -> Figure:
    """Cells of 17 pixels' height, with `space` pixels around them; a cell whose heat is None stays empty."""
    go = plotly()
    figure = go.Figure(
        go.Heatmap(
            z=heats,
            x=columns,
            y=list(range(len(rows))),
            text=texts,
            texttemplate="%{text}",
            textfont={"size": 10, "color": CELL_INK},
            hovertext=hovers,
            hoverinfo="text",
            hoverongaps=False,
            xgap=2,
            ygap=1,
            colorscale=list(colours),
            zmin=value_range[0],
            zmax=value_range[1],
            colorbar={
                "thickness": 10,
                "outlinewidth": 0,
                "len": 1.0,
                "xpad": 4,
                "ypad": 0,
                "tickvals": [tick for tick, _ in ticks],
                "ticktext": [label for _, label in ticks],
            },
        )
    )
    figure.update_layout(
        xaxis={"side": "top", "type": "category", "tickangle": 0, "showgrid": False},
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": rows,
            "tickfont": {"size": 11},
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
        **bare_layout(max(space + 17 * len(rows), 200)),
    )
    return figure


# --- The tensors of a plan


def measures_of(plan: PlanSummary) -> list[Measure]:
    """What the runs of a plan have recorded of its tensors."""
    measures: list[Measure] = []
    if any(site.format for site in plan.sites):
        measures.append("format")
    if any(_has_error(site) for site in plan.sites):
        measures.append("error")
    return measures


def sites_chart(plan: PlanSummary, measure: Measure) -> Figure | None:
    """Operations down, operands across; tensors that the plan does not round stay empty.

    Tensors whose bits follow a schedule show their range; the figure's ``meta`` has their bits at some steps, for the
    page's slider.
    """
    chosen = [site for site in plan.sites if (site.format if measure == "format" else _has_error(site))]
    if not chosen:
        return None
    operations = list(dict.fromkeys(site.site for site in chosen))
    operands = operands_in_order({site.role for site in chosen})
    sites = {(site.site, site.role): site for site in chosen}

    def grid(value: Any, empty: Any = "") -> _Grid:
        return [
            [value(sites[key]) if (key := (operation, operand)) in sites else empty for operand in operands]
            for operation in operations
        ]

    moving = moving_bits(plan.judged[0]) if measure == "format" else {}
    value_range, ticks = _scale_of(chosen, measure)
    figure = heatmap(
        grid(lambda site: _moving_heat(site, moving) or _heat(site, measure), None),
        grid(lambda site: format_text(site, moving) if measure == "format" else _error_text(site)),
        grid(_hover),
        [operand_text(operand) for operand in operands],
        row_names(operations),
        value_range,
        ticks,
        110,
    )
    names = [name for name, (_, bits) in moving.items() if min(bits) < max(bits)]
    followed = {_schedule_of(site, moving) for site in chosen}
    if followed & set(names):
        follows = grid(lambda site: names.index(name) if (name := _schedule_of(site, moving)) in names else None, None)
        bits = [moving[name][1] for name in names]
        figure.update_layout(meta={"steps": moving[names[0]][0], "bits": bits, "follows": follows})
    return figure


def row_names(operations: Sequence[str]) -> list[str]:
    """Operations by their modules; with the operation's name where a module has several, or only a number for a name.

    >>> row_names(["layer1.conv1/conv2d.0", "layer1/add.0", "layer1/add.1", "0/linear.0"])
    ['layer1.conv1', 'layer1/add.0', 'layer1/add.1', '0/linear.0']
    """
    modules = [operation.rpartition("/")[0] for operation in operations]
    alone = {module for module, count in Counter(modules).items() if module and not module.isdigit() and count == 1}
    names = [module if module in alone else operation for module, operation in zip(modules, operations, strict=True)]
    return [safe(end_of(name, 34)) for name in names]


def operand_text(operand: str) -> str:
    """The name of an operand over a narrow column."""
    return safe(operand).replace("_", "<br>").replace(".", "<br>.").replace("(", "<br>(")


#: The slider over a run stops at so many steps, at most.
_MOST_STOPS = 60


def moving_bits(run: Run) -> dict[str, tuple[list[int], list[int]]]:
    """Schedule as sites name it -> some steps of the run, and its bits there. A user's own functions are not called."""
    total = run.planned_steps
    if run.plan_text is None or total < 1:
        return {}
    try:
        schedules = list(Plan.from_yaml(run.plan_text).all_schedules.values())
    except BitplanError:  # perhaps written by another version; the plan keeps its cells
        return {}
    steps = np.unique(np.linspace(0, total - 1, min(total, _MOST_STOPS)).round().astype(np.int64))
    return {
        str(schedule): (steps.tolist(), schedule.at(steps, total).tolist())
        for schedule in schedules
        if next(schedule.code(), None) is None
    }


def _schedule_of(site: SiteRecord, moving: Mapping[str, Any]) -> str | None:
    """The schedule whose name the site's format has, the longest where one name is the start of another."""
    _, _, rest = (site.format or "").partition(" ")
    fitting = [name for name in moving if rest == name or rest.startswith(f"{name} ")]
    return max(fitting, key=len, default=None)


def _moving_heat(site: SiteRecord, moving: Mapping[str, tuple[list[int], list[int]]]) -> float | None:
    name = _schedule_of(site, moving)
    return None if name is None else math.log2(sum(moving[name][1]) / len(moving[name][1]))


def format_text(site: SiteRecord, moving: Mapping[str, tuple[list[int], list[int]]]) -> str:
    """The format of a tensor in a cell, with the range of bits that follow a schedule."""
    word, name = (site.format or "").partition(" ")[0], _schedule_of(site, moving)
    if name is None:
        return safe(start_of(word, 8))
    low, high = min(moving[name][1]), max(moving[name][1])
    return safe(f"{word}{low}" if low == high else f"{word}{low}\N{EN DASH}{high}")


def _format_bits(quantizer: str) -> int | None:
    """The bits of a quantizer as plans write it; its first word is the format."""
    try:
        return get_format(quantizer.split()[0]).bits
    except (BitplanError, IndexError):
        return None


def _has_error(site: SiteRecord) -> bool:
    return site.error is not None and math.isfinite(site.error)


def operands_in_order(operands: set[str]) -> list[str]:
    """As plans list them; a second weight comes after the first."""
    order = {name: number for number, name in enumerate(PLACES)}
    return sorted(operands, key=lambda operand: (order.get(operand.partition("(")[0], len(order)), operand))


def _heat(site: SiteRecord, measure: Measure) -> float | None:
    """The logarithm of the bits or of the error."""
    if measure == "format":
        bits = _format_bits(site.format or "")
        return None if bits is None else math.log2(bits)
    assert site.error is not None
    return round(math.log10(max(site.error, _SMALLEST_ERROR)), 4)


def _error_text(site: SiteRecord) -> str:
    return percent_text(site.error).replace(" ", "") if site.error else "0"


def _hover(site: SiteRecord) -> str:
    lines = [f"<b>{safe(site.site)}</b>, {safe(site.role)}", safe(site.format or "left alone")]
    if site.rule:
        lines.append(f"by {safe(site.rule)}")
    for name, value in (("error", site.error), ("overflow", site.overflow), ("underflow", site.underflow)):
        if value is not None:
            lines.append(f"{name} {percent_text(value)}")
    return "<br>".join(lines)


def _scale_of(sites: list[SiteRecord], measure: Measure) -> tuple[tuple[float, float], list[tuple[int, str]]]:
    """The range of the colours and its ticks: that of bits is the same for every plan."""
    if measure == "format":
        return (0.0, 5.0), list(enumerate(["1", "2", "4", "8", "16", "32 bits"]))
    heats = [heat for site in sites if (heat := _heat(site, measure)) is not None]
    low, high = min(heats), max(*heats, min(heats) + 0.5)
    return (low, high), [(tick, f"{100 * 10.0**tick:g} %") for tick in range(math.floor(low), math.ceil(high) + 1)]


# --- The products of a model: a run's ``measurements.jsonl``, or a file of ``bitplan measure -o``

#: The file that ``bitplan measure -o FOLDER`` writes.
MEASUREMENT_FILE = "measurement.json"


@dataclass(frozen=True)
class MeasuredCell:
    """One candidate in one pass of one product."""

    product: str
    pass_: str
    candidate: str
    median: float
    #: The median times the square root of the number of summed values, which makes products comparable.
    level: float
    p99: float
    sqnr: float
    underflow: float
    overflow: float
    #: Of the left and of the right operand.
    kurtosis: tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """All products at one step."""

    #: Such as ``after 40 steps``.
    when: str
    cells: tuple[MeasuredCell, ...]
    #: In the order of time.
    alarms: tuple[str, ...] = ()


def measured_in_run(path: Path) -> Measured | None:
    """The last measurement of a run; None where nothing was measured."""
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
    stages = []
    for stage in measurement.stages:
        rows = measurement.select(stage=stage)
        when = "as it is" if stage == "now" else f"{stage}, {_when(rows[0].step)}"
        stages.append(Measured(when, tuple(_cell(row.to_dict()) for row in rows)))
    return stages


def _by_pass(cells: Iterable[MeasuredCell]) -> dict[tuple[str, str], dict[str, MeasuredCell]]:
    """(product, pass) -> candidate -> its cell."""
    rows: dict[tuple[str, str], dict[str, MeasuredCell]] = {}
    for cell in cells:
        rows.setdefault((cell.product, cell.pass_), {})[cell.candidate] = cell
    return rows


def _when(step: int) -> str:
    return f"after {counted(step, 'step')}"


def _cell(row: Mapping[str, Any]) -> MeasuredCell:
    median = float(row["median"])
    return MeasuredCell(
        product=str(row["product"]),
        pass_=str(row["pass"]),
        candidate=str(row["candidate"]),
        median=median,
        level=median * math.sqrt(max(float(row["nonzero"]), 1.0)),
        p99=float(row["p99"]),
        sqnr=float(row["sqnr"]),
        underflow=float(row["underflow"]),
        overflow=float(row["overflow"]),
        kurtosis=(float(row["left"]["kurtosis"]), float(row["right"]["kurtosis"])),
    )


_CAPTION = (
    "Products and passes down, candidates across: the median backward error of each, measured on sampled elements. "
    "Colours are of the error times the root of the sum's length, so that rows can be compared; dark is bad."
)


def measured_drawing(measured: Measured, label: str) -> Drawing:
    """The heat map with its caption and its table."""
    alarms = f" Alarms: {' '.join(measured.alarms)}" if measured.alarms else ""
    title = f"error by format, {label}, {measured.when}"
    return Drawing(title, _CAPTION + alarms, measured_chart(measured), measured_table(measured), is_wide=True)


def measured_chart(measured: Measured) -> Figure | None:
    """Rows in the order of the forward pass; what was not measured stays empty."""
    rows = _by_pass(measured.cells)
    candidates = list(dict.fromkeys(cell.candidate for cell in measured.cells))
    if not rows:
        return None

    def grid(value: Any, empty: Any = "") -> _Grid:
        return [[value(row[name]) if name in row else empty for name in candidates] for row in rows.values()]

    products = list(dict.fromkeys(product for product, _ in rows))
    names = dict(zip(products, row_names(products), strict=True))
    heats = [_measured_heat(cell) for cell in measured.cells if math.isfinite(cell.level)]
    low, high = min(heats, default=-4.0), max(heats, default=0.0)
    return heatmap(
        grid(lambda cell: _measured_heat(cell) if math.isfinite(cell.level) else None, None),
        grid(lambda cell: f"{cell.median:.0e}".replace("e-0", "e-")),
        grid(_measured_hover),
        [safe(name).replace(" ", "<br>").replace("/", "/<br>").replace("-dy", "-<br>dy") for name in candidates],
        [f"{names[product]}  {safe(pass_)}" for product, pass_ in rows],
        (low, max(high, low + 0.5)),
        [(tick, f"{10.0**tick:g}") for tick in range(math.floor(low), math.ceil(high) + 1)],
        130,
    )


def measured_table(measured: Measured) -> Table:
    """Medians by product, pass and candidate."""
    candidates = list(dict.fromkeys(cell.candidate for cell in measured.cells))
    columns = [("product", False), ("pass", False), *((candidate, True) for candidate in candidates)]
    rows = [
        [Cell(product), Cell(pass_), *(Cell(f"{row[name].median:.1e}" if name in row else "-") for name in candidates)]
        for (product, pass_), row in _by_pass(measured.cells).items()
    ]
    return Table("median backward error by product and candidate", columns, rows)


def _measured_heat(cell: MeasuredCell) -> float:
    return round(math.log10(max(cell.level, _SMALLEST_LEVEL)), 4)


def _measured_hover(cell: MeasuredCell) -> str:
    lines = [
        f"<b>{safe(cell.product)}</b>, {safe(cell.pass_)}",
        safe(cell.candidate),
        f"median {cell.median:.2e}, 99 % below {cell.p99:.2e}",
        f"times the root of the sum's length {cell.level:.3g}",
        f"SQNR {cell.sqnr:.1f} dB",
        f"underflow {cell.underflow:.1%}, overflow {cell.overflow:.1%}",
        f"kurtosis {cell.kurtosis[0]:.1f} left, {cell.kurtosis[1]:.1f} right",
    ]
    return "<br>".join(lines)
