"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from their own files, the binary version or the Python one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bitplan.errors import TaskError
from bitplan.tasks.pictures import PictureData, StoredPictures
from bitplan.tasks.sources.pickled import NotPlainData, bytes_array, plain_data
from bitplan.tasks.sources.places import Sought, read_bytes

_PIXELS = 3 * 32 * 32
_TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class CifarFiles:
    """How one of the two sets lies in its folders."""

    name: str
    classes: Sequence[str]
    #: (folder, training files, test files) of the binary and of the Python version.
    binary: tuple[str, Sequence[str], Sequence[str]]
    python: tuple[str, Sequence[str], Sequence[str]]
    #: Bytes of labels in front of a binary record's pixels; the last one counts.
    label_bytes: int
    #: What the Python version calls the labels.
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
    """The set from `folder` or from the subfolder that its archive unpacks to; None where it is not there."""
    for (subfolder, training, test), read in ((kind.binary, _read_binary), (kind.python, _read_python)):
        for place in (folder / subfolder, folder):
            if (place / training[0]).is_file():
                known, held_out = (_join([read(kind, place / name) for name in names]) for names in (training, test))
                return PictureData(known, held_out, kind.classes)
    return None


def sought(kind: CifarFiles) -> Sought:
    """What to tell a user whose folder lacks it."""
    binary, python = (f"{folder}/{training[0]}" for folder, training, _ in (kind.binary, kind.python))
    return Sought(
        kind.name,
        f"a folder with {binary} (the binary version) or {python} (the Python one)",
        f"unpack the archive {kind.name.lower()}-binary.tar.gz of its authors",
    )


def _join(parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> StoredPictures:
    labels, pixels = (np.concatenate(each) for each in zip(*parts, strict=True))
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
        # Keys are text, or bytes where Python 3 wrote Python 2's strings.
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
