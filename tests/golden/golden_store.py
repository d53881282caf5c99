"""Stored goldens: one JSON file for each torch version and CPU capability, or GPU.

The key is not enough on CPUs: matrix libraries choose kernels by the CPU's maker, too. So a file also holds the digest
of a few plain torch operations, the probe. Where that differs, torch itself computes other last bits, and the stored
numbers say nothing about bitplan.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

STORED = Path(__file__).parent / "stored"
HOW_TO_MAKE = "check out a commit whose numbers are trusted and run: python tests/golden/make.py"


def hardware(device: str = "cpu") -> str:
    return torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name()


def path_of(device: str = "cpu") -> Path:
    return STORED / (re.sub(r"[^\w.+-]+", "-", f"torch-{torch.__version__}-{hardware(device)}") + ".json")


def probe(device: str = "cpu") -> str:
    """A digest of what torch alone computes here: products, a convolution and their gradients, transcendentals."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.Generator().manual_seed(0)
        image, kernel, matrix = (
            torch.randn(shape, generator=source) for shape in ((8, 8, 9, 9), (16, 8, 3, 3), (48, 16))
        )
        image, kernel, matrix = (x.to(device).requires_grad_() for x in (image, kernel, matrix))
        features = F.gelu(F.conv2d(image, kernel, padding=1).mean((2, 3)))
        wide = F.linear(features, matrix)
        loss = F.cross_entropy(wide.exp().log1p() @ wide.t(), torch.arange(8, device=device))
        loss.backward()
        hashed = hashlib.sha256()
        for tensor in (loss, wide, image.grad, kernel.grad, matrix.grad):
            assert tensor is not None
            hashed.update(tensor.detach().cpu().numpy().tobytes())
        return hashed.hexdigest()
    finally:
        torch.set_num_threads(threads)


def read(path: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(path.read_text())
    return stored


def write(path: Path, stored: dict[str, Any]) -> None:
    """One case a line, so that a difference between two files is a list of cases."""
    head = json.dumps({name: value for name, value in stored.items() if name != "cases"}, indent=1)
    cases = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in sorted(stored["cases"].items()))
    text = head.removesuffix("\n}") + f',\n "cases": {{\n{cases}\n }}\n}}\n'
    json.loads(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def why_not_comparable(path: Path, device: str = "cpu") -> str | None:
    """Why this machine's numbers cannot be compared to stored ones; None where they can."""
    if not path.is_file():
        return f"no goldens are stored for torch {torch.__version__} on {hardware(device)}: {HOW_TO_MAKE}"
    if read(path)["probe"] != probe(device):
        return f"torch alone computes other last bits here than where {path.name} was made: {HOW_TO_MAKE}"
    return None


def difference(expected: dict[str, Any], actual: dict[str, Any]) -> str | None:
    """What differs first, in one line; None where all stored quantities are equal."""
    if "losses" in expected:
        pairs = zip(expected["losses"], actual["losses"], strict=True)
        for step, (before, now) in enumerate(pairs):
            if before != now:
                return f"the loss of step {step} is {_both(now)}, stored {_both(before)}"
    if "weights" in expected and expected["weights"] != actual["weights"]:
        return "all losses are equal, but the final weights or buffers are not"
    return None


def _both(loss: str) -> str:
    return f"{float.fromhex(loss)!r} ({loss})"
