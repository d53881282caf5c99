"""Cyclic precision in language modelling: Penn Treebank, one LSTM layer of 800, the published recipe in full.

    python experiments/ptb.py FOLDER --device cuda --compile --jobs 5     # the folder with ptb.train.txt.gz and so on
    python experiments/ptb.py FOLDER --device cuda --compile --jobs 5 --epochs 13
    python experiments/ptb.py FOLDER --quick                              # a rehearsal: a few tiny steps on a CPU

FP32, static 8, and the schedules CR, RR and ER between 5 and 8 bits, as Wolfe & Kyrillidis (arXiv 2403.02243) have it:
40 epochs of SGD at a learning rate of 20, a quarter of that wherever the validation perplexity did not fall, gradients
clipped to 0.25, 20 texts of 35 words at once, dropout 0.5. Input, recurrent and decoder products are quantised. Of
their static 8 they published a validation perplexity of 89.65 and a test perplexity of 85.59. Ours are those of the
last epoch.

What it takes on a GPU: an epoch is 1,327 steps. With CUDA graphs we expect 4 to 6 ms a step, so 4 to 5 minutes a run
of 40 epochs, besides one or two minutes of compiling a layer that is written out over 35 words (once a process, and
once more for evaluation). Five processes at once take little longer only where they share the GPU at the same time
(NVIDIA's MPS); taking turns, 20 minutes and more. Measure one epoch first: --epochs 1. With fewer epochs than 40 the
recipe is not theirs, and FP32 is likely to miss its floor, which the results then say.

The same command goes on where it was interrupted, and `bitplan report` draws the folder of the runs.
"""

from __future__ import annotations

from typing import Any

from common import EVALUATION, Experiment, against, arguments, in_sentences, metric_record

from bitplan.compare.time_suites import cpt_choices
from bitplan.tasks.registry import find_task
from bitplan.tasks.task import Metric

RANGE = (5, 8)
SCHEDULES = ("CR", "RR", "ER")
STATIC = f"static {RANGE[1]}"
PUBLISHED = {"plan": STATIC, "perplexity": 89.65, "test_perplexity": 85.59}
EPOCHS, EPOCH = 40, 1327
#: FP32 must come down to this validation perplexity; where it does not, the runs were too short.
FLOOR = 92.0

QUICK = ("features=8", "length=4", "batch=4", "evaluation=2", "steps=3", "evaluate_every=3")


def main() -> None:
    parser = arguments(__doc__, seeds=1, data="the folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt (or .gz)")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--plans", nargs="+", metavar="PLAN", help="only these, such as FP32 CR (default: all)")
    experiment = Experiment("ptb", parser.parse_args())
    studies = [study(experiment)]
    experiment.write(studies, bits=list(RANGE), evaluation=EVALUATION, published=PUBLISHED)
    experiment.conclude(studies, "perplexity")


def study(experiment: Experiment) -> dict[str, Any]:
    epochs = experiment.asked.epochs
    settings = experiment.settings((f"steps={epochs * EPOCH}", f"evaluate_every={EPOCH}"), QUICK)
    place = [f"data={experiment.asked.data}"]
    task = find_task("ptb", [*place, *settings])
    wanted = experiment.asked.plans or ("FP32", STATIC, *SCHEDULES)
    choices = [c for c in cpt_choices(task, SCHEDULES, *RANGE, static=(RANGE[1],)) if c.label in wanted]
    folder = f"{epochs}-epochs"
    plans = experiment.compared("ptb", choices, folder=folder, settings=[*place, *settings], metric=task.metric)
    for plan in plans:
        tested = [each["test_perplexity"] for each in plan["metrics"].values() if "test_perplexity" in each]
        plan["test_perplexity"] = sum(tested) / len(tested) if tested else None
    short = experiment.why_short(plans, FLOOR, task.metric)
    return {
        "study": f"{epochs} epochs",
        "settings": settings,
        "metric": metric_record(task.metric, "the validation text, after the last epoch"),
        "floor": FLOOR,
        "short_run": short is not None,
        "reading": short or reading(plans, task.metric, epochs),
        "plans": plans,
        "curves": experiment.curves(folder, task.metric.name),
    }


def reading(plans: list[dict[str, Any]], metric: Metric, epochs: int) -> str:
    """What held, in a few sentences."""
    words = [against(plans, SCHEDULES, STATIC, metric)]
    static = next((plan for plan in plans if plan["plan"] == STATIC), None)
    if static is not None and static["test_perplexity"] is not None and epochs == EPOCHS:
        words.append(
            f"Static 8 has {static['metric']:.2f} in validation and {static['test_perplexity']:.2f} in the test; "
            f"published are {PUBLISHED['perplexity']} and {PUBLISHED['test_perplexity']}."
        )
    tested = [f"{p['plan']} {p['test_perplexity']:.2f}" for p in plans if p["test_perplexity"] is not None]
    return " ".join([*words, f"Test perplexities: {', '.join(tested)}." if tested else ""]).strip()


if __name__ == "__main__":
    in_sentences(main)
