from __future__ import annotations

import pytest
import torch

from bitplan.errors import TaskError
from bitplan.lab.tasks.detection import overlaps
from bitplan.lab.tasks.images import digits
from bitplan.lab.tasks.scenes import DigitScenes, Objects, digit_scenes

DIGITS = digits()


def test_scenes_are_functions_of_their_number() -> None:
    first, second = (digit_scenes(DIGITS, 64).training for _ in range(2))
    second.image(5)
    torch.manual_seed(99)  # the global generator is neither asked nor touched
    before = torch.get_rng_state()
    assert torch.equal(first.image(3), second.image(3))
    assert torch.equal(first.objects(3).boxes, second.objects(3).boxes)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first.image(3), first.image(4))
    assert not torch.equal(first.image(3), digit_scenes(DIGITS, 64).held_out.image(3))


def test_scenes_vary_and_digits_lie_apart_inside() -> None:
    scenes = digit_scenes(DIGITS, 64).training
    result = [scenes.objects(index) for index in range(60)]
    assert {len(objects) for objects in result} == {1, 2, 3, 4}
    assert {int(label) for objects in result for label in objects.labels} == set(range(10))
    heights = torch.cat([objects.boxes[:, 3] - objects.boxes[:, 1] for objects in result])
    assert heights.max() > 1.7 * heights.min()
    for objects in result:
        assert objects.boxes.min() >= 0
        assert objects.boxes.max() <= 64
        apart = overlaps(objects.boxes, objects.boxes).fill_diagonal_(0)
        assert (apart == 0).all()


def test_the_ink_is_in_the_boxes() -> None:
    scenes = DigitScenes(DIGITS.training, "training", 10, 64)
    for index in range(10):
        image, objects = scenes.image(index), scenes.objects(index)
        assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
        outside = torch.ones(64, 64, dtype=torch.bool)
        boxes = objects.boxes.round().long().tolist()
        for left, top, right, bottom in boxes:
            outside[max(top - 2, 0) : bottom + 2, max(left - 2, 0) : right + 2] = False
        noise = image[0][outside].float()
        assert abs(noise.mean() - noise.median()) < 8  # nothing but noise: ink would shift the mean
        for left, top, right, bottom in boxes:
            assert image[0, top:bottom, left:right].float().mean() > noise.mean() + 20


def test_held_out_scenes_have_held_out_digits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[object, int]] = []
    for part in (DIGITS.training, DIGITS.held_out):
        take = part.take
        monkeypatch.setattr(part, "take", lambda chosen, part=part, take=take: requests.append(part) or take(chosen))
    data = digit_scenes(DIGITS, 64)
    for index in range(20):
        data.held_out.image(index)
    assert set(requests) == {DIGITS.held_out}
    data.training.image(0)
    assert requests[-1] is DIGITS.training


def test_mirrored_objects() -> None:
    mirrored = Objects.of([[1.0, 2, 11, 22]], [4]).mirrored(64)
    assert mirrored.boxes.tolist() == [[53, 2, 63, 22]]
    assert mirrored.labels.tolist() == [4]


def test_objects_of_different_numbers_are_refused() -> None:
    with pytest.raises(TaskError, match="2 labels take as many boxes"):
        Objects.of([[0.0, 0, 1, 1]], [1, 2])
