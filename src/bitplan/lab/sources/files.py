"""Locating the files of a data set, and the error if they are missing."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bitplan.errors import TaskError

# --- Files of a data set by their relative names, in a folder or in an uncompressed ``.tar``


class Files(ABC):
    """Files below a folder or in an archive. Names have slashes, and none of them leads outside."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all files, sorted."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file's content."""

    def where(self, name: str) -> str:
        """The file's name in messages."""
        return f"{self.place}/{name}"


class FolderFiles(Files):
    """Files in a folder."""

    def names(self) -> list[str]:
        return sorted(path.relative_to(self.place).as_posix() for path in self.place.rglob("*") if path.is_file())

    def read(self, name: str) -> bytes:
        return read_bytes(self.place / name)


class TarFiles(Files):
    """Files in an uncompressed archive, read in place. Links are ignored."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        require_file(place)
        try:
            with tarfile.open(place, "r:") as archive:
                members = [member for member in archive if member.isreg() and not member.issparse()]
        except tarfile.ReadError as error:
            raise TaskError(
                f"{place} is no .tar archive, or is compressed or damaged: unpack it, and set data= to the folder."
            ) from error
        except OSError as error:
            raise TaskError(
                f"cannot read {place} ({error.strerror}): set data= to a file that you may read."
            ) from error
        self._members = {member.name.removeprefix("./"): (member.offset_data, member.size) for member in members}

    def names(self) -> list[str]:
        return sorted(self._members)

    def read(self, name: str) -> bytes:
        if name not in self._members:
            raise TaskError(f"there is no {name} in {self.place}, which belongs to the set: get the archive again.")
        start, size = self._members[name]
        with self.place.open("rb") as file:
            file.seek(start)
            content = file.read(size)
        if len(content) < size:
            raise TaskError(f"{self.place} ends in the middle of {name}: get the archive again.")
        return content


def open_files(place: Path) -> Files:
    """The files of a folder or of an archive."""
    return FolderFiles(place) if place.is_dir() else TarFiles(place)


Found = TypeVar("Found")

#: The default folder of downloads.
DOWNLOADS = "data"


@dataclass(frozen=True)
class Sought:
    """The description of a data set."""

    name: str
    #: The contents of its folder.
    layout: str
    #: Where to get it.
    advice: str


def read_set(
    sought: Sought,
    read: Callable[[Path], Found | None],
    data: str,
    usual: Sequence[Path] = (),
    download: Callable[[Path], None] | None = None,
) -> Found:
    """The data set that `read` finds in the folder `data`, in one of the `usual` places, or after `download`.

    :param data: the folder that the user named, or "".
    :param download: downloads the set into a folder; None unless the user asked for it.
    """
    places = [Path(data).expanduser()] if data else [*usual, Path(DOWNLOADS)]
    if data and not places[0].is_dir() and download is None:
        raise TaskError(f"there is no folder {data}: set data= to {sought.layout}.")
    for place in places:
        data_set = read(place)
        if data_set is not None:
            return data_set
    if download is not None:
        download(places[-1])
        data_set = read(places[-1])
        if data_set is not None:
            return data_set
    looked = f"{data} holds no {sought.name}" if data else f"{sought.name} is not here"
    raise TaskError(f"{looked}: {sought.advice} and set data= to {sought.layout}, or set download=true.")


#: Compressed files may grow to this many bytes, or by this factor; small files of zeros that fill the memory do more.
_MOST_DECOMPRESSED, _MOST_GROWTH = 2**26, 200


def read_bytes(path: Path) -> bytes:
    """The file's content, decompressed if its name ends in ``.gz``; raises an error if it cannot be read."""
    require_file(path)
    try:
        content = path.read_bytes()
        return _decompressed(path, content) if path.suffix == ".gz" else content
    except FileNotFoundError as error:
        raise TaskError(f"there is no file {path}, which belongs to the set: copy it there.") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TaskError(f"{path} is damaged ({error}): get it again.") from error
    except OSError as error:
        raise TaskError(f"cannot read {path} ({error.strerror}): set data= to a folder that you may read.") from error


def require_file(path: Path) -> None:
    """Raise where `path` is a pipe or a device, which could be read for ever."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise TaskError(f"{path} is a pipe or a device: set data= to a file or a folder.")


def _decompressed(path: Path, content: bytes) -> bytes:
    most = max(_MOST_DECOMPRESSED, _MOST_GROWTH * len(content))
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        plain = file.read(most + 1)
    if len(plain) > most:
        raise TaskError(f"{path} decompresses to more than {most:,} bytes: decompress it yourself if you trust it.")
    return plain


def read_text(path: Path) -> str:
    """The file's text, as UTF-8, decompressed if its name ends in ``.gz``."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or name another file.") from error


def with_torchvision(name: str, folder: Path) -> None:
    """Download the set that torchvision calls `name` into `folder`."""
    try:
        from torchvision import datasets
    except ModuleNotFoundError as error:
        raise TaskError(
            "download=true needs torchvision, which is not installed: run 'pip install torchvision', "
            "or get the files yourself and set data= to their folder."
        ) from error
    try:
        getattr(datasets, name)(str(folder), train=True, download=True)
    except Exception as error:  # no network, a full disk, an error page: the message says why
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TaskError(
            f"torchvision could not fetch {name} into {folder} ({first.removesuffix('.')}): "
            f"get the files yourself and set data= to their folder."
        ) from error
