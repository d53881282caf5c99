from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from bitplan.errors import TaskError
from bitplan.lab.sources.images import read_fashion_mnist, read_idx
from bitplan.lab.tasks import public_images
from bitplan.lab.tasks.registry import find_task


def idx(array: np.ndarray) -> bytes:  # type: ignore[type-arg]
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


def write(folder: Path, packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 20), ("t10k", 10)):
        images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            content = idx(array)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("below", [".", "FashionMNIST/raw"])
def test_the_four_files_are_read(tmp_path: Path, packed: bool, below: str) -> None:
    write(tmp_path / below, packed)
    data = read_fashion_mnist(tmp_path)
    assert data is not None
    assert (len(data.training), len(data.held_out), len(data.classes)) == (20, 10, 10)
    expected = np.random.default_rng(20).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    assert torch.equal(data.training.take(torch.tensor([3]))[0, 1], torch.from_numpy(expected[3]))
    assert data.held_out.labels.tolist() == list(range(10))


def test_debian_s_place_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "debian")
    monkeypatch.setattr(public_images, "DEBIAN", tmp_path / "debian")
    task = find_task("fashion-mnist", ["batch=2"])
    assert task.batch(0)[0].shape == task.example()[0].shape == (2, 3, 28, 28)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", r"is not an IDX file of bytes"),
        (b"\0\0\x0d\x01\0\0\0\1\0", r"is not an IDX file of bytes"),
        (b"\0\0\x08\x03\0\0", r"is not an IDX file of bytes"),
        (b"\0\0\x08\x01\0\0\0\x05abc", r"is damaged: it has 3 values and promises 5\."),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "broken").write_bytes(content)
    with pytest.raises(TaskError, match=sentence):
        read_idx(tmp_path / "broken")


def test_a_missing_sibling_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(TaskError, match=r"there is no file .*t10k-labels-idx1-ubyte\.gz"):
        read_fashion_mnist(tmp_path)
