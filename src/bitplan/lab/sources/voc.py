"""Images with boxes in the layout of the PASCAL VOC challenge, which many annotation tools write.

::

    JPEGImages/NAME.jpg            (or .png and others)
    Annotations/NAME.xml
    ImageSets/Main/train.txt       one name per line; also val, trainval, test

They may be in a subfolder of the given one (``VOCdevkit/VOC2012``).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bitplan.errors import TaskError
from bitplan.lab.sources.files import Files, open_files
from bitplan.lab.sources.images import ENDINGS, HOLD_OUT_EVERY, KEPT_BYTES, pillow
from bitplan.lab.tasks.scenes import Objects, SceneData, Scenes

#: Pairs of a training list and a held-out list; the first pair that exists is used.
PAIRS = (("trainval", "test"), ("train", "val"), ("train", "test"))

#: The largest annotation file; anything larger is something else.
_LONGEST = 1 << 20
#: Boxes with fewer pixels on a side are annotation errors.
_THINNEST = 2.0
#: The grey padding of images that are not square.
_AROUND = 114
_EDGES = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True)
class Annotation:
    """The contents of an XML file."""

    #: In pixels, from 0 at the image's left and upper edge.
    boxes: Sequence[Sequence[float]]
    names: Sequence[str]
    difficult: Sequence[bool]
    #: (width, height) of the image; None if the file has none.
    size: tuple[int, int] | None


def read_voc(place: Path, side: int, training: str = "", held_out: str = "") -> SceneData:
    """The set in a folder or in a .tar, as squares of `side` pixels.

    :param training: the training list; by default trainval if a list test with annotations exists, else train.
    :param held_out: the held-out list; by default test, else val. Without lists it is every fifth image.
    """
    if not place.exists():
        raise TaskError(f"there is no {place}: set data= to a folder, or a .tar, with JPEGImages and Annotations.")
    pillow()
    files = open_files(place)
    names = files.names()
    annotations = {_stem(name): name for name in names if _is_in(name, "Annotations", (".xml",))}
    images = {_stem(name): name for name in names if _is_in(name, "JPEGImages", ENDINGS)}
    if not annotations or not images:
        raise TaskError(f"{place} has no JPEGImages, or no Annotations: set data= to a folder or a .tar with both.")
    sets = sorted({str(PurePosixPath(name).parents[1]) for name in names if _is_in(name, "Annotations", (".xml",))})
    if len(sets) > 1:
        raise TaskError(f"{place} holds {len(sets)} sets ({', '.join(sets)}): set data= to the folder of one of them.")
    lists = {_stem(name): name for name in names if _is_in(name, "Main", (".txt",), "ImageSets")}
    stems = sorted(annotations.keys() & images.keys())
    parts = _parts(files, lists, stems, training, held_out)
    for name in (name for part in parts for name in part):
        if name not in annotations or name not in images:
            what = "Annotations" if name not in annotations else "JPEGImages"
            raise TaskError(f"{place} lists {name}, and has none such in {what}: add it, or take it off the list.")
    read = {name: read_annotation(files.read(annotations[name]), files.where(annotations[name])) for name in stems}
    used = [read[name] for part in parts for name in part]
    classes = sorted({name for annotation in used for name in annotation.names})
    if not classes:
        raise TaskError(f"the images of {place} have no objects: there is nothing to learn.")
    first, second = (
        VocScenes(files, [images[name] for name in part], [read[name] for name in part], classes, side)
        for part in parts
    )
    return SceneData(first, second, classes)


class VocScenes(Scenes):
    """Images that are read on demand, fitted into the centre of a square, and cached if they fit."""

    def __init__(
        self,
        files: Files,
        images: Sequence[str],
        annotations: Sequence[Annotation],
        classes: Sequence[str],
        side: int,
    ) -> None:
        self.files, self.images, self.annotations, self.side = files, images, annotations, side
        self._numbers = {name: number for number, name in enumerate(classes)}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._keeps = len(images) * 3 * side * side <= KEPT_BYTES
        self._kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Tensor:
        if index in self._kept:
            return self._kept[index]
        where = self.files.where(self.images[index])
        with _opened(where, self.files.read(self.images[index])) as opened:
            said = self.annotations[index].size
            if said is not None and said != opened.size:
                raise TaskError(
                    f"{where} has {opened.width} x {opened.height} pixels, and its annotation says "
                    f"{said[0]} x {said[1]}: mend one of them."
                )
            width, height, left, top = _inside(opened.size, self.side)
            shrunk = opened.convert("RGB").resize((width, height), reducing_gap=3.0)
        pixels = torch.from_numpy(np.asarray(shrunk, dtype=np.uint8).copy()).permute(2, 0, 1)
        image = F.pad(pixels, (left, self.side - width - left, top, self.side - height - top), value=_AROUND)
        if self._keeps:
            self._kept[index] = image
        return image

    def objects(self, index: int) -> Objects:
        annotation = self.annotations[index]
        size = self._size(index)
        width, height, left, top = _inside(size, self.side)
        boxes = torch.tensor(annotation.boxes, dtype=torch.float32).view(-1, 4)
        limits = torch.tensor([*size, *size], dtype=torch.float32)
        boxes = torch.minimum(boxes.clamp(min=0), limits)
        kept = ((boxes[:, 2:] - boxes[:, :2]) >= _THINNEST).all(1)
        factors = torch.tensor([width / size[0], height / size[1]] * 2)
        labels = torch.tensor([self._numbers[name] for name in annotation.names], dtype=torch.long)
        difficult = torch.tensor(annotation.difficult, dtype=torch.bool)
        moved = boxes * factors + torch.tensor([left, top, left, top])
        return Objects(moved[kept], labels[kept], difficult[kept])

    def _size(self, index: int) -> tuple[int, int]:
        said = self.annotations[index].size
        if said is not None:
            return said
        if index not in self._sizes:
            with _opened(self.files.where(self.images[index]), self.files.read(self.images[index])) as opened:
                self._sizes[index] = opened.size
        return self._sizes[index]


@contextmanager
def _opened(where: str, content: bytes) -> Iterator[Any]:
    """A Pillow image; a damaged file is reported in one sentence."""
    module = pillow()
    try:
        with module.open(io.BytesIO(content)) as image:
            yield image
    except TaskError:
        raise
    except (OSError, ValueError, SyntaxError, module.DecompressionBombError) as error:
        raise TaskError(f"{where} is not an image that can be read ({error}): mend it or take it away.") from error


def read_annotation(content: bytes, where: str) -> Annotation:
    """The annotation of an image from its XML file. Files that define entities are rejected."""
    root = _parsed(content, where)
    boxes, names, difficult = [], [], []
    for element in root.findall("object"):
        name, box = (element.findtext("name") or "").strip(), element.find("bndbox")
        if not name or box is None:
            raise _damaged(where, "an object has no name or no bndbox")
        edges = [_number(box.findtext(edge), where) for edge in _EDGES]
        if edges[2] < edges[0] or edges[3] < edges[1]:
            raise _damaged(where, f"a box reaches from {edges[:2]} to {edges[2:]}")
        # VOC counts pixels from 1, and the last one belongs to the box.
        boxes.append([edges[0] - 1, edges[1] - 1, edges[2], edges[3]])
        names.append(name)
        difficult.append((element.findtext("difficult") or "0").strip() == "1")
    sides = [root.findtext(f"size/{side}") for side in ("width", "height")]
    size = None if None in sides else tuple(int(_number(side, where)) for side in sides)
    # Some tools write zeros where they have no value.
    return Annotation(boxes, names, difficult, (size[0], size[1]) if size and min(size) > 0 else None)


def _parsed(content: bytes, where: str) -> Element:
    if len(content) > _LONGEST:
        raise _damaged(where, f"it has {len(content)} bytes")
    builder, parser = TreeBuilder(), expat.ParserCreate()
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = partial(_refuse_doctype, where)
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise _damaged(where, str(error)) from error
    root = builder.close()
    if root.tag != "annotation":
        raise _damaged(where, f"it begins with <{root.tag}>")
    return root


def _refuse_doctype(where: str, *declared: Any) -> NoReturn:
    raise TaskError(f"{where} has a DOCTYPE, which annotations do not need and which may hide anything: take it out.")


def _number(text: str | None, where: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _damaged(where, f"{'nothing' if text is None else repr(text.strip())} stands where a number belongs")
    return number


def _damaged(where: str, why: str) -> TaskError:
    return TaskError(f"{where} is no VOC annotation, or is damaged ({why}): mend it or take it away.")


def _parts(
    files: Files, lists: dict[str, str], names: Sequence[str], training: str, held_out: str
) -> tuple[list[str], list[str]]:
    """The names of the training images and of the held-out ones."""
    if not lists and not training and not held_out:
        others = list(names[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY])
        listed = [name for name in names if name not in set(others)]
    else:
        pair = (training, held_out) if training and held_out else _pair(files, lists, set(names), training, held_out)
        for name in pair:
            if name not in lists:
                have = ", ".join(sorted(lists)) or "none"
                raise TaskError(f"{files.place} has no list ImageSets/Main/{name}.txt; its lists are: {have}.")
        listed, others = (_listed(files, lists[name]) for name in pair)
        both = set(listed) & set(others)
        if both:
            raise TaskError(f"{min(both)} is in both lists, {pair[0]} and {pair[1]}: hold out what is not trained on.")
    if not listed or not others:
        raise TaskError(f"{files.place} leaves no image to train on, or none to hold out: it takes more images.")
    return listed, others


def _pair(files: Files, lists: dict[str, str], names: Iterable[str], training: str, held_out: str) -> tuple[str, str]:
    names = set(names)
    for pair in PAIRS:
        fits = all(name in lists for name in pair) and (training or pair[0], held_out or pair[1]) == pair
        # The challenge does not publish the annotations of its later test sets.
        if fits and names.issuperset(_listed(files, lists[pair[1]])):
            return pair
    have = ", ".join(sorted(lists)) or "none"
    raise TaskError(
        f"{files.place} has no pair of lists to train on and to hold out; its lists are: {have}. Name two of them with "
        f"training= and held_out=."
    )


def _listed(files: Files, name: str) -> list[str]:
    try:
        text = files.read(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{files.where(name)} is not UTF-8 text: write the images' names there, a line each."
        ) from error
    # Lists of one class have a flag after each name.
    return list(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.split()))


def _is_in(name: str, folder: str, endings: Iterable[str], above: str = "") -> bool:
    path = PurePosixPath(name)
    parents = path.parts[:-1]
    is_there = parents[-1:] == (folder,) and (not above or parents[-2:-1] == (above,))
    return is_there and path.suffix.lower() in endings and not path.name.startswith(".")


def _stem(name: str) -> str:
    return PurePosixPath(name).stem


def _inside(size: tuple[int, int], side: int) -> tuple[int, int, int, int]:
    """Width and height of an image that fills a square of that side, and the position of its top left corner."""
    factor = side / max(size)
    width, height = (max(1, round(length * factor)) for length in size)
    return width, height, (side - width) // 2, (side - height) // 2
