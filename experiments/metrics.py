"""Does the measured error rank what formats do to training? BERT on text, and a ResNet on CIFAR-10.

    python experiments/metrics.py --text FOLDER --images cifar10_jpeg_pack.npz --device cuda
    python experiments/metrics.py --text FOLDER --images cifar10_jpeg_pack.npz --quick     # a rehearsal on a CPU

Of each model (our set-up: BERT-mini of four layers of 256 on pieces of words; ResNet-20 on CIFAR-10 as JPEGs): backward
errors of all candidates are measured early, in the middle and late in a run of its own precision (`bitplan measure`).
Then the model is trained in BF16 and FP32, under thirteen configurations of low precision, which round operands of
products and leave all else in FP32, and under the plan that `bitplan advise` makes of the measurement, with two seeds
each. A configuration's predicted error is, slot by slot, the mean level (error times the root of the sums' length) of
its quantizers with that operand alone quantised; all of it, the root of the sum of their squares. Spearman's
correlation of predicted error with the gap of the held-out loss to BF16, over configurations and by slot, says whether
the metric ranks.

The same command resumes an interrupted experiment, and `bitplan report` draws the folders of its runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import CIFAR_PACK, MARGIN, Experiment, arguments, in_sentences, word

from bitplan.analysis.measure import DEFAULT_CANDIDATES, Measurement
from bitplan.lab.compare import Choice
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Task
from bitplan.lab.train.stages import measure_task
from bitplan.planners.advise import Advice, Slot, SlotAdvice, advise_on, collect_pairs, make_plan
from bitplan.plans import SLOTS, Plan, QuantizerSpec
from bitplan.significance import LEAST, Judgement, cost_correlation, judge_all

BASELINE, CONTROL = "bf16", "fp32"
MODELS = ("bert", "resnet")

#: Name -> the quantizer of each operand; other operands are not rounded.
CONFIGURATIONS: dict[str, dict[str, str]] = {
    "weights int8": {"w": "int8 tensor"},
    "weights e4m3": {"w": "e4m3 tensor"},
    "activations int8": {"x": "int8 tensor"},
    "gradients int8": {"dy": "int8 tensor"},
    "gradients int8 vector": {"dy": "int8 vector"},
    "gradients e5m2": {"dy": "e5m2 tensor"},
    "all int8": dict.fromkeys(("x", "w", "dy"), "int8 tensor"),
    "all int8 vector": dict.fromkeys(("x", "w", "dy"), "int8 vector"),
    "all int8 vector, stochastic dy": {"x": "int8 vector", "w": "int8 vector", "dy": "int8 vector stochastic"},
    "all e4m3": dict.fromkeys(("x", "w", "dy"), "e4m3 tensor"),
    "all e5m2": dict.fromkeys(("x", "w", "dy"), "e5m2 tensor"),
    "e4m3, gradients e5m2": {"x": "e4m3 tensor", "w": "e4m3 tensor", "dy": "e5m2 tensor"},
    "all int4 vector": dict.fromkeys(("x", "w", "dy"), "int4 vector"),
}
ADVICE = "advice"
#: The configurations of a rehearsal.
FEW = ("weights int8", "gradients int8", "all int8", "all int4 vector")

#: On a GPU launches bound the time of a step, so that large batches cost little and learn more.
BERT = ("steps=500", "evaluate_every=250", "warmup=50", "batch=256", "lr=2e-3", "vocabulary=1000", "evaluation=8")
RESNET = ("steps=500", "evaluate_every=250", "decay=cosine", "warmup=20", "batch=256", "lr=0.2")
QUICK = ("steps=6", "evaluate_every=6", "warmup=2")
QUICK_BERT = (*QUICK, "size=tiny", "length=16", "batch=4", "vocabulary=300", "evaluation=2")
QUICK_RESNET = (*QUICK, "model=resnet8", "width=0.25", "batch=16")
#: The baseline's loss must be below this share of the trivial predictor's, or the runs were too short.
FLOORS = {"bert": 0.9, "resnet": 0.7}


@dataclass(frozen=True)
class Study:
    """One model with its recipe."""

    model: str
    task: str
    settings: tuple[str, ...]


def main() -> None:
    parser = arguments(__doc__, seeds=2)
    parser.add_argument("--text", default="", help="a folder of text, or a text file (default: Python's own sources)")
    parser.add_argument("--images", help="CIFAR-10 as cifar_pack.py reads it (without: the digits that come along)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    experiment = Experiment("metrics", parser.parse_args())
    studies: list[dict[str, Any]] = []
    for model in experiment.options.models:
        studies.append(studied(experiment, study_of(experiment, model)))
        experiment.write(
            studies,
            candidates=list(map(str, DEFAULT_CANDIDATES)),
            configurations=CONFIGURATIONS,
            gap="held-out loss after the last step, less the baseline's of the same seed",
        )
    experiment.conclude(studies, "metric")


def study_of(experiment: Experiment, model: str) -> Study:
    options = experiment.options
    if model == "bert":
        task, data, settings = "bert-mini", options.text, experiment.settings(BERT, QUICK_BERT)
    else:
        task, data = (CIFAR_PACK if options.images else "digits"), options.images
        settings = experiment.settings(RESNET, (*QUICK_RESNET, *(["most=64"] if options.images else [])))
    return Study(model, task, (*([f"data={data}"] if data else []), *settings))


def studied(experiment: Experiment, study: Study) -> dict[str, Any]:
    """Measure, train, correlate."""
    task = find_task(study.task, study.settings)
    measurement, seconds = measured(experiment, study, task)
    advice = advise_on(measurement)
    names = FEW if experiment.options.quick else tuple(CONFIGURATIONS)
    choices = [Choice(BASELINE, "bf16-all"), Choice(CONTROL, None)]
    choices += [Choice(name, configured(advice, CONFIGURATIONS[name])) for name in names]
    choices.append(Choice(ADVICE, advice.plan))
    plans = experiment.compared(
        study.task, choices, folder=f"{study.model}/runs", settings=study.settings, metric=task.metric
    )
    errors = {name: slot_errors(measurement, CONFIGURATIONS[name]) for name in names}
    errors[ADVICE] = advised_errors(advice)
    with_gaps(plans, errors)
    return {
        "study": study.model,
        "settings": [setting for setting in study.settings if not setting.startswith("data=")],
        "measurement": {
            "seconds": seconds,
            "products": len(measurement.products),
            "stages": levels_by_stage(measurement),
        },
        "advice": {"tau": advice.tau, "counts": advice.counts},
        "trivial_loss": trivial_loss(task),
        "plans": plans,
        "spearman": correlations(plans),
        "reading": why_short(plans, trivial_loss(task), FLOORS[study.model], experiment.options)
        or reading(plans, trivial_loss(task)),
    }


def measured(experiment: Experiment, study: Study, task: Task) -> tuple[Measurement, float]:
    """The measurement, and its seconds, training included. A stored one is reused: a second one on a GPU may differ
    in its last bits, and runs that were started with its advice could not be resumed."""
    folder = experiment.runs / study.model
    file, clock = folder / "measurement.json", folder / "measurement.seconds"
    if not file.exists():
        steps = task.settings.all_steps
        print(f"{study.model}: measuring at three stages of {steps} steps", flush=True)
        began = time.perf_counter()
        measurement = measure_task(task, steps=steps, device=experiment.options.device)
        folder.mkdir(parents=True, exist_ok=True)
        clock.write_text(f"{time.perf_counter() - began:.3f}")
        measurement.save(file)
    return Measurement.load(file), float(clock.read_text())


# --- Configurations and their measured errors


def configured(advice: Advice, operands: dict[str, str]) -> Plan:
    """A plan for every measured product."""
    specs = {operand: spec_of(text) for operand, text in operands.items()}
    slots = [
        SlotAdvice(advised.product, advised.slot, specs[operand], 0.0, "", advised.inside)
        for advised in advice.slots
        if (operand := advised.slot.split(".")[1]) in specs
    ]
    return make_plan(slots)


def spec_of(text: str) -> QuantizerSpec:
    name, scale, *rounding = text.split()
    return QuantizerSpec(name, scale=scale, rounding=rounding[0] if rounding else "nearest")  # type: ignore[arg-type]


def slot_errors(measurement: Measurement, operands: dict[str, str]) -> dict[str, float]:
    """Slot -> mean level over products, each at its worst stage, with that operand alone quantised."""
    levels: dict[str, list[float]] = {}
    for slot in (slot for pair in collect_pairs(measurement) for slot in pair):
        text = operands.get(slot.slot.split(".")[1])
        level = None if text is None else level_of(slot, text)
        if level is not None:
            levels.setdefault(slot.slot, []).append(level)
    return {name: statistics.mean(values) for name, values in levels.items()}


def level_of(slot: Slot, text: str) -> float | None:
    """The level of a quantizer that was measured; nearest rounding stands in for stochastic rounding."""
    option = slot.option(text) or slot.option(text.removesuffix(" stochastic"))
    return option.level if option is not None and math.isfinite(option.level) else None


def advised_errors(advice: Advice) -> dict[str, float]:
    levels: dict[str, list[float]] = {}
    for advised in advice.slots:
        levels.setdefault(advised.slot, []).append(advised.level)
    return {name: statistics.mean(values) for name, values in levels.items()}


def levels_by_stage(measurement: Measurement) -> dict[str, dict[str, dict[str, float]]]:
    """Stage -> candidate -> pass -> median level over products."""
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in measurement.rows:
        table.setdefault(row.stage, {}).setdefault(row.candidate, {}).setdefault(row.pass_, []).append(row.level)
    return {
        stage: {
            name: {pass_: statistics.median(levels) for pass_, levels in passes.items()}
            for name, passes in rows.items()
        }
        for stage, rows in table.items()
    }


# --- Results of the runs


def with_gaps(plans: list[dict[str, Any]], errors: dict[str, dict[str, float]]) -> None:
    """Add its predicted error to each plan, and the gap of its losses to the baseline's, by seed."""
    for plan in plans:
        own = errors.get(plan["plan"])
        plan["predicted"] = None if own is None else {"all": math.hypot(*own.values()), **own}
        plan["losses"] = {seed: metrics["validation_loss"] for seed, metrics in plan["metrics"].items()}
        plan["losses"] |= dict.fromkeys(plan["diverged"], math.inf)
    baseline = plans[0]["losses"]
    for plan in plans:
        gaps = {seed: loss - baseline[seed] for seed, loss in plan["losses"].items() if seed in baseline}
        plan["gaps"], plan["gap"] = gaps, statistics.mean(gaps.values())


def correlations(plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The correlation of predicted error with loss gap, overall and by slot; diverged plans have the largest gap."""
    measured_plans = [plan for plan in plans if plan["predicted"] is not None]
    correlations_by_slot: dict[str, Any] = {}
    for name in ("all", *SLOTS):
        own = [plan for plan in measured_plans if name in plan["predicted"]]
        if len(own) < LEAST or len({plan["predicted"][name] for plan in own}) < LEAST:
            correlations_by_slot[name] = None
            continue
        gaps = [[min(gap, 1e9) for gap in plan["gaps"].values()] for plan in own]
        correlation = cost_correlation([plan["predicted"][name] for plan in own], gaps)
        correlations_by_slot[name] = {
            "value": correlation.value,
            "interval": [correlation.low, correlation.high],
            "plans": correlation.plans,
        }
    return correlations_by_slot


def trivial_loss(task: Task) -> float:
    """The loss of the predictor that knows only the frequencies of tokens, or of classes."""
    trivial = task.metric.trivial
    return math.log(trivial) if task.metric.name == "perplexity" else -math.log(trivial)


def seed_spread(plans: Sequence[dict[str, Any]], trivial: float) -> float:
    """The standard deviation of the loss over seeds, pooled over all plans, since two runs say little."""
    by_plan = [[*plan["losses"].values()] for plan in plans]
    learning = [losses for losses in by_plan if len(losses) > 1 and statistics.mean(losses) < trivial]
    return math.sqrt(statistics.mean(map(statistics.variance, learning))) if learning else 0.0


def why_short(plans: Sequence[dict[str, Any]], trivial: float, floor: float, options: argparse.Namespace) -> str | None:
    """Why no conclusion can be drawn; None if there is no such reason."""
    if options.quick:
        return "A rehearsal: nothing follows from it."
    base = statistics.mean(plans[0]["losses"].values())
    if base < floor * trivial:
        return None
    return (
        f"A short run: the baseline's held-out loss is {base:.2f}, the trivial predictor's {trivial:.2f}, so "
        f"nothing follows from it."
    )


def against_baseline(plans: Sequence[Mapping[str, Any]]) -> dict[str, Judgement]:
    """The verdicts on all plans by their held-out losses, beside the baseline's with the same seeds."""
    losses = {plan["plan"]: plan["losses"] for plan in plans}
    baseline = losses.pop(BASELINE)
    return judge_all(losses, baseline, MARGIN * statistics.mean(baseline.values()), "lower")


def reading(plans: Sequence[dict[str, Any]], trivial: float) -> str:
    """The conclusions, in sentences."""
    records = {plan["plan"]: plan for plan in plans}
    base = statistics.mean(plans[0]["losses"].values())
    noise = seed_spread(plans, trivial)
    sentences = [f"BF16 {base:.4f}; the spread over seeds, pooled over all plans that learn, is {noise:.4f}."]

    judged = against_baseline(plans)

    def verdict(name: str) -> str:
        gap = records[name]["gap"]
        result = "diverged" if math.isinf(gap) else f"{gap:+.4f}"
        return f"{name} {result} ({word(judged[name])})"

    sentences.append(f"FP32: {verdict(CONTROL)}. INT8 weights: {verdict('weights int8')}.")
    sentences.append(f"Gradients: {', '.join(verdict(name) for name in records if name.startswith('gradients'))}.")
    sentences.append(
        f"The advice: {verdict(ADVICE)}, with {records[ADVICE]['relative_to_fp32']:.1%} of FP32's bit operations."
    )
    by_slot = correlations(plans)
    for name in ("all", *SLOTS):
        if by_slot[name] is not None:
            low, high = by_slot[name]["interval"]
            sentences.append(f"Spearman, {name}: {by_slot[name]['value']:+.2f} ({low:+.2f} to {high:+.2f}).")
    return " ".join(sentences)


if __name__ == "__main__":
    in_sentences(main)
