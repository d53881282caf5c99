"""Records of a plan over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bitplan.lab.tasks.task import Metric
from bitplan.lab.train import Summary

#: Figures of a record that are means over all of its runs.
_MEANS = ("relative_to_fp32", "mean_bits")


def plan_record(label: str, ended: Mapping[int, Summary], metric: Metric) -> dict[str, Any]:
    """One plan over its seeds: the metric after the last step, of each and on average."""
    finished = {seed: summary for seed, summary in sorted(ended.items()) if summary.status == "finished"}
    return {
        "plan": label,
        **_over_seeds({seed: summary.metrics[metric.name] for seed, summary in finished.items()}),
        "metrics": {seed: dict(summary.metrics) for seed, summary in finished.items()},
        "diverged": [seed for seed, summary in sorted(ended.items()) if summary.status == "diverged"],
        **{name: statistics.mean(summary.cost[name] for summary in ended.values()) for name in _MEANS},
        "seconds": sum(summary.seconds for summary in ended.values()),
    }


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a plan whose runs are partly an earlier result's and partly new, with other seeds.

    Fields that a study adds to its records are kept.
    """
    return {
        **before,
        **_over_seeds(dict(sorted((before["values"] | after["values"]).items()))),
        "metrics": dict(sorted((before["metrics"] | after["metrics"]).items())),
        "diverged": sorted({*before["diverged"], *after["diverged"]}),
        **{name: mean_over_runs(name, before, after) for name in _MEANS},
        "seconds": before["seconds"] + after["seconds"],
    }


def ended_seeds(record: Mapping[str, Any]) -> set[int]:
    """The seeds with which the plan was run to an end."""
    return {*record["values"], *record["diverged"]}


def mean_over_runs(name: str, *records: Mapping[str, Any]) -> float:
    """A figure that is a mean over the runs of both records."""
    runs = [len(ended_seeds(record)) for record in records]
    total = sum(record[name] * count for record, count in zip(records, runs, strict=True))
    return float(total / sum(runs))


def row(plan: Mapping[str, Any], metric: str) -> str:
    """A line of a table."""
    reached = "diverged" if plan["metric"] is None else f"{metric} {spread(plan)}"
    return f"{plan['plan']:34} {reached:32} cost {plan['relative_to_fp32']:.4f}"


def spread(plan: Mapping[str, Any]) -> str:
    """The mean over seeds and, for more than one, their standard deviation."""
    return f"{plan['metric']:.4f}" + (f" ± {plan['deviation']:.4f}" if len(plan["values"]) > 1 else "")


def _over_seeds(values: dict[int, float]) -> dict[str, Any]:
    return {
        "metric": statistics.mean(values.values()) if values else None,
        "deviation": statistics.stdev(values.values()) if len(values) > 1 else 0.0,
        "values": values,
    }
