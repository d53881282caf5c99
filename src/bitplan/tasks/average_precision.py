"""Mean average precision: the figure that detectors are judged by, as the VOC challenge defines it since 2010.

Detections of a class are gone through from the surest to the least sure, over all images. One that overlaps an object
of its image by half or more finds it, if nobody found it before; every other one is a mistake. Precision is the share
of finds so far, recall the share of objects found. Average precision is the area under the curve of precision over
recall, where precision counts as the best that is still to come at equal or higher recall. Its mean is over the classes
that have objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.tasks.boxes import overlaps
from bitplan.tasks.scenes import Objects

#: The least overlap of a find.
ENOUGH = 0.5


@dataclass(frozen=True)
class Detections:
    """What a detector says of an image."""

    boxes: Tensor
    labels: Tensor
    #: How sure it is of each.
    scores: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def mean_average_precision(told: Sequence[Detections], true: Sequence[Objects], classes: int) -> float:
    """mAP at an overlap of 0.5 over images, with what was told of each and what is in it; 0 where nothing is."""
    found = [average_precision(told, true, label) for label in range(classes)]
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known else 0.0


def average_precision(told: Sequence[Detections], true: Sequence[Objects], label: int) -> float | None:
    """The average precision of one class; None where no image has an object of it (difficult ones do not count)."""
    wanted = sum(int(((objects.labels == label) & ~objects.difficult).sum()) for objects in true)
    if not wanted:
        return None
    scores, finds = [], []
    for detections, objects in zip(told, true, strict=True):
        here = detections.labels == label
        order = detections.scores[here].argsort(descending=True, stable=True)
        scores += detections.scores[here][order].tolist()
        finds += _finds(detections.boxes[here][order], objects, label)
    surest = sorted((number for number in range(len(finds)) if finds[number] is not None), key=lambda n: -scores[n])
    hits = torch.tensor([float(bool(finds[number])) for number in surest], dtype=torch.float64)
    return _area(hits, wanted)


def _finds(boxes: Tensor, objects: Objects, label: int) -> list[bool | None]:
    """Of one image's detections, the surest first: whether each is a find; None where it does not count."""
    of_class = objects.labels == label
    if not bool(of_class.any()):
        return [False] * len(boxes)
    difficult = objects.difficult[of_class].tolist()
    most, nearest = overlaps(boxes, objects.boxes[of_class]).max(1)
    taken: set[int] = set()
    finds: list[bool | None] = []
    for overlap, place in zip(most.tolist(), nearest.tolist(), strict=True):
        if overlap < ENOUGH:
            finds.append(False)
        elif difficult[place]:
            finds.append(None)
        else:
            finds.append(place not in taken)
            taken.add(place)
    return finds


def _area(hits: Tensor, wanted: int) -> float:
    """Under precision over recall, of detections in order, each 1 for a find or 0."""
    if not len(hits):
        return 0.0
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    best_to_come = precision.flip(0).cummax(0).values.flip(0)
    # Recall rises by 1 / wanted at every find, and only there.
    return float((best_to_come * hits).sum()) / wanted
