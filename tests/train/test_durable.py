"""A full disk, and other reasons why something cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from safetensors import SafetensorError

from bitplan.lab.train import RunFolder, train
from bitplan.lab.train.checkpoint import checkpoints_in
from bitplan.lab.train.folder import DiskError, Journal, as_os_error, write_durably, writing
from bitplan.plans import Plan


def test_a_disk_that_fills_up_costs_no_checkpoint(
    tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors writes half of a file, and says what the system said."""
    save = safetensors.torch.save_file

    def fill_up(tensors: Any, path: Path) -> None:
        if "step-00000018" in str(path):
            path.write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(tensors, path)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), noisy, folder=whole)
    monkeypatch.setattr(safetensors.torch, "save_file", fill_up)
    with pytest.raises(DiskError) as reported:
        train(tiny(), noisy, folder=parts)
    assert str(reported.value) == (
        f"the disk is full and {parts}/checkpoints/step-00000018.safetensors could not be written: free some space "
        f"there. The checkpoint of step 12 is whole; go on from it with: bitplan train --resume {parts}"
    )
    assert [item.step for item in checkpoints_in(parts / "checkpoints")] == [12, 6]
    assert len(list((parts / "checkpoints").iterdir())) == 4
    assert RunFolder(parts).status() == "unfinished"
    monkeypatch.setattr(safetensors.torch, "save_file", save)
    train(tiny(), noisy, folder=parts)
    assert fingerprint(parts) == fingerprint(whole)


def test_a_line_that_does_not_fit_is_cut_off_at_the_next_start(
    tmp_path: Path, tiny: Any, noisy: Plan, fingerprint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Journal.add

    def fill_up(self: Journal, line: Any) -> None:
        if self.path.name == "metrics.jsonl" and line["step"] == 20:
            with writing(self.path):
                self._file.write(b'{"step": 20, "lo')
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, line)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(tiny(), noisy, folder=whole)
    monkeypatch.setattr(Journal, "add", fill_up)
    with pytest.raises(DiskError, match=r"disk is full and .*metrics\.jsonl .* The checkpoint of step 18 is whole"):
        train(tiny(), noisy, folder=parts)
    monkeypatch.setattr(Journal, "add", add)
    train(tiny(), noisy, folder=parts)
    assert fingerprint(parts) == fingerprint(whole)


def test_before_the_first_checkpoint_there_is_none_to_go_on_from(
    tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensors: Any, path: Path) -> None:
        raise SafetensorError("I/O error: Permission denied (os error 13)")

    monkeypatch.setattr(safetensors.torch, "save_file", refuse)
    with pytest.raises(
        DiskError, match=r"\(Permission denied\): name a folder you may write to. No checkpoint was written"
    ):
        train(tiny(), folder=tmp_path / "run")


def test_the_systems_number_is_found_in_a_librarys_words() -> None:
    assert as_os_error(SafetensorError("x (os error 28)")).errno == errno.ENOSPC
    assert as_os_error(SafetensorError("something else")).errno == errno.EIO


def test_what_cannot_be_written_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_durably(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError, match="the disk is full"):
        write_durably(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
