"""Image data sets: CIFAR, Fashion-MNIST, and folders of image files, one per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitplan.errors import TaskError
from bitplan.lab.sources.files import Sought, read_bytes, require_file
from bitplan.lab.sources.pickled import NotPlainData, bytes_array, plain_data
from bitplan.lab.tasks.images import PictureData, Pictures, StoredPictures

# --- CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the binary version or the Python one


_PIXELS = 3 * 32 * 32

_TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class CifarFiles:
    """The files of one of the two sets."""

    name: str
    classes: Sequence[str]
    #: (folder, training files, test files) of the binary and of the Python version.
    binary: tuple[str, Sequence[str], Sequence[str]]
    python: tuple[str, Sequence[str], Sequence[str]]
    #: Label bytes before a binary record's pixels; the last one counts.
    label_bytes: int
    #: The key of the labels in the Python version.
    labels: str


CIFAR10 = CifarFiles(
    "CIFAR-10",
    _TEN,
    ("cifar-10-batches-bin", [f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]),
    ("cifar-10-batches-py", [f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]),
    1,
    "labels",
)

CIFAR100 = CifarFiles(
    "CIFAR-100",
    [f"class {number}" for number in range(100)],
    ("cifar-100-binary", ["train.bin"], ["test.bin"]),
    ("cifar-100-python", ["train"], ["test"]),
    2,
    "fine_labels",
)


def read_cifar(kind: CifarFiles, folder: Path) -> PictureData | None:
    """The set from `folder` or from the subfolder that its archive unpacks to; None if it is missing."""
    for (subfolder, training, test), read in ((kind.binary, _read_binary), (kind.python, _read_python)):
        for place in (folder / subfolder, folder):
            if (place / training[0]).is_file():
                train_set, held_out = (
                    _join([read(kind, place / name) for name in names]) for names in (training, test)
                )
                return PictureData(train_set, held_out, kind.classes)
    return None


def sought(kind: CifarFiles) -> Sought:
    """The error message for a folder without the set."""
    binary, python = (f"{folder}/{training[0]}" for folder, training, _ in (kind.binary, kind.python))
    return Sought(
        kind.name,
        f"a folder with {binary} (the binary version) or {python} (the Python one)",
        f"unpack the archive {kind.name.lower()}-binary.tar.gz of its authors",
    )


def _join(parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> StoredPictures:
    labels, pixels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return StoredPictures(torch.from_numpy(pixels).view(-1, 3, 32, 32), torch.from_numpy(labels))


def _read_binary(kind: CifarFiles, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    content = np.frombuffer(read_bytes(path), np.uint8)
    record = kind.label_bytes + _PIXELS
    if not len(content) or len(content) % record:
        raise _damaged(path, f"its {len(content)} bytes are not records of {record}")
    records = content.reshape(-1, record)
    return _checked(kind, path, records[:, kind.label_bytes - 1], records[:, kind.label_bytes :])


def _read_python(kind: CifarFiles, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    try:
        held = plain_data(read_bytes(path))
        if not isinstance(held, dict):
            raise NotPlainData("no dictionary")
        # Keys are text, or bytes where Python 3 read Python 2's strings.
        by_name: dict[str, Any] = {key.decode() if isinstance(key, bytes) else str(key): held[key] for key in held}
        pixels = bytes_array(by_name["data"])
        labels = np.array(by_name[kind.labels], dtype=np.int64)
    except (NotPlainData, KeyError, ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    if pixels.shape != (len(labels), _PIXELS) or labels.ndim != 1:
        raise _damaged(path, f"it holds {len(labels)} labels and pixels of shape {[*pixels.shape]}")
    return _checked(kind, path, labels, pixels)


def _checked(
    kind: CifarFiles, path: Path, labels: NDArray[Any], pixels: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if labels.min() < 0 or labels.max() >= len(kind.classes):
        raise _damaged(path, f"it has the label {labels.max()}, and {kind.name} has {len(kind.classes)} classes")
    return labels.astype(np.uint8), pixels


def _damaged(path: Path, why: str) -> TaskError:
    return TaskError(f"{path} is damaged or something else ({why}): get the archive again and unpack it.")


# --- Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) from its IDX files, compressed or not


#: Debian's package dataset-fashion-mnist.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")

SOUGHT = Sought(
    "Fashion-MNIST",
    "a folder with train-images-idx3-ubyte.gz and its three siblings",
    "get its four files (on Debian: apt install dataset-fashion-mnist)",
)

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def read_fashion_mnist(folder: Path) -> PictureData | None:
    """The set from `folder`, or from torchvision's subfolder; None if it is missing."""
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


ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})

TRAINING_NAMES = ("train", "training")

HELD_OUT_NAMES = ("val", "valid", "validation", "test")

#: Without a folder of held-out images, every image with this stride is held out.
HOLD_OUT_EVERY = 5

#: Decoded images are cached if all of them fit into this many bytes.
KEPT_BYTES = 1 << 30


class FiledPictures(Pictures):
    """Images that are read on demand, cropped to squares of one size, and cached if they fit."""

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
    """The central square of an image file, (3, size, size) bytes."""
    image_module = pillow()
    require_file(path)
    try:
        with image_module.open(path) as opened:
            image = opened.convert("RGB")
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            square = image.resize((size, size), box=(left, top, left + side, top + side), reducing_gap=3.0)
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:  # of damaged files
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
    classes = sorted(entry.name for entry in top.iterdir() if entry.is_dir() and not entry.name.startswith("."))
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
