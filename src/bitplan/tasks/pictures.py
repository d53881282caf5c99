"""Sets of labelled images: what a task reads its batches from, and what is done to an image on the way."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bitplan.errors import TaskError
from bitplan.tasks.draws import generator

#: The last so many of the digits are held out: other hands wrote them.
DIGITS_HELD_OUT = 360


class Pictures(ABC):
    """Images of one size, three bytes a pixel, with their labels."""

    labels: Tensor

    @abstractmethod
    def take(self, indices: Tensor) -> Tensor:
        """These images as bytes, (count, 3, height, width)."""

    def __len__(self) -> int:
        return len(self.labels)


class StoredPictures(Pictures):
    """Images that lie in memory. Grey ones have one channel there and are given out with three."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3):
            raise TaskError(f"images are bytes (count, 1 or 3, height, width), not {images.dtype} {[*images.shape]}.")
        if len(images) != len(labels) or not len(images):
            raise TaskError(f"{len(images)} images and {len(labels)} labels do not make a set: each image has one.")
        self.images = images
        self.labels = labels.long()

    def take(self, indices: Tensor) -> Tensor:
        return self.images.index_select(0, indices).expand(-1, 3, -1, -1)


@dataclass(frozen=True)
class PictureData:
    """A data set: what is trained on, what is held out, and the names of the classes."""

    training: Pictures
    held_out: Pictures
    classes: Sequence[str]

    def __post_init__(self) -> None:
        for part in (self.training, self.held_out):
            largest = int(part.labels.max())
            if largest >= len(self.classes) or int(part.labels.min()) < 0:
                raise TaskError(
                    f"a label is {largest}, but there are {len(self.classes)} classes: this is another set."
                )


def digits() -> PictureData:
    """The 1,797 handwritten digits that come with bitplan (see tasks/data/DIGITS.md for their source)."""
    with (files("bitplan") / "tasks" / "data" / "digits.npz").open("rb") as file:
        try:
            stored = np.load(file, allow_pickle=False)
            images, labels = stored["images"], stored["labels"]
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise TaskError("bitplan's digits.npz is damaged: install bitplan again.") from error
    pictures, names = torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)
    return PictureData(
        StoredPictures(pictures[:-DIGITS_HELD_OUT], names[:-DIGITS_HELD_OUT]),
        StoredPictures(pictures[-DIGITS_HELD_OUT:], names[-DIGITS_HELD_OUT:]),
        [str(digit) for digit in range(10)],
    )


@dataclass(frozen=True)
class Normalisation:
    """Bytes to floats of mean 0 and variance 1, channel by channel."""

    mean: Tensor
    deviation: Tensor

    #: Enough images to know two numbers a channel, and few enough for a folder whose images are read one by one.
    SAMPLE = 10_000

    @classmethod
    def of(cls, pictures: Pictures) -> Normalisation:
        """From the training images, or from :data:`SAMPLE` of them spread over the set."""
        step = max(1, len(pictures) // cls.SAMPLE)
        total = squares = torch.zeros(3, dtype=torch.float64)
        count = 0
        for first in range(0, len(pictures), 1000 * step):
            part = torch.arange(first, min(first + 1000 * step, len(pictures)), step)
            values = pictures.take(part).double()
            total = total + values.sum((0, 2, 3))
            squares = squares + values.square().sum((0, 2, 3))
            count += values.numel() // 3
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        # A channel of one colour throughout has nothing to say, and must not be divided by zero.
        return cls(*(each.float().view(3, 1, 1) for each in (mean, torch.where(deviation > 0, deviation, 1.0))))

    def __call__(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean) / self.deviation


def moved_and_mirrored(images: Tensor, pad: int, mirror: bool, seed: int, step: int) -> Tensor:
    """Each image cut out of itself with `pad` black pixels around, and mirrored or not: a function of seed and step."""
    draws = generator("augmentation", seed, step)
    count, _, height, width = images.shape
    if pad:
        down, right = torch.randint(2 * pad + 1, (2, count), generator=draws)
        # All windows as one view, of which whole images are taken: four times as fast as pixels by their indices.
        windows = F.pad(images, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
        images = windows[torch.arange(count), :, down, right]
    if mirror:
        mirrored = (torch.rand(count, generator=draws) < 0.5).nonzero().squeeze(1)
        images = images.index_copy(0, mirrored, images[mirrored].flip(-1))
    return images
