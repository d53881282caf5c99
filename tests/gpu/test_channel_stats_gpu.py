"""Codes and moments in one pass on a CUDA device, held against plain operations."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import bitplan
from bitplan import Plan
from bitplan.compiler import partitioning
from bitplan.compiler.batch_norm_fusion import (
    cast_with_channel_stats_reference,
    fuse_channel_stats,
)
from bitplan.compiler.launching import with_kernel_inlining

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(4, 64, 9, 7), (3, 24, 5, 5), (2, 1030, 3, 3), (1, 16, 1, 1), (64, 96, 56, 56)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("small", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_one_pass_finds_the_same(shape: tuple[int, ...], dtype: torch.dtype, small: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU converts no float8")
    torch.manual_seed(0)
    y = 3 * torch.randn(shape, device="cuda") + 20 * torch.randn(1, shape[1], 1, 1, device="cuda")
    y = y.to(dtype).contiguous(memory_format=torch.channels_last)
    y[0, 0, 0, 0] = 60000.0
    code, var, mean = torch.ops.bitplan.cast_with_channel_stats(y, small)
    plain_code, _, _ = cast_with_channel_stats_reference(y, small)
    assert code.stride() == y.stride()
    assert torch.equal(code.view(torch.uint8), plain_code.view(torch.uint8))
    exact_var, exact_mean = torch.var_mean(code.double(), (0, 2, 3), correction=0, keepdim=True)
    assert torch.allclose(var.double(), exact_var, rtol=1e-4, atol=1e-9)
    assert torch.allclose(mean.double(), exact_mean, rtol=1e-4, atol=1e-5)


def test_what_is_no_number_spoils_its_own_channel_only() -> None:
    y = torch.randn(4, 8, 6, 6, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
    y[0, 3, 0, 0] = float("nan")
    _, var, mean = torch.ops.bitplan.cast_with_channel_stats(y, torch.float8_e4m3fn)
    spoilt = torch.arange(8, device="cuda") == 3
    assert torch.equal(mean.flatten().isnan(), spoilt)
    assert torch.equal(var.flatten().isnan(), spoilt)


@pytest.mark.parametrize("shape", [(4, 64, 9, 7), (3, 24, 5, 5), (2, 1030, 3, 3), (1, 16, 1, 1), (16, 96, 56, 56)])
def test_launched_by_inductor_the_kernels_give_the_same_bits(shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    y = (3 * torch.randn(shape, device="cuda")).bfloat16().contiguous(memory_format=torch.channels_last)
    compiled = torch.compile(
        torch.ops.bitplan.cast_with_channel_stats, fullgraph=True, options=with_kernel_inlining(None)
    )
    with torch._inductor.config.patch(force_disable_caches=True):
        ours, codes = run_and_get_code(compiled, y, torch.float8_e4m3fn)
    assert "_cast_and_sum" in codes[0]
    assert "ops.bitplan" not in codes[0]
    for first, second in zip(ours, torch.ops.bitplan.cast_with_channel_stats(y, torch.float8_e4m3fn), strict=True):
        assert first.stride() == second.stride()
        assert torch.equal(first.float(), second.float())


def test_a_packed_step_launches_the_kernels_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU converts no float8")
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(partitioning, "fuse_channel_stats", functools.partial(fuse_channel_stats, min_elements=0))
    model = nn.Sequential(
        *(nn.Conv2d(8, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
    ).to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 8, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "conv2d", "activation": "e4m3"}]})
    with bitplan.attach(model, plan, example=x, execution="packed") as run:
        called = run.compile()

        def step() -> float:
            with torch.autocast("cuda", torch.bfloat16):
                loss = called(x).float().square().mean()
            loss.backward()
            return float(loss.detach())

        with torch._inductor.config.patch(force_disable_caches=True):
            loss, codes = run_and_get_code(step)
    assert loss > 0
    assert len(codes) == 2
    assert "_cast_and_sum" in codes[0]
    assert not any("ops.bitplan" in code for code in codes)
