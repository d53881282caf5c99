"""Cyclic precision in language modelling: Penn Treebank, one LSTM layer of 800, the published recipe in full.

    python experiments/ptb.py FOLDER --device cuda --compile --jobs 5     # the folder with ptb.train.txt.gz and so on
    python experiments/ptb.py FOLDER --device cuda --compile --jobs 5 --epochs 13
    python experiments/ptb.py FOLDER --quick                              # a rehearsal: a few tiny steps on a CPU

FP32, static 8, and the schedules CR, RR and ER between 5 and 8 bits, as Wolfe & Kyrillidis (arXiv 2403.02243) have it:
40 epochs of SGD at a learning rate of 20, a quarter of that wherever the validation perplexity did not fall, gradients
clipped to 0.25, 20 texts of 35 words at once, dropout 0.5. Input, recurrent and decoder products are quantised. Of
their static 8 they published a validation perplexity of 89.65 and a test perplexity of 85.59. Ours are those of the
last epoch.

Time on a GPU: an epoch is 1,327 steps. With CUDA graphs we expect 4 to 6 ms per step, so 4 to 5 minutes per run of 40
epochs, besides one or two minutes for compiling a layer that is unrolled over 35 words (once per process, and once more
for evaluation). Five processes in parallel take little longer only if they share the GPU (NVIDIA's MPS); taking turns,
20 minutes and more. Measure one epoch first: --epochs 1. With fewer than 40 epochs the recipe is not theirs, and FP32
is likely to miss its floor, which the results then report.

The same command resumes an interrupted experiment, and `bitplan report` draws the folder of the runs.
"""

from __future__ import annotations

from typing import Any

from common import Experiment, arguments, cyclic_study, in_sentences

RANGE = (5, 8)
SCHEDULES = ("CR", "RR", "ER")
STATIC = f"static {RANGE[1]}"
PUBLISHED = {"plan": STATIC, "perplexity": 89.65, "test_perplexity": 85.59}
EPOCHS, EPOCH = 40, 1327
#: The largest validation perplexity of FP32; above it, the runs were too short.
FLOOR = 92.0

QUICK = ("features=8", "length=4", "batch=4", "evaluation=2", "steps=3", "evaluate_every=3")


def main() -> None:
    parser = arguments(__doc__, seeds=1, data="the folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt (or .gz)")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--plans", nargs="+", metavar="PLAN", help="only these, such as FP32 CR (default: all)")
    experiment = Experiment("ptb", parser.parse_args())
    epochs, plan_names = experiment.options.epochs, experiment.options.plans or ("FP32", STATIC, *SCHEDULES)
    study = cyclic_study(
        *(experiment, f"{epochs} epochs", "ptb", [f"data={experiment.options.data}"]),
        experiment.settings((f"steps={epochs * EPOCH}", f"evaluate_every={EPOCH}"), QUICK),
        names=SCHEDULES,
        bits=RANGE,
        floor=FLOOR,
        of="the validation text, after the last epoch",
        is_included=lambda label: label in plan_names,
    )
    tested(study, epochs)
    experiment.write([study], published=PUBLISHED)
    experiment.conclude([study], "perplexity")


def tested(study: dict[str, Any], epochs: int) -> None:
    """Add test perplexities to plans and to the reading, with the published ones."""
    for plan in study["plans"]:
        perplexities = [
            metrics["test_perplexity"] for metrics in plan["metrics"].values() if "test_perplexity" in metrics
        ]
        plan["test_perplexity"] = sum(perplexities) / len(perplexities) if perplexities else None
    records = {plan["plan"]: plan for plan in study["plans"] if plan["test_perplexity"] is not None}
    if study["short_run"] or not records:
        return
    sentences = [study["reading"]]
    figures = [f"{name} {plan['test_perplexity']:.2f}" for name, plan in records.items()]
    sentences.append(f"Test: {', '.join(figures)}.")
    if STATIC in records and epochs == EPOCHS:
        sentences.append(
            f"Static 8 has {records[STATIC]['metric']:.2f} in validation and "
            f"{records[STATIC]['test_perplexity']:.2f} in the test; published are {PUBLISHED['perplexity']} and "
            f"{PUBLISHED['test_perplexity']}."
        )
    study["reading"] = " ".join(sentences)


if __name__ == "__main__":
    in_sentences(main)
