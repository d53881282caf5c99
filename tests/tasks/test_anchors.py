from __future__ import annotations

import pytest
import torch

from bitplan.lab.models.retinanet import RetinaNet
from bitplan.lab.tasks.detection import BACKGROUND, IGNORED, IN_CELL, Anchors, areas, moved_by
from bitplan.lab.tasks.scenes import Objects

ANCHORS = Anchors(64, 3, 1.5)


def test_they_are_those_of_the_paper() -> None:
    boxes = Anchors(320, 5, 4.0).boxes
    assert len(boxes) == (1600 + 400 + 100 + 25 + 9) * 9
    sides = areas(boxes[:9]).sqrt()
    assert sides.tolist() == pytest.approx([32 * 2 ** (scale / 3) for scale in (0, 0, 0, 1, 1, 1, 2, 2, 2)])
    width, height = (boxes[:3, 2:] - boxes[:3, :2]).unbind(1)
    assert (height / width).tolist() == pytest.approx([0.5, 1, 2])
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    assert middles[0].tolist() == pytest.approx([4, 4])
    assert middles[9].tolist() == pytest.approx([12, 4])  # the next cell of the row
    assert middles[9 * 40].tolist() == pytest.approx([4, 12])  # the next row
    assert middles[9 * 1600].tolist() == pytest.approx([8, 8])  # the next level


@pytest.mark.parametrize("levels", [3, 4, 5])
@pytest.mark.parametrize("side", [32, 64, 96])
def test_there_is_one_for_each_output_of_the_network(levels: int, side: int) -> None:
    with torch.device("meta"):
        logits, offsets = RetinaNet(4, anchors=IN_CELL, width=0.25, levels=levels)(torch.empty(2, 3, side, side))
    count = len(Anchors(side, levels, 4.0).boxes)
    assert logits.shape == (2, count, 4)
    assert offsets.shape == (2, count, 4)


def test_an_object_s_anchors_lead_to_it_and_the_rest_is_background() -> None:
    objects = Objects.of([[10.0, 12, 26, 30], [40, 40, 52, 58]], [7, 2])
    expected = ANCHORS.wanted(objects)
    labels, offsets = ANCHORS.stacked([expected, ANCHORS.wanted(Objects.of([], []))])
    assert labels.shape == (2, len(ANCHORS.boxes))
    assert set(labels[0].tolist()) == {BACKGROUND, IGNORED, 7, 2}
    assert (labels[1] == BACKGROUND).all()
    assert (labels[0] == BACKGROUND).float().mean() > 0.9
    for label, box in ((7, objects.boxes[0]), (2, objects.boxes[1])):
        mine = labels[0] == label
        torch.testing.assert_close(moved_by(offsets[0][mine], ANCHORS.boxes[mine]), box.expand(int(mine.sum()), 4))


def test_an_object_that_no_anchor_fits_has_the_best_one() -> None:
    thin = Objects.of([[5.0, 5, 60, 8]], [3])
    labels, _ = ANCHORS.stacked([ANCHORS.wanted(thin)])
    assert (labels == 3).sum() == 1


def test_difficult_objects_are_neither_to_be_found_nor_background() -> None:
    boxes = [[10.0, 12, 26, 30], [40, 40, 52, 58]]
    plain, _ = ANCHORS.stacked([ANCHORS.wanted(Objects.of(boxes, [7, 2]))])
    marked, _ = ANCHORS.stacked([ANCHORS.wanted(Objects.of(boxes, [7, 2], [True, False]))])
    assert (marked[plain == 7] == IGNORED).all()
    assert torch.equal(marked[plain != 7], plain[plain != 7])
