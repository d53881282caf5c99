"""Precision over tensors on CIFAR-10: how much low precision training bears, and what it really saves.

    python experiments/assignments.py cifar10_jpeg_pack.npz --device cuda --compile --jobs 3
    python experiments/assignments.py cifar10_jpeg_pack.npz --device cuda --compile --only squeezenet
    python experiments/assignments.py cifar10_jpeg_pack.npz --quick          # a rehearsal: a few tiny steps on a CPU

The images are a pack of JPEGs (see cifar_pack.py) or a folder with CIFAR-10's own files. SqueezeNet and ResNet-18 with
the formats of Lee, Sharma & Aiken 2023 (arXiv 2301.13464) and their loss scale, 8,000 iterations of 128 images, two
seeds: FP32, operator, uniform low, and ratios .3 .5 .7 .9 1.0 with promotion. On SqueezeNet at .5 and .9 also without
promotion and with the orders smallest, random and sensitivity. Then a small GPT on characters at .5 and .9, and
ResNet-18 two and a half times as long: FP32, operator, .7 and .9.

For every plan also the peak of a packed step, measured on this device, and how many tensors were promoted and when. The
claim that is read: at FP32's accuracy, an assignment saves more than twice what the operator baseline saves.

That is 30 runs of SqueezeNet (smallest first at .9 demotes all, as 1.0 does), 16 of ResNet-18, 10 of the GPT and 8 long
ones. The same command goes on where it was interrupted, and `bitplan report` draws the folders of the runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import CIFAR_PACK, CONTROL, Experiment, arguments, in_sentences, is_short, metric_record, short_words
from records import ended_seeds

from bitplan.analysis.memory import measure_memory
from bitplan.analysis.targets import placed
from bitplan.lab.compare import Choice
from bitplan.lab.compare.compare import PLANS_FOLDER, slug
from bitplan.lab.compare.suites import RATIOS, assign_choices
from bitplan.lab.report.runs import Run
from bitplan.lab.task_planners import assign_task
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Metric, Task
from bitplan.planners.assign.assign import LOSS_SCALE, AssignRequest
from bitplan.planners.assign.levels import PAPER
from bitplan.plans import Plan

STUDIES = ("squeezenet", "resnet18", "gpt", "resnet18-long")
#: FP32 must reach these; where it does not, the runs were too short to conclude anything from.
FLOORS = {"squeezenet": 0.84, "resnet18": 0.90, "gpt": 10.0, "resnet18-long": 0.90}
RECIPE = (
    *("batch=128", "steps=8000", "evaluate_every=2000", "lr=0.1", "momentum=0.9", "weight_decay=5e-4", "decay=cosine"),
    *("pad=4", "mirror=true"),
)
LONG = ("steps=20000", "evaluate_every=5000")
LONG_PLANS = (CONTROL, "operator", "r = 0.7", "r = 0.9")
QUICK = ("width=0.25", "batch=8", "steps=4", "evaluate_every=4")
GPT_RECIPE = ("layers=6", "heads=8", "features=256", "length=256", "batch=32", "steps=2000", "evaluate_every=500")
GPT_QUICK = ("layers=1", "heads=2", "features=32", "length=32", "steps=4", "evaluate_every=4", "batch=2")
#: What is varied on one network, at these ratios.
ABLATED = (0.5, 0.9)
ORDERS = ("smallest", "random", "sensitivity")
#: An accuracy within so much of FP32's, in deviations of both over seeds but at least a half per cent, is the same.
SAME = 0.005


def main() -> None:
    parser = arguments(__doc__, seeds=2, data="a .npz pack of JPEGs, or a folder with CIFAR-10's files")
    parser.add_argument("--only", choices=STUDIES, action="append", help="these studies only; repeatable")
    experiment = Experiment("assignments", parser.parse_args())
    studies = []
    for name in experiment.asked.only or STUDIES:
        studies.append(study(experiment, name))
        experiment.write(studies, formats=PAPER.name, loss_scale=LOSS_SCALE)
    experiment.conclude(studies, "metric")


def study(experiment: Experiment, name: str) -> dict[str, Any]:
    task_name, settings = _recipe(experiment, name)
    task = find_task(task_name, settings)
    ratios = RATIOS if name != "gpt" else ABLATED
    choices = [*assign_choices(task, (0.5,) if experiment.asked.quick else ratios)]
    if name == "squeezenet":
        choices += _ablations(experiment, task, experiment.runs / name)
    if name == "resnet18-long":
        choices = [choice for choice in choices if choice.label in LONG_PLANS]
    same = _same(choices)
    choices = [choice for choice in choices if choice.label not in same]
    plans = experiment.compared(task_name, choices, folder=name, settings=settings, metric=task.metric)
    runs = _by_label(experiment.runs_of(name))
    peaks = _peaks(experiment, task, choices)
    for plan in plans:
        plan |= _ratio_and_promotions(plan, runs.get(plan["plan"], []))
        plan["packed_peak"] = peaks.get(plan["plan"])
    known = {plan["plan"]: plan for plan in plans}
    plans += [{**known[other], "plan": label, "same_as": other} for label, other in same.items() if other in known]
    floor = FLOORS[name]
    short = is_short(plans, floor, task.metric)
    reading = short_words(floor, task.metric) if short else _reading(plans, task.metric)
    return {
        "study": name,
        "settings": [each for each in settings if not each.startswith("data=")],
        "seeds": list(experiment.seeds),
        "metric": metric_record(task.metric, "held-out data, after the last iteration, under the assignment"),
        "floor": floor,
        "short_run": short,
        "reading": reading,
        "plans": plans,
        "curves": experiment.curves(name, task.metric.name),
    }


def _recipe(experiment: Experiment, name: str) -> tuple[str, list[str]]:
    """The task, and its settings."""
    if name == "gpt":
        return "lm", experiment.settings(GPT_RECIPE, GPT_QUICK)
    network, _, length = name.partition("-")
    settings = experiment.settings((f"model={network}", *RECIPE, *(LONG if length else ())), QUICK)
    given = experiment.asked.data
    if Path(given).is_dir():
        return "cifar10", [f"data={given}", *settings]
    return CIFAR_PACK, [f"data={given}", *(["most=64"] if experiment.asked.quick else []), *settings]


def _ablations(experiment: Experiment, task: Task, folder: Path) -> list[Choice]:
    found = []
    for ratio in ABLATED[:1] if experiment.asked.quick else ABLATED:
        asked = {"no promotion": AssignRequest(ratio=ratio, promotion=False)}
        asked |= {order: AssignRequest(ratio=ratio, order=order) for order in ORDERS}
        for words, each in asked.items():
            label = f"r = {ratio:g}, {words}"
            plan = _plan_of_runs(folder, label) or assign_task(task, each, PAPER, device=experiment.asked.device).plan
            found.append(Choice(label, plan, (f"loss_scale={LOSS_SCALE:g}",)))
    return found


def _plan_of_runs(folder: Path, label: str) -> Plan | None:
    """The plan with which runs were begun: a probe on a GPU does not find the same order of groups every time."""
    file = folder / PLANS_FOLDER / f"{slug(label)}.yaml"
    return Plan.load(file) if file.is_file() else None


def _by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.label, []).append(run)
    return found


def _same(choices: Sequence[Choice]) -> dict[str, str]:
    """Label -> the label of an earlier choice that rounds the same: at 0.9, smallest first demotes every group."""
    found: dict[str, str] = {}
    first: dict[str, str] = {}
    for choice in choices:
        if isinstance(choice.plan, Plan):
            content = choice.plan.flattened().to_dict()
            rounds = json.dumps([content.get("rules"), content.get("quantizers")])
            if first.setdefault(rounds, choice.label) != choice.label:
                found[choice.label] = first[rounds]
    return found


def _ratio_and_promotions(record: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Of the runs that lie here; those of an earlier result's are told in the record already."""
    made = [run for run in runs if run.seed in ended_seeds(record)]
    earlier = ended_seeds(record) - {run.seed for run in made}
    ratios = [*(run.low_precision_ratio for run in made), *([record.get("ratio")] * len(earlier))]
    promoted = {
        run.seed: [{"site": each.site, "step": each.step, "share": each.share} for each in run.promotions]
        for run in made
    }
    before = {int(seed): each for seed, each in record.get("promoted", {}).items() if int(seed) in earlier}
    return {"ratio": statistics.mean(ratios), "promoted": dict(sorted((before | promoted).items()))}


def _peaks(experiment: Experiment, task: Task, choices: Sequence[Choice]) -> dict[str, int]:
    """Bytes of a packed step's peak, measured, without promotions; FP32's as it is."""
    torch.manual_seed(task.seed)
    target = placed(task.target(), torch.device(experiment.asked.device))
    found = {}
    for choice in choices:
        how: tuple[Any, ...] = (choice.plan, "emulate" if choice.plan is None else "packed")
        measured = measure_memory(target.model, target.batch, target.loss, task.optimizer, *how, steps=2)
        found[choice.label] = measured.peak
    return found


def _reading(plans: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    """Does more than twice the operator baseline's saving hold at FP32's accuracy?"""
    known = {plan["plan"]: plan for plan in plans if plan["metric"] is not None and not plan["diverged"]}
    lost = [plan["plan"] for plan in plans if plan["plan"] not in known]
    words = [f"Diverged: {', '.join(lost)}."] if lost else ["None diverged."]
    base, operator = known.get(CONTROL), known.get("operator")
    if base is None or operator is None:
        return " ".join([*words, "Without FP32 and the operator baseline the claim cannot be read."])

    def keeps(plan: Mapping[str, Any]) -> bool:
        room = max(SAME * abs(base["metric"]), plan["deviation"], base["deviation"])
        worse = base["metric"] - plan["metric"] if metric.better == "higher" else plan["metric"] - base["metric"]
        return bool(worse <= room)

    # The method of the claim: what was varied of it, at fewer ratios, is read beside it.
    assigned = [plan for name, plan in known.items() if name.startswith("r = ") and "," not in name]
    if not assigned:
        return " ".join([*words, "Without an assignment that was run to its end the claim cannot be read."])
    kept = [plan for plan in assigned if keeps(plan)]
    if not kept:
        return " ".join([*words, "No assignment keeps FP32's figure, so the claim does not hold here."])
    best = max(kept, key=lambda plan: plan["ratio"])
    times = best["ratio"] / operator["ratio"] if operator["ratio"] else float("inf")
    words.append(
        f"At FP32's {metric.name} ({base['metric']:.4f}), {best['plan']} has a mean ratio of {best['ratio']:.3f}, "
        f"{times:.2f} times the operator baseline's {operator['ratio']:.3f}: more than twice its saving "
        f"{'holds' if times > 2 else 'does not hold'}. (The operator baseline "
        f"{'keeps' if keeps(operator) else 'does not keep'} FP32's {metric.name}.)"
    )
    words.append(
        f"Packed peaks, measured: FP32 {base['packed_peak'] / 2**20:.0f} MiB, operator "
        f"{operator['packed_peak'] / 2**20:.0f}, {best['plan']} {best['packed_peak'] / 2**20:.0f}."
    )
    return " ".join(words)


if __name__ == "__main__":
    in_sentences(main)
