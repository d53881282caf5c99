from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitplan.errors import TaskError
from bitplan.lab.sources.images import CIFAR10, CIFAR100, CifarFiles, read_cifar
from bitplan.lab.tasks.registry import find_task

EACH = 3


def pixels(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, (EACH, 3072), dtype=np.uint8)


def write_binary(kind: CifarFiles, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*kind.binary[1], *kind.binary[2]]):
        labels = np.tile(np.arange(EACH, dtype=np.uint8)[:, None], (1, kind.label_bytes))
        labels[:, 0] += 5 * (kind.label_bytes - 1)  # the coarse label of CIFAR-100, which does not count
        (folder / name).write_bytes(np.concatenate([labels, pixels(number)], 1).tobytes())


def write_python(kind: CifarFiles, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*kind.python[1], *kind.python[2]]):
        held = {b"data": pixels(number), kind.labels.encode(): list(range(EACH)), b"filenames": [b"x.png"] * EACH}
        (folder / name).write_bytes(pickle.dumps(held, 2))


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100])
@pytest.mark.parametrize("below", [True, False])
def test_the_two_versions_hold_the_same(tmp_path: Path, kind: CifarFiles, below: bool) -> None:
    places = tmp_path / "binary", tmp_path / "python"
    write_binary(kind, places[0] / (kind.binary[0] if below else "."))
    write_python(kind, places[1] / (kind.python[0] if below else "."))
    binary, python = (read_cifar(kind, place) for place in places)
    assert binary is not None
    assert python is not None
    assert len(binary.training) == len(kind.binary[1]) * EACH
    assert len(binary.held_out) == EACH
    for first, second in ((binary.training, python.training), (binary.held_out, python.held_out)):
        everything = torch.arange(len(first))
        assert torch.equal(first.take(everything), second.take(everything))
        assert torch.equal(first.labels, second.labels)
    assert binary.training.labels[:EACH].tolist() == [0, 1, 2]
    # Red comes first, row by row.
    assert binary.training.take(torch.tensor([1]))[0, 0, 0].tolist() == pixels(0)[1, :32].tolist()


def test_a_task_reads_it_and_learns_from_augmented_images(tmp_path: Path) -> None:
    write_binary(CIFAR10, tmp_path)
    task = find_task("cifar10", [f"data={tmp_path}", "batch=4", "model=resnet8"])
    images, labels = task.batch(0)
    assert images.shape == (4, 3, 32, 32)
    assert images.abs().max() < 10
    assert task.metric.trivial == pytest.approx(1 / 3)
    model = task.model()
    task.loss(model(images), labels).backward()
    with torch.no_grad():
        figures = task.evaluate(model.eval())
    assert figures["accuracy"] in (0, 1 / 3, 2 / 3, 1)
    example, target = task.example()
    assert (example.shape, example.dtype, target.dtype) == (images.shape, images.dtype, labels.dtype)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("data_batch_2.bin", b"x" * 100, r"data_batch_2\.bin is damaged .*its 100 bytes are not records of 3073"),
        ("data_batch_2.bin", b"", r"its 0 bytes are not records"),
        ("test_batch.bin", b"\x0b" * 3073, r"it has the label 11, and CIFAR-10 has 10 classes"),
        ("data_batch_4.bin", None, r"there is no file .*data_batch_4\.bin, which belongs to the set"),
    ],
)
def test_damaged_binary_files_are_named(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    write_binary(CIFAR10, tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=sentence):
        read_cifar(CIFAR10, tmp_path)


@pytest.mark.parametrize(
    "held",
    [
        ["no dictionary"],
        {"data": pixels(0)},
        {"data": pixels(0), "labels": [1]},
        {"data": [1, 2], "labels": [1, 2]},
        {"data": pixels(0), "labels": ["a", "b", "c"]},
        {"data": pixels(0), "labels": [0, 1, 10]},
        {"data": pixels(0)[:, :-1], "labels": [0, 1, 2]},
    ],
)
def test_damaged_python_files_are_named(tmp_path: Path, held: Any) -> None:
    write_python(CIFAR10, tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(held, 2))
    with pytest.raises(TaskError, match=r"data_batch_3 is damaged or something else \(.*\): get the archive again"):
        read_cifar(CIFAR10, tmp_path)


def test_a_folder_without_it_says_what_it_should_hold(tmp_path: Path) -> None:
    assert read_cifar(CIFAR100, tmp_path) is None
    with pytest.raises(TaskError, match=r"holds no CIFAR-100: .*cifar-100-binary/train\.bin .*or set download=true"):
        find_task("cifar100", [f"data={tmp_path}"]).batch(0)
