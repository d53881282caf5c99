from __future__ import annotations

import io
from importlib.resources import files

import pytest
import torch
from torch import Tensor

from bitplan.errors import TaskError
from bitplan.lab.tasks import images as pictures
from bitplan.lab.tasks.images import Normalisation, PictureData, StoredPictures, digits, moved_and_mirrored


def ramp(count: int = 6, size: int = 5) -> Tensor:
    """Images in which every pixel has a value of its own, none of them 0."""
    values = torch.arange(1, 1 + 3 * size * size, dtype=torch.uint8).view(1, 3, size, size)
    return values.expand(count, -1, -1, -1).contiguous()


def test_the_digits_are_all_there_and_split_for_good() -> None:
    data = digits()
    assert (len(data.training), len(data.held_out), len(data.classes)) == (1437, 360, 10)
    assert data.training.take(torch.arange(3)).shape == (3, 3, 8, 8)
    # The first digits of the set are 0, 1, 2, ...; each class has about a tenth.
    assert data.training.labels[:10].tolist() == list(range(10))
    assert torch.bincount(data.held_out.labels).min() > 30
    first = data.training.take(torch.tensor([0]))[0, 0]
    assert first[0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert first.max() <= 16


def test_the_digits_come_with_their_source() -> None:
    text = (files("bitplan") / "lab" / "tasks" / "data" / "DIGITS.md").read_text()
    assert "CC BY 4.0" in text
    assert "Alpaydin" in text


def test_damaged_digits_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged:
        def __truediv__(self, name: str) -> Damaged:
            return self

        def open(self, mode: str) -> io.BytesIO:
            return io.BytesIO(b"PK\x03\x04 and then nothing")

    monkeypatch.setattr(pictures, "files", lambda package: Damaged())
    with pytest.raises(TaskError, match=r"digits\.npz is damaged: install bitplan again\."):
        digits()


def test_grey_images_are_given_out_with_three_equal_channels() -> None:
    grey = StoredPictures(torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2), torch.tensor([0, 1]))
    taken = grey.take(torch.tensor([1]))
    assert taken.shape == (1, 3, 2, 2)
    assert torch.equal(taken[:, 0], taken[:, 2])


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2), r"images are bytes"),
        (torch.zeros(2, 2, 4, 4, dtype=torch.uint8), torch.zeros(2), r"images are bytes"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3), r"2 images and 3 labels do not make a set"),
        (torch.zeros(0, 3, 4, 4, dtype=torch.uint8), torch.zeros(0), r"0 images and 0 labels do not make a set"),
    ],
)
def test_images_that_do_not_fit_are_refused(images: Tensor, labels: Tensor, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        StoredPictures(images, labels)


def test_labels_beyond_the_classes_are_refused() -> None:
    part = StoredPictures(ramp(2), torch.tensor([0, 3]))
    with pytest.raises(TaskError, match=r"a label is 3, but there are 2 classes"):
        PictureData(part, part, ["a", "b"])


def test_normalisation_gives_mean_zero_and_variance_one_in_each_channel() -> None:
    torch.manual_seed(0)
    images = torch.randint(256, (50, 3, 4, 4), dtype=torch.uint8)
    images[:, 1] = images[:, 1] // 4 + 100
    whole = Normalisation.of(StoredPictures(images, torch.zeros(50)))(images)
    assert whole.mean((0, 2, 3)).abs().max() < 1e-5
    assert (whole.var((0, 2, 3), correction=0) - 1).abs().max() < 1e-4


def test_a_channel_of_one_colour_is_not_divided_by_zero() -> None:
    images = torch.full((4, 3, 2, 2), 7, dtype=torch.uint8)
    assert torch.equal(Normalisation.of(StoredPictures(images, torch.zeros(4)))(images), torch.zeros(4, 3, 2, 2))


def test_large_sets_are_sampled_over_their_whole_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Normalisation, "SAMPLE", 10)
    images = torch.zeros(100, 3, 1, 1, dtype=torch.uint8)
    images[50:] = 200  # half of the samples, if they come from everywhere
    assert Normalisation.of(StoredPictures(images, torch.zeros(100))).mean.flatten().tolist() == [100.0] * 3


def test_moved_images_are_windows_of_the_padded_ones() -> None:
    images, pad = ramp(40), 2
    moved = moved_and_mirrored(images, pad, False, seed=0, step=0)
    padded = torch.nn.functional.pad(images, (pad,) * 4)
    offsets = set()
    for number, image in enumerate(moved):
        fitting = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(padded[number, :, top : top + 5, left : left + 5], image)
        ]
        assert len(fitting) == 1
        offsets |= set(fitting)
    assert len(offsets) > 10
    assert {top for top, _ in offsets} == {left for _, left in offsets} == set(range(5))


def test_about_half_of_the_images_are_mirrored() -> None:
    images = ramp(200)
    mirrored = moved_and_mirrored(images, 0, True, seed=0, step=0)
    flipped = (mirrored == images.flip(-1)).flatten(1).all(1)
    same = (mirrored == images).flatten(1).all(1)
    assert bool((flipped ^ same).all())
    assert 60 < int(flipped.sum()) < 140


def test_augmentation_is_a_function_of_seed_and_step() -> None:
    images = ramp(20)

    def augmented(seed: int, step: int) -> Tensor:
        return moved_and_mirrored(images, 2, True, seed, step)

    once = augmented(1, 5)
    augmented(1, 6)
    assert torch.equal(augmented(1, 5), once)
    assert not torch.equal(augmented(1, 6), once)
    assert not torch.equal(augmented(2, 5), once)


def test_without_augmentation_images_stay() -> None:
    assert torch.equal(moved_and_mirrored(ramp(), 0, False, 0, 0), ramp())
