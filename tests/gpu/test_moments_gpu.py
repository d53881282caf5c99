"""Codes and moments in one pass on a CUDA device, held against plain operations."""

from __future__ import annotations

import pytest
import torch

from bitplan.moments import coded_moments, plain_coded_moments

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
    code, var, mean = coded_moments(y, small)
    plain_code, _, _ = plain_coded_moments(y, small)
    assert code.stride() == y.stride()
    assert torch.equal(code.view(torch.uint8), plain_code.view(torch.uint8))
    exact_var, exact_mean = torch.var_mean(code.double(), (0, 2, 3), correction=0, keepdim=True)
    assert torch.allclose(var.double(), exact_var, rtol=1e-4, atol=1e-9)
    assert torch.allclose(mean.double(), exact_mean, rtol=1e-4, atol=1e-5)


def test_what_is_no_number_spoils_its_own_channel_only() -> None:
    y = torch.randn(4, 8, 6, 6, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last)
    y[0, 3, 0, 0] = float("nan")
    _, var, mean = coded_moments(y, torch.float8_e4m3fn)
    spoilt = torch.arange(8, device="cuda") == 3
    assert torch.equal(mean.flatten().isnan(), spoilt)
    assert torch.equal(var.flatten().isnan(), spoilt)
