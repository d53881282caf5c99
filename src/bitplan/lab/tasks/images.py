"""Image classification: one task for every set of labelled images."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from bitplan.errors import TaskError, nearest_names
from bitplan.lab.models.resnet import cifar_resnet, imagenet_resnet, preactivated_resnet, resnet18
from bitplan.lab.models.small_cnns import MobileNetV2, ShuffleNetV2, SqueezeNet
from bitplan.lab.tasks.task import DECAYS, DecayedRate, LoadingTask, Metric, Settings, fused_for, generator, shuffled
from bitplan.numerics.wire_format import AUGMENTATION

# --- Sets of labelled images, normalisation and augmentation


#: The number of held-out digits, the last ones: other writers wrote them.
DIGITS_HELD_OUT = 360


class Pictures(ABC):
    """Images of one size, three bytes per pixel, with their labels."""

    labels: Tensor

    @abstractmethod
    def take(self, indices: Tensor) -> Tensor:
        """These images as bytes, (count, 3, height, width)."""

    def __len__(self) -> int:
        return len(self.labels)


class StoredPictures(Pictures):
    """Images in memory. Grey ones are stored with one channel and returned with three."""

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
    """A data set: training images, held-out images, and the names of the classes."""

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
    with (files("bitplan.lab") / "tasks" / "data" / "digits.npz").open("rb") as file:
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
    """Normalises bytes to floats of mean 0 and variance 1 per channel."""

    mean: Tensor
    deviation: Tensor

    #: Enough images for two statistics per channel, and few enough for a folder whose images are read one by one.
    SAMPLE = 10_000

    @classmethod
    def of(cls, pictures: Pictures) -> Normalisation:
        """Of the training images, or of :data:`SAMPLE` of them spread over the set."""
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
        # A constant channel has no variance, and must not be divided by zero.
        return cls(
            *(statistic.float().view(3, 1, 1) for statistic in (mean, torch.where(deviation > 0, deviation, 1.0)))
        )

    def __call__(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean) / self.deviation


def moved_and_mirrored(images: Tensor, pad: int, mirror: bool, seed: int, step: int) -> Tensor:
    """A random crop of each image with `pad` black pixels around, randomly mirrored: a function of seed and step."""
    draws = generator(AUGMENTATION, seed, step)
    count, _, height, width = images.shape
    if pad:
        down, right = torch.randint(2 * pad + 1, (2, count), generator=draws)
        # All windows as one view, indexed by whole images: four times as fast as indexing pixels.
        windows = F.pad(images, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
        images = windows[torch.arange(count), :, down, right]
    if mirror:
        mirrored = (torch.rand(count, generator=draws) < 0.5).nonzero().squeeze(1)
        images = images.index_copy(0, mirrored, images[mirrored].flip(-1))
    return images


#: Name -> constructor of the network; each takes classes= and width=. Names are those of ``bitplan sites``.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(cifar_resnet, depth) for depth in (8, 14, 20, 38, 56, 74, 110, 152)},
    "resnet164": partial(preactivated_resnet, 164),
    "resnet18": resnet18,
    "mobilenet-v2": MobileNetV2,
    "squeezenet": SqueezeNet,
    "shufflenet-v2": ShuffleNetV2,
    "resnet18-imagenet": partial(imagenet_resnet, 18),
    "resnet34-imagenet": partial(imagenet_resnet, 34),
    "resnet50": partial(imagenet_resnet, 50),
}


@dataclass(frozen=True)
class ImageSettings(Settings):
    """Settings of image classification; the defaults are the CIFAR recipe of arXiv 2101.09868."""

    steps: int = 64_000
    evaluate_every: int = 1000
    #: A network: resnet20, resnet74, resnet18, mobilenet-v2, ...
    model: str = "resnet20"
    #: Multiplier of its channels.
    width: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    #: The decay of the learning rate: steps (a tenth at 50 % and again at 75 %), cosine or constant.
    decay: str = "steps"
    #: Warm-up steps of the learning rate.
    warmup: int = 0
    #: Shift images by up to this many pixels.
    pad: int = 4
    #: Mirror half of the images.
    mirror: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("model", NETWORKS), ("decay", DECAYS)):
            if getattr(self, name) not in choices:
                wrong = getattr(self, name)
                raise TaskError(f"there is no {name} {wrong!r}; {nearest_names(wrong, choices)}")
        if not self.width > 0:
            raise TaskError(f"width is {self.width}; it must be above 0.")
        if not 0 <= self.momentum < 1:
            raise TaskError(f"momentum is {self.momentum}; it must be at least 0 and below 1.")
        for name in ("weight_decay", "pad", "warmup"):
            if not getattr(self, name) >= 0:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 0.")


class ImageClassification(DecayedRate, LoadingTask[PictureData]):
    """Image classification; a data set derives from this and loads its data."""

    settings_class: ClassVar[type[ImageSettings]] = ImageSettings
    settings: ImageSettings

    @property
    def classes(self) -> int:
        return len(self.data.classes)

    @cached_property
    def normalisation(self) -> Normalisation:
        return Normalisation.of(self.data.training)

    @cached_property
    def metric(self) -> Metric:
        """Accuracy on held-out images; the trivial predictor always answers the most common class in training."""
        commonest = torch.bincount(self.data.training.labels).argmax()
        hits = (self.data.held_out.labels == commonest).double().mean()
        return Metric("accuracy", "higher", float(hits))

    def model(self) -> nn.Module:
        return NETWORKS[self.settings.model](classes=self.classes, width=self.settings.width)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        pictures = self.data.training
        chosen = shuffled(step, self.settings.batch, len(pictures), self.seed)
        images = pictures.take(chosen)
        images = moved_and_mirrored(images, self.settings.pad, self.settings.mirror, self.seed, step)
        return self.normalisation(images), pictures.labels[chosen]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def optimizer(self, model: nn.Module) -> Optimizer:
        recipe = self.settings
        trained = list(model.parameters())
        return SGD(trained, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, fused=fused_for(trained))

    def epoch(self) -> int:
        """Batches per epoch."""
        return -(-len(self.data.training) // self.settings.batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        pictures, size = self.data.held_out, self.settings.batch
        hits = losses = 0.0
        for first in range(0, len(pictures), size):
            count = min(size, len(pictures) - first)
            # A short last batch is filled up with its own images: one shape for compiled models, and
            # unchanged batch scales.
            chosen = first + torch.arange(size) % count
            logits = model(self.normalisation(pictures.take(chosen)).to(device))[:count].float()
            labels = pictures.labels[first : first + count].to(device)
            hits += float((logits.argmax(1) == labels).sum())
            losses += float(F.cross_entropy(logits, labels, reduction="sum"))
        return {"accuracy": hits / len(pictures), "validation_loss": losses / len(pictures)}


@dataclass(frozen=True)
class DigitsSettings(ImageSettings):
    """A quick recipe: a few seconds on one CPU core."""

    steps: int = 300
    evaluate_every: int = 50
    model: str = "resnet8"
    decay: str = "cosine"
    weight_decay: float = 5e-4
    pad: int = 1
    mirror: bool = False  # a mirrored digit is not a digit


class Digits(ImageClassification):
    """Handwritten digits, 8x8 pixels: the quick task without a download."""

    name = "digits"
    summary = "handwritten digits, 8x8 pixels"
    settings_class = DigitsSettings

    def load(self) -> PictureData:
        return digits()
