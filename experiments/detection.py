"""Cyclic precision in object detection: RetinaNet on an image set in VOC's layout, from scratch.

    python experiments/detection.py bccd_voc.tar --device cuda --compile
    python experiments/detection.py bccd_voc.tar --quick          # a rehearsal: a few tiny steps on a CPU

FP32, 8 bits throughout, a static plan that costs what CR costs, and the schedules CR, RR and ER between 5 and 8 bits
(the range of Wolfe & Kyrillidis for detection, arXiv 2403.02243), each with two seeds. Every convolution is quantised,
those of the pyramid and the heads, too. Training is from scratch, where the papers fine-tune from ImageNet; with
weights at hand, --set weights=resnet18.safetensors --set norm=frozen --set width=1 does as they do.

The same command resumes an interrupted experiment, and `bitplan report` draws its folder.
"""

from __future__ import annotations

from pathlib import Path

from common import Experiment, arguments, cyclic_study, in_sentences

RANGE = (5, 8)
SCHEDULES = ("CR", "RR", "ER")
#: The least mAP of FP32; below it, the runs were too short for conclusions.
FLOOR = 0.65

RECIPE = ("size=256", "width=0.5", "levels=4", "anchor=2", "batch=16", "steps=1200", "warmup=100", "evaluate_every=400")
QUICK = (
    "size=64",
    "width=0.25",
    "levels=3",
    "head=1",
    "anchor=1",
    "batch=4",
    "steps=4",
    "warmup=0",
    "evaluate_every=4",
)


def main() -> None:
    parser = arguments(__doc__, seeds=2, data="a folder or a .tar with JPEGImages, Annotations and ImageSets")
    experiment = Experiment("detection", parser.parse_args())
    data = experiment.options.data
    study = cyclic_study(
        *(experiment, Path(data).stem, "voc", [f"data={data}"], experiment.settings(RECIPE, QUICK)),
        names=SCHEDULES,
        bits=RANGE,
        floor=FLOOR,
        of="held-out images, after the last step",
    )
    experiment.write([study])
    experiment.conclude([study], "mAP")


if __name__ == "__main__":
    in_sentences(main)
