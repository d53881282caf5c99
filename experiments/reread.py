"""Read stored results again, without a run: sentences and verdicts follow from the stored runs.

    python experiments/reread.py docs/results/*.json

For when the statistics change. A test compares every stored reading with this one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import assignments
import deficits
import metrics
import ptb
import sst2
from common import CONTROL, EQUAL_COST, against, in_sentences, read_cyclic

from bitplan.files import strict, write_whole
from bitplan.lab.tasks.task import Metric


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for file in parser.parse_args().files:
        result = json.loads(file.read_text(encoding="utf-8"))
        write_whole(file, json.dumps(strict(read_again(result)), indent=2) + "\n")


def read_again(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with the sentences and statistics that its runs give today."""
    studies = [{**study, **_read(result, study)} for study in result["studies"]]
    if result["experiment"] == "ptb":
        ptb.tested(studies[0], ptb.EPOCHS)
    return {**result, "studies": studies}


def metric_of(result: Mapping[str, Any], study: Mapping[str, Any]) -> Metric:
    record = study.get("metric", result.get("metric"))
    assert record is not None
    return Metric(record["name"], record["better"], record.get("trivial", study.get("trivial")))


def plans_of(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records of a study's plans; the first results had FP32 and accuracies in other places."""
    plans = [{**plan, "metric": plan["metric"] if "metric" in plan else plan["accuracy"]} for plan in study["plans"]]
    if "fp32" in study:
        control = {"plan": CONTROL, "metric": study["fp32"]["accuracy"], "values": study["fp32"]["values"]}
        plans.insert(0, {**control, "diverged": [], "relative_to_fp32": 1.0})
    return plans


def _read(result: Mapping[str, Any], study: Mapping[str, Any]) -> dict[str, Any]:
    experiment = result["experiment"]
    if experiment == "range_test":  # its bound is no statistic of several runs
        return {}
    if experiment == "metrics":
        plans = study["plans"]
        read = {"spearman": metrics.correlations(plans), "reading": metrics.reading(plans, study["trivial_loss"])}
        return read if not study["reading"].startswith("A ") else {"spearman": read["spearman"]}
    metric, plans = metric_of(result, study), plans_of(study)
    if experiment in ("assignments", "deficits"):
        module = assignments if experiment == "assignments" else deficits
        read = {"reading": module.reading(plans, metric)}
    elif "order" not in study:
        read = {"reading": against(plans, _others(plans, "static 8"), "static 8", metric)}
    else:
        bits = study.get("bits", result.get("bits"))
        names = [name for name in _others(plans) if not name.startswith(("static ", EQUAL_COST))]
        read = read_cyclic(plans, names, f"static {bits[1]}", metric)
    if study["short_run"]:
        read["reading"] = study["reading"]
    elif experiment == "sst2" and not result["is_fine_tune"]:
        read["reading"] = f"{sst2.NO_FINE_TUNE} {read['reading']}"
    return read


def _others(plans: Sequence[Mapping[str, Any]], *left_out: str) -> list[str]:
    return [plan["plan"] for plan in plans if plan["plan"] not in (CONTROL, *left_out)]


if __name__ == "__main__":
    in_sentences(main)
