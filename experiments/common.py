"""What all experiments share: their arguments, their record, and how plans over seeds become a table and a reading.

An experiment is a list of studies; a study is one comparison of plans on a task. Results are written after every
study, so that an interruption leaves what is known, and the same command goes on where it stopped: the runs are a
comparison's.
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
from bitplan.lab.compare.correlation import LEAST, cost_correlation, seed_share
from bitplan.lab.compare.suites import cpt_choices
from bitplan.lab.report.runs import Run, read_runs
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Metric
from bitplan.lab.train import Summary
from bitplan.lab.train.config import machine, versions
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES

CONTROL = "FP32"
RESULTS = Path("docs/results")
#: CIFAR-10 as JPEGs in one file.
CIFAR_PACK = f"{Path(__file__).with_name('cifar_pack.py')}:CifarPack"
#: How plans of one seed compare: what seeds differ by is not known.
BESIDE = "one seed, so no verdict, beside"
#: Where seeds alone would make so much of the variance between plans, an order of the plans may be chance's.
LARGE_SHARE = 0.5
#: Schedules that end on a growing part, which all of the papers' do, end at their highest bits.
EVALUATION = "at the bits of the moment, which are the highest ones at the end of every schedule here"


def arguments(words: str | None, seeds: int, data: str | None = None) -> argparse.ArgumentParser:
    """The options that every experiment has; more may be added.

    :param words: the script's docstring.
    :param data: what the first argument is; None: there is none.
    """
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    """A script at work: what was asked of it, and where everything goes."""

    name: str
    asked: argparse.Namespace
    #: Where a study is dear; 0: as many as asked.
    most_seeds: int = 0
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        let_products_be(self.products)

    @property
    def products(self) -> str:
        """In which format a product multiplies float32: on a GPU, in TF32."""
        return TF32 if torch.device(self.asked.device).type == "cuda" else FLOAT32

    @property
    def is_late(self) -> bool:
        """Whether the minutes that were given are over."""
        return self.asked.minutes is not None and time.monotonic() - self.began > 60 * self.asked.minutes

    @cached_property
    def earlier(self) -> Earlier:
        device = machine(torch.device(self.asked.device))
        return Earlier(self.asked.go_on_from, self.name, device, versions(), self.products)

    @property
    def runs(self) -> Path:
        return self.asked.runs or Path("runs") / f"experiment-{self.name}{'-quick' * self.asked.quick}"

    @property
    def out(self) -> Path:
        return self.asked.out or (self.runs if self.asked.quick else RESULTS) / f"{self.name}.json"

    @property
    def seeds(self) -> range:
        count = 1 if self.asked.quick else self.asked.seeds
        return range(min(count, self.most_seeds or count))

    @property
    def command(self) -> str:
        """What makes it again; where data, runs and results lay is nobody's business."""
        told = argparse.ArgumentParser(add_help=False)
        for where in ("--runs", "--out", "--go-on-from"):
            told.add_argument(where)
        _, words = told.parse_known_args(sys.argv[1:])
        words = [Path(word).name if "/" in word and Path(word).exists() else word for word in words]
        return shlex.join(["python", f"experiments/{self.name}.py", *words])

    def settings(self, recipe: Sequence[str], quick: Sequence[str] = ()) -> list[str]:
        """The recipe as ``key=value``, with what a rehearsal changes, and with what --set says instead."""
        chosen = dict(each.split("=", 1) for each in recipe)
        chosen |= dict(each.split("=", 1) for each in quick) if self.asked.quick else {}
        for each in self.asked.settings:
            if "=" not in each:
                raise TaskError(f"--set {each} says nothing: write --set key=value.")
        chosen |= dict(each.split("=", 1) for each in self.asked.settings)
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
        """Make what is left of a comparison's runs, telling each; a record for every plan that was run.

        :param compiles: whether --compile is for this one.
        """
        known = self.earlier.plans(folder, settings)
        print(f"{folder}: {len(choices)} plans, seeds {', '.join(map(str, self.seeds))}", flush=True)
        if known:
            print(f"  {', '.join(map(_taken, known.values()))}: taken from {self.asked.go_on_from}", flush=True)
        planned = [replace(choice, seeds=self._missing(known.get(choice.label))) for choice in choices]
        left = [choice for choice in planned if choice.seeds]
        seen: dict[str, dict[int, Summary]] = {choice.label: {} for choice in left}

        def note(update: Update) -> None:
            if update.summary is not None:
                if update.summary.status != "stopped":
                    seen[update.job.label][update.job.seed] = update.summary
                print(f"  {told(update, metric)}", flush=True)

        asked = self.asked
        if left:
            compare(
                task,
                left,
                folder=self.runs / folder,
                seeds=self.seeds,
                settings=settings,
                jobs=asked.jobs,
                device=asked.device,
                compile=asked.compile and compiles,
                command=self.command,
                on_update=note,
                stop=lambda: self.is_late,
            )
        made = {label: plan_record(label, ended, metric) for label, ended in seen.items() if ended}
        for label, before in known.items():
            made[label] = joined(before, made[label]) if label in made else before
        return [made[choice.label] for choice in choices if choice.label in made]

    def _missing(self, known: Mapping[str, Any] | None) -> tuple[int, ...]:
        """The seeds with which a plan was not run yet."""
        return tuple(seed for seed in self.seeds if known is None or seed not in ended_seeds(known))

    def why_short(self, plans: Sequence[Mapping[str, Any]], floor: float, metric: Metric) -> str | None:
        """Why nothing follows from these runs; None where something may."""
        if self.asked.quick:
            return "A rehearsal: nothing follows from it."
        if all(plan["plan"] != CONTROL for plan in plans):
            return f"{CONTROL} was not run, so nothing follows from the rest."
        return short_words(floor, metric) if is_short(plans, floor, metric) else None

    def runs_of(self, folder: str) -> list[Run]:
        """Those of a study that lie here: none where all of it is an earlier result's."""
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
        """All of it so far, into one file, at once."""
        content = {
            "experiment": self.name,
            "command": self.command,
            "machine": machine(torch.device(self.asked.device)),
            "versions": versions(),
            "float32_products": self.products,
            "seeds": list(self.seeds),
            "processes": self.asked.jobs,
            "rehearsal": self.asked.quick,
            # Whether the time was over before every run was made.
            "is_part": self.is_late,
            **self.earlier.told(),
            **more,
            "studies": list(studies),
            # Of the runs, whenever they were made; those of several processes ran at the same time.
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
    """TF32: of all products of this process, and of those that it starts; torch's own default has only convolutions so.

    A step of an LSTM is mostly products, and in float32 these do not run on tensor cores.
    """
    if products == TF32:
        os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
        torch.set_float32_matmul_precision("high")


def in_sentences(main: Callable[[], None]) -> None:
    """Run a script: a user's mistake ends it with a sentence."""
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
    wanted: Callable[[str], bool] = lambda label: True,
) -> dict[str, Any]:
    """FP32, static plans and cyclic schedules on one task: made, counted and read.

    :param place: the settings that say where data are, which results do not tell.
    :param names: of the schedules.
    :param floor: what FP32 must reach for anything to follow.
    :param of: what the metric is taken of.
    :param wanted: of a plan's label, whether it is made; by default all of :func:`cpt_choices` are.
    """
    task = find_task(task_name, [*place, *settings])
    choices = cpt_choices(task, names, *bits, static=static, cycles=cycles)
    chosen = [choice for choice in choices if wanted(choice.label)]
    folder = name.replace(" ", "-")
    plans = experiment.compared(task_name, chosen, folder=folder, settings=[*place, *settings], metric=task.metric)
    told = {"settings": list(settings), "metric": metric_record(task.metric, of), "bits": list(bits), "cycles": cycles}
    read = cyclic_reading(experiment, plans, names, f"static {bits[1]}", floor, task.metric)
    return {"study": name, **told, **read, "curves": experiment.curves(folder, task.metric.name)}


def cyclic_reading(
    experiment: Experiment,
    plans: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    static: str,
    floor: float,
    metric: Metric,
) -> dict[str, Any]:
    """What the plans of a study say: of schedules against a static plan, and of cost against the metric."""
    found, short = order_by_cost(plans), experiment.why_short(plans, floor, metric)
    words = [against(plans, names, static, metric), *([found["words"]] if found is not None else [])]
    return {
        "seeds": list(experiment.seeds),
        "evaluation": EVALUATION,
        "floor": floor,
        "short_run": short is not None,
        "spearman": found,
        "reading": short or " ".join(words),
        "plans": list(plans),
    }


# --- plans over seeds ---


def told(update: Update, metric: Metric) -> str:
    summary = update.summary
    assert summary is not None
    reached = summary.metrics.get(metric.name)
    words = summary.status if reached is None or summary.status != "finished" else f"{metric.name} {reached:.4f}"
    return f"{update.job.label}, seed {update.job.seed}: {words}, {summary.seconds:.1f} s"


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


def order_by_cost(plans: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Spearman's correlation of cost with the metric over rounded plans, and whether it may be the seeds' doing."""
    known = [plan for plan in plans if plan["plan"] != CONTROL and plan["metric"] is not None]
    if len(known) < LEAST:
        return None
    values = [[*plan["values"].values()] for plan in known]
    found = cost_correlation([plan["relative_to_fp32"] for plan in known], values)
    share = seed_share(values)
    one_seed = all(len(each) < 2 for each in values)
    is_sure = found.is_sure and not one_seed and share < LARGE_SHARE
    return {
        "value": found.value,
        "interval": [found.low, found.high],
        "plans": found.plans,
        # Of the variance between plans, what seeds alone would make; 1 or more: plans do not differ.
        "seed_share": share if math.isfinite(share) else None,
        "is_sure": is_sure,
        "words": f"Spearman of cost with the metric {found}: "
        + ("an order." if is_sure else "one seed, so no verdict." if one_seed else "no order that is sure.")
        + (f" Seeds alone would make {share:.0%} of the variance between plans." if share >= LARGE_SHARE else ""),
    }


def against(plans: Sequence[Mapping[str, Any]], names: Sequence[str], static: str, metric: Metric) -> str:
    """How plans compare with one of them, in sentences."""
    known = {plan["plan"]: plan for plan in plans if plan["metric"] is not None}
    lost = [plan["plan"] for plan in plans if plan["metric"] is None or plan["diverged"]]
    words = [f"Diverged: {', '.join(lost)}."] if lost else []
    base = known.get(static)
    if base is None or static in lost:
        return " ".join([*words, f"Without {static} there is nothing to compare with."])
    if CONTROL in known:
        words.append(f"{CONTROL} {known[CONTROL]['metric']:.4f}, {static} {spread(base)}.")
    kinds: dict[str, list[str]] = {"better than": [], "worse than": [], "within the spread of": [], BESIDE: []}
    for name in (name for name in names if name in known and name not in lost):
        kinds[_kind(known[name], base, metric)].append(f"{name} ({known[name]['metric'] - base['metric']:+.4f})")
    words += [f"{kind.capitalize()} {static}: {', '.join(found)}." for kind, found in kinds.items() if found]
    costs = {known[name]["relative_to_fp32"] / base["relative_to_fp32"] for name in names if name in known}
    if costs:
        words.append(f"They cost {min(costs):.0%} to {max(costs):.0%} of {static}.")
    return " ".join(words)


def _kind(plan: Mapping[str, Any], base: Mapping[str, Any], metric: Metric) -> str:
    if max(len(plan["values"]), len(base["values"])) < 2:
        return BESIDE
    if abs(plan["metric"] - base["metric"]) <= max(plan["deviation"], base["deviation"]):
        return "within the spread of"
    return "better than" if metric.is_better(plan["metric"], base["metric"]) else "worse than"
