"""What the processor of this machine is called."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """As its maker calls it, or as well as the system knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
