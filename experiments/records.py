"""One plan over its seeds: what results tell of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bitplan.lab.tasks.task import Metric
from bitplan.lab.train import Summary

#: Of a record's figures, the means over all of its runs.
_MEANS = ("relative_to_fp32", "mean_bits")


def plan_record(label: str, ended: Mapping[int, Summary], metric: Metric) -> dict[str, Any]:
    """One plan over its seeds: the metric after the last step, of each and on average."""
    finished = {seed: each for seed, each in sorted(ended.items()) if each.status == "finished"}
    return {
        "plan": label,
        **_over_seeds({seed: each.metrics[metric.name] for seed, each in finished.items()}),
        "metrics": {seed: dict(each.metrics) for seed, each in finished.items()},
        "diverged": [seed for seed, each in sorted(ended.items()) if each.status == "diverged"],
        **{name: statistics.mean(each.cost[name] for each in ended.values()) for name in _MEANS},
        "seconds": sum(each.seconds for each in ended.values()),
    }


def joined(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The record of one plan's runs, of which some are an earlier result's and others, with other seeds, were made now.

    What a study adds to its records stays as it was before.
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
    """Those with which the plan was run to an end."""
    return {*record["values"], *record["diverged"]}


def mean_over_runs(name: str, *records: Mapping[str, Any]) -> float:
    """Of a figure that is a mean over each record's runs."""
    runs = [len(ended_seeds(record)) for record in records]
    total = sum(record[name] * count for record, count in zip(records, runs, strict=True))
    return float(total / sum(runs))


def row(plan: Mapping[str, Any], metric: str) -> str:
    """A line of a table."""
    reached = "diverged" if plan["metric"] is None else f"{metric} {spread(plan)}"
    return f"{plan['plan']:34} {reached:32} cost {plan['relative_to_fp32']:.4f}"


def spread(plan: Mapping[str, Any]) -> str:
    """The mean over seeds and, of more than one, their deviation."""
    return f"{plan['metric']:.4f}" + (f" ± {plan['deviation']:.4f}" if len(plan["values"]) > 1 else "")


def _over_seeds(values: dict[int, float]) -> dict[str, Any]:
    return {
        "metric": statistics.mean(values.values()) if values else None,
        "deviation": statistics.stdev(values.values()) if len(values) > 1 else 0.0,
        "values": values,
    }
