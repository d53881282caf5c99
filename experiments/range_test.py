"""The two published outcomes of the range test: 3 bits for a deep ResNet, 4 for MobileNet-v2, on CIFAR.

    python experiments/range_test.py cifar10_jpeg_pack.npz --device cuda
    python experiments/range_test.py digits --models mobilenet-v2 --seeds 1 --set width=0.25 --set batch=32 --window 20
    python experiments/range_test.py cifar10_jpeg_pack.npz --quick          # a rehearsal: a few tiny steps on a CPU

Fu et al. 2021 (arXiv 2101.09868) find 3 bits for ResNet-152 and 4 for MobileNet-v2 on CIFAR-100; their code has neither
window nor threshold. Here: ResNet-74 and MobileNet-v2 on CIFAR-10 (a pack of JPEGs, see cifar_pack.py, or a folder with
CIFAR-10's own files), with the window and threshold of `bitplan range-test`. A seed is a test of its own. `digits` in
the place of the file takes the handwritten digits that come with bitplan: a smaller task for a CPU.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from cifar import data_of
from common import Experiment, arguments, in_sentences

from bitplan.cli.schedules import read_bits
from bitplan.lab.task_planners import range_test_of_task
from bitplan.lab.tasks.registry import find_task
from bitplan.planners.range_test import THRESHOLD, WINDOW

#: Model -> its recipe, and the published bound.
STUDIES = {
    "resnet74": (("batch=128",), 3),
    "mobilenet-v2": (("batch=128", "lr=0.03"), 4),
    "resnet38": (("batch=128",), 3),  # smaller; not by default
}
QUICK = ("width=0.25", "batch=8")
DIGITS = "digits"


def main() -> None:
    parser = arguments(__doc__, seeds=3, data=f"a .npz pack of JPEGs, a folder with CIFAR-10's files, or {DIGITS}")
    parser.add_argument("--bits", default="2-8", metavar="LOW-HIGH", help="the widths to try")
    parser.add_argument("--window", type=int, default=WINDOW, help="steps for each width")
    parser.add_argument("--models", nargs="+", choices=STUDIES, default=[*STUDIES][:2])
    experiment = Experiment("range_test", parser.parse_args())
    studies: list[dict[str, Any]] = []
    for model in experiment.options.models:
        studies.append(studied(experiment, model))
        experiment.write(studies, threshold=THRESHOLD)
    for study in studies:
        print(study["reading"])
    print(f"All of it is in {experiment.out}.")


def studied(experiment: Experiment, model: str) -> dict[str, Any]:
    """The bound of a model with each seed."""
    options = experiment.options
    task_name, place = (DIGITS, []) if options.data == DIGITS else data_of(experiment)
    recipe, published = STUDIES[model]
    settings = [f"model={model}", *experiment.settings(recipe, QUICK)]
    low, high = read_bits(options.bits)
    tests = []
    for seed in experiment.seeds:
        began = time.monotonic()
        task = find_task(task_name, [*place, *settings], seed)
        window = 4 if options.quick else options.window
        result = range_test_of_task(task, device=options.device, low=low, high=high, window=window)
        tests.append({"plan": f"seed {seed}", **result.to_dict(), "seconds": time.monotonic() - began})
        print(f"  {model}, seed {seed}: {result.reason}", flush=True)
    bounds = [test["low"] for test in tests]
    known = [bound for bound in bounds if bound is not None]
    median = statistics.median_low(known) if known else None
    return {
        "study": model,
        "task": task_name if task_name == DIGITS else "CIFAR-10",
        "settings": settings,
        "bits": [low, high],
        "published": published,
        "bounds": bounds,
        "bound": median,
        "reading": reading(model, bounds, median, published),
        "plans": tests,
    }


def reading(model: str, bounds: list[int | None], median: int | None, published: int) -> str:
    found = ", ".join("none" if bound is None else str(bound) for bound in bounds)
    verdict = "no bound" if median is None else "as published" if median == published else f"not {published}"
    return f"{model}: bounds {found} (one of each seed); published {published}: {verdict}."


if __name__ == "__main__":
    in_sentences(main)
