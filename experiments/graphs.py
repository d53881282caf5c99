"""Cyclic precision on graphs: GCN and GraphSAGE on Cora and Coauthor-CS, neighbour sums quantised or not.

    python experiments/graphs.py FOLDER --device cuda        # the folder with planetoid_cora.npz and coauthor_cs.npz
    python experiments/graphs.py FOLDER --quick              # a rehearsal: a few tiny steps on a CPU

FP32, 8 bits throughout, a static plan that costs what CR costs, and all ten schedules between 3 and 8 bits (the range
of Wolfe & Kyrillidis for OGBN-Arxiv, arXiv 2403.02243), each with three seeds. FP-Agg rounds the linear products only,
Q-Agg also what is summed over neighbours. A graph is one batch, so bits change every epoch. Of each study, Spearman's
correlation of cost with accuracy over the rounded plans, and its interval by a bootstrap over plans and seeds.

The runs are comparisons': the same command goes on where it was interrupted, and `bitplan report` draws their folders.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from bitplan.compare import Choice, Update, compare
from bitplan.compare.correlation import LEAST, Correlation, cost_correlation, seed_share
from bitplan.compare.time_suites import cpt_choices
from bitplan.errors import BitplanError
from bitplan.files import write_whole
from bitplan.schedules import TEN
from bitplan.tasks.registry import find_task
from bitplan.train.environment import machine, versions

RANGE = (3, 8)
GRAPHS = ("cora", "coauthor-cs")
MODELS = ("gcn", "sage")
AGGREGATIONS = ("fp-agg", "q-agg")
CONTROL, STATIC = "FP32", f"static {RANGE[1]}"

#: FP32 must reach this accuracy; where it does not, the runs were too short to conclude anything from.
FLOORS = {("cora", "gcn"): 0.78, ("cora", "sage"): 0.76, ("coauthor-cs", "gcn"): 0.89, ("coauthor-cs", "sage"): 0.87}
#: Where seeds alone would make so much of the variance between plans, an order of the plans may be chance's.
LARGE_SHARE = 0.5
RECIPE = ("steps=200", "evaluate_every=100", "features=64")
QUICK = ("steps=3", "evaluate_every=3", "features=8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the folder of the graphs' .npz files")
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=GRAPHS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--aggregations", nargs="+", choices=AGGREGATIONS, default=AGGREGATIONS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="run training steps through torch.compile")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="three steps and one seed: does everything work?")
    parser.add_argument("--runs", type=Path, help="where the runs lie (default: runs/experiment-graphs[-quick])")
    parser.add_argument(
        "--out", type=Path, help="the results (default: docs/results/graphs.json; quick: with the runs)"
    )
    asked = parser.parse_args()
    runs = asked.runs or Path("runs") / f"experiment-graphs{'-quick' * asked.quick}"
    out = asked.out or (runs / "graphs.json" if asked.quick else Path("docs/results/graphs.json"))
    studies: list[dict[str, Any]] = []
    for graph in asked.graphs:
        for model in asked.models:
            controls: dict[int, float] = {}
            for aggregation in asked.aggregations:
                try:
                    studies.append(study(asked, runs, graph, model, aggregation, controls))
                    # After every study, so that an interruption leaves what is known.
                    out.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(out, json.dumps(result(asked, studies), indent=2) + "\n")
                except BitplanError as error:
                    sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    for each in studies:
        print(f"{each['graph']}, {each['model']}, {each['aggregation']}: {each['reading']}")
    print(f"All of it is in {out}.")


def result(asked: argparse.Namespace, studies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "experiment": "graphs",
        "command": command(asked),
        "machine": machine(torch.device(asked.device)),
        "versions": versions(),
        "settings": settings_of(asked),
        "seeds": list(seeds_of(asked)),
        "bits": list(RANGE),
        "metric": {"name": "accuracy", "better": "higher", "of": "test nodes, after the last step"},
        "evaluation": "at the bits of the moment, which are the highest ones at the end of every schedule here",
        "studies": list(studies),
        # Of the runs, whenever they were made.
        "seconds": sum(plan["seconds"] for study in studies for plan in study["plans"]),
    }


def study(
    asked: argparse.Namespace, runs: Path, graph: str, model: str, aggregation: str, controls: dict[int, float]
) -> dict[str, Any]:
    """Run what is left of one study. FP32 is the same for both aggregations, and is run for the first of them."""
    settings = (f"data={asked.data}", f"model={model}", *settings_of(asked))
    names = ("CR", "RR") if asked.quick else tuple(TEN)
    task = find_task(graph, settings)
    choices = [
        choice
        for choice in cpt_choices(task, names, *RANGE, static=(RANGE[1],), quantized_aggregation=aggregation == "q-agg")
        if choice.label != CONTROL or not controls
    ]
    seen: dict[str, dict[int, Update]] = {}
    print(f"{graph}, {model}, {aggregation}", flush=True)
    compare(
        graph,
        choices,
        folder=runs / f"{graph}-{model}-{aggregation}",
        seeds=seeds_of(asked),
        settings=settings,
        device=asked.device,
        compile=asked.compile,
        command=command(asked),
        on_update=lambda update: noted(update, seen),
    )
    plans = [record(choice, seen[choice.label].values()) for choice in choices]
    controls.update(next((plan["values"] for plan in plans if plan["plan"] == CONTROL), {}))
    control = statistics.mean(controls.values())
    is_short = control < FLOORS[graph, model]
    rounded = [plan for plan in plans if plan["plan"] != CONTROL and plan["accuracy"] is not None]
    values = [[*plan["values"].values()] for plan in rounded]
    found = None
    if len(rounded) >= LEAST:
        found = cost_correlation([plan["relative_to_fp32"] for plan in rounded], values)
    share = seed_share(values) if len(rounded) > 1 else 0.0
    return {
        "graph": graph,
        "model": model,
        "aggregation": aggregation,
        "fp32": {"accuracy": control, "values": dict(controls)},
        "trivial": task.metric.trivial,
        "floor": FLOORS[graph, model],
        "short_run": is_short,
        "spearman": None if found is None else {"value": found.value, "interval": [found.low, found.high]},
        # Of the variance between plans, what seeds alone would make; 1 or more: plans do not differ.
        "seed_share": share if math.isfinite(share) else None,
        "reading": reading(plans, control, is_short, found, share),
        "plans": plans,
    }


def noted(update: Update, seen: dict[str, dict[int, Update]]) -> None:
    if update.summary is not None:
        seen.setdefault(update.job.label, {})[update.job.seed] = update
        reached = update.summary.metrics.get("accuracy")
        words = update.summary.status if reached is None else f"accuracy {reached:.4f}"
        print(f"  {update.job.label}, seed {update.job.seed}: {words}, {update.summary.seconds:.1f} s", flush=True)


def record(choice: Choice, updates: Iterable[Update]) -> dict[str, Any]:
    """One plan over its seeds."""
    ended = {each.job.seed: each.summary for each in updates if each.summary is not None}
    values = {seed: each.metrics["accuracy"] for seed, each in ended.items() if each.status == "finished"}
    return {
        "plan": choice.label,
        "accuracy": statistics.mean(values.values()) if values else None,
        "deviation": statistics.stdev(values.values()) if len(values) > 1 else 0.0,
        "values": values,
        "diverged": [seed for seed, each in ended.items() if each.status == "diverged"],
        "relative_to_fp32": statistics.mean(each.cost["relative_to_fp32"] for each in ended.values()),
        "seconds": sum(each.seconds for each in ended.values()),
    }


def reading(
    plans: Sequence[dict[str, Any]], control: float, is_short: bool, found: Correlation | None, share: float
) -> str:
    """What held, in a few sentences."""
    if is_short:
        return f"A short run: FP32 reached {control:.3f} only, so nothing follows from it."
    known = {plan["plan"]: plan for plan in plans if plan["accuracy"] is not None}
    static = known.get(STATIC)
    if static is None or len(known) < len(plans):
        return "Not every plan got to its end; the figures of each say which."
    cyclic = [plan for name, plan in known.items() if name in TEN]
    words = [f"FP32 {control:.4f}, static 8 {static['accuracy']:.4f} ± {static['deviation']:.4f}."]
    for sign, kind in ((1, "above"), (-1, "below")):
        beyond = [
            plan["plan"]
            for plan in cyclic
            if sign * (plan["accuracy"] - static["accuracy"]) > max(plan["deviation"], static["deviation"])
        ]
        words.append(f"Beyond the spread {kind} static 8: {', '.join(beyond) or 'none'}.")
    best, worst = (choose(cyclic, key=lambda plan: plan["accuracy"]) for choose in (max, min))
    words.append(
        f"Of the schedules, best {best['plan']} ({best['accuracy']:.4f}) and worst {worst['plan']} "
        f"({worst['accuracy']:.4f})."
    )
    if share >= LARGE_SHARE:
        words.append(f"Seeds alone would make {min(share, 1):.0%} of the variance between plans.")
    if found is not None:
        kind = "an order" if found.is_sure and share < LARGE_SHARE else "no order that is sure"
        words.append(f"Spearman of cost with accuracy {found}: {kind}.")
    return " ".join(words)


def settings_of(asked: argparse.Namespace) -> list[str]:
    changed = {each.partition("=")[0] for each in asked.settings}
    recipe = QUICK if asked.quick else RECIPE
    return [*(each for each in recipe if each.partition("=")[0] not in changed), *asked.settings]


def seeds_of(asked: argparse.Namespace) -> range:
    return range(1 if asked.quick else asked.seeds)


def command(asked: argparse.Namespace) -> str:
    """What makes it again; where the graphs lay is nobody's business."""
    told = argparse.ArgumentParser(add_help=False)
    for where in ("--runs", "--out"):
        told.add_argument(where)
    _, rest = told.parse_known_args(sys.argv[1:])
    words = [Path(word).name if word == asked.data else word for word in rest]
    return shlex.join(["python", "experiments/graphs.py", *words])


if __name__ == "__main__":
    main()
