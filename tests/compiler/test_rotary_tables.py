"""Sines and cosines of rotary embeddings lie in memory as tables, where Inductor would compute them again and again."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from bitplan.compiler import rotary_tables
from bitplan.compiler.launching import OPTION, KernelInliningPass
from bitplan.compiler.rotary_tables import write_tables
from bitplan.compiler.torch_private import REALIZE_TO_STRIDES, CustomGraphPass

BATCH, HEADS, TOKENS, FEATURES = 2, 4, 16, 8


def tables(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """As transformers computes them: in float32, twice the same half."""
    frequencies = 10000 ** -(torch.arange(0, FEATURES, 2).float() / FEATURES)
    angles = torch.arange(TOKENS).float()[:, None] * frequencies
    doubled = torch.cat((angles, angles), -1)[None]
    return (doubled.cos() * 1.0).to(dtype), (doubled.sin() * 1.0).to(dtype)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x[..., : FEATURES // 2], x[..., FEATURES // 2 :]
    return x * cosine[:, None] + torch.cat((-second, first), -1) * sine[:, None]


def layers(x: Tensor) -> Tensor:
    cosine, sine = tables(x.dtype)
    return rotated(rotated(x, cosine, sine).relu(), cosine, sine)


def traced(function: Any, *inputs: Tensor) -> fx.Graph:
    return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs).graph


def queries(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, HEADS, TOKENS, FEATURES).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tables_are_marked_in_the_dtype_in_which_they_are_read(dtype: torch.dtype) -> None:
    graph = traced(layers, queries(dtype))
    assert write_tables(graph) == 0  # no GPU
    assert write_tables(graph, "cpu") == 2
    marked = [node.meta["val"] for node in graph.nodes if node.meta.get(REALIZE_TO_STRIDES)]
    assert [(value.dtype, tuple(value.shape)) for value in marked] == [(dtype, (1, TOKENS, FEATURES))] * 2


def test_what_is_no_table_is_left_to_inductor() -> None:
    for function in (torch.sin, lambda x: x.sin() * x, lambda x: x[:, :2].cos().sum(1, keepdim=True) + x):
        assert write_tables(traced(function, queries()), "cpu") == 0


class OnThisDevice(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        write_tables(graph, "cpu")

    def uuid(self) -> None:
        return None


@pytest.mark.parametrize("writes", [True, False])
def test_inductor_computes_each_of_them_once(monkeypatch: pytest.MonkeyPatch, writes: bool) -> None:
    monkeypatch.setattr(rotary_tables, "WRITES_TABLES", writes)
    torch._dynamo.reset()
    x = queries()
    compiled = torch.compile(layers, fullgraph=True, options={OPTION: OnThisDevice()})
    result, (code,) = run_and_get_code(compiled, x)
    counts = [len(re.findall(rf"\b(?:std::)?{wave}\(", code)) for wave in ("cos", "sin")]
    assert (counts == [1, 1]) == writes
    assert min(counts) > 0
    if writes:
        torch.testing.assert_close(result, layers(x), rtol=2**-7, atol=2**-7)


def test_what_is_stored_compiled_knows_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = KernelInliningPass().uuid()
    monkeypatch.setattr(rotary_tables, "WRITES_TABLES", False)
    assert KernelInliningPass().uuid() != before
