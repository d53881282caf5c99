"""Object detection with RetinaNet, and a quick built-in task on synthetic scenes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

from bitplan.errors import TaskError, nearest_names
from bitplan.lab.models.resnet import IMAGENET_DEPTHS
from bitplan.lab.models.retinanet import BACKBONE_LEVELS, COARSEST, MOST_LEVELS, RetinaNet, freeze_norms, level_grids
from bitplan.lab.sources.pretrained import read_backbone
from bitplan.lab.tasks.images import Normalisation, digits
from bitplan.lab.tasks.scenes import Objects, SceneData, digit_scenes
from bitplan.lab.tasks.task import DECAYS, DecayedRate, LoadingTask, Metric, Settings, fused_for, generator, shuffled
from bitplan.numerics.wire_format import MIRROR

# --- Boxes: the last dimension of a tensor is left, top, right and bottom edge in pixels


#: Divisors of offsets, which make them about 1 (Girshick 2015, arXiv 1504.08083).
_DEVIATIONS = (0.1, 0.1, 0.2, 0.2)
#: The largest factor between box and anchor: exp() of an untrained output must stay finite.
_LARGEST_GROWTH = math.log(1000 / 16)


def areas(boxes: Tensor) -> Tensor:
    """The area of each box; 0 where its edges cross."""
    width, height = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).unbind(-1)
    return width * height


def overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of each box in `boxes` (n, 4) with each in `others` (m, 4): (n, m).

    >>> overlaps(torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[0.0, 0, 2, 2], [1, 0, 3, 2], [5, 5, 6, 6]]))
    tensor([[1.0000, 0.3333, 0.0000]])
    """
    first = torch.maximum(boxes[:, None, :2], others[None, :, :2])
    last = torch.minimum(boxes[:, None, 2:], others[None, :, 2:])
    common = areas(torch.cat([first, last], -1))
    union = areas(boxes)[:, None] + areas(others)[None] - common
    return torch.where(union > 0, common / union, 0.0)


def offsets_to(boxes: Tensor, anchors: Tensor) -> Tensor:
    """The offsets of each box from its anchor: the centre in units of the anchor's sides, and log ratios of sides."""
    box_middle, box_side = _middle_and_side(boxes)
    middle, side = _middle_and_side(anchors)
    offsets = torch.cat([(box_middle - middle) / side, (box_side / side).log()], -1)
    return offsets / offsets.new_tensor(_DEVIATIONS)


def moved_by(offsets: Tensor, anchors: Tensor) -> Tensor:
    """The boxes at those offsets: the inverse of :func:`offsets_to`."""
    middle, side = _middle_and_side(anchors)
    scaled = offsets * offsets.new_tensor(_DEVIATIONS)
    new_middle = middle + scaled[..., :2] * side
    half = side * scaled[..., 2:].clamp(max=_LARGEST_GROWTH).exp() / 2
    return torch.cat([new_middle - half, new_middle + half], -1)


def kept_of(boxes: Tensor, labels: Tensor, most: float) -> Tensor:
    """Non-maximum suppression: a mask of the boxes, best first, that no better box of the same label overlaps too much.

    Suppressed boxes suppress none. Greedy suppression decides from the best to the worst. This decides all boxes at
    once, repeatedly until nothing changes. A box is decided correctly as soon as all better ones are, so the result is
    the greedy one, after as many rounds as the longest chain of boxes has.
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


# --- Anchors, and their targets for the objects of an image


#: Sides of a cell's anchors relative to the smallest, and ratios of height to width.
SCALES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))

RATIOS = (0.5, 1.0, 2.0)

IN_CELL = len(SCALES) * len(RATIOS)

#: The label of an anchor without a class.
BACKGROUND, IGNORED = -1, -2
#: Anchors with at least the first overlap belong to an object, those below the second are background; others are
#: ignored.
_OBJECT_FROM, _BACKGROUND_BELOW = 0.5, 0.4


@dataclass(frozen=True)
class Wanted:
    """The targets of an image's anchors; anchors that are not listed are background."""

    places: Tensor
    #: A class, or :data:`IGNORED`.
    labels: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class Anchors:
    """The anchors of square images, in the order of :class:`bitplan.lab.models.retinanet.Head`'s outputs."""

    side: int
    levels: int
    #: The side of the smallest anchor of a cell, in units of the cell's side.
    smallest: float

    @cached_property
    def boxes(self) -> Tensor:
        """(anchors, 4)."""
        with torch.device("cpu"):  # under a fake device, models are created on another device
            return torch.cat([self._of_level(*grid) for grid in level_grids(self.side, self.levels)])

    def _of_level(self, stride: int, cells: int) -> Tensor:
        places = (torch.arange(cells) + 0.5) * stride
        middle = torch.stack([places.expand(cells, cells), places[:, None].expand(cells, cells)], -1)[:, :, None]
        sides = [(scale / ratio**0.5, scale * ratio**0.5) for scale in SCALES for ratio in RATIOS]
        half = torch.tensor(sides) * stride * self.smallest / 2
        return torch.cat([middle - half, middle + half], -1).view(-1, 4)

    def wanted(self, objects: Objects) -> Wanted:
        """The targets of an image with these objects.

        Every object gets at least the anchor that overlaps it most, however little. Difficult objects are neither
        objects nor background.
        """
        if not len(objects):
            return Wanted(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0, 4))
        overlap = overlaps(self.boxes, objects.boxes)
        most, nearest = overlap.max(1)
        best_of_object, best_anchor = overlap.max(0)
        served = best_of_object > 0
        nearest[best_anchor[served]] = torch.arange(len(objects))[served]
        is_object = most >= _OBJECT_FROM
        is_object[best_anchor[served]] = True
        places = (is_object | (most >= _BACKGROUND_BELOW)).nonzero().flatten()
        nearest, is_object = nearest[places], is_object[places] & ~objects.difficult[nearest[places]]
        return Wanted(
            places,
            torch.where(is_object, objects.labels[nearest], IGNORED),
            offsets_to(objects.boxes[nearest], self.boxes[places]),
        )

    def stacked(self, targets: Sequence[Wanted]) -> tuple[Tensor, Tensor]:
        """The targets of a batch: labels (batch, anchors) and offsets (batch, anchors, 4)."""
        labels = torch.full((len(targets), len(self.boxes)), BACKGROUND)
        offsets = torch.zeros(len(targets), len(self.boxes), 4)
        for number, target in enumerate(targets):
            labels[number, target.places] = target.labels
            offsets[number, target.places] = target.offsets
        return labels, offsets


# --- Mean average precision, as the VOC challenge defines it since 2010


#: The least overlap of a true positive.
ENOUGH = 0.5


@dataclass(frozen=True)
class Detections:
    """The detections of an image."""

    boxes: Tensor
    labels: Tensor
    #: Confidence of each.
    scores: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def mean_average_precision(detections: Sequence[Detections], true: Sequence[Objects], classes: int) -> float:
    """mAP at an overlap of 0.5 over images, with the detections and the objects of each; 0 without objects."""
    precisions = [average_precision(detections, true, label) for label in range(classes)]
    defined = [value for value in precisions if value is not None]
    return sum(defined) / len(defined) if defined else 0.0


def average_precision(found_by_image: Sequence[Detections], true: Sequence[Objects], label: int) -> float | None:
    """The average precision of one class; None if no image has an object of it (difficult ones do not count)."""
    object_count = sum(int(((objects.labels == label) & ~objects.difficult).sum()) for objects in true)
    if not object_count:
        return None
    scores, finds = [], []
    for detections, objects in zip(found_by_image, true, strict=True):
        is_label = detections.labels == label
        order = detections.scores[is_label].argsort(descending=True, stable=True)
        scores += detections.scores[is_label][order].tolist()
        finds += _finds(detections.boxes[is_label][order], objects, label)
    surest = sorted((number for number in range(len(finds)) if finds[number] is not None), key=lambda n: -scores[n])
    hits = torch.tensor([float(bool(finds[number])) for number in surest], dtype=torch.float64)
    return _area(hits, object_count)


def _finds(boxes: Tensor, objects: Objects, label: int) -> list[bool | None]:
    """Whether each detection of an image, most confident first, is a true positive; None if it does not count."""
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


def _area(hits: Tensor, object_count: int) -> float:
    """The area under the precision-recall curve of detections in order, each 1 for a true positive or 0."""
    if not len(hits):
        return 0.0
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    best_to_come = precision.flip(0).cummax(0).values.flip(0)
    # Recall rises by 1 / (number of objects) at every true positive, and only there.
    return float((best_to_come * hits).sum()) / object_count


NORMS = ("batch", "frozen")

#: The focal loss's weight of objects against background, and its exponent.
_ALPHA, _GAMMA = 0.25, 2.0
#: Errors of offsets below this are squared.
_BETA = 1 / 9

#: Detections are the boxes with at least this confidence, among at most this many of an image, after suppression
#: with this overlap.
_SURE, _CANDIDATES, _HIDDEN = 0.05, 500, 0.5
#: The largest number of detections of an image.
_MOST = 100

#: Training images that the trivial predictor is computed from.
_TRIVIAL_IMAGES = 500

#: ImageNet's mean and standard deviation of red, green and blue, in bytes, as pretrained backbones expect.
_COLOURS = Normalisation(
    *(
        torch.tensor(bytes_, device="cpu").view(3, 1, 1)
        for bytes_ in ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    )
)


@dataclass(frozen=True)
class DetectionSettings(Settings):
    """Settings of a detection task; the defaults train RetinaNet with a ResNet-18 from scratch."""

    steps: int = 4000
    batch: int = 16
    evaluate_every: int = 500
    lr: float = 1e-3
    clip: float = 1.0
    #: Side of an image in pixels, a multiple of 32.
    size: int = 320
    #: Depth of the ResNet: 18, 34, 50 or 101.
    depth: int = 18
    #: Multiplier of the channels.
    width: float = 1.0
    #: Levels of the feature pyramid, from P3 on.
    levels: int = MOST_LEVELS
    #: The side of the smallest anchor in a cell, in units of the cell's side.
    anchor: float = 4.0
    #: Hidden convolutions of each head.
    head: int = 4
    #: Batch norms: batch (trained), or frozen (as they come with the backbone's weights).
    norm: str = "batch"
    #: A safetensors file with the initial weights of a ResNet of that depth.
    weights: str = ""
    #: The decay of the learning rate.
    decay: str = "cosine"
    #: Warm-up steps of the learning rate.
    warmup: int = 100
    #: Mirror half of the images.
    mirror: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("norm", NORMS), ("decay", DECAYS)):
            if getattr(self, name) not in choices:
                wrong = getattr(self, name)
                raise TaskError(f"there is no {name} {wrong!r}; {nearest_names(wrong, choices)}")
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
        if self.depth not in IMAGENET_DEPTHS:
            raise TaskError(f"depth is {self.depth}; it must be one of {', '.join(map(str, IMAGENET_DEPTHS))}.")
        if self.weights and self.width != 1:
            raise TaskError(f"weights are those of a whole ResNet-{self.depth}: drop width, or the weights.")


class Detection(DecayedRate, LoadingTask[SceneData]):
    """Object detection; a data set derives from this and loads its data."""

    settings_class: ClassVar[type[DetectionSettings]] = DetectionSettings
    settings: DetectionSettings

    def __init__(self, settings: Settings | None = None, seed: int = 0) -> None:
        super().__init__(settings, seed)
        # Matching thousands of anchors takes longer than a small step on a GPU, and images are used repeatedly.
        self._known = lru_cache(maxsize=4096)(self._wanted)

    @property
    def classes(self) -> int:
        return len(self.data.classes)

    @cached_property
    def anchors(self) -> Anchors:
        return Anchors(self.settings.size, self.settings.levels, self.settings.anchor)

    @cached_property
    def metric(self) -> Metric:
        """Mean average precision on held-out images; the trivial predictor gives the same answer for all of them.

        It is the best answer without looking: for each anchor and class the frequency of objects in training, and their
        mean offsets.
        """
        often = torch.zeros(len(self.anchors.boxes), self.classes)
        offsets = torch.zeros(len(self.anchors.boxes), 4)
        scenes = self.data.training
        count = min(len(scenes), _TRIVIAL_IMAGES)
        for index in range(count):
            target = self._known(index, False)
            is_object = target.labels >= 0
            often[target.places[is_object], target.labels[is_object]] += 1
            offsets[target.places[is_object]] += target.offsets[is_object]
        offsets /= often.sum(1, keepdim=True).clamp(min=1)
        detections = self.detections(often / count, offsets, at_least=0.0)
        true = self._true()
        return Metric("mAP", "higher", mean_average_precision([detections] * len(true), true, self.classes))

    def model(self) -> nn.Module:
        recipe = self.settings
        model = RetinaNet(
            self.classes,
            anchors=IN_CELL,
            width=recipe.width,
            levels=recipe.levels,
            head_layers=recipe.head,
            depth=recipe.depth,
        )
        if recipe.weights:
            read_backbone(Path(recipe.weights).expanduser(), model.backbone, recipe.depth)
        if recipe.norm == "frozen":
            freeze_norms(model)
        return model

    def batch(self, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Images, and the labels and offsets of every anchor: the same shapes for any number of objects."""
        recipe, scenes = self.settings, self.data.training
        chosen = shuffled(step, recipe.batch, len(scenes), self.seed)
        mirrored = torch.rand(recipe.batch, generator=generator(MIRROR, self.seed, step)) < 0.5
        turned = [(index, bool(turn) and recipe.mirror) for index, turn in zip(chosen.tolist(), mirrored, strict=True)]
        images = [scenes.image(index).flip(-1) if turn else scenes.image(index) for index, turn in turned]
        targets = [self._known(index, turn) for index, turn in turned]
        return _COLOURS(torch.stack(images)), self.anchors.stacked(targets)

    def loss(self, output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
        """The focal loss of every anchor and class, and the error of the objects' boxes, per anchor with an object.

        Anchors were assigned with the batch: a plan that also rounds losses must not change the targets.
        """
        (logits, offsets), (labels, target_offsets) = output, target
        is_object = labels >= 0
        true = (labels[..., None] == torch.arange(logits.shape[-1], device=labels.device)).to(logits.dtype)
        surprise = F.binary_cross_entropy_with_logits(logits, true, reduction="none")
        chance = logits.sigmoid()
        wrong = true * (1 - chance) + (1 - true) * chance
        weight = (true * _ALPHA + (1 - true) * (1 - _ALPHA)) * wrong**_GAMMA
        classes = (weight * surprise * (labels != IGNORED)[..., None]).sum()
        boxes = F.smooth_l1_loss(offsets, target_offsets, reduction="none", beta=_BETA)
        return (classes + (boxes.mean(-1) * is_object).sum()) / is_object.sum().clamp(min=1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Adam(trained, self.settings.lr, fused=fused_for(trained))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        scenes, size = self.data.held_out, self.settings.batch
        detections: list[Detections] = []
        for first in range(0, len(scenes), size):
            count = min(size, len(scenes) - first)
            # A short last batch is filled up with its own images: one shape, and batch scales do not change.
            images = torch.stack([scenes.image(first + number % count) for number in range(size)])
            logits, offsets = model(_COLOURS(images).to(device))
            chances = logits[:count].float().sigmoid().cpu()
            detections += [
                self.detections(*prediction) for prediction in zip(chances, offsets[:count].float().cpu(), strict=True)
            ]
        return {"mAP": mean_average_precision(detections, self._true(), self.classes)}

    def detections(self, chances: Tensor, offsets: Tensor, at_least: float = _SURE) -> Detections:
        """The detections of one image, from each anchor's probabilities (anchors, classes) and offsets (anchors, 4)."""
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
        """The targets of a training image."""
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
    mirror: bool = False  # a mirrored digit is not a digit


class DigitDetection(Detection):
    """Handwritten digits on a canvas."""

    name = "detection"
    summary = "handwritten digits on a canvas, found by RetinaNet"
    settings_class = DigitDetectionSettings

    def load(self) -> SceneData:
        return digit_scenes(digits(), self.settings.size)
