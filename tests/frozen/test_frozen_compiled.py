"""Compiled models with frozen weights in few bits: the numbers of eager mode, and what backward needs in memory."""

from typing import Any

import pytest
import torch
from frozen_models import PLANS, batch, make, same, train
from torch import Tensor

import bitplan as bp


def saved_by(loss: Tensor) -> list[Tensor]:
    """The tensors that compiled code has saved for the backward pass of this loss."""
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if "CompiledFunction" in type(node).__name__:
            return list(node.saved_tensors)
        nodes += [source for source, _ in node.next_functions if source is not None]
    raise AssertionError("nothing is compiled")


@pytest.mark.parametrize("execution", ["packed", bp.Native(min_macs=1 << 60)], ids=["packed", "native"])
def test_inductor_has_the_numbers_of_eager_and_saves_codes_only(execution: Any) -> None:
    torch.compiler.reset()
    eager, compiled = make(), make()
    run = bp.attach(eager, PLANS["nf4"], execution=execution, example=batch())
    expected = train(eager, steps=1, run=run)
    run = bp.attach(compiled, PLANS["nf4"], execution=execution, example=batch())
    forward = run.compile()
    results = train(compiled, forward, steps=1, run=run)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(results, expected, strict=True))
    saved = saved_by(forward(batch().requires_grad_()).square().mean())
    weights = {(96, 128), (128, 96)}
    assert not [tensor.shape for tensor in saved if tuple(tensor.shape) in weights and tensor.is_floating_point()]
    assert [tensor.shape for tensor in saved if tensor.dtype == torch.uint8 and tensor.numel() == 96 * 128 // 2]


@pytest.mark.parametrize("name", ["nf4", "e4m3", "slots", "output"])
def test_graphs_have_the_bits_of_eager(name: str) -> None:
    results = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        model = make()
        run = bp.attach(model, PLANS[name], execution=bp.Native(min_macs=1 << 60), example=batch())
        forward = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else None
        results.append(train(model, forward, steps=2, run=run))
    assert same(*results)
