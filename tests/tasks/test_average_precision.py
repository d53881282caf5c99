"""Average precision against cases that can be counted by hand."""

from __future__ import annotations

import pytest
import torch

from bitplan.lab.tasks.detection import Detections, average_precision, mean_average_precision
from bitplan.lab.tasks.scenes import Objects

A, B, C = [0.0, 0, 10, 10], [20.0, 0, 30, 10], [40.0, 0, 50, 10]
HALF = [0.0, 0, 10, 5]  # overlaps A by exactly a half
NOWHERE = [60.0, 60, 70, 70]


def told(*detections: tuple[list[float], int, float]) -> Detections:
    boxes, labels, scores = zip(*detections, strict=True) if detections else ([], [], [])
    return Detections(
        torch.tensor(list(boxes), dtype=torch.float32).view(-1, 4),
        torch.tensor(list(labels), dtype=torch.long),
        torch.tensor(list(scores), dtype=torch.float32),
    )


def ap(detections: list[Detections], objects: list[Objects], label: int = 0) -> float:
    result = average_precision(detections, objects, label)
    assert result is not None
    return result


def test_all_found_and_nothing_else_is_one() -> None:
    assert ap([told((A, 0, 0.3), (B, 0, 0.9))], [Objects.of([A, B], [0, 0])]) == 1.0


def test_nothing_said_is_zero() -> None:
    assert ap([told()], [Objects.of([A], [0])]) == 0.0
    assert mean_average_precision([told()], [Objects.of([], [])], 3) == 0.0


def test_precision_is_the_best_that_is_still_to_come() -> None:
    """Find, mistake, find, find of 4 objects: precisions 1, 1/2, 2/3, 3/4, so 1 and twice 3/4, each for a quarter."""
    detections = told((A, 0, 0.9), (NOWHERE, 0, 0.8), (B, 0, 0.7), (C, 0, 0.6))
    objects = Objects.of([A, B, C, [80.0, 0, 90, 10]], [0, 0, 0, 0])
    assert ap([detections], [objects]) == pytest.approx((1 + 0.75 + 0.75) / 4)


def test_an_object_is_found_once() -> None:
    """Find, twice the same, find of 2 objects: 1 and 2/3."""
    detections = told((A, 0, 0.9), (A, 0, 0.8), (B, 0, 0.7))
    assert ap([detections], [Objects.of([A, B], [0, 0])]) == pytest.approx((1 + 2 / 3) / 2)


def test_a_half_is_enough_and_less_is_not() -> None:
    assert ap([told((HALF, 0, 0.9))], [Objects.of([A], [0])]) == 1.0
    assert ap([told(([0.0, 0, 10, 4.9], 0, 0.9))], [Objects.of([A], [0])]) == 0.0


def test_the_nearest_object_counts_even_where_it_was_found_before() -> None:
    """As in the challenge: a second detection near A is a mistake, though it would also do for the box beside it."""
    beside = [1.0, 0, 11, 10]
    detections = told((A, 0, 0.9), ([0.2, 0, 10.2, 10], 0, 0.8))
    assert ap([detections], [Objects.of([A, beside], [0, 0])]) == pytest.approx(0.5)


def test_detections_of_all_images_are_one_list() -> None:
    """The surest detection, of the second image, is a mistake: 0, 1/2, 2/3 for two objects."""
    images = [told((A, 0, 0.5)), told((NOWHERE, 0, 0.9), (B, 0, 0.4))]
    objects = [Objects.of([A], [0]), Objects.of([B], [0])]
    assert ap(images, objects) == pytest.approx(2 / 3)
    assert ap(images[::-1], objects[::-1]) == pytest.approx(2 / 3)


def test_difficult_objects_are_neither_finds_nor_mistakes() -> None:
    objects = Objects.of([A, B], [0, 0], [True, False])
    assert ap([told((A, 0, 0.9), (B, 0, 0.8))], [objects]) == 1.0
    assert ap([told((B, 0, 0.8))], [objects]) == 1.0
    assert average_precision([told()], [Objects.of([A], [0], [True])], 0) is None


def test_the_mean_is_over_classes_that_have_objects() -> None:
    """Class 0 all found, class 1 said as class 0 (a mistake there), class 2 has no objects."""
    detections = told((A, 0, 0.9), (B, 0, 0.8), (NOWHERE, 2, 0.7))
    objects = Objects.of([A, B], [0, 1])
    assert average_precision([detections], [objects], 2) is None
    assert mean_average_precision([detections], [objects], 3) == pytest.approx(0.5)
