"""What a number was measured on and with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bitplan._version import __version__

_PACKAGES = ("torch", "triton", "numpy", "torchao", "qtorch", "ml_dtypes", "gfloat")


def cpu_name() -> str:
    """What the processor is called by its maker, or as well as the system knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, device and versions, for the head of every result."""
    versions = {"bitplan": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    described: dict[str, Any] = {"cpu": cpu_name(), "system": platform.platform(), "versions": versions}
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
        described["cuda"] = torch.version.cuda
    return described


def cores() -> int:
    """The number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
