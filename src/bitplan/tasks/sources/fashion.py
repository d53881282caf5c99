"""Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) from its IDX files, packed or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitplan.errors import TaskError
from bitplan.tasks.pictures import PictureData, StoredPictures
from bitplan.tasks.sources.places import Sought, read_bytes

#: Debian's package dataset-fashion-mnist.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")

SOUGHT = Sought(
    "Fashion-MNIST",
    "a folder with train-images-idx3-ubyte.gz and its three siblings",
    "get its four files (on Debian: apt install dataset-fashion-mnist)",
)
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def read_fashion_mnist(folder: Path) -> PictureData | None:
    """The set from `folder`, or from where torchvision puts it below; None where it is not there."""
    for place in (folder, folder / "FashionMNIST" / "raw"):
        if _file(place, "train-images-idx3-ubyte") is not None:
            return PictureData(_part(place, "train"), _part(place, "t10k"), CLASSES)
    return None


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)


def _part(folder: Path, part: str) -> StoredPictures:
    names = (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte")
    images, labels = (read_idx(_file(folder, name) or folder / f"{name}.gz") for name in names)
    return StoredPictures(images.unsqueeze(1), labels)


def read_idx(path: Path) -> Tensor:
    """The unsigned bytes of an IDX file: two zero bytes, the type 8, the number of dimensions, each as four bytes."""
    content = read_bytes(path)
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if content[:3] != b"\0\0\x08" or len(content) < start:
        raise TaskError(f"{path} is not an IDX file of bytes: get it again.")
    shape = np.frombuffer(content[4:start], ">u4").astype(np.int64)
    if len(content) - start != shape.prod():
        raise TaskError(f"{path} is damaged: it has {len(content) - start} values and promises {shape.prod()}.")
    return torch.from_numpy(np.frombuffer(content[start:], np.uint8).reshape(shape).copy())
