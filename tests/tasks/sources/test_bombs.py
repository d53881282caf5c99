"""Files that would fill the memory, or could be read for ever, are refused in a sentence."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitplan.errors import RunError, TaskError
from bitplan.lab.sources import files
from bitplan.lab.sources.files import FolderFiles, TarFiles, read_bytes
from bitplan.lab.sources.graphs import read_npz
from bitplan.lab.sources.images import read_image
from bitplan.lab.train import RunFolder


def test_a_gzip_file_that_grows_beyond_measure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_DECOMPRESSED", 1000)
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(TaskError, match=r"x\.gz decompresses to more than"):
        read_bytes(path)
    path.write_bytes(gzip.compress(b"text" * 1000))
    assert read_bytes(path) == b"text" * 1000
    path.write_bytes(gzip.compress(b"text" * 1000)[:-9])
    with pytest.raises(TaskError, match=r"x\.gz is damaged"):
        read_bytes(path)


def test_an_image_with_too_many_pixels_is_refused(tmp_path: Path) -> None:
    def chunk(name: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")

    header = (100_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (tmp_path / "x.png").write_bytes(png)
    with pytest.raises(TaskError, match=r"x\.png is not an image that can be read"):
        read_image(tmp_path / "x.png", 8)


@pytest.mark.parametrize("shape", [(10**12, 10**12), (4, 10**14), (-4, 2), (4,), ()])
def test_a_graph_of_any_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "x.npz"
    matrix: dict[str, Any] = {"data": np.ones(4), "indices": np.zeros(4, int), "indptr": np.arange(5)}
    arrays = {f"{name}_{part}": array for name in ("x", "adj") for part, array in matrix.items()}
    np.savez(path, **arrays, x_shape=np.array(shape), y=np.zeros(4, int))
    with pytest.raises(TaskError, match=r"x\.npz"):
        read_npz(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize(
    "read",
    [read_bytes, TarFiles, lambda path: FolderFiles(path.parent).read(path.name), lambda path: read_image(path, 8)],
)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, read: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match="is a pipe"):
        read(tmp_path / "pipe")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["summary.json", "plan.yaml", "metrics.jsonl"])
def test_a_run_folder_with_a_pipe_is_damaged(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    folder = RunFolder(tmp_path)
    reads = {"summary.json": folder.summary, "plan.yaml": folder.plan, "metrics.jsonl": folder.metrics}
    with pytest.raises(RunError, match=f"{name} is damaged"):
        reads[name]()
