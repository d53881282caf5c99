"""Files of a data set by their relative names, in a folder or in a ``.tar`` that need not be unpacked."""

from __future__ import annotations

import tarfile
from abc import ABC, abstractmethod
from pathlib import Path

from bitplan.errors import TaskError
from bitplan.tasks.sources.places import read_bytes


class Files(ABC):
    """What lies below some place. Names have slashes, and none of them leads out of it."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @abstractmethod
    def names(self) -> list[str]:
        """Of all files, sorted."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file's content."""

    def where(self, name: str) -> str:
        """The file as messages call it."""
        return f"{self.place}/{name}"


class FolderFiles(Files):
    """Files in a folder."""

    def names(self) -> list[str]:
        return sorted(path.relative_to(self.place).as_posix() for path in self.place.rglob("*") if path.is_file())

    def read(self, name: str) -> bytes:
        return read_bytes(self.place / name)


class TarFiles(Files):
    """Files in an archive that is not compressed, so that each can be read where it lies. Links are passed over."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
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
    """Those of a folder or of an archive."""
    return FolderFiles(place) if place.is_dir() else TarFiles(place)
