"""A report as plain values: for JSON, for CSV, and for whatever else reads tables."""

from __future__ import annotations

import csv
import io
from typing import Any

from bitplan.report.runs import Run
from bitplan.report.summaries import Experiment, PlanSummary, Report


def report_record(report: Report) -> dict[str, Any]:
    """All of a report that ``--json`` prints."""
    return {
        "answer": report.answer,
        "experiments": [
            {
                "task": experiment.task,
                "variant": experiment.variant,
                "metric": metric_record(experiment),
                "answer": experiment.answer,
                "plans": [plan_record(plan) for plan in experiment.plans],
                "runs": [run_record(run) for run in experiment.runs],
            }
            for experiment in report.experiments
        ],
    }


def metric_record(experiment: Experiment) -> dict[str, Any]:
    metric = experiment.metric
    return {"name": metric.name, "better": metric.better, "trivial": metric.trivial}


def plan_record(plan: PlanSummary) -> dict[str, Any]:
    """One plan with mean and spread over its runs."""
    value = plan.value
    return {
        "plan": plan.label,
        "runs": len(plan.runs),
        "finished": plan.count("finished"),
        "diverged": plan.count("diverged"),
        "verdict": plan.verdict,
        "why": plan.why,
        "metric": None if value is None else value.mean,
        "deviation": None if value is None else value.deviation,
        "relative_to_fp32": plan.cost,
        "mean_bits": plan.mean_bits,
        "memory_bytes": plan.memory,
        "on_cost_front": plan.on_cost_front,
        "on_memory_front": plan.on_memory_front,
        "seconds": plan.seconds,
    }


def run_record(run: Run) -> dict[str, Any]:
    """One run on one line."""
    return {
        "task": run.task,
        "plan": run.label,
        "seed": run.seed,
        "status": run.status,
        "step": run.step,
        "metric": run.metric.name,
        "value": run.value,
        "best": run.best,
        "loss": run.loss,
        "relative_to_fp32": run.relative_cost,
        "bit_operations": run.bit_operations,
        "mean_bits": run.mean_bits,
        "memory_bytes": run.total_memory,
        "peak_bytes": run.peak,
        "seconds": run.seconds,
        "execution": run.execution,
        "device": run.device,
        "compile": run.compiled,
        "why": run.why,
        "folder": str(run.folder),
        "command": run.command,
    }


def csv_text(report: Report) -> str:
    """Every run on a line of its own, with a heading."""
    records = [run_record(run) for run in report.runs]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()
