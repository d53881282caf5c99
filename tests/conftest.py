"""What all tests share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
