"""Cyclic precision in object detection: RetinaNet on an image set in VOC's layout, from scratch.

    python experiments/detection.py bccd_voc.tar --device cuda --compile
    python experiments/detection.py bccd_voc.tar --quick          # a rehearsal: a few tiny steps on a CPU

FP32, 8 bits throughout, a static plan that costs what CR costs, and the schedules CR, RR and ER between 5 and 8 bits
(the range of Wolfe & Kyrillidis for detection, arXiv 2403.02243), each with two seeds. Every convolution is quantised,
those of the pyramid and the heads, too. Training is from scratch, where the papers fine-tune from ImageNet; with
weights at hand, --set weights=resnet18.safetensors --set norm=frozen --set width=1 does as they do.

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
from bitplan.train.environment import machine, versions

RANGE = (5, 8)
SCHEDULES = ("CR", "RR", "ER")
#: FP32 must reach this mAP; where it does not, the runs were too short to conclude anything from.
FLOOR = 0.65

RECIPE = ("size=256", "width=0.5", "levels=4", "anchor=2", "batch=16", "steps=1200", "warmup=100", "evaluate_every=400")
QUICK = (
    "size=64",
    "width=0.25",
    "levels=3",
    "head=1",
    "anchor=1",
    "batch=4",
    "steps=4",
    "warmup=0",
    "evaluate_every=4",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder or a .tar with JPEGImages, Annotations and ImageSets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="run training steps through torch.compile")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one seed: does everything work?")
    parser.add_argument("--runs", type=Path, help="where the runs lie (default: runs/experiment-detection[-quick])")
    parser.add_argument(
        "--out", type=Path, help="the results (default: docs/results/detection.json; quick: with the runs)"
    )
    asked = parser.parse_args()
    runs = asked.runs or Path("runs") / f"experiment-detection{'-quick' * asked.quick}"
    out = asked.out or (runs / "detection.json" if asked.quick else Path("docs/results/detection.json"))
    try:
        result = experiment(asked, runs)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(result, indent=2) + "\n")
    except BitplanError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    for plan in (plan for plan in result["plans"] if plan["metric"] is not None):
        print(
            f"{plan['plan']:28} mAP {plan['metric']:.4f} ± {plan['deviation']:.4f}, cost {plan['relative_to_fp32']:.4f}"
        )
    print(f"{result['reading']} All of it is in {out}.")


def experiment(asked: argparse.Namespace, runs: Path) -> dict[str, Any]:
    """Run what is left to run, and tell all of it."""
    recipe = QUICK if asked.quick else RECIPE
    changed = {each.partition("=")[0] for each in asked.settings}
    settings = (
        f"data={asked.data}",
        *(each for each in recipe if each.partition("=")[0] not in changed),
        *asked.settings,
    )
    seeds = range(1 if asked.quick else asked.seeds)
    began = time.perf_counter()
    choices = cpt_choices(find_task("voc", settings), SCHEDULES, *RANGE, static=(RANGE[1],))
    compare(
        "voc",
        choices,
        folder=runs,
        seeds=seeds,
        settings=settings,
        device=asked.device,
        compile=asked.compile,
        command=command(asked),
        on_update=tell,
    )
    (found,) = Report.of([runs]).experiments
    plans = []
    for plan in found.plans:
        values = {run.seed: run.value for run in plan.runs}
        curves = {run.seed: [list(pair) for pair in zip(*run.curve("mAP"), strict=True)] for run in plan.runs}
        plans.append({**plan_record(plan), "values": values, "curves": curves})
    control = next(plan["metric"] for plan in plans if plan["plan"] == "FP32")
    is_short = control is None or control < FLOOR
    return {
        "experiment": "detection",
        "command": command(asked),
        "machine": machine(torch.device(asked.device)),
        "versions": versions(),
        "data": Path(asked.data).name,
        "settings": [each for each in settings if not each.startswith("data=")],
        "seeds": list(seeds),
        "metric": metric_record(found),
        "bits": list(RANGE),
        "evaluation": "at the bits of the moment, which are the highest ones at the end of CR, RR and ER",
        "floor": FLOOR,
        "short_run": is_short,
        "reading": reading(plans, is_short),
        "plans": plans,
        "seconds": time.perf_counter() - began,
    }


def command(asked: argparse.Namespace) -> str:
    """What makes it again; where the images lay is nobody's business."""
    words = [Path(word).name if word == asked.data else word for word in sys.argv[1:]]
    return shlex.join(["python", "experiments/detection.py", *words])


def reading(plans: list[dict[str, Any]], is_short: bool) -> str:
    """What held, in a sentence."""
    if is_short:
        return f"A short run: FP32 did not reach an mAP of {FLOOR}, so nothing follows from it."
    if any(plan["metric"] is None or plan["diverged"] for plan in plans):
        return "Not every plan got to its end; the figures of each say which."
    known = {plan["plan"]: plan for plan in plans}
    static = known[f"static {RANGE[1]}"]
    words = []
    for name in SCHEDULES:
        difference = known[name]["metric"] - static["metric"]
        spread = max(known[name]["deviation"], static["deviation"])
        how = "within the spread of" if abs(difference) <= spread else "above" if difference > 0 else "below"
        share = known[name]["relative_to_fp32"] / static["relative_to_fp32"]
        words.append(f"{name} is {how} static {RANGE[1]} ({difference:+.4f}) at {share:.0%} of its cost")
    return "; ".join(words) + "."


def tell(update: Update) -> None:
    if update.summary is not None:
        reached = update.summary.metrics.get("mAP")
        words = update.summary.status if reached is None else f"mAP {reached:.4f}"
        print(f"{update.job.label}, seed {update.job.seed}: {words} after {update.summary.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
