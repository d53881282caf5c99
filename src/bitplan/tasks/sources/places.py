"""Where data are looked for, and what is said when they are not there."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bitplan.errors import TaskError

Found = TypeVar("Found")

#: Where a downloader puts data when no folder is named.
DOWNLOADS = "data"


@dataclass(frozen=True)
class Sought:
    """A data set in words."""

    name: str
    #: What its folder looks like.
    layout: str
    #: How to come by it.
    advice: str


def read_set(
    sought: Sought,
    read: Callable[[Path], Found | None],
    data: str,
    usual: Sequence[Path] = (),
    download: Callable[[Path], None] | None = None,
) -> Found:
    """What `read` finds in the folder `data`, in one of the `usual` places, or after `download`.

    :param data: the folder that the user named, or "".
    :param download: fetches the set into a folder; None where the user did not ask for it.
    """
    places = [Path(data).expanduser()] if data else [*usual, Path(DOWNLOADS)]
    if data and not places[0].is_dir() and download is None:
        raise TaskError(f"there is no folder {data}: set data= to {sought.layout}.")
    for place in places:
        found = read(place)
        if found is not None:
            return found
    if download is not None:
        download(places[-1])
        found = read(places[-1])
        if found is not None:
            return found
    looked = f"{data} holds no {sought.name}" if data else f"{sought.name} is not here"
    raise TaskError(f"{looked}: {sought.advice} and set data= to {sought.layout}, or set download=true.")


def read_bytes(path: Path) -> bytes:
    """The file's content, unpacked where its name ends in ``.gz``, or a sentence."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except FileNotFoundError as error:
        raise TaskError(f"there is no file {path}, which belongs to the set: copy it there.") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TaskError(f"{path} is damaged ({error}): get it again.") from error
    except OSError as error:
        raise TaskError(f"cannot read {path} ({error.strerror}): set data= to a folder that you may read.") from error


def read_text(path: Path) -> str:
    """The file's text, as UTF-8, unpacked where its name ends in ``.gz``."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or name another file.") from error


def with_torchvision(name: str, folder: Path) -> None:
    """Have torchvision fetch the set that it calls `name` into `folder`."""
    try:
        from torchvision import datasets
    except ModuleNotFoundError as error:
        raise TaskError(
            "download=true needs torchvision, which is not installed: run 'pip install torchvision', "
            "or get the files yourself and set data= to their folder."
        ) from error
    try:
        getattr(datasets, name)(str(folder), train=True, download=True)
    except Exception as error:  # no network, no room, another machine's error page: the reason is in the words
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TaskError(
            f"torchvision could not fetch {name} into {folder} ({first.removesuffix('.')}): "
            f"get the files yourself and set data= to their folder."
        ) from error
