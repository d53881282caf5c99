"""What a run ran on and with: for run folders, and for bug reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bitplan._version import __version__
from bitplan.machine import describe_machine

#: What bitplan cannot do without.
NEEDED = ("torch", "numpy", "PyYAML", "safetensors", "typer", "rich")
#: What it uses where it is installed.
OPTIONAL = (
    "triton",
    "tensorboard",
    "plotly",
    "transformers",
    "torchvision",
    "torchao",
    "ml_dtypes",
    "gfloat",
    "qtorch",
)
#: Flags of a processor that decide how fast low precision is there.
FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")


def versions() -> dict[str, str]:
    """What a run's numbers may depend on."""
    found = {"bitplan": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "safetensors", "triton"):
        version = _version(package)
        if version is not None:
            found[package] = version
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, device and threads: with other ones a run may differ in its last bits."""
    described = describe_machine(device)
    described.pop("versions")
    return {**described, "threads": torch.get_num_threads()}


def environment() -> dict[str, Any]:
    """Everything that a bug report needs."""
    packages = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    return {
        "bitplan": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {
            "name": describe_machine(torch.device("cpu"))["cpu"],
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "flags": cpu_flags(),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "packages": packages,
    }


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Which of :data:`FLAGS` the processor has; none where the system does not tell."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    words = {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
    return [flag for flag in FLAGS if flag in words]


def _gpu(index: int) -> dict[str, Any]:
    known = torch.cuda.get_device_properties(index)
    return {
        "name": known.name,
        "memory": known.total_memory,
        "capability": f"{known.major}.{known.minor}",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
