"""Critical learning periods: does low precision for a while do lasting damage? CIFAR-10 and a graph.

    python experiments/deficits.py --images cifar10_jpeg_pack.npz --graphs FOLDER --device cuda --compile --jobs 3
    python experiments/deficits.py --images cifar10_jpeg_pack.npz --graphs FOLDER --quick    # a rehearsal on a CPU

The suite `deficits` on ResNet-20 (CIFAR-10 as JPEGs) and on a GCN (Cora; the folder has planetoid_cora.npz): 3 bits
early, for a quarter, a half or all of a budget, and then the full budget at 8 bits; windows of half the budget that
begin at 0, 12.5, 25 and 50 % of it; the early half for weights, activations and gradients alone; beside them no
deficit, no deficit and a budget more, and a static plan that costs what half at 3 bits costs. Gradients have 8 bits,
but where they alone have the deficit.

The budgets are short: 4,000 iterations of ResNet-20, where Wolfe & Kyrillidis (arXiv 2403.02243) have 256,000 of
ResNet-74 (no weight decay, as theirs), and 200 epochs of the graph, where they have 1,000; two seeds each. A suite is
17 budgets: on a GPU at 3 ms an iteration, 200 s a seed of CIFAR-10, were processes to take turns; the graph, which is
not compiled, takes a minute or two.

The same command resumes an interrupted experiment, and `bitplan report` draws the folders of the runs, with windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import CIFAR_PACK, CONTROL, Experiment, arguments, in_sentences, judgements, metric_record, word
from records import spread

from bitplan.lab.compare.suites import EARLY, HIGH, LOW, STARTS, deficit_choices
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Metric

NONE, LONGER, EQUAL = "no deficit", f"no deficit, {EARLY[-1]}% longer", "static at the cost of half"
PARTS = ("weights", "activations", "gradients")


@dataclass(frozen=True)
class Subject:
    """A model under the deficits."""

    name: str
    task: str
    #: The option with its data's location.
    option: str
    recipe: tuple[str, ...]
    quick: tuple[str, ...]
    #: The metric that FP32 must reach for conclusions.
    floor: float
    #: Whether --compile applies: not if all runs together take less time than compilation.
    compiles: bool


SUBJECTS = (
    Subject(
        *("CIFAR-10, ResNet-20", CIFAR_PACK, "images"),
        ("model=resnet20", "batch=128", "steps=4000", "evaluate_every=2000", "weight_decay=0"),
        ("model=resnet8", "width=0.25", "batch=16", "most=64", "steps=4", "evaluate_every=4"),
        floor=0.78,
        compiles=True,
    ),
    Subject(
        *("Cora, GCN", "cora", "graphs"),
        ("model=gcn", "features=64", "steps=200", "evaluate_every=50"),
        ("features=8", "steps=4", "evaluate_every=4"),
        floor=0.78,
        compiles=False,
    ),
)


def main() -> None:
    parser = arguments(__doc__, seeds=2)
    parser.add_argument("--images", help="CIFAR-10 as cifar_pack.py reads it (without: no images)")
    parser.add_argument("--graphs", help="the folder with planetoid_cora.npz (without: no graph)")
    experiment = Experiment("deficits", parser.parse_args())
    studies: list[dict[str, Any]] = []
    for subject in SUBJECTS:
        place = getattr(experiment.options, subject.option)
        if place and not experiment.is_late:
            studies.append(study(experiment, subject, place))
            experiment.write(studies, bits=[LOW, HIGH])
    if not studies:
        parser.error("name --images, --graphs or both")
    experiment.conclude(studies, "accuracy")


def study(experiment: Experiment, subject: Subject, place: str) -> dict[str, Any]:
    settings = experiment.settings(subject.recipe, subject.quick)
    task = find_task(subject.task, [f"data={place}", *settings])
    choices = deficit_choices(task)
    plans = experiment.compared(
        subject.task,
        choices,
        folder=subject.option,
        settings=[f"data={place}", *settings],
        metric=task.metric,
        compiles=subject.compiles,
    )
    held = {choice.label: int(dict(item.split("=") for item in choice.settings).get("hold", 0)) for choice in choices}
    budget = int(task.settings.steps)
    # Early deficits come before a full budget: such a run is longer, and its whole cost is what it takes.
    plans = [
        {**plan, "total_cost": plan["relative_to_fp32"] * (budget + held[plan["plan"]]) / budget} for plan in plans
    ]
    short = experiment.why_short(plans, subject.floor, task.metric)
    return {
        "study": subject.name,
        "settings": settings,
        "metric": metric_record(task.metric, "held out, after the last step"),
        "floor": subject.floor,
        "short_run": short is not None,
        "reading": short or reading(plans, task.metric),
        "plans": plans,
        "curves": experiment.curves(subject.option, task.metric.name),
    }


def reading(plans: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    """The conclusions, in sentences."""
    records = {plan["plan"]: plan for plan in plans}
    lost = [name for name, plan in records.items() if plan["metric"] is None or plan["diverged"]]
    if any(name in lost or name not in records for name in (NONE, LONGER)):
        return "The runs without a deficit did not get to their end, so there is nothing to compare with."
    sentences = [f"Diverged: {', '.join(lost)}."] if lost else []
    if all(len(plan["values"]) < 2 for plan in plans):
        sentences.append("One seed each, so there is no verdict on any difference.")
    base, longer = records[NONE], records[LONGER]
    sentences.append(f"FP32 {spread(records[CONTROL])}, 8 bits without a deficit {spread(base)}.")

    def verdict(name: str, other: Mapping[str, Any]) -> str:
        if name in lost or name not in records:
            return "diverged" if name in lost else "not run"
        record = records[name]
        difference = record["metric"] - other["metric"]
        if max(len(record["values"]), len(other["values"])) < 2:
            return f"{difference:+.4f}"
        return f"{difference:+.4f} ({word(judgements(records.values(), other, metric)[name])})"

    early = [f"{share} % of the budget early {verdict(f'early {share}%, then a full budget', base)}" for share in EARLY]
    sentences.append(f"3 bits and then a full budget at 8, against no deficit: {', '.join(early)}.")
    sentences.append(
        f"Against a run as long without a deficit ({spread(longer)}), the longest is "
        f"{verdict(f'early {EARLY[-1]}%, then a full budget', longer)}."
    )
    slid = [f"from {start} {verdict(f'half from {start}', base)}" for start in STARTS]
    sentences.append(f"Half the budget at 3 bits: {', '.join(slid)}.")
    sentences.append(f"The static plan that costs as much: {verdict(EQUAL, base)}.")
    parts = [f"{part} {verdict(f'half from 0%, {part} only', base)}" for part in PARTS]
    sentences.append(f"The first half at 3 bits for one rounding alone: {', '.join(parts)}.")
    return " ".join(sentences)


if __name__ == "__main__":
    in_sentences(main)
