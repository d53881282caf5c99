"""Files are written whole or not at all."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from bitplan.files import locked, write_whole


def test_a_file_is_written_and_overwritten_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for text in ("one\n", "two ä\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [item.name for item in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("precious")

    def half(self: Path, text: str, **options: object) -> int:
        self.write_bytes(text[:1].encode())
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="the disk is full"):
        write_whole(path, "new")
    assert path.read_bytes() == b"precious"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def held(path: Path, most_seconds: float) -> bool:
    """Whether somebody else holds the lock, who is not waited for longer than that."""
    began = time.monotonic()
    with locked(path, most_seconds):
        return time.monotonic() - began >= most_seconds


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_a_lock_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    path = tmp_path / "measuring.lock"
    assert not held(path, 0.3)
    with locked(path):
        assert held(path, 0.3)
    assert not held(path, 0.3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_lock_does_not_live_on_in_a_process_that_was_forked_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "measuring.lock"
    wake, ends = os.pipe()
    with locked(path):
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.read(wake, 1)  # until the other end is closed
            os._exit(0)
    assert not held(path, 0.3)
    os.close(ends)
    assert os.waitpid(child, 0)[1] == 0
    os.close(wake)
