from __future__ import annotations

from pathlib import Path

import torch

from bitplan._version import __version__
from bitplan.lab.train.config import REQUIRED, cpu_flags, environment, machine, versions


def test_what_is_needed_is_installed_and_has_its_version() -> None:
    result = environment()
    assert result["bitplan"] == __version__
    assert all(result["packages"][name] for name in REQUIRED)
    assert result["packages"]["torch"] == torch.__version__
    assert result["cpu"]["threads"] == torch.get_num_threads()
    assert len(result["gpus"]) == torch.cuda.device_count()


def test_flags_that_matter_are_picked_out(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("model name\t: A CPU\nflags\t\t: fpu avx2 avx512f mmx avx512_vnni\nbugs\t\t: amx_tile\n")
    assert cpu_flags(path) == ["avx2", "avx512f", "avx512_vnni"]
    path.write_text("Features\t: fp asimd bf16 i8mm\n")
    assert cpu_flags(path) == ["asimd", "i8mm", "bf16"]
    assert cpu_flags(tmp_path / "nowhere") == []


def test_runs_are_told_apart_by_versions_and_machine() -> None:
    assert versions()["torch"] == torch.__version__
    assert {"cpu", "system", "threads"} <= set(machine(torch.device("cpu")))
