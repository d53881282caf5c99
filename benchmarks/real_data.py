"""Real data for a target whose own batch is random: bitplan's built-in data in the shape of the batch.

Enough to compare variants of training the same model; not the data that the model was made for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bitplan.analysis.targets import Target
from bitplan.lab.sources.texts import library_text
from bitplan.lab.tasks.images import Normalisation, digits, moved_and_mirrored
from bitplan.lab.tasks.task import generator, shuffled
from bitplan.lab.tasks.tokens import tokenised
from bitplan.numerics.wire_format import WINDOWS


class Stream(ABC):
    """Batches in a target's shape, as a pure function of the step."""

    #: The name of the data, for the head of a result.
    description: str

    @abstractmethod
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, on the target's device."""


class DigitStream(Stream):
    """The built-in handwritten digits, shifted by a pixel and enlarged to the size of the images."""

    def __init__(self, images: Tensor, seed: int) -> None:
        self.pictures = digits().training
        self.scaled = Normalisation.of(self.pictures)
        self.like = images
        self.seed = seed
        size = f"{images.shape[-2]}x{images.shape[-1]}"
        self.description = f"bitplan's {len(self.pictures)} handwritten digits, enlarged from 8x8 to {size}"

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        like = self.like
        chosen = shuffled(step, len(like), len(self.pictures), self.seed)
        small = moved_and_mirrored(self.pictures.take(chosen), 1, mirror=False, seed=self.seed, step=step)
        there = self.scaled(small).to(like.device, non_blocking=True)
        images = F.interpolate(there, size=like.shape[-2:], mode="bilinear")
        channels_last = like.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if channels_last and not like.is_contiguous() else torch.contiguous_format
        labels = self.pictures.labels[chosen].to(like.device, non_blocking=True)
        return images.to(like.dtype, memory_format=layout), labels


class TextStream(Stream):
    """Windows of the Python standard library's sources, byte by byte."""

    description = "the bytes of the Python standard library's sources"

    def __init__(self, tokens: Tensor, seed: int, part: slice = slice(None)) -> None:
        """`part`: the range of the text from which windows are taken."""
        self.text = tokenised(library_text(), "bytes", 256)[1][part]
        self.like = tokens
        self.seed = seed

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        count, length = self.like.shape
        firsts = torch.randint(len(self.text) - length, (count,), generator=generator(WINDOWS, self.seed, step))
        windows = self.text[firsts[:, None] + torch.arange(length + 1)].to(self.like.device, non_blocking=True)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def stream_for(target: Target, seed: int = 0) -> Stream | None:
    """Real data in the shape of the target's batch; None if there is none."""
    batch: Any = target.batch
    if target.loss is None or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return None
    inputs, expected = batch
    if not isinstance(inputs, Tensor) or not isinstance(expected, Tensor) or expected.dtype != torch.int64:
        return None
    if inputs.dim() == 4 and inputs.shape[1] == 3 and expected.dim() == 1:
        return DigitStream(inputs, seed)
    if inputs.dim() == 2 and inputs.dtype == torch.int64 and expected.shape == inputs.shape:
        return TextStream(inputs, seed)
    return None
