"""Plans that ``bitplan assign`` made: the metric against the ratio of low-precision values in their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bitplan.errors import PlanError
from bitplan.lab.report.figures import NEUTRAL, Drawing, bare_layout, metric_axis, plan_styles, plotly, safe
from bitplan.lab.report.summaries import Experiment, PlanSummary
from bitplan.lab.report.tables import Cell, Table
from bitplan.plans import Plan

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PLANNER = "bitplan assign"


@dataclass(frozen=True)
class Assigned:
    """One plan of a comparison that is an assignment, or a baseline of one."""

    #: Its index in the comparison.
    number: int
    plan: PlanSummary
    #: 2 (bits all high - bits now) / bits all high, mean over the steps of its runs: promotion lowers it.
    ratio: float
    #: The ratio the planner was asked for; None for baselines.
    target: float | None
    #: Which groups the planner lowered first; None for baselines.
    order: str | None
    #: Tensors that were promoted, mean over its runs.
    promoted: float


def assigned_plans(experiment: Experiment) -> list[Assigned]:
    """Assignments and their baselines among the plans of a comparison, in its order."""
    assigned = []
    for number, plan in enumerate(experiment.plans):
        made_by = _made_by(plan)
        ratios = [run.low_precision_ratio for run in plan.judged if run.low_precision_ratio is not None]
        if made_by is None or not ratios:
            continue
        promoted = sum(len(run.promotions) for run in plan.judged) / len(plan.judged)
        order = None if "baseline" in made_by else str(made_by.get("order", "largest"))
        target = None if order is None else made_by.get("ratio")
        assigned.append(Assigned(number, plan, sum(ratios) / len(ratios), target, order, promoted))
    return assigned


def _made_by(plan: PlanSummary) -> Mapping[str, Any] | None:
    text = plan.judged[0].plan_text
    if text is None or _PLANNER not in text:
        return None
    try:
        made_by = Plan.from_yaml(text).made_by
    except PlanError:
        return None
    return made_by if isinstance(made_by, dict) and made_by.get("planner") == _PLANNER else None


def ratio_chart(experiment: Experiment) -> Figure | None:
    """A point for each plan at the ratio of its runs; assignments of one order are joined."""
    go = plotly()
    figure, styles, scale = go.Figure(), plan_styles(experiment.plans), experiment.metric_scale
    points = [
        (assigned, assigned.plan.value)
        for assigned in assigned_plans(experiment)
        if assigned.plan.value is not None and assigned.plan.has_value
    ]
    orders = dict.fromkeys(assigned.order for assigned, _ in points if assigned.order is not None)
    if not orders:
        return None
    for order in orders:
        line = sorted((assigned.ratio, scale * value.mean) for assigned, value in points if assigned.order == order)
        figure.add_trace(
            go.Scatter(
                x=[ratio for ratio, _ in line],
                y=[mean for _, mean in line],
                mode="lines",
                line={"color": NEUTRAL[0], "width": 1},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    for assigned, value in points:
        plan, style = assigned.plan, styles[assigned.number]
        promoted = f"<br>{assigned.promoted:.3g} tensors promoted" if assigned.promoted else ""
        label = f"<b>{safe(plan.label)}</b><br>{safe(experiment.spread_text(plan))}"
        figure.add_trace(
            go.Scatter(
                x=[assigned.ratio],
                y=[scale * value.mean],
                error_y={"array": [scale * value.deviation], "visible": value.count > 1, "thickness": 1.5, "width": 5},
                mode="markers",
                cliponaxis=False,
                marker={
                    "size": 12,
                    "symbol": "x" if plan.verdict == "fails" else style.symbol,
                    "color": style.colour,
                    "line": {"width": 1.5},
                },
                hovertext=[f"{label}<br>ratio {assigned.ratio:.3f}{promoted}"],
                hoverinfo="text",
                showlegend=False,
                meta={"plan": assigned.number},
            )
        )
    reference = experiment.reference
    if reference is not None and reference.value is not None and reference.has_value:
        figure.add_hline(y=scale * reference.value.mean, line={"color": NEUTRAL[0], "width": 1.5, "dash": "dot"})
    figure.update_layout(
        xaxis={"title": "low-precision ratio, mean over the run", "range": [-0.04, 1.06]},
        yaxis=metric_axis(experiment),
        **bare_layout(380),
    )
    return figure


def ratio_drawings(experiment: Experiment) -> list[Drawing]:
    """The chart of assignments; none where no plan is an assignment."""
    plans = assigned_plans(experiment)
    if not any(assigned.order is not None for assigned in plans):
        return []
    metric = experiment.metric.name
    columns = [("plan", False), ("asked", True), ("order", False), ("ratio", True), ("promoted", True), (metric, True)]
    rows = [
        [
            Cell(assigned.plan.label),
            Cell("-" if assigned.target is None else f"{assigned.target:g}"),
            Cell(assigned.order or "baseline"),
            Cell(f"{assigned.ratio:.3f}"),
            Cell(f"{assigned.promoted:g}"),
            Cell(experiment.spread_text(assigned.plan)),
        ]
        for assigned in plans
    ]
    caption = (
        "The ratio is 0 where every tensor has 16 bits and 1 where every one has 8; memory against 16 bits is 1 - "
        "ratio / 2, an aggregate and not a peak. It is a mean over the run, which promotions lower. Joined: "
        "assignments of one order; dotted: the reference; a cross: a plan that fails."
    )
    table = Table("assignments", columns, rows)
    return [Drawing(f"{metric} against the low-precision ratio", caption, ratio_chart(experiment), table)]
