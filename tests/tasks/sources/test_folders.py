from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bitplan.errors import TaskError
from bitplan.lab.sources import images as folders
from bitplan.lab.sources.images import read_folder, read_image
from bitplan.lab.tasks.registry import find_task

Image = pytest.importorskip("PIL.Image")


def write(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (12, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def write_classes(folder: Path, each: int = 5) -> None:
    for label, name in enumerate(("cat", "ant")):
        for number in range(each):
            write(folder / name / f"{number:02}.png", (10 * number, 100 * label, 7))


def test_classes_are_folders_and_every_fifth_image_is_held_out(tmp_path: Path) -> None:
    write_classes(tmp_path, each=10)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    data = read_folder(tmp_path, 8)
    assert list(data.classes) == ["ant", "cat"]
    assert (len(data.training), len(data.held_out)) == (16, 4)
    taken = data.held_out.take(torch.arange(4))
    assert taken.shape == (4, 3, 8, 8)
    assert taken[:, :, 4, 4].tolist() == [[40, 100, 7], [90, 100, 7], [40, 0, 7], [90, 0, 7]]
    assert data.held_out.labels.tolist() == [0, 0, 1, 1]


def test_folders_of_their_own_are_taken_as_they_are(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", each=3)
    write_classes(tmp_path / "val", each=1)
    data = read_folder(tmp_path, 8)
    assert (len(data.training), len(data.held_out)) == (6, 2)


def test_the_middle_square_is_what_counts(tmp_path: Path) -> None:
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 200  # the middle of a wide image
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert (read_image(tmp_path / "wide.png", 10) == 200).all()


@pytest.mark.parametrize("room", [True, False])
def test_images_are_read_once_if_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    write_classes(tmp_path)
    if not room:
        monkeypatch.setattr(folders, "KEPT_BYTES", 10)
    data = read_folder(tmp_path, 8)
    first = data.training.take(torch.tensor([0, 1]))
    for path in tmp_path.rglob("*.png"):
        write(path, (1, 1, 1))
    assert torch.equal(data.training.take(torch.tensor([0, 1])), first) == room


def test_a_task_trains_on_them(tmp_path: Path) -> None:
    write_classes(tmp_path)
    task = find_task("images", [f"data={tmp_path}", "size=16", "batch=4", "model=resnet8", "width=0.5"])
    images, labels = task.batch(0)
    assert images.shape == (4, 3, 16, 16)
    model = task.model()
    assert model(images).shape == (4, 2)
    with torch.no_grad():
        assert task.evaluate(model.eval())["accuracy"] in (0, 0.5, 1)
    assert labels.max() == 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        ([], r"has 0 class folders with 0 images: it takes at least two\."),
        (["only/1.png"], r"has 1 class folders with 1 images"),
        (["a/1.png", "b/1.png"], r"leaves no image to hold out: each class wants 5 or more\."),
        (["train/a/1.png", "train/b/1.png"], r"has a train folder and no val folder"),
        (["val/a/1.png", "other/b/1.png"], r"has a val folder and no train folder"),
        (["train/a/1.png", "train/b/1.png", "val/c/1.png"], r"val leaves no image to hold out"),
    ],
)
def test_folders_that_do_not_fit_are_one_sentence(tmp_path: Path, make: list[str], sentence: str) -> None:
    for name in make:
        write(tmp_path / name, (1, 2, 3))
    with pytest.raises(TaskError, match=sentence):
        read_folder(tmp_path, 8)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    write_classes(tmp_path)
    (tmp_path / "cat" / "01.png").write_bytes((tmp_path / "cat" / "01.png").read_bytes()[:40])
    with pytest.raises(TaskError, match=r"01\.png is not an image that can be read"):
        read_folder(tmp_path, 8).training.take(torch.arange(8))


def test_without_a_folder_the_user_is_told(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="set data= to a folder of class folders"):
        find_task("images").batch(0)
    with pytest.raises(TaskError, match=r"there is no folder .*absent"):
        find_task("images", [f"data={tmp_path}/absent"]).batch(0)


def test_without_pillow_the_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classes(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(TaskError, match="image files need Pillow, which is not installed: run 'pip install pillow'"):
        read_folder(tmp_path, 8)
