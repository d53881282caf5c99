"""Image files in a folder for each class, read with Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.errors import TaskError
from bitplan.tasks.pictures import PictureData, Pictures

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
TRAINING_NAMES = ("train", "training")
HELD_OUT_NAMES = ("val", "valid", "validation", "test")

#: Without a folder of held-out images every so many-th one is held out.
HOLD_OUT_EVERY = 5

#: Decoded images are kept while all of them fit into so many bytes.
KEPT_BYTES = 1 << 30


class FiledPictures(Pictures):
    """Images that are read when they are wanted, cut to squares of one size, and kept if there is room."""

    def __init__(self, paths: list[Path], labels: list[int], size: int) -> None:
        self.paths, self.labels, self.size = paths, torch.tensor(labels), size
        fits = len(paths) * 3 * size * size <= KEPT_BYTES
        self.kept: dict[int, Tensor] | None = {} if fits else None

    def take(self, indices: Tensor) -> Tensor:
        return torch.stack([self._one(index) for index in indices.tolist()])

    def _one(self, index: int) -> Tensor:
        if self.kept is None:
            return read_image(self.paths[index], self.size)
        if index not in self.kept:
            self.kept[index] = read_image(self.paths[index], self.size)
        return self.kept[index]


def read_image(path: Path, size: int) -> Tensor:
    """The middle square of an image file, (3, size, size) bytes."""
    image_module = pillow()
    try:
        with image_module.open(path) as opened:
            image = opened.convert("RGB")
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            square = image.resize((size, size), box=(left, top, left + side, top + side), reducing_gap=3.0)
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises all three for damaged files
        raise TaskError(f"{path} is not an image that can be read ({error}): mend it or take it away.") from error
    return torch.from_numpy(np.asarray(square, dtype=np.uint8).copy()).permute(2, 0, 1).contiguous()


def pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise TaskError("image files need Pillow, which is not installed: run 'pip install pillow'.") from error
    return Image


def read_folder(folder: Path, size: int) -> PictureData:
    """Classes are the subfolders of ``train`` and of ``val`` (or ``test``), or of `folder` itself.

    In the latter case every fifth image of each class, by name, is held out.
    """
    if not folder.is_dir():
        raise TaskError(f"there is no folder {folder}: set data= to one that has a folder of images for each class.")
    pillow()
    training, held_out = (_first_folder(folder, names) for names in (TRAINING_NAMES, HELD_OUT_NAMES))
    if (training is None) != (held_out is None):
        there, missing = ("train", "val") if held_out is None else ("val", "train")
        raise TaskError(f"{folder} has a {there} folder and no {missing} folder: add it, or keep the classes alone.")
    top = training or folder
    classes = sorted(each.name for each in top.iterdir() if each.is_dir() and not each.name.startswith("."))
    listed = [(path, label) for label, name in enumerate(classes) for path in _images(top / name)]
    if len(classes) < 2 or not listed:
        raise TaskError(f"{top} has {len(classes)} class folders with {len(listed)} images: it takes at least two.")
    if held_out is not None:
        others = [(path, label) for label, name in enumerate(classes) for path in _images(held_out / name)]
    else:
        places = {path: place for name in classes for place, path in enumerate(_images(top / name))}
        others = [pair for pair in listed if places[pair[0]] % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1]
        listed = [pair for pair in listed if places[pair[0]] % HOLD_OUT_EVERY != HOLD_OUT_EVERY - 1]
    if not others:
        raise TaskError(f"{held_out or top} leaves no image to hold out: each class wants {HOLD_OUT_EVERY} or more.")
    return PictureData(_pictures(listed, size), _pictures(others, size), classes)


def _pictures(pairs: list[tuple[Path, int]], size: int) -> FiledPictures:
    return FiledPictures([path for path, _ in pairs], [label for _, label in pairs], size)


def _first_folder(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS) if folder.is_dir() else []
