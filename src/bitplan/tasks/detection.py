"""Object detection: find the objects of an image, by RetinaNet; and the quick task that every machine has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from bitplan.errors import TaskError, nearest_names
from bitplan.models.retinanet import BACKBONE_LEVELS, COARSEST, MOST_LEVELS, RetinaNet, freeze_norms
from bitplan.tasks.anchors import IGNORED, IN_CELL, Anchors, Wanted
from bitplan.tasks.average_precision import Detections, mean_average_precision
from bitplan.tasks.boxes import kept_of, moved_by
from bitplan.tasks.decay import DECAYS, decayed
from bitplan.tasks.draws import generator, shuffled
from bitplan.tasks.loading import LoadingTask
from bitplan.tasks.optimizing import fused_for
from bitplan.tasks.pictures import Normalisation, digits
from bitplan.tasks.scenes import Objects, SceneData, digit_scenes
from bitplan.tasks.sources.backbones import read_backbone
from bitplan.tasks.task import Metric, Settings

NORMS = ("batch", "frozen")

#: The focal loss's weight of objects against background, and how much sure answers count less.
_ALPHA, _GAMMA = 0.25, 2.0
#: Offsets that are wrong by less than this count by their square.
_BETA = 1 / 9

#: What becomes a detection: surer than this, among so many of an image, not hidden by a better one of more overlap.
_SURE, _CANDIDATES, _HIDDEN = 0.05, 500, 0.5
#: The most detections of an image.
_MOST = 100

#: Training images whose objects the trivial predictor knows.
_TRIVIAL_IMAGES = 500

#: ImageNet's mean and deviation of red, green and blue, in bytes: what pretrained backbones are used to.
_COLOURS = Normalisation(
    *(
        torch.tensor(bytes_, device="cpu").view(3, 1, 1)
        for bytes_ in ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    )
)


@dataclass(frozen=True)
class DetectionSettings(Settings):
    """What ``--set`` may change of a detection; the defaults train RetinaNet with a ResNet-18 from scratch."""

    steps: int = 4000
    batch: int = 16
    evaluate_every: int = 500
    lr: float = 1e-3
    clip: float = 1.0
    #: Pixels of an image's side, a multiple of 32.
    size: int = 320
    #: Channels, times this.
    width: float = 1.0
    #: Levels of the feature pyramid, from P3 on.
    levels: int = MOST_LEVELS
    #: The side of the smallest anchor in a cell, in the cell's.
    anchor: float = 4.0
    #: Convolutions of each head before the one that tells.
    head: int = 4
    #: What batch norms do: batch (they learn), or frozen (as they come with the backbone's weights).
    norm: str = "batch"
    #: A safetensors file with the weights of a ResNet-18 to begin from.
    weights: str = ""
    #: How the learning rate falls.
    decay: str = "cosine"
    #: Steps over which the learning rate rises from 0 to its peak first.
    warmup: int = 100
    #: Mirror every other image.
    mirror: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("norm", NORMS), ("decay", DECAYS)):
            if getattr(self, name) not in known:
                wrong = getattr(self, name)
                raise TaskError(f"there is no {name} {wrong!r}; {nearest_names(wrong, known)}")
        if self.size < COARSEST or self.size % COARSEST:
            raise TaskError(f"size is {self.size}; it must be a multiple of {COARSEST} pixels.")
        for name in ("width", "anchor"):
            if not getattr(self, name) > 0:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be above 0.")
        if not BACKBONE_LEVELS <= self.levels <= MOST_LEVELS:
            raise TaskError(f"levels is {self.levels}; it must be {BACKBONE_LEVELS} to {MOST_LEVELS}.")
        for name in ("head", "warmup"):
            if getattr(self, name) < 0:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 0.")
        if self.weights and self.width != 1:
            raise TaskError("weights are those of a whole ResNet-18: drop width, or the weights.")


class Detection(LoadingTask[SceneData]):
    """Find the objects of an image. A set of images derives from this and says where its data come from."""

    settings_class: ClassVar[type[DetectionSettings]] = DetectionSettings
    settings: DetectionSettings

    def __init__(self, settings: Settings | None = None, seed: int = 0) -> None:
        super().__init__(settings, seed)
        # Matching thousands of anchors takes longer than a small step on a GPU, and images come again.
        self._known = lru_cache(maxsize=4096)(self._wanted)

    @property
    def classes(self) -> int:
        return len(self.data.classes)

    @cached_property
    def anchors(self) -> Anchors:
        return Anchors(self.settings.size, self.settings.levels, self.settings.anchor)

    @cached_property
    def metric(self) -> Metric:
        """Mean average precision on held-out images; the trivial predictor says the same of all of them.

        It is the best that can be said blindly: of each anchor and class, how often that is an object in training, and
        where such objects lie on average.
        """
        often = torch.zeros(len(self.anchors.boxes), self.classes)
        offsets = torch.zeros(len(self.anchors.boxes), 4)
        scenes = self.data.training
        count = min(len(scenes), _TRIVIAL_IMAGES)
        for index in range(count):
            wanted = self._known(index, False)
            found = wanted.labels >= 0
            often[wanted.places[found], wanted.labels[found]] += 1
            offsets[wanted.places[found]] += wanted.offsets[found]
        offsets /= often.sum(1, keepdim=True).clamp(min=1)
        told = self.detections(often / count, offsets, at_least=0.0)
        true = self._true()
        return Metric("mAP", "higher", mean_average_precision([told] * len(true), true, self.classes))

    def model(self) -> nn.Module:
        recipe = self.settings
        model = RetinaNet(
            self.classes, anchors=IN_CELL, width=recipe.width, levels=recipe.levels, head_layers=recipe.head
        )
        if recipe.weights:
            read_backbone(Path(recipe.weights).expanduser(), model.backbone)
        if recipe.norm == "frozen":
            freeze_norms(model)
        return model

    def batch(self, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Images, and of every anchor its label and offsets: one shape, however many objects there are."""
        recipe, scenes = self.settings, self.data.training
        chosen = shuffled(step, recipe.batch, len(scenes), self.seed)
        mirrored = torch.rand(recipe.batch, generator=generator("mirror", self.seed, step)) < 0.5
        turned = [(index, bool(turn) and recipe.mirror) for index, turn in zip(chosen.tolist(), mirrored, strict=True)]
        images = [scenes.image(index).flip(-1) if turn else scenes.image(index) for index, turn in turned]
        wanted = [self._known(index, turn) for index, turn in turned]
        return _COLOURS(torch.stack(images)), self.anchors.stacked(wanted)

    def loss(self, output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        """The focal loss of every anchor and class, and how far the objects' boxes are off, per anchor with an object.

        Which anchors are whose was decided with the batch: a plan that rounds losses, too, must not move the aim.
        """
        (logits, offsets), (labels, wanted) = output, target
        is_object = labels >= 0
        true = (labels[..., None] == torch.arange(logits.shape[-1], device=labels.device)).to(logits.dtype)
        surprise = F.binary_cross_entropy_with_logits(logits, true, reduction="none")
        chance = logits.sigmoid()
        wrong = true * (1 - chance) + (1 - true) * chance
        weight = (true * _ALPHA + (1 - true) * (1 - _ALPHA)) * wrong**_GAMMA
        classes = (weight * surprise * (labels != IGNORED)[..., None]).sum()
        boxes = F.smooth_l1_loss(offsets, wanted, reduction="none", beta=_BETA)
        return (classes + (boxes.mean(-1) * is_object).sum()) / is_object.sum().clamp(min=1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        trained = [each for each in model.parameters() if each.requires_grad]
        return Adam(trained, self.settings.lr, fused=fused_for(trained))

    def learning_rate(self, step: int) -> float:
        recipe = self.settings
        return decayed(recipe.decay, step, recipe.steps, recipe.warmup)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        scenes, size = self.data.held_out, self.settings.batch
        told: list[Detections] = []
        for first in range(0, len(scenes), size):
            count = min(size, len(scenes) - first)
            # A short last batch is filled with its own images again: one shape, and no scale over the batch changes.
            images = torch.stack([scenes.image(first + number % count) for number in range(size)])
            logits, offsets = model(_COLOURS(images).to(device))
            chances = logits[:count].float().sigmoid().cpu()
            told += [self.detections(*each) for each in zip(chances, offsets[:count].float().cpu(), strict=True)]
        return {"mAP": mean_average_precision(told, self._true(), self.classes)}

    def detections(self, chances: Tensor, offsets: Tensor, at_least: float = _SURE) -> Detections:
        """What is in one image, from each anchor's chances (anchors, classes) and offsets (anchors, 4)."""
        order = chances.flatten().argsort(descending=True, stable=True)[:_CANDIDATES]
        order = order[chances.flatten()[order] > at_least]
        places, labels = order // chances.shape[1], order % chances.shape[1]
        boxes = moved_by(offsets[places], self.anchors.boxes[places]).clamp(0, self.settings.size)
        kept = kept_of(boxes, labels, _HIDDEN).nonzero().flatten()[:_MOST]
        return Detections(boxes[kept], labels[kept], chances.flatten()[order][kept])

    def _true(self) -> list[Objects]:
        scenes = self.data.held_out
        return [scenes.objects(index) for index in range(len(scenes))]

    def _wanted(self, index: int, mirrored: bool) -> Wanted:
        """What to say of a training image."""
        objects = self.data.training.objects(index)
        return self.anchors.wanted(objects.mirrored(self.settings.size) if mirrored else objects)


@dataclass(frozen=True)
class DigitDetectionSettings(DetectionSettings):
    """A quick recipe: about a minute on one CPU core."""

    steps: int = 600
    evaluate_every: int = 150
    lr: float = 2e-3
    size: int = 64
    width: float = 0.25
    levels: int = BACKBONE_LEVELS
    anchor: float = 1.5
    head: int = 2
    warmup: int = 20
    mirror: bool = False  # a mirrored digit is no digit


class DigitDetection(Detection):
    """Handwritten digits on a canvas."""

    name = "detection"
    summary = "handwritten digits on a canvas, found by RetinaNet"
    settings_class = DigitDetectionSettings

    def load(self) -> SceneData:
        return digit_scenes(digits(), self.settings.size)
