from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bitplan.lab.tasks.detection import areas, kept_of, moved_by, offsets_to, overlaps


def some_boxes(count: int, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    corner, side = (torch.rand(count, 2, generator=draws) * size for size in (30, 20))
    return torch.cat([corner, corner + side + 1], 1)


def test_overlaps_of_boxes_that_can_be_counted_by_hand() -> None:
    square = torch.tensor([[0.0, 0, 4, 4]])
    others = torch.tensor([[0.0, 0, 4, 4], [2, 0, 6, 4], [1, 1, 3, 3], [4, 0, 8, 4], [3, 3, 3, 9]])
    assert overlaps(square, others)[0].tolist() == pytest.approx([1, 8 / 24, 4 / 16, 0, 0])
    assert areas(others).tolist() == [16, 16, 4, 16, 0]
    nothing = torch.zeros(1, 4)
    assert overlaps(nothing, nothing).tolist() == [[0.0]]  # no area at all, and no NaN


def test_offsets_are_those_of_the_papers_and_lead_back() -> None:
    anchor = torch.tensor([[10.0, 20, 20, 40]])
    box = torch.tensor([[12.0, 20, 32, 50]])
    # The middle moves by (7, 5) of (10, 20); the sides grow by (2, 1.5); divided by 0.1 and 0.2.
    expected = [7.0, 2.5, math.log(2) / 0.2, math.log(1.5) / 0.2]
    assert offsets_to(box, anchor)[0].tolist() == pytest.approx(expected)
    boxes, anchors = some_boxes(50, 0), some_boxes(50, 1)
    torch.testing.assert_close(moved_by(offsets_to(boxes, anchors), anchors), boxes, atol=1e-4, rtol=1e-4)


def test_an_absurd_offset_is_still_a_finite_box() -> None:
    assert moved_by(torch.tensor([[0.0, 0, 1e4, 1e4]]), torch.tensor([[0.0, 0, 8, 8]])).isfinite().all()


def greedy(boxes: Tensor, labels: Tensor, most: float) -> list[bool]:
    """Suppression as it is usually written: from the best to the worst."""
    kept: list[int] = []
    overlap = overlaps(boxes, boxes)
    for number in range(len(boxes)):
        if not any(overlap[better, number] > most and labels[better] == labels[number] for better in kept):
            kept.append(number)
    return [number in kept for number in range(len(boxes))]


@pytest.mark.parametrize("seed", range(5))
def test_suppression_is_the_greedy_one(seed: int) -> None:
    boxes, labels = some_boxes(120, seed), torch.arange(120) % 3
    kept = kept_of(boxes, labels, 0.3)
    assert kept.tolist() == greedy(boxes, labels, 0.3)
    assert 0 < int(kept.sum()) < 120


def test_a_box_that_was_taken_away_takes_none() -> None:
    """A chain: the first hides the second, which would have hidden the third, and so on."""
    chain = torch.tensor([[float(3 * number), 0, float(3 * number + 10), 10] for number in range(6)])
    same = torch.zeros(6, dtype=torch.long)
    assert kept_of(chain, same, 0.5).tolist() == [True, False, True, False, True, False]
    assert kept_of(chain, torch.arange(6), 0.5).all()  # other classes are no rivals
    assert kept_of(torch.zeros(0, 4), same[:0], 0.5).tolist() == []
