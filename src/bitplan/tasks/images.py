"""Image classification: one task for every set of labelled images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from bitplan.errors import TaskError, nearest_names
from bitplan.models.mobilenet import MobileNetV2
from bitplan.models.resnet import cifar_resnet, imagenet_resnet, resnet18
from bitplan.models.shufflenet import ShuffleNetV2
from bitplan.models.squeezenet import SqueezeNet
from bitplan.tasks.decay import DECAYS, decayed
from bitplan.tasks.draws import shuffled
from bitplan.tasks.loading import LoadingTask
from bitplan.tasks.optimizing import fused_for
from bitplan.tasks.pictures import Normalisation, PictureData, digits, moved_and_mirrored
from bitplan.tasks.task import Metric, Settings

#: Name -> what makes the network; each takes classes= and width=. Names are those of ``bitplan sites``.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(cifar_resnet, depth) for depth in (8, 14, 20, 38, 56, 74, 110, 152)},
    "resnet18": resnet18,
    "mobilenet-v2": MobileNetV2,
    "squeezenet": SqueezeNet,
    "shufflenet-v2": ShuffleNetV2,
    "resnet18-imagenet": partial(imagenet_resnet, 18),
    "resnet50": partial(imagenet_resnet, 50),
}


@dataclass(frozen=True)
class ImageSettings(Settings):
    """What ``--set`` may change of an image classification; the defaults are the CIFAR recipe of arXiv 2101.09868."""

    steps: int = 64_000
    evaluate_every: int = 1000
    #: A network: resnet20, resnet74, resnet18, mobilenet-v2, ...
    model: str = "resnet20"
    #: Its channels, times this.
    width: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    #: How the learning rate falls: steps (a tenth at 50 % and again at 75 %), cosine or constant.
    decay: str = "steps"
    #: Steps over which the learning rate rises from 0 to its peak first.
    warmup: int = 0
    #: Move images by up to so many pixels.
    pad: int = 4
    #: Mirror every other image.
    mirror: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("model", NETWORKS), ("decay", DECAYS)):
            if getattr(self, name) not in known:
                wrong = getattr(self, name)
                raise TaskError(f"there is no {name} {wrong!r}; {nearest_names(wrong, known)}")
        if not self.width > 0:
            raise TaskError(f"width is {self.width}; it must be above 0.")
        if not 0 <= self.momentum < 1:
            raise TaskError(f"momentum is {self.momentum}; it must be at least 0 and below 1.")
        for name in ("weight_decay", "pad", "warmup"):
            if not getattr(self, name) >= 0:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 0.")


class ImageClassification(LoadingTask[PictureData]):
    """Tell an image's class. A set of images derives from this and says where its data come from."""

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
        """Accuracy on held-out images; the trivial predictor always says the class commonest in training."""
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

    def learning_rate(self, step: int) -> float:
        recipe = self.settings
        return decayed(recipe.decay, step, recipe.steps, recipe.warmup)

    def epoch(self) -> int:
        """So many batches see every image once."""
        return -(-len(self.data.training) // self.settings.batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        pictures, size = self.data.held_out, self.settings.batch
        hits = losses = 0.0
        for first in range(0, len(pictures), size):
            count = min(size, len(pictures) - first)
            # A short last batch is filled with its own images again: compiled models meet one shape only, and no scale
            # that is taken over the batch changes.
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
    mirror: bool = False  # a mirrored digit is no digit


class Digits(ImageClassification):
    """Handwritten digits, 8x8 pixels: the quick task that every machine has."""

    name = "digits"
    summary = "handwritten digits, 8x8 pixels"
    settings_class = DigitsSettings

    def load(self) -> PictureData:
        return digits()
