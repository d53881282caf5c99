from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from bitplan.errors import TaskError
from bitplan.lab.sources.files import open_files


def write_tar(path: Path, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in (("./set/b.txt", b"bee"), ("set/a.txt", b"a" * 5000)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("set/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def test_a_folder_and_an_archive_look_the_same(tmp_path: Path) -> None:
    (tmp_path / "folder" / "set").mkdir(parents=True)
    (tmp_path / "folder" / "set" / "a.txt").write_bytes(b"a" * 5000)
    (tmp_path / "folder" / "set" / "b.txt").write_bytes(b"bee")
    for files in (open_files(tmp_path / "folder"), open_files(write_tar(tmp_path / "set.tar"))):
        assert files.names() == ["set/a.txt", "set/b.txt"]  # links are passed over
        assert files.read("set/b.txt") == b"bee"
        assert files.read("set/a.txt") == b"a" * 5000
        with pytest.raises(TaskError, match=r"there is no .*c\.txt"):
            files.read("set/c.txt")


def test_what_is_no_archive_or_no_whole_one_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.tar").write_text("not a tar file at all")
    with pytest.raises(TaskError, match=r"text\.tar is no \.tar archive, or is compressed or damaged: unpack it"):
        open_files(tmp_path / "text.tar")
    with pytest.raises(TaskError, match="compressed or damaged: unpack it, and set data= to the folder"):
        open_files(write_tar(tmp_path / "set.tar.gz", "w:gz"))
    whole = write_tar(tmp_path / "set.tar")
    files = open_files(whole)
    whole.write_bytes(whole.read_bytes()[:3000])  # someone cuts it while it is in use
    with pytest.raises(TaskError, match=r"set\.tar ends in the middle of set/a\.txt: get the archive again\."):
        files.read("set/a.txt")
