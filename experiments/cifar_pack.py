"""CIFAR-10 from one .npz file of JPEGs: a task for experiments, named as ``experiments/cifar_pack.py:CifarPack``.

The file holds `header` and `body` (bytes), `off` (the offset of each image in the body), `y` (classes) and `is_test`;
image i is the JPEG `header + body[off[i]:off[i+1]]`. Accuracies on JPEGs are not comparable with published ones, only
with each other.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from bitplan.errors import TaskError
from bitplan.lab.tasks.images import ImageClassification, ImageSettings, PictureData, StoredPictures

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class PackSettings(ImageSettings):
    """Settings of the file, and of the number of images."""

    data: str = ""
    #: Use this many images of each split; 0 for all.
    most: int = 0


class CifarPack(ImageClassification):
    """CIFAR-10 as JPEGs."""

    name = "cifar-pack"
    summary = "CIFAR-10 from a pack of JPEGs"
    settings_class: ClassVar[type[PackSettings]] = PackSettings
    settings: PackSettings

    def load(self) -> PictureData:
        path = Path(self.settings.data).expanduser()
        if not path.is_file():
            raise TaskError(f"there is no file {self.settings.data!r}: set data= to the .npz file of the images.")
        return _read(path, self.settings.most)


@lru_cache(maxsize=1)  # shared by the tasks of all seeds
def _read(path: Path, most: int) -> PictureData:
    with np.load(path, allow_pickle=False) as stored:
        header, body = stored["header"].tobytes(), stored["body"].tobytes()
        starts, labels, held_out = stored["off"], stored["y"], stored["is_test"].astype(bool)
    parts = []
    for part in (~held_out, held_out):
        # Sorted by class: a random sample has some of each.
        chosen = np.random.default_rng(0).permutation(np.flatnonzero(part))[: most or len(labels)]
        images = np.stack([_pixels(header + body[starts[i] : starts[i + 1]]) for i in chosen])
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        parts.append(StoredPictures(pixels, torch.from_numpy(labels[chosen].astype(np.int64))))
    return PictureData(parts[0], parts[1], CLASSES)


def _pixels(data: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
