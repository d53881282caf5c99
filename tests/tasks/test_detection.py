"""The task of detection: what it is trained on, what its loss wants, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.errors import TaskError
from bitplan.lab.models.retinanet import FrozenBatchNorm
from bitplan.lab.tasks import detection, scenes
from bitplan.lab.tasks.detection import BACKGROUND, IGNORED, DigitDetection, DigitDetectionSettings
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import train
from bitplan.planners import cpt_plan

SMALL = ("batch=4", "size=32", "head=1", "steps=4", "evaluate_every=2", "warmup=0")


class Knows(nn.Module):
    """Tells what is right of every image but the first `silent` ones it sees, and where it has seen what shapes."""

    def __init__(self, task: DigitDetection, silent: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.task, self.silent, self.seen, self.shapes = task, silent, 0, set[tuple[int, ...]]()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        self.shapes.add(tuple(images.shape))
        scenes, task = self.task.data.held_out, self.task
        expected = [
            task.anchors.wanted(scenes.objects((self.seen + number) % len(scenes))) for number in range(len(images))
        ]
        labels, offsets = task.anchors.stacked(expected)
        labels[: max(0, self.silent - self.seen)] = BACKGROUND
        self.seen += len(images)
        return F.one_hot(labels.clamp(min=-1) + 1, 11)[..., 1:] * 20.0 - 10, offsets


@pytest.mark.parametrize("batch", [16, 64])
def test_every_held_out_image_counts_once_and_shapes_never_change(batch: int) -> None:
    task = find_task("detection", [f"batch={batch}"])
    assert isinstance(task, DigitDetection)
    right = Knows(task, silent=0)
    assert task.evaluate(right) == {"mAP": pytest.approx(1.0)}
    assert right.shapes == {(batch, 3, 64, 64)}
    some = task.evaluate(Knows(task, silent=50))["mAP"]
    objects = [task.data.held_out.objects(index).labels for index in range(200)]
    counts = [torch.bincount(torch.cat(part), minlength=10).double() for part in (objects[50:], objects)]
    assert some == pytest.approx(float((counts[0] / counts[1]).mean()))


def test_the_trivial_predictor_is_honest() -> None:
    task = DigitDetection()
    assert (task.metric.name, task.metric.better) == ("mAP", "higher")
    assert 0.001 < task.metric.trivial < 0.02  # blind, but better than nothing


def test_batches_are_a_function_of_seed_and_step() -> None:
    first, second = (find_task("detection", SMALL, seed=1) for _ in range(2))
    third = first.batch(3)
    second.batch(5)
    torch.manual_seed(99)
    for a, b in zip((third[0], *third[1]), (second.batch(3)[0], *second.batch(3)[1]), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(third[0], first.batch(4)[0])
    assert not torch.equal(third[0], find_task("detection", SMALL, seed=2).batch(3)[0])
    labels, offsets = third[1]
    assert labels.shape == offsets.shape[:2] == (4, len(first.anchors.boxes))


def test_mirrored_images_have_mirrored_objects() -> None:
    plain, mirroring = (find_task("detection", [*SMALL, f"mirror={mirror}"]) for mirror in ("no", "yes"))
    pairs = zip(plain.batch(0)[0], mirroring.batch(0)[0], strict=True)
    turned = [not torch.equal(first, second) for first, second in pairs]
    assert True in turned
    assert False in turned
    number = turned.index(True)
    assert torch.equal(plain.batch(0)[0][number].flip(-1), mirroring.batch(0)[0][number])
    chances, offsets = [], []
    for task in (plain, mirroring):
        labels, moves = (item[number] for item in task.batch(0)[1])
        chances.append(F.one_hot(labels.clamp(min=-1) + 1, 11)[:, 1:].float())
        offsets.append(moves)
    first, second = (plain.detections(*item) for item in zip(chances, offsets, strict=True))
    mirror_image = torch.stack(
        [32 - second.boxes[:, 2], second.boxes[:, 1], 32 - second.boxes[:, 0], second.boxes[:, 3]], 1
    )
    sort = [boxes[boxes[:, 0].argsort()] for boxes in (first.boxes, mirror_image)]
    torch.testing.assert_close(sort[0], sort[1], atol=1e-3, rtol=0)


def test_the_loss_against_the_papers_formulas() -> None:
    task = find_task("detection", SMALL)
    labels = torch.tensor([[1, BACKGROUND, IGNORED]])
    logits, offsets = torch.tensor([[[-1.0, 2.0], [0.5, -3.0], [9.0, 9.0]]]), torch.zeros(1, 3, 4)
    offsets[0, 0] = torch.tensor([0.05, -1.0, 0.0, 0.0])
    offsets[0, 1:] = 100.0  # of no object: they do not count
    chance = logits.sigmoid()
    focal = -((1 - chance[0, 0, 1]) ** 2) * 0.25 * chance[0, 0, 1].log()
    for background in (chance[0, 0, 0], chance[0, 1, 0], chance[0, 1, 1]):
        focal = focal - background**2 * 0.75 * (1 - background).log()
    boxes = (0.5 * 0.05**2 * 9 + (1 - 0.5 / 9)) / 4
    loss = task.loss((logits, offsets), (labels, torch.zeros(1, 3, 4)))
    assert loss.item() == pytest.approx(float(focal) + boxes, rel=1e-5)
    nothing = task.loss((logits[:, 1:2], offsets[:, 1:2]), (labels[:, 1:2], torch.zeros(1, 1, 4)))
    assert nothing.isfinite()  # an image without objects divides by no zero


def test_a_packed_run_under_a_cyclic_plan_is_stopped_and_ends_as_an_emulated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenes, "HELD_OUT_SCENES", 4)
    target = find_task("detection", SMALL).target()
    plan = cpt_plan(target.model, target.batch, target.loss, schedule="CR", low=5, high=8, cycles=2)
    rows = bitplan.explain(target.model, plan, target.batch, target.loss)
    products = {row.site.module for row in rows if row.site.role == "fprop.w"}
    rounded = {row.site.module for row in rows if row.site.role == "fprop.w" and row.quantizer is not None}
    assert rounded == products  # every convolution, those of the pyramid and of the heads, too
    assert {name.split(".")[0] for name in rounded} == {"backbone", "pyramid", "class_head", "box_head"}
    seen: list[int] = []

    def options(last: int) -> dict[str, Callable[..., Any]]:
        return {"on_progress": lambda now: seen.append(now.step), "stop": lambda: bool(seen) and seen[-1] >= last}

    train(find_task("detection", SMALL), plan, folder=tmp_path / "whole")
    parts = tmp_path / "parts"
    assert train(find_task("detection", SMALL), plan, folder=parts, execution="packed", **options(3)).step == 3
    train(find_task("detection", SMALL), plan, folder=parts, execution="packed")
    assert (parts / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert (parts / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_frozen_norms_are_left_out_of_training() -> None:
    task = find_task("detection", [*SMALL, "norm=frozen"])
    model = task.model()
    assert any(isinstance(module, FrozenBatchNorm) for module in model.modules())
    trained = {id(item) for group in task.optimizer(model).param_groups for item in group["params"]}
    assert trained == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(trained) < len([*model.parameters()])


def test_only_so_many_detections_of_an_image_and_the_surest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    task = DigitDetection(DigitDetectionSettings(size=32))
    monkeypatch.setattr(detection, "_MOST", 3)
    count = len(task.anchors.boxes)
    chances = torch.linspace(0, 1, count * 10).view(count, 10)
    reported = task.detections(chances, torch.zeros(count, 4))
    assert len(reported) == 3
    assert reported.scores[0] == 1.0
    assert reported.boxes.min() >= 0
    assert reported.boxes.max() <= 32
    assert len(task.detections(torch.full((count, 10), 0.04), torch.zeros(count, 4))) == 0


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("size=48", r"size is 48; it must be a multiple of 32 pixels\."),
        ("levels=2", r"levels is 2; it must be 3 to 5\."),
        ("anchor=0", r"anchor is 0\.0; it must be above 0\."),
        ("width=nan", r"width is nan; it must be above 0\."),
        ("head=-1", r"head is -1; it must be at least 0\."),
        ("norm=bath", r"there is no norm 'bath'; did you mean batch"),
        ("weights=a.safetensors", r"weights are those of a whole ResNet-18: drop width, or the weights\."),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        find_task("detection", [setting])
