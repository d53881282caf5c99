"""Boxes of images: left, top, right and bottom edge in pixels, the last dimension of every tensor here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: What offsets are divided by, so that they are about 1 (Girshick 2015, arXiv 1504.08083).
_DEVIATIONS = (0.1, 0.1, 0.2, 0.2)
#: No box is told to be larger than its anchor by more than this factor: exp() of an untrained output must stay finite.
_LARGEST_GROWTH = math.log(1000 / 16)


def areas(boxes: Tensor) -> Tensor:
    """Of each box; 0 where its edges cross."""
    width, height = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).unbind(-1)
    return width * height


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Intersection over union of each box in `one` (n, 4) with each in `other` (m, 4): (n, m).

    >>> overlaps(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[0.0, 0, 2, 2], [1, 0, 3, 2], [5, 5, 6, 6]]))
    tensor([[1.0000, 0.3333, 0.0000]])
    """
    first = torch.maximum(one[:, None, :2], other[None, :, :2])
    last = torch.minimum(one[:, None, 2:], other[None, :, 2:])
    common = areas(torch.cat([first, last], -1))
    union = areas(one)[:, None] + areas(other)[None] - common
    return torch.where(union > 0, common / union, 0.0)


def offsets_to(boxes: Tensor, anchors: Tensor) -> Tensor:
    """How far each box is from its anchor: the middle in the anchor's sides, the sides as logarithms of their ratio."""
    box_middle, box_side = _middle_and_side(boxes)
    middle, side = _middle_and_side(anchors)
    told = torch.cat([(box_middle - middle) / side, (box_side / side).log()], -1)
    return told / told.new_tensor(_DEVIATIONS)


def moved_by(offsets: Tensor, anchors: Tensor) -> Tensor:
    """The boxes that lie at those offsets: the inverse of :func:`offsets_to`."""
    middle, side = _middle_and_side(anchors)
    told = offsets * offsets.new_tensor(_DEVIATIONS)
    new_middle = middle + told[..., :2] * side
    half = side * told[..., 2:].clamp(max=_LARGEST_GROWTH).exp() / 2
    return torch.cat([new_middle - half, new_middle + half], -1)


def kept_of(boxes: Tensor, labels: Tensor, most: float) -> Tensor:
    """Which of the boxes, best first, stay (a mask): a better one of equal label that overlaps more takes one away.

    A box that was itself taken away takes none. Greedy suppression decides from the best to the worst; here all are
    decided at once, again and again until nothing changes. A box's fate is right as soon as those of all better ones
    are, so the end is the greedy one, after as many rounds as the longest chain of boxes has.
    """
    rivals = (overlaps(boxes, boxes) > most) & (labels[:, None] == labels[None])
    rivals = rivals.triu(diagonal=1)  # row: the better one
    kept = torch.ones_like(labels, dtype=torch.bool)
    while True:
        now = ~(rivals & kept[:, None]).any(0)
        if torch.equal(now, kept):
            return kept
        kept = now


def _middle_and_side(boxes: Tensor) -> tuple[Tensor, Tensor]:
    first, last = boxes[..., :2], boxes[..., 2:]
    return (first + last) / 2, last - first
