"""``python benchmarks/auto_losses.py``: losses after many steps under the plans that ``benchmarks/auto.py`` found.

Every plan trains the model that it was found for from the same weights on the same batches as the model without a plan,
with several orders of the data (seeds). Batches are smaller than those of the search, so that a thousand steps take
seconds; a plan has a process of its own, and a GPU trains one at a time.

    python benchmarks/auto_losses.py --models vit_b:16 llama_2048:1 --json benchmarks/results/auto-losses-h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.foreign_models import data_for, load_problem
from benchmarks.own_plans import AUTO, found_plans, own_plan
from benchmarks.processes import ContenderError, call_all, contenders
from bitplan.analysis.targets import resize_batch
from bitplan.files import strict
from bitplan.machine import describe_machine
from bitplan.planners.auto import LocalTrials, Problem
from bitplan.significance import Difference

PLAIN = "no plan"


@dataclass(frozen=True)
class Row:
    """One plan over its seeds."""

    plan: str
    #: Which searches chose it: memory limits, or none.
    searches: tuple[str, ...]
    #: Bytes, as the search measured the training step at its own batch.
    peak: int | None
    losses: tuple[float, ...]
    #: The mean loss less that without a plan with the same seed, and its interval of 95 %; None without a plan.
    gap: float | None = None
    low: float | None = None
    high: float | None = None


class LossContender:
    """A model with a batch of a few samples, under one plan."""

    def __init__(self, model: str, samples: int, plan: str) -> None:
        self.problem = small_problem(model, samples)
        self.plan = None if plan == PLAIN else own_plan(plan)

    def losses(self, steps: int, seeds: int) -> list[float]:
        return LocalTrials(self.problem).final_losses(self.plan, steps, seeds)


def small_problem(model: str, samples: int) -> Problem:
    """The benchmark's model and data with that many samples in a batch."""
    problem = load_problem(model)
    batch: Any = tree_map_only(Tensor, lambda tensor: resize_batch(tensor, samples), problem.target.batch)
    target = replace(problem.target, batch=batch)
    return replace(problem, target=target, data=data_for(target))


def plans_of(model: str) -> dict[str, list[str]]:
    """Plan -> the searches that chose it, for plans that differ."""
    by_rules: dict[str, str] = {}
    chosen: dict[str, list[str]] = {}
    for name in found_plans(model):
        plan = own_plan(name).to_dict()
        if not plan.get("rules"):
            continue  # BF16, perhaps recomputed, trains as without a plan
        key = json.dumps([plan["rules"], plan.get("execution")], sort_keys=True)
        chosen.setdefault(by_rules.setdefault(key, name), []).append(name.removeprefix(f"{AUTO} {model}").lstrip(":"))
    return chosen


def measure(model: str, samples: int, steps: int, seeds: int, jobs: int, in_processes: bool = True) -> list[Row]:
    """All plans of a model."""
    searches = plans_of(model)
    arguments = {plan: (model, samples, plan) for plan in (PLAIN, *searches)}
    with contenders(LossContender, arguments, in_processes) as started:
        answers = dict(call_all(started, "losses", steps, seeds, jobs=jobs))
    plain = answers[PLAIN]
    if isinstance(plain, ContenderError):
        raise plain
    peaks = [_searched(plan, "plain_peak_bytes") for plan in searches]
    rows = [Row(PLAIN, (), peaks[0], tuple(plain))]
    for plan, losses in answers.items():
        if isinstance(losses, ContenderError):
            print(f"{model}, {plan} failed: {losses}", flush=True)
        elif plan != PLAIN:
            gap = Difference.of(losses, plain)
            name, peak = own_plan(plan).name or plan, _searched(plan, "peak_bytes")
            rows.append(Row(name, tuple(searches[plan]), peak, tuple(losses), gap.mean, gap.low, gap.high))
    return rows


def _searched(plan: str, key: str) -> int | None:
    """What the search measured that found the plan."""
    made_by = own_plan(plan).made_by
    return made_by.get(key) if isinstance(made_by, Mapping) else None


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="MODEL:SAMPLES", default=["vit_b:16", "llama_2048:1"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=4, help="plans of a model that compile at a time")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(words)
    models: dict[str, Any] = {}
    for wanted in options.models:
        model, _, samples = wanted.partition(":")
        rows = measure(model, int(samples or 1), options.steps, options.seeds, options.jobs)
        models[model] = {"samples": int(samples or 1), "rows": [asdict(row) for row in rows]}
        for row in rows:
            peak = "" if row.peak is None else f"{row.peak / 2**30:6.2f} GiB"
            gap = "" if row.gap is None else f"{row.gap:+.4f} ({row.low:+.4f} to {row.high:+.4f})"
            mean, spread = statistics.fmean(row.losses), max(row.losses) - min(row.losses)
            print(f"{model:12} {row.plan[:44]:44} {peak} {mean:.4f} over {spread:.4f}  {gap}", flush=True)
        if options.json is not None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            document = {
                "benchmark": "auto losses",
                "command": f"python benchmarks/auto_losses.py --models {' '.join(options.models)} "
                f"--steps {options.steps} --seeds {options.seeds}",
                "machine": describe_machine(device),
                "steps": options.steps,
                "loss": "mean of the last quarter of the steps",
                "models": models,
            }
            options.json.write_text(json.dumps(strict(document), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
