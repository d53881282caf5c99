from __future__ import annotations

import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bitplan.errors import TaskError
from bitplan.lab.sources import voc
from bitplan.lab.sources.voc import read_annotation, read_voc
from bitplan.lab.tasks.registry import find_task

Image = pytest.importorskip("PIL.Image")

Box = tuple[str, float, float, float, float]


def annotation(boxes: Sequence[Box] = (), size: tuple[int, int] | None = (40, 20), difficult: bool = False) -> str:
    sides = "" if size is None else f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    objects = "".join(
        f"<object><name>{name}</name><difficult>{int(difficult)}</difficult><bndbox><xmin>{left}</xmin>"
        f"<ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for name, left, top, right, bottom in boxes
    )
    return f"<annotation><filename>x.jpg</filename>{sides}{objects}</annotation>"


def write_set(top: Path, count: int = 10, lists: dict[str, Sequence[int]] | None = None) -> Path:
    """Images of 40 x 20 pixels, grey but for a red cell in the same place, and one blue one in the last of them."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (top / folder).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image = Image.new("RGB", (40, 20), (90, 90, 90))
        image.paste((200, 0, 0), (10, 4, 20, 12))
        image.save(top / "JPEGImages" / f"i{number}.png")
        boxes: list[Box] = [("red", 11, 5, 20, 12)]
        if number == count - 1:
            boxes.append(("blue", 21, 5, 30, 14))
        (top / "Annotations" / f"i{number}.xml").write_text(annotation(boxes))
    for name, numbers in (lists or {}).items():
        text = "".join(f"i{number}\n" for number in numbers)
        (top / "ImageSets" / "Main" / f"{name}.txt").write_text(text)
    return top


def packed(top: Path, archive: Path, mode: str = "w") -> Path:
    with tarfile.open(archive, mode) as tar:
        tar.add(top, "SET")
    return archive


def test_images_are_fitted_into_squares_and_their_boxes_with_them(tmp_path: Path) -> None:
    data = read_voc(write_set(tmp_path), 80)
    assert data.classes == ["blue", "red"]
    image, objects = data.training.image(0), data.training.objects(0)
    assert (image.shape, image.dtype) == ((3, 80, 80), torch.uint8)
    # Twice as large, and 20 pixels down; pixels 11 to 20 in the file are those from 10 up to 20.
    assert objects.boxes.tolist() == [[20, 28, 40, 44]]
    assert objects.labels.tolist() == [1]
    assert image[:, 36, 30].tolist() == [200, 0, 0]
    assert image[:, 36, 60].tolist() == [90, 90, 90]
    assert image[:, 5, 30].tolist() == [114, 114, 114]  # what is added


def test_every_fifth_image_is_held_out_where_there_are_no_lists(tmp_path: Path) -> None:
    data = read_voc(write_set(tmp_path), 32)
    assert (len(data.training), len(data.held_out)) == (8, 2)
    assert len(data.held_out.objects(1)) == 2


@pytest.mark.parametrize(
    ("lists", "chosen", "expected"),
    [
        ({"train": range(5), "val": range(5, 8), "trainval": range(8), "test": range(8, 10)}, ("", ""), (8, 2)),
        ({"train": range(5), "val": range(5, 8), "trainval": range(8)}, ("", ""), (5, 3)),
        # The challenge's later tests have no annotations.
        ({"train": range(5), "val": range(5, 8), "trainval": range(8), "test": range(50, 60)}, ("", ""), (5, 3)),
        ({"train": range(5), "test": range(8, 10)}, ("", ""), (5, 2)),
        ({"train": range(5), "val": range(5, 8), "trainval": range(8), "test": range(8, 10)}, ("train", ""), (5, 3)),
        ({"mine": range(3), "yours": range(3, 10)}, ("mine", "yours"), (3, 7)),
    ],
)
def test_lists_say_what_is_held_out(
    tmp_path: Path, lists: dict[str, Sequence[int]], chosen: tuple[str, str], expected: tuple[int, int]
) -> None:
    data = read_voc(write_set(tmp_path, lists=lists), 32, *chosen)
    assert (len(data.training), len(data.held_out)) == expected


def test_an_archive_is_read_as_it_is(tmp_path: Path) -> None:
    top = write_set(tmp_path / "set", lists={"train": range(7), "val": range(7, 10)})
    (top / "Annotations" / "._i0.xml").write_bytes(b"\0\1")  # what some systems leave in archives
    first, second = read_voc(top, 32), read_voc(packed(top, tmp_path / "set.tar"), 32)
    assert len(first.training) == len(second.training) == 7
    for index in range(3):
        assert torch.equal(first.held_out.image(index), second.held_out.image(index))
        assert torch.equal(first.held_out.objects(index).boxes, second.held_out.objects(index).boxes)


@pytest.mark.parametrize("room", [True, False])
def test_images_are_read_once_if_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    if not room:
        monkeypatch.setattr(voc, "KEPT_BYTES", 10)
    data = read_voc(write_set(tmp_path), 32)
    first = data.training.image(0)
    Image.new("RGB", (40, 20), (1, 1, 1)).save(tmp_path / "JPEGImages" / "i0.png")
    assert torch.equal(data.training.image(0), first) == room


def test_what_annotations_say_and_leave_out(tmp_path: Path) -> None:
    reported = read_annotation(annotation([("a", 1.5, 2, 3, 4)], None, difficult=True).encode(), "x.xml")
    assert (reported.boxes, reported.names, reported.difficult, reported.size) == (
        [[0.5, 1, 3, 4]],
        ["a"],
        [True],
        None,
    )
    assert read_annotation(annotation((), (0, 0)).encode(), "x.xml").size is None
    top = write_set(tmp_path)
    # No size, so the image says its own; a box beyond the edge ends there; one of a single pixel is a slip.
    boxes: list[Box] = [("red", 31, 5, 99, 14), ("red", 3, 3, 3, 3)]
    (top / "Annotations" / "i0.xml").write_text(annotation(boxes, None))
    assert read_voc(top, 40).training.objects(0).boxes.tolist() == [[30, 14, 40, 24]]


BOMB = '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;&x;">]><annotation>&y;</annotation>'


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (BOMB.encode(), r"x\.xml has a DOCTYPE, .*: take it out\."),
        (BOMB.encode("utf-16"), r"x\.xml has a DOCTYPE"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', r"x\.xml has a DOCTYPE"),
        (b"<annotation>&unknown;</annotation>", r"is damaged \(undefined entity.*\): mend it or take it away\."),
        (b"<annotation>", r"is damaged \(no element found"),
        (b"", r"is damaged \(no element found"),
        (b"\0\1\2", r"is damaged \(not well-formed"),
        (b"<html></html>", r"is damaged \(it begins with <html>\)"),
        (b"<annotation>" + b" " * (1 << 20) + b"</annotation>", r"is damaged \(it has \d+ bytes\)"),
        (annotation([("", 1, 1, 2, 2)]).encode(), "an object has no name or no bndbox"),
        (b"<annotation><object><name>a</name></object></annotation>", "an object has no name or no bndbox"),
        (annotation([("a", 9, 1, 2, 2)]).encode(), r"a box reaches from \[9\.0, 1\.0\] to \[2\.0, 2\.0\]"),
        (annotation([("a", "", 1, 2, 2)]).encode(), "'' stands where a number belongs"),  # type: ignore[list-item]
        (annotation([("a", float("nan"), 1, 2, 2)]).encode(), "'nan' stands where a number belongs"),
        (annotation([("a", 1, 1, 2, 2)]).replace("<xmax>2</xmax>", "").encode(), "nothing stands where a number"),
    ],
)
def test_a_damaged_annotation_is_one_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence) as raised:
        read_annotation(content, "x.xml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("lists", "chosen", "sentence"),
    [
        ({"train": [0]}, ("", ""), r"has no pair of lists .*; its lists are: train\. Name two of them with training="),
        (
            {"train": [0], "val": [1]},
            ("train", "vall"),
            r"has no list ImageSets/Main/vall\.txt; its lists are: train, val",
        ),
        ({"train": [0, 1], "val": [1]}, ("", ""), r"i1 is in both lists, train and val"),
        ({"train": [0, 70], "val": [1]}, ("", ""), r"lists i70, and has none such in Annotations"),
        ({"train": [], "val": [1]}, ("", ""), r"leaves no image to train on, or none to hold out"),
        (None, ("mine", "yours"), r"has no list ImageSets/Main/mine\.txt; its lists are: none\."),
    ],
)
def test_lists_that_do_not_fit_are_one_sentence(
    tmp_path: Path, lists: dict[str, Sequence[int]] | None, chosen: tuple[str, str], sentence: str
) -> None:
    with pytest.raises(TaskError, match=sentence):
        read_voc(write_set(tmp_path, lists=lists), 32, *chosen)


def test_places_that_hold_no_such_set_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"there is no .*absent: set data= to a folder, or a \.tar"):
        read_voc(tmp_path / "absent", 32)
    with pytest.raises(TaskError, match="has no JPEGImages, or no Annotations"):
        read_voc(tmp_path, 32)
    for name in ("one", "two"):
        write_set(tmp_path / "both" / name)
    with pytest.raises(TaskError, match=r"holds 2 sets \(one, two\): set data= to the folder of one of them\."):
        read_voc(tmp_path / "both", 32)
    empty = write_set(tmp_path / "empty")
    for file in (empty / "Annotations").iterdir():
        file.write_text(annotation())
    with pytest.raises(TaskError, match="have no objects: there is nothing to learn"):
        read_voc(empty, 32)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    top = write_set(tmp_path)
    path = top / "JPEGImages" / "i0.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(TaskError, match=r"i0\.png is not an image that can be read"):
        read_voc(top, 32).training.image(0)
    Image.new("RGB", (20, 20)).save(path)
    with pytest.raises(TaskError, match=r"i0\.png has 20 x 20 pixels, and its annotation says 40 x 20: mend one"):
        read_voc(top, 32).training.image(0)


def test_without_pillow_the_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(TaskError, match="image files need Pillow, which is not installed: run 'pip install pillow'"):
        read_voc(tmp_path, 32)


def test_a_task_trains_on_it(tmp_path: Path) -> None:
    archive = packed(write_set(tmp_path / "set"), tmp_path / "set.tar")
    task = find_task("voc", [f"data={archive}", "size=32", "batch=2", "width=0.25", "levels=3", "anchor=1", "head=0"])
    images, target = task.batch(0)
    model = task.model()
    loss = task.loss(model(images), target)
    loss.backward()
    assert loss.isfinite()
    assert images.shape == (2, 3, 32, 32)
    # There is but one red cell, always in the same place: even the blind predictor finds it, and never the blue one.
    assert task.metric.trivial == pytest.approx(0.5)
    with torch.no_grad():
        assert 0 <= task.evaluate(model.eval())["mAP"] <= 1
    with pytest.raises(TaskError, match=r"set data= to a folder or a \.tar in VOC's layout"):
        find_task("voc").batch(0)
