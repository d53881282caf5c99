"""The size of the graphs that rounding adds to a model: it decides how long compiling takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import bitplan as bp

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def graphs_of(model: nn.Module) -> tuple[Counter[str], Counter[str]]:
    """How often Dynamo's graph calls each function, and AOTAutograd's graphs each operation."""
    dynamo: Counter[str] = Counter()
    aot: Counter[str] = Counter()

    def count(gm: fx.GraphModule, inputs: Any) -> Any:
        aot.update(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    lower = aot_autograd(fw_compiler=count, bw_compiler=count)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        dynamo.update(getattr(node.target, "__name__", "") for node in gm.graph.nodes if node.op == "call_function")
        return lower(gm, inputs)

    torch.compiler.reset()
    torch.compile(model, backend=backend, fullgraph=True)(X).sum().backward()
    return dynamo, aot


def test_a_rounding_to_fp8_takes_15_nodes() -> None:
    plain = graphs_of(Net())[1]
    model = Net()
    bp.attach(model, "fp8-linear", example=X)
    dynamo, aot = graphs_of(model)
    assert dynamo == {"rounded_in_graph": 3, "linear": 1, "tanh": 1}
    assert aot["aten.copysign.Tensor"] == 3
    assert aot["aten.detach.default"] == plain["aten.detach.default"]
    assert aot["aten.clone.default"] <= 1  # dy, of which autograd wants a copy
    assert aot.total() <= plain.total() + 3 * 15 + 1


@pytest.mark.parametrize("plan", ["fp8-all", "int8-all"])
def test_one_node_of_dynamo_rounds_a_tensor_and_its_gradient(plan: str) -> None:
    model = Net()
    bp.attach(model, plan, example=X)
    dynamo, _ = graphs_of(model)
    del dynamo["getitem"]  # the key of a weight's random bits
    assert dynamo == {"rounded_in_graph": 3, "linear": 1, "tanh": 1}


@pytest.mark.parametrize("target", ["e4m3", "e5m2"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_largest_value_of_any_magnitude_needs_no_bound(target: str, power_of_two: bool) -> None:
    """Compiled code does not clamp values that were divided by their own scale."""
    bits = torch.randint(0, 0x7F800000, (1 << 16, 1), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    x = torch.cat((bits.view(torch.float32), torch.tensor([[3.4e38], [1e-45], [0.0], [torch.inf], [torch.nan]])))
    x = torch.cat((x, x * 0.37), 1)

    def rounded(x: Tensor) -> Tensor:
        return bp.quantize(x, target, scale="channel", axis=0, power_of_two=power_of_two)

    eager, compiled = rounded(x), torch.compile(rounded, backend="aot_eager")(x)
    assert torch.equal(eager.isnan(), compiled.isnan())
    assert torch.equal(eager.nan_to_num(nan=7.0), compiled.nan_to_num(nan=7.0))
    assert not torch.equal(x.nan_to_num(nan=7.0), eager.nan_to_num(nan=7.0))
