"""Cyclic precision on CIFAR-10: ResNet-20, all ten schedules between 3 and 8 bits.

    python experiments/cifar.py cifar10_jpeg_pack.npz --device cuda --compile --jobs 3
    python experiments/cifar.py cifar10_jpeg_pack.npz --device cuda --compile --jobs 3 --long
    python experiments/cifar.py cifar10_jpeg_pack.npz --quick          # a rehearsal: a few tiny steps on a CPU

The images are a pack of JPEGs (see cifar_pack.py) or a folder with CIFAR-10's own files. FP32, static 8, static 6, a
static plan that costs what CR costs, and the ten schedules of Wolfe & Kyrillidis (arXiv 2403.02243), 8,000 iterations
of 128 images with three seeds each; their recipe otherwise, which has 64,000 iterations of a deeper network.
Whether groups of schedules that cost more are better is a Jonckheere-Terpstra test; also Pearson's correlation of cost
with accuracy, and the balanced schedules less the static plan of their cost, paired by seed. --long adds 24,000
iterations of FP32, static 8, CR and RR with one seed.

Compiled, all rounded plans share one graph, so each process compiles twice: FP32, and the rest. At 3 ms per iteration
on a GPU, with processes taking turns: 42 runs of 24 s, 17 minutes, and 5 more for --long. If processes share the GPU
(NVIDIA's MPS: `nvidia-cuda-mps-control -d` beforehand), four of them should take 5 to 7 minutes.

The same command resumes an interrupted experiment, and `bitplan report` draws the folders of the runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common import CIFAR_PACK, Experiment, arguments, cyclic_study, in_sentences

from bitplan.plans.schedules import TEN

RANGE = (3, 8)
#: The least accuracies of FP32; below them, the runs were too short for conclusions.
FLOOR, LONGER_FLOOR = 0.83, 0.86

RECIPE = ("model=resnet20", "batch=128", "steps=8000", "evaluate_every=8000")
LONGER = (*RECIPE, "steps=24000", "evaluate_every=8000")
QUICK = ("width=0.25", "model=resnet8", "batch=16", "steps=4", "evaluate_every=4")
FEW = ("CR", "RR")
OF = "held-out images, after the last iteration"


def main() -> None:
    parser = arguments(__doc__, seeds=3, data="a .npz pack of JPEGs, or a folder with CIFAR-10's files")
    parser.add_argument("--long", action="store_true", help="also 24,000 iterations of FP32, static 8, CR and RR")
    experiment = Experiment("cifar", parser.parse_args())
    task, place = data_of(experiment)
    names = FEW if experiment.options.quick else tuple(TEN)
    recipe = experiment.settings(RECIPE, QUICK)
    studies = [
        cyclic_study(
            *(experiment, "all ten", task, place, recipe),
            names=names,
            bits=RANGE,
            static=(8, 6),
            equal_to=FEW if experiment.options.quick else ("RR", "CR", "ER"),
            floor=FLOOR,
            of=OF,
        )
    ]
    experiment.write(studies)
    if experiment.options.long and not experiment.is_late:
        studies.append(
            cyclic_study(
                *(replace(experiment, most_seeds=1), "longer", task, place, experiment.settings(LONGER, QUICK)),
                names=FEW,
                bits=RANGE,
                floor=LONGER_FLOOR,
                of=OF,
                is_included=lambda label: not label.startswith("static at"),
            )
        )
        experiment.write(studies)
    experiment.conclude(studies, "accuracy")


def data_of(experiment: Experiment) -> tuple[str, list[str]]:
    """The task that reads the given data, and the settings of its location."""
    data = experiment.options.data
    if Path(data).is_dir():
        return "cifar10", [f"data={data}"]
    return CIFAR_PACK, [f"data={data}", *(["most=64"] if experiment.options.quick else [])]


if __name__ == "__main__":
    in_sentences(main)
