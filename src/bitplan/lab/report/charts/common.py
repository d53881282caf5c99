"""What all charts share: plotly itself, safe texts, colours, and the bare layout.

Everything a user named (plans, sites) goes through :func:`safe`, as plotly reads a little HTML in its texts. Colours of
the ground and of writing are left to the page, which knows whether it is dark.
"""

from __future__ import annotations

import html
import math
from typing import Any

from bitplan.errors import RunError
from bitplan.lab.report.palette import Style, plan_styles
from bitplan.lab.report.summaries import Experiment


def plotly() -> Any:
    """plotly's figures, or a sentence on how to get them."""
    try:
        import plotly.graph_objects
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "plotly":
            raise
        raise RunError("the page's charts need plotly, which is not installed: run 'pip install plotly'.") from None
    return plotly.graph_objects


def safe(text: str) -> str:
    """A text that plotly shows as it is written."""
    return html.escape(text, quote=False)


def styles_of(experiment: Experiment) -> list[Style]:
    return plan_styles([plan.verdict == "reference" for plan in experiment.plans])


def bare_layout(height: int) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 28, "b": 8, "pad": 2},
        "xaxis_automargin": True,
        "yaxis_automargin": True,
        "hovermode": "closest",
        "dragmode": False,
        "showlegend": False,
        "template": "none",
    }


def metric_axis(experiment: Experiment) -> dict[str, Any]:
    unit = ", %" if experiment.metric_is_share else ""
    return {"title": f"{safe(experiment.metric.name)}{unit} ({experiment.metric.better} is better)"}


def shortened(label: str, most: int = 22) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


def byte_unit(largest: float) -> tuple[str, float]:
    for unit, divisor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= divisor:
            return f"{unit} of a step's tensors", float(divisor)
    return "bytes of a step's tensors", 1.0


def log_ticks(values: list[float]) -> list[float]:
    """1, 2 and 5 times powers of ten over the range, or only powers of ten where that is long."""
    if not values:
        return []
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]
