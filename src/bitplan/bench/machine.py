"""What a number was measured on and with."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from bitplan._version import __version__
from bitplan.processor import cpu_name

_PACKAGES = ("torch", "triton", "numpy", "torchao", "qtorch", "ml_dtypes", "gfloat")


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
