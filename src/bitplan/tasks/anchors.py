"""The boxes that a detector moves, and what it ought to say of each where the objects of an image are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bitplan.models.retinanet import level_grids
from bitplan.tasks.boxes import offsets_to, overlaps
from bitplan.tasks.scenes import Objects

#: Sides of a cell's anchors in those of the smallest, and height over width.
SCALES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))
RATIOS = (0.5, 1.0, 2.0)
IN_CELL = len(SCALES) * len(RATIOS)

#: What an anchor's label is where it is no class's.
BACKGROUND, IGNORED = -1, -2
#: An anchor is an object's from this overlap on, and background below the other one; between them it does not count.
_OBJECT_FROM, _BACKGROUND_BELOW = 0.5, 0.4


@dataclass(frozen=True)
class Wanted:
    """What to say of an image's anchors; of those that it does not name, that they are background."""

    places: Tensor
    #: A class, or :data:`IGNORED`.
    labels: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class Anchors:
    """Those of square images, in the order of :class:`bitplan.models.retinanet.Head`'s outputs."""

    side: int
    levels: int
    #: The side of the smallest anchor of a cell, in the cell's.
    smallest: float

    @cached_property
    def boxes(self) -> Tensor:
        """(anchors, 4)."""
        with torch.device("cpu"):  # where only shapes are asked for, models are made on another device
            return torch.cat([self._of_level(*grid) for grid in level_grids(self.side, self.levels)])

    def _of_level(self, stride: int, cells: int) -> Tensor:
        places = (torch.arange(cells) + 0.5) * stride
        middle = torch.stack([places.expand(cells, cells), places[:, None].expand(cells, cells)], -1)[:, :, None]
        sides = [(scale / ratio**0.5, scale * ratio**0.5) for scale in SCALES for ratio in RATIOS]
        half = torch.tensor(sides) * stride * self.smallest / 2
        return torch.cat([middle - half, middle + half], -1).view(-1, 4)

    def wanted(self, objects: Objects) -> Wanted:
        """What to say of an image with these objects.

        Every object has at least the anchor that overlaps it most, however little that is. Difficult objects are
        neither to be found nor background.
        """
        if not len(objects):
            return Wanted(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0, 4))
        overlap = overlaps(self.boxes, objects.boxes)
        most, nearest = overlap.max(1)
        best_of_object, best_anchor = overlap.max(0)
        served = best_of_object > 0
        nearest[best_anchor[served]] = torch.arange(len(objects))[served]
        found = most >= _OBJECT_FROM
        found[best_anchor[served]] = True
        places = (found | (most >= _BACKGROUND_BELOW)).nonzero().flatten()
        nearest, found = nearest[places], found[places] & ~objects.difficult[nearest[places]]
        return Wanted(
            places,
            torch.where(found, objects.labels[nearest], IGNORED),
            offsets_to(objects.boxes[nearest], self.boxes[places]),
        )

    def stacked(self, wanted: Sequence[Wanted]) -> tuple[Tensor, Tensor]:
        """What to say of a batch: labels (batch, anchors) and offsets (batch, anchors, 4), however many objects."""
        labels = torch.full((len(wanted), len(self.boxes)), BACKGROUND)
        offsets = torch.zeros(len(wanted), len(self.boxes), 4)
        for number, each in enumerate(wanted):
            labels[number, each.places] = each.labels
            offsets[number, each.places] = each.offsets
        return labels, offsets
