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

from common import Experiment, arguments, cyclic_study, in_sentences

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
    epochs, wanted = experiment.asked.epochs, experiment.asked.plans or ("FP32", STATIC, *SCHEDULES)
    study = cyclic_study(
        *(experiment, f"{epochs} epochs", "ptb", [f"data={experiment.asked.data}"]),
        experiment.settings((f"steps={epochs * EPOCH}", f"evaluate_every={EPOCH}"), QUICK),
        names=SCHEDULES,
        bits=RANGE,
        floor=FLOOR,
        of="the validation text, after the last epoch",
        wanted=lambda label: label in wanted,
    )
    tested(study, epochs)
    experiment.write([study], published=PUBLISHED)
    experiment.conclude([study], "perplexity")


def tested(study: dict[str, Any], epochs: int) -> None:
    """Add test perplexities to plans and to the reading, and what was published."""
    for plan in study["plans"]:
        found = [each["test_perplexity"] for each in plan["metrics"].values() if "test_perplexity" in each]
        plan["test_perplexity"] = sum(found) / len(found) if found else None
    known = {plan["plan"]: plan for plan in study["plans"] if plan["test_perplexity"] is not None}
    if study["short_run"] or not known:
        return
    words = [study["reading"]]
    figures = [f"{name} {plan['test_perplexity']:.2f}" for name, plan in known.items()]
    words.append(f"Test: {', '.join(figures)}.")
    if STATIC in known and epochs == EPOCHS:
        words.append(
            f"Static 8 has {known[STATIC]['metric']:.2f} in validation and {known[STATIC]['test_perplexity']:.2f} in "
            f"the test; published are {PUBLISHED['perplexity']} and {PUBLISHED['test_perplexity']}."
        )
    study["reading"] = " ".join(words)


if __name__ == "__main__":
    in_sentences(main)
