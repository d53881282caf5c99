"""The parts that all experiments share: arguments, records, and tables and readings of plans over seeds.

An experiment is a list of studies; a study is one comparison of plans on a task. Results are written after every study,
so that an interruption loses nothing, and the same command resumes: the runs are those of a comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from earlier import FLOAT32, TF32, Earlier
from records import ended_seeds, joined, plan_record, row, spread

from bitplan.errors import BitplanError, TaskError
from bitplan.files import strict, write_whole
from bitplan.lab.compare import Choice, Update, compare
from bitplan.lab.compare.suites import cpt_choices
from bitplan.lab.report.runs import Run, read_runs
from bitplan.lab.report.summaries import MARGIN
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Metric
from bitplan.lab.train import Summary
from bitplan.lab.train.config import machine, versions
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES
from bitplan.plans.schedules.named import GROUPS
from bitplan.significance import (
    LEAST,
    Difference,
    Judgement,
    cost_correlation,
    judge_all,
    pearson,
    seed_share,
    trend,
)

CONTROL = "FP32"
RESULTS = Path("docs/results")
#: CIFAR-10 as JPEGs in one file.
CIFAR_PACK = f"{Path(__file__).with_name('cifar_pack.py')}:CifarPack"
#: Verdicts on plans beside a static one. One seed never decides: the variation between seeds is unknown.
KINDS = {
    "better": "Better than",
    "keeps": f"Within {MARGIN:.0%} of",
    "loses": f"Worse by over {MARGIN:.0%} than",
    "undecided": "Undecided beside",
}
#: The name of a static plan that costs as much as a schedule begins so; schedules within this share of its cost are
#: compared with it.
EQUAL_COST, EQUAL_WITHIN = "static at the cost of", 0.05
#: Schedules that end with a growing part, as all of the papers' do, end at their highest bits.
EVALUATION = "at the bits of the moment, which are the highest ones at the end of every schedule here"


def arguments(docstring: str | None, seeds: int, data: str | None = None) -> argparse.ArgumentParser:
    """The options that every experiment has; more may be added.

    :param docstring: the script's docstring.
    :param data: the meaning of the first argument; None: there is none.
    """
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data is not None:
        parser.add_argument("data", help=data)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="run training steps through torch.compile")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, on one device")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--minutes", type=float, help="stop after so long, and tell what is known; go on by the same command"
    )
    parser.add_argument("--go-on-from", type=Path, metavar="FILE", help="a result whose runs are not made again")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one seed: does everything work?")
    parser.add_argument("--runs", type=Path, help="where the runs lie (default: runs/experiment-NAME[-quick])")
    parser.add_argument("--out", type=Path, help="the results (default: docs/results/NAME.json; quick: with the runs)")
    return parser


@dataclass(frozen=True)
class Experiment:
    """A running script: its options, and the locations of its files."""

    name: str
    options: argparse.Namespace
    #: Seeds of an expensive study; 0: the number in the options.
    most_seeds: int = 0
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        let_products_be(self.products)

    @property
    def products(self) -> str:
        """The format in which float32 products are computed: on a GPU, TF32."""
        return TF32 if torch.device(self.options.device).type == "cuda" else FLOAT32

    @property
    def is_late(self) -> bool:
        """Whether the time limit is exceeded."""
        return self.options.minutes is not None and time.monotonic() - self.began > 60 * self.options.minutes

    @cached_property
    def earlier(self) -> Earlier:
        device = machine(torch.device(self.options.device))
        return Earlier(self.options.go_on_from, self.name, device, versions(), self.products)

    @property
    def runs(self) -> Path:
        return self.options.runs or Path("runs") / f"experiment-{self.name}{'-quick' * self.options.quick}"

    @property
    def out(self) -> Path:
        return self.options.out or (self.runs if self.options.quick else RESULTS) / f"{self.name}.json"

    @property
    def seeds(self) -> range:
        count = 1 if self.options.quick else self.options.seeds
        return range(min(count, self.most_seeds or count))

    @property
    def command(self) -> str:
        """The command that repeats the experiment, without the locations of data, runs and results."""
        parser = argparse.ArgumentParser(add_help=False)
        for where in ("--runs", "--out", "--go-on-from"):
            parser.add_argument(where)
        _, arguments = parser.parse_known_args(sys.argv[1:])
        arguments = [Path(word).name if "/" in word and Path(word).exists() else word for word in arguments]
        return shlex.join(["python", f"experiments/{self.name}.py", *arguments])

    def settings(self, recipe: Sequence[str], quick: Sequence[str] = ()) -> list[str]:
        """The recipe as ``key=value``, with the changes of a rehearsal and of --set."""
        chosen = dict(setting.split("=", 1) for setting in recipe)
        chosen |= dict(setting.split("=", 1) for setting in quick) if self.options.quick else {}
        for setting in self.options.settings:
            if "=" not in setting:
                raise TaskError(f"--set {setting} says nothing: write --set key=value.")
        chosen |= dict(setting.split("=", 1) for setting in self.options.settings)
        return [f"{key}={value}" for key, value in chosen.items()]

    def compared(
        self,
        task: str,
        choices: Sequence[Choice],
        *,
        folder: str,
        settings: Sequence[str],
        metric: Metric,
        compiles: bool = True,
    ) -> list[dict[str, Any]]:
        """Make the missing runs of a comparison and print each; returns a record for every plan.

        :param compiles: whether --compile applies to this study.
        """
        earlier_records = self.earlier.plans(folder, settings)
        print(f"{folder}: {len(choices)} plans, seeds {', '.join(map(str, self.seeds))}", flush=True)
        if earlier_records:
            print(
                f"  {', '.join(map(_taken, earlier_records.values()))}: taken from {self.options.go_on_from}",
                flush=True,
            )
        planned = [replace(choice, seeds=self._missing(earlier_records.get(choice.label))) for choice in choices]
        left = [choice for choice in planned if choice.seeds]
        seen: dict[str, dict[int, Summary]] = {choice.label: {} for choice in left}

        def note(update: Update) -> None:
            if update.summary is not None:
                if update.summary.status != "stopped":
                    seen[update.job.label][update.job.seed] = update.summary
                print(f"  {update_line(update, metric)}", flush=True)

        options = self.options
        if left:
            compare(
                task,
                left,
                folder=self.runs / folder,
                seeds=self.seeds,
                settings=settings,
                jobs=options.jobs,
                device=options.device,
                compile=options.compile and compiles,
                command=self.command,
                on_update=note,
                stop=lambda: self.is_late,
            )
        made = {label: plan_record(label, ended, metric) for label, ended in seen.items() if ended}
        for label, before in earlier_records.items():
            made[label] = joined(before, made[label]) if label in made else before
        return [made[choice.label] for choice in choices if choice.label in made]

    def _missing(self, record: Mapping[str, Any] | None) -> tuple[int, ...]:
        """The seeds of a plan that are still missing."""
        return tuple(seed for seed in self.seeds if record is None or seed not in ended_seeds(record))

    def why_short(self, plans: Sequence[Mapping[str, Any]], floor: float, metric: Metric) -> str | None:
        """Why no conclusion can be drawn from these runs; None if there is no such reason."""
        if self.options.quick:
            return "A rehearsal: nothing follows from it."
        if all(plan["plan"] != CONTROL for plan in plans):
            return f"{CONTROL} was not run, so nothing follows from the rest."
        return short_words(floor, metric) if is_short(plans, floor, metric) else None

    def runs_of(self, folder: str) -> list[Run]:
        """The runs of a study in its folder; none if all of it comes from an earlier result."""
        begun = any((self.runs / folder).glob("*/run.json"))
        return read_runs([self.runs / folder]) if begun else []

    def curves(self, folder: str, metric: str) -> dict[str, dict[int, list[list[float]]]]:
        """Plan -> seed -> pairs of a step and the metric there."""
        found: dict[str, dict[int, list[list[float]]]] = {}
        for run in self.runs_of(folder):
            pairs = zip(*run.curve(metric), strict=True)
            found.setdefault(run.label, {})[run.seed] = [list(pair) for pair in pairs]
        for label, curves in self.earlier.curves(folder).items():
            found[label] = curves | found.get(label, {})
        return found

    def write(self, studies: Sequence[dict[str, Any]], **more: Any) -> None:
        """Write all results so far to one file, atomically."""
        content = {
            "experiment": self.name,
            "command": self.command,
            "machine": machine(torch.device(self.options.device)),
            "versions": versions(),
            "float32_products": self.products,
            "seeds": list(self.seeds),
            "processes": self.options.jobs,
            "rehearsal": self.options.quick,
            # Whether the time limit ended it before every run was made.
            "is_part": self.is_late,
            **self.earlier.record(),
            **more,
            "studies": list(studies),
            # Of all runs, whenever they were made; parallel processes overlap.
            "seconds": sum(plan["seconds"] for study in studies for plan in study["plans"]),
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.out, json.dumps(strict(content), indent=2) + "\n")

    def conclude(self, studies: Iterable[dict[str, Any]], metric: str) -> None:
        """Print a table and a reading of each study."""
        for study in studies:
            print(f"\n{study['study']}")
            for plan in study["plans"]:
                print(f"  {row(plan, metric)}")
            print(study["reading"])
        print(f"All of it is in {self.out}.")


def let_products_be(products: str) -> None:
    """TF32 for all products of this process and its child processes; torch's default uses it for convolutions only.

    A step of an LSTM is mostly products, and in float32 these do not run on tensor cores.
    """
    if products == TF32:
        os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
        torch.set_float32_matmul_precision("high")


def in_sentences(main: Callable[[], None]) -> None:
    """Run a script: a user's mistake ends it with one sentence."""
    try:
        main()
    except BitplanError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def cyclic_study(
    experiment: Experiment,
    name: str,
    task_name: str,
    place: Sequence[str],
    settings: Sequence[str],
    *,
    names: Sequence[str],
    bits: tuple[int, int],
    floor: float,
    of: str,
    static: Sequence[int] = (8,),
    cycles: int = DEFAULT_CYCLES,
    equal_to: Sequence[str] | None = None,
    is_included: Callable[[str], bool] = lambda label: True,
) -> dict[str, Any]:
    """FP32, static plans and cyclic schedules on one task: run, count and read.

    :param place: the settings of the data's location, which results do not contain.
    :param names: names of the schedules.
    :param floor: the metric that FP32 must reach for conclusions.
    :param of: what the metric is computed on.
    :param equal_to: the schedules that get a static plan of their cost; by default CR.
    :param is_included: whether a plan of that label is run; by default all of :func:`cpt_choices` are.
    """
    task = find_task(task_name, [*place, *settings])
    choices = cpt_choices(task, names, *bits, static=static, cycles=cycles, equal_to=equal_to)
    chosen = [choice for choice in choices if is_included(choice.label)]
    folder = name.replace(" ", "-")
    plans = experiment.compared(task_name, chosen, folder=folder, settings=[*place, *settings], metric=task.metric)
    record = {
        "settings": list(settings),
        "metric": metric_record(task.metric, of),
        "bits": list(bits),
        "cycles": cycles,
    }
    read = cyclic_reading(experiment, plans, names, f"static {bits[1]}", floor, task.metric)
    return {"study": name, **record, **read, "curves": experiment.curves(folder, task.metric.name)}


def cyclic_reading(
    experiment: Experiment,
    plans: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    static: str,
    floor: float,
    metric: Metric,
) -> dict[str, Any]:
    """The reading of a study: schedules against a static plan, and cost against the metric."""
    short = experiment.why_short(plans, floor, metric)
    read = read_cyclic(plans, names, static, metric)
    return {
        "seeds": list(experiment.seeds),
        "evaluation": EVALUATION,
        "floor": floor,
        "short_run": short is not None,
        **read,
        "reading": short or read["reading"],
        "plans": list(plans),
    }


def read_cyclic(
    plans: Sequence[Mapping[str, Any]], names: Sequence[str], static: str, metric: Metric
) -> dict[str, Any]:
    """The order of the schedules by cost, and the sentences on all plans."""
    order = order_by_cost(plans, metric)
    sentences = [against(plans, names, static, metric), *([order["words"]] if order is not None else [])]
    return {"order": order, "reading": " ".join(sentences)}


# --- plans over seeds ---


def update_line(update: Update, metric: Metric) -> str:
    summary = update.summary
    assert summary is not None
    reached = summary.metrics.get(metric.name)
    result = summary.status if reached is None or summary.status != "finished" else f"{metric.name} {reached:.4f}"
    return f"{update.job.label}, seed {update.job.seed}: {result}, {summary.seconds:.1f} s"


def metric_record(metric: Metric, of: str) -> dict[str, Any]:
    return {"name": metric.name, "better": metric.better, "trivial": metric.trivial, "of": of}


def is_short(plans: Sequence[Mapping[str, Any]], floor: float, metric: Metric, control: str = CONTROL) -> bool:
    """Whether the control missed its floor, so that nothing follows from the runs."""
    reached = next((plan["metric"] for plan in plans if plan["plan"] == control), None)
    return reached is None or metric.is_better(floor, reached)


def short_words(floor: float, metric: Metric, control: str = CONTROL) -> str:
    return f"A short run: {control} did not reach {metric.name} {floor:g}, so nothing follows from it."


def _taken(record: Mapping[str, Any]) -> str:
    seeds = ended_seeds(record)
    return f"{record['plan']} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))})"


def order_by_cost(plans: Sequence[Mapping[str, Any]], metric: Metric) -> dict[str, Any] | None:
    """Whether schedules that cost more are better, and whether they differ from a static plan of their cost.

    Of the papers' schedules alone: static plans have an order of their own. None for fewer than four schedules, or for
    those of a single group. The mean without seeds that diverged would be too good, so there is no verdict on them.
    """
    records = {plan["plan"]: plan for plan in plans if plan["metric"] is not None}
    diverged = [plan["plan"] for plan in plans if plan["diverged"]]
    groups = {group: [name for name in names if name in records] for group, names in GROUPS.items()}
    groups = {group: names for group, names in groups.items() if names}
    names = [name for own in groups.values() for name in own]
    if len(groups) < 2 or len(names) < LEAST:
        return None
    sign = 1.0 if metric.better == "higher" else -1.0
    tested = trend([[sign * records[name]["metric"] for name in own] for own in groups.values()])
    is_one_seed = all(len(records[name]["values"]) < 2 for name in names)
    means = {group: sum(records[name]["metric"] for name in own) / len(own) for group, own in groups.items()}
    listed = ", ".join(f"{group} {mean:.4f}" for group, mean in means.items())
    values = [[sign * value for value in records[name]["values"].values()] for name in names]
    correlation = cost_correlation([records[name]["relative_to_fp32"] for name in names], values, measure=pearson)
    share = seed_share(values)
    lost = [name for own in GROUPS.values() for name in own if name in diverged]
    why_none = f"{' and '.join(lost)} diverged" if lost else "one seed" if is_one_seed else ""
    is_sure = tested.is_sure and correlation.low > 0 and not why_none
    verdict = f"{why_none}, so no verdict" if why_none else "an order" if is_sure else "no order that is sure"
    quality = "the metric" if sign > 0 else f"minus {metric.name}"
    words = [
        f"Groups of schedules, the cheapest first: {listed}; {tested} in the order of cost; Pearson of cost with "
        f"{quality} over {correlation.plans} schedules {correlation}: {verdict}.",
    ]
    result: dict[str, Any] = {
        "groups": groups,
        "means": means,
        "trend": {"concordant": tested.concordant, "pairs": tested.pairs, "p_value": tested.p_value},
        # Both the trend and the correlation.
        "is_sure": is_sure,
        # Positive where plans that cost more are better, whatever the metric.
        "pearson": {
            "value": correlation.value,
            "interval": [correlation.low, correlation.high],
            "plans": correlation.plans,
        },
        # The share of the variance between schedules that seeds alone explain; 1 or more: schedules do not differ.
        "seed_share": share if math.isfinite(share) else None,
    }
    comparisons = []
    for control in (plan for name, plan in records.items() if name.startswith(EQUAL_COST)):
        equal = [name for name in names if is_equal_cost(records[name], control)]
        if not equal or why_none or control["plan"] in diverged:
            continue
        difference = Difference.of_mean([records[name]["values"] for name in equal], control["values"])
        comparisons.append({"control": control["plan"], "schedules": equal, **difference.to_dict()})
        words.append(
            f"{len(equal)} schedules less {control['plan']}, paired by {difference.pairs} seeds: "
            f"{difference.mean:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})."
        )
    if comparisons:
        result["equal_cost"] = comparisons
    return {**result, "words": " ".join(words)}


def is_equal_cost(plan: Mapping[str, Any], control: Mapping[str, Any]) -> bool:
    return bool(abs(plan["relative_to_fp32"] / control["relative_to_fp32"] - 1) <= EQUAL_WITHIN)


def judgements(
    plans: Iterable[Mapping[str, Any]], base: Mapping[str, Any], metric: Metric, margin: float = MARGIN
) -> dict[str, Judgement]:
    """The verdicts on all plans of a study beside one of them, corrected for their number.

    :param margin: as a share of that plan's metric.
    """
    others = {plan["plan"]: plan["values"] for plan in plans if plan["plan"] != base["plan"]}
    return judge_all(others, base["values"], margin * abs(base["metric"]), metric.better)


def word(judgement: Judgement) -> str:
    """The verdict, or better where a plan is so by more than chance."""
    return "better" if judgement.is_better else judgement.verdict


def against(plans: Sequence[Mapping[str, Any]], names: Sequence[str], static: str, metric: Metric) -> str:
    """How plans compare with one of them, in sentences."""
    records = {plan["plan"]: plan for plan in plans if plan["metric"] is not None}
    lost = [plan["plan"] for plan in plans if plan["metric"] is None or plan["diverged"]]
    sentences = [f"Diverged: {', '.join(lost)}."] if lost else []
    base = records.get(static)
    if base is None or static in lost:
        return " ".join([*sentences, f"Without {static} there is nothing to compare with."])
    if CONTROL in records:
        sentences.append(f"{CONTROL} {records[CONTROL]['metric']:.4f}, {static} {spread(base)}.")
    judged = judgements(records.values(), base, metric)
    kinds: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in (name for name in names if name in records and name not in lost):
        difference = records[name]["metric"] - base["metric"]
        kinds[word(judged[name])].append(f"{name} ({difference:+.4f})")
    sentences += [f"{KINDS[kind]} {static}: {', '.join(plans)}." for kind, plans in kinds.items() if plans]
    costs = {records[name]["relative_to_fp32"] / base["relative_to_fp32"] for name in names if name in records}
    if costs:
        sentences.append(f"They cost {min(costs):.0%} to {max(costs):.0%} of {static}.")
    return " ".join(sentences)
