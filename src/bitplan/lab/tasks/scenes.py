"""Images with objects in boxes, for detection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from bitplan.errors import TaskError
from bitplan.lab.tasks.images import PictureData, Pictures
from bitplan.lab.tasks.task import generator
from bitplan.numerics.wire_format import DIGIT_SCENE, HELD_OUT_SET, TRAINING_SET

#: Numbers of training and of held-out scenes of digits.
TRAINING_SCENES, HELD_OUT_SCENES = 10_000, 200
#: The sides of a digit, in pixels, and the number of digits of a scene.
_SIDES = (14, 28)
_DIGITS = (1, 4)
#: Attempts to place a digit before it is left out.
_TRIES = 20


@dataclass(frozen=True)
class Objects:
    """The objects of an image."""

    #: (objects, 4): left, top, right, bottom in pixels.
    boxes: Tensor
    labels: Tensor
    #: Difficult objects: neither finding nor missing them counts.
    difficult: Tensor

    def __post_init__(self) -> None:
        count = len(self.labels)
        if self.boxes.shape != (count, 4) or self.labels.shape != (count,) or self.difficult.shape != (count,):
            raise TaskError(f"{count} labels take as many boxes (of four edges each) and marks of difficulty.")

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, boxes: Sequence[Sequence[float]], labels: Sequence[int], difficult: Sequence[bool] = ()) -> Objects:
        """From Python numbers."""
        return cls(
            torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
            torch.tensor(labels, dtype=torch.long),
            torch.tensor(difficult or [False] * len(labels), dtype=torch.bool),
        )

    def mirrored(self, side: int) -> Objects:
        """Mirrored, in an image of that side."""
        left, top, right, bottom = self.boxes.unbind(1)
        return Objects(torch.stack([side - right, top, side - left, bottom], 1), self.labels, self.difficult)


class Scenes(ABC):
    """Square images of one size with their objects."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of images."""

    @abstractmethod
    def image(self, index: int) -> Tensor:
        """One image as bytes, (3, side, side)."""

    @abstractmethod
    def objects(self, index: int) -> Objects:
        """The objects of an image."""


@dataclass(frozen=True)
class SceneData:
    """A data set: training images, held-out images, and the names of the classes."""

    training: Scenes
    held_out: Scenes
    classes: Sequence[str]


class DigitScenes(Scenes):
    """Handwritten digits on noise: each scene is a function of the set's name and its index."""

    def __init__(self, digits: Pictures, name: str, count: int, side: int) -> None:
        self.digits, self.name, self.count, self.side = digits, name, count, side
        # Image and objects are requested one after the other, and held-out scenes at every evaluation.
        self._scene = lru_cache(maxsize=1024)(self._draw)

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> Tensor:
        return self._scene(index)[0]

    def objects(self, index: int) -> Objects:
        return self._scene(index)[1]

    def _draw(self, index: int) -> tuple[Tensor, Objects]:
        draws = generator(DIGIT_SCENE, self.name, index)

        def whole(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=draws))

        def share(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=draws))

        canvas = torch.full((self.side, self.side), share(0.0, 0.3))
        boxes: list[list[float]] = []
        labels: list[int] = []
        for _ in range(whole(*_DIGITS)):
            chosen, side, ink = whole(0, len(self.digits) - 1), min(whole(*_SIDES), self.side), share(0.5, 0.9)
            small = self.digits.take(torch.tensor([chosen]))[:, :1].float() / 16
            edges = _ink_edges(small[0, 0], side)
            for _ in range(_TRIES):
                left, top = whole(0, self.side - side), whole(0, self.side - side)
                box = [left + edges[0], top + edges[1], left + edges[2], top + edges[3]]
                if not any(_add_rows(box, other) for other in boxes):
                    digit = F.interpolate(small, (side, side), mode="bilinear", antialias=False)[0, 0]
                    place = canvas[top : top + side, left : left + side]
                    place += (ink - place).clamp(min=0) * digit
                    boxes.append(box)
                    labels.append(int(self.digits.labels[chosen]))
                    break
        canvas = canvas + share(0.02, 0.1) * torch.randn(canvas.shape, generator=draws)
        image = (canvas.clamp(0, 1) * 255).round().to(torch.uint8)
        return image.expand(3, -1, -1), Objects.of(boxes, labels)


def digit_scenes(digits: PictureData, side: int) -> SceneData:
    """Training scenes of training digits, and held-out scenes of digits by other writers."""
    return SceneData(
        DigitScenes(digits.training, TRAINING_SET, TRAINING_SCENES, side),
        DigitScenes(digits.held_out, HELD_OUT_SET, HELD_OUT_SCENES, side),
        digits.classes,
    )


def _ink_edges(digit: Tensor, side: int) -> list[float]:
    """Left, top, right and bottom of a digit's ink when it is drawn `side` pixels high and wide."""
    inked = digit > 0.25
    pixel = side / digit.shape[-1]
    columns, rows = (inked.any(dim).nonzero().flatten() for dim in (0, 1))
    return [float(edge) * pixel for edge in (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)]


def _add_rows(first: Sequence[float], second: Sequence[float]) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]
