"""Native execution of a model under tensor parallelism says which products it emulates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bitplan
from bitplan.compiler.torch_private import FakeStore
from bitplan.errors import PlanError


@pytest.fixture
def split_model() -> Iterator[nn.Module]:
    """Three layers, of which a group of two processes, which sends nothing, splits two."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    yield model
    dist.destroy_process_group()


def test_products_of_shards_are_listed(split_model: nn.Module) -> None:
    example, native = torch.randn(8, 64), bitplan.Native(min_macs=0)
    with bitplan.attach(split_model, "int8-linear", example=example, execution=native) as run:
        reasons = {fallback.site: fallback.reason for fallback in run.fallbacks()}
    assert [site for site, reason in reasons.items() if "tensor parallelism" in reason] == ["0/linear.0", "1/linear.0"]
    with pytest.raises(PlanError, match="tensor parallelism"):
        bitplan.attach(split_model, "int8-linear", example=example, execution=bitplan.Native(min_macs=0, strict=True))
