from __future__ import annotations

import errno
import gzip
import os
import sys
import types
from pathlib import Path

import pytest

from bitplan.errors import TaskError
from bitplan.lab.sources.files import Sought, read_bytes, read_set, read_text, with_torchvision

SOUGHT = Sought("Things", "a folder with things.bin", "get things")


def read(folder: Path) -> str | None:
    path = folder / "things.bin"
    return path.read_text() if path.is_file() else None


def test_the_named_folder_counts_before_the_usual_ones(tmp_path: Path) -> None:
    usual, named = tmp_path / "usual", tmp_path / "named"
    for place in (usual, named):
        place.mkdir()
        (place / "things.bin").write_text(place.name)
    assert read_set(SOUGHT, read, str(named), usual=[usual]) == "named"
    assert read_set(SOUGHT, read, "", usual=[tmp_path / "absent", usual]) == "usual"


def test_what_is_not_there_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        TaskError, match=r"^Things is not here: get things and set data= to a folder .* download=true\.$"
    ):
        read_set(SOUGHT, read, "")
    with pytest.raises(TaskError, match=r"there is no folder absent: set data= to a folder with things\.bin\.$"):
        read_set(SOUGHT, read, "absent")


def test_it_is_fetched_only_where_it_is_missing(tmp_path: Path) -> None:
    fetched: list[Path] = []

    def fetch(folder: Path) -> None:
        fetched.append(folder)
        folder.mkdir()
        (folder / "things.bin").write_text("fetched")

    place = tmp_path / "new"
    for _ in range(2):
        assert read_set(SOUGHT, read, str(place), download=fetch) == "fetched"
    assert fetched == [place]


def test_a_downloader_that_brings_nothing_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no Things"):
        read_set(SOUGHT, read, str(tmp_path), download=lambda folder: None)


def test_packed_files_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("grüß".encode()))
    assert read_text(tmp_path / "a.txt.gz") == "grüß"


def test_files_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 1000)[:-10])
    (tmp_path / "no.gz").write_bytes(b"not packed")
    (tmp_path / "latin.txt").write_bytes("grüß".encode("latin-1"))
    with pytest.raises(TaskError, match=r"cut\.gz is damaged \("):
        read_bytes(tmp_path / "cut.gz")
    with pytest.raises(TaskError, match=r"no\.gz is damaged \("):
        read_bytes(tmp_path / "no.gz")
    with pytest.raises(TaskError, match=r"latin\.txt is not UTF-8 text \(byte 2\)"):
        read_text(tmp_path / "latin.txt")
    with pytest.raises(TaskError, match=r"there is no file .*absent"):
        read_bytes(tmp_path / "absent")
    with pytest.raises(TaskError, match=r"cannot read .* \(Is a directory\)"):
        read_bytes(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root, who may run this, may read everything
    path = tmp_path / "secret"
    with pytest.raises(TaskError, match=r"cannot read .*secret \(Permission denied\)"):
        read_bytes(path)


def test_without_torchvision_the_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(TaskError, match="download=true needs torchvision, which is not installed"):
        with_torchvision("CIFAR10", tmp_path)


def test_torchvision_is_asked_for_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[object] = []

    def cifar(root: str, train: bool, download: bool) -> None:
        requests.append((root, train, download))
        if len(requests) > 1:
            raise OSError("<urlopen error no network>\nand more")

    library = types.ModuleType("torchvision")
    library.datasets = types.SimpleNamespace(CIFAR10=cifar)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", library)
    with_torchvision("CIFAR10", tmp_path)
    assert requests == [(str(tmp_path), True, True)]
    with pytest.raises(
        TaskError, match=r"torchvision could not fetch CIFAR10 into .* \(<urlopen error no network>\): get"
    ):
        with_torchvision("CIFAR10", tmp_path)
