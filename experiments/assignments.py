"""Precision over tensors on CIFAR-10: how much low precision training bears, and what it really saves.

    python experiments/assignments.py cifar10_jpeg_pack.npz --device cuda --compile --jobs 3
    python experiments/assignments.py cifar10_jpeg_pack.npz --device cuda --compile --only squeezenet
    python experiments/assignments.py cifar10_jpeg_pack.npz --quick          # a rehearsal: a few tiny steps on a CPU

The images are a pack of JPEGs (see cifar_pack.py) or a folder with CIFAR-10's own files. SqueezeNet and ResNet-18 with
the formats of Lee, Sharma & Aiken 2023 (arXiv 2301.13464) and their loss scale, 8,000 iterations of 128 images, two
seeds: FP32, operator, uniform low, and ratios .3 .5 .7 .9 1.0 with promotion. On SqueezeNet at .5 and .9 also without
promotion and with the orders smallest, random and sensitivity. Then a small GPT on characters at .5 and .9, and
ResNet-18 two and a half times as long: FP32, operator, .7 and .9.

For every plan the peak of a packed step is measured on this device too, and the promotions are counted with their
steps. The claim under test: at FP32's accuracy, an assignment saves more than twice as much as the operator baseline.

That is 30 runs of SqueezeNet (smallest first at .9 demotes all, as 1.0 does), 16 of ResNet-18, 10 of the GPT and 8 long
ones. The same command resumes an interrupted experiment, and `bitplan report` draws the folders of the runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    CIFAR_PACK,
    CONTROL,
    Experiment,
    arguments,
    in_sentences,
    is_short,
    judgements,
    metric_record,
    short_words,
)
from records import ended_seeds

from bitplan.analysis.memory import measure_memory
from bitplan.analysis.targets import move_target
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
#: The least accuracy of FP32; below it, the runs were too short for conclusions.
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
#: Ablations on one network, at these ratios.
ABLATED = (0.5, 0.9)
ORDERS = ("smallest", "random", "sensitivity")
#: The share of FP32's figure that a plan may lose and still keeps it.
SAME = 0.005


def main() -> None:
    parser = arguments(__doc__, seeds=2, data="a .npz pack of JPEGs, or a folder with CIFAR-10's files")
    parser.add_argument("--only", choices=STUDIES, action="append", help="these studies only; repeatable")
    experiment = Experiment("assignments", parser.parse_args())
    studies = []
    for name in experiment.options.only or STUDIES:
        studies.append(study(experiment, name))
        experiment.write(studies, formats=PAPER.name, loss_scale=LOSS_SCALE)
    experiment.conclude(studies, "metric")


def study(experiment: Experiment, name: str) -> dict[str, Any]:
    task_name, settings = _recipe(experiment, name)
    task = find_task(task_name, settings)
    ratios = RATIOS if name != "gpt" else ABLATED
    choices = [*assign_choices(task, (0.5,) if experiment.options.quick else ratios)]
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
    records = {plan["plan"]: plan for plan in plans}
    plans += [{**records[other], "plan": label, "same_as": other} for label, other in same.items() if other in records]
    floor = FLOORS[name]
    short = is_short(plans, floor, task.metric)
    words = short_words(floor, task.metric) if short else reading(plans, task.metric)
    return {
        "study": name,
        "settings": [setting for setting in settings if not setting.startswith("data=")],
        "seeds": list(experiment.seeds),
        "metric": metric_record(task.metric, "held-out data, after the last iteration, under the assignment"),
        "floor": floor,
        "short_run": short,
        "reading": words,
        "plans": plans,
        "curves": experiment.curves(name, task.metric.name),
    }


def _recipe(experiment: Experiment, name: str) -> tuple[str, list[str]]:
    """The task, and its settings."""
    if name == "gpt":
        return "lm", experiment.settings(GPT_RECIPE, GPT_QUICK)
    network, _, length = name.partition("-")
    settings = experiment.settings((f"model={network}", *RECIPE, *(LONG if length else ())), QUICK)
    data = experiment.options.data
    if Path(data).is_dir():
        return "cifar10", [f"data={data}", *settings]
    return CIFAR_PACK, [f"data={data}", *(["most=64"] if experiment.options.quick else []), *settings]


def _ablations(experiment: Experiment, task: Task, folder: Path) -> list[Choice]:
    choices = []
    for ratio in ABLATED[:1] if experiment.options.quick else ABLATED:
        requests = {"no promotion": AssignRequest(ratio=ratio, promotion=False)}
        requests |= {order: AssignRequest(ratio=ratio, order=order) for order in ORDERS}
        for variant, request in requests.items():
            label = f"r = {ratio:g}, {variant}"
            plan = (
                _plan_of_runs(folder, label) or assign_task(task, request, PAPER, device=experiment.options.device).plan
            )
            choices.append(Choice(label, plan, (f"loss_scale={LOSS_SCALE:g}",)))
    return choices


def _plan_of_runs(folder: Path, label: str) -> Plan | None:
    """The plan of runs that were already started: probes on a GPU do not always give the same order of groups."""
    file = folder / PLANS_FOLDER / f"{slug(label)}.yaml"
    return Plan.load(file) if file.is_file() else None


def _by_label(runs: Sequence[Run]) -> dict[str, list[Run]]:
    runs_by_label: dict[str, list[Run]] = {}
    for run in runs:
        runs_by_label.setdefault(run.label, []).append(run)
    return runs_by_label


def _same(choices: Sequence[Choice]) -> dict[str, str]:
    """Label -> the label of an earlier choice with the same roundings: at 0.9, smallest first demotes every group."""
    duplicates: dict[str, str] = {}
    first: dict[str, str] = {}
    for choice in choices:
        if isinstance(choice.plan, Plan):
            content = choice.plan.flattened().to_dict()
            rounds = json.dumps([content.get("rules"), content.get("quantizers")])
            if first.setdefault(rounds, choice.label) != choice.label:
                duplicates[choice.label] = first[rounds]
    return duplicates


def _ratio_and_promotions(record: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Of the runs in this folder; those of an earlier result are already in the record."""
    made = [run for run in runs if run.seed in ended_seeds(record)]
    earlier = ended_seeds(record) - {run.seed for run in made}
    ratios = [*(run.low_precision_ratio for run in made), *([record.get("ratio")] * len(earlier))]
    promoted = {
        run.seed: [
            {"site": promotion.site, "step": promotion.step, "share": promotion.share} for promotion in run.promotions
        ]
        for run in made
    }
    before = {int(seed): promotion for seed, promotion in record.get("promoted", {}).items() if int(seed) in earlier}
    return {"ratio": statistics.mean(ratios), "promoted": dict(sorted((before | promoted).items()))}


def _peaks(experiment: Experiment, task: Task, choices: Sequence[Choice]) -> dict[str, int]:
    """The measured peak of a packed step in bytes, without promotions; FP32's is not packed."""
    torch.manual_seed(task.seed)
    target = move_target(task.target(), torch.device(experiment.options.device))
    peaks = {}
    for choice in choices:
        how: tuple[Any, ...] = (choice.plan, "emulate" if choice.plan is None else "packed")
        measured = measure_memory(target.model, target.batch, target.loss, task.optimizer, *how, steps=2)
        peaks[choice.label] = measured.peak
    return peaks


def reading(plans: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    """Whether the saving is more than twice the operator baseline's at FP32's accuracy."""
    records = {plan["plan"]: plan for plan in plans if plan["metric"] is not None and not plan["diverged"]}
    lost = [plan["plan"] for plan in plans if plan["plan"] not in records]
    sentences = [f"Diverged: {', '.join(lost)}."] if lost else ["None diverged."]
    base, operator = records.get(CONTROL), records.get("operator")
    if base is None or operator is None:
        return " ".join([*sentences, "Without FP32 and the operator baseline the claim cannot be read."])

    # The method of the claim; its ablations, at fewer ratios, are read separately.
    assigned = [plan for name, plan in records.items() if name.startswith("r = ") and "," not in name]
    if not assigned:
        return " ".join([*sentences, "Without an assignment that was run to its end the claim cannot be read."])
    judged = judgements(records.values(), base, metric, SAME)
    verdicts = ", ".join(f"{plan['plan']} {judged[plan['plan']].verdict}" for plan in (*assigned, operator))
    sentences.append(f"FP32's {metric.name} is {base['metric']:.4f}; within {SAME:.1%} of it: {verdicts}.")
    kept = [plan for plan in assigned if judged[plan["plan"]].verdict == "keeps"]
    near = [plan for plan in assigned if judged[plan["plan"]].is_near]
    if not kept and not near:
        return " ".join([*sentences, "No assignment keeps FP32's figure, so the claim does not hold here."])
    best = max(kept or near, key=lambda plan: plan["ratio"])
    times = best["ratio"] / operator["ratio"] if operator["ratio"] else float("inf")
    twice = {judged[plan["plan"]].verdict for plan in assigned if plan["ratio"] > 2 * operator["ratio"]}
    holds = "holds" if "keeps" in twice else "is undecided" if "undecided" in twice else "does not hold"
    sentences.append(
        f"{best['plan']} has a mean ratio of {best['ratio']:.3f}, {times:.2f} times the operator baseline's "
        f"{operator['ratio']:.3f}: more than twice its saving at FP32's {metric.name} {holds}."
    )
    sentences.append(
        f"Packed peaks, measured: FP32 {base['packed_peak'] / 2**20:.0f} MiB, operator "
        f"{operator['packed_peak'] / 2**20:.0f}, {best['plan']} {best['packed_peak'] / 2**20:.0f}."
    )
    return " ".join(sentences)


if __name__ == "__main__":
    in_sentences(main)
