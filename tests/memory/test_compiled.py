"""Compiled estimate, from the partitioned graph. Compiling is slow, so there is one small model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bitplan.analysis.memory import estimate_memory, measure_memory
from bitplan.analysis.memory.lifetimes import extra_bytes
from bitplan.errors import MemoryEstimateError
from bitplan.plans import Plan


class Gated(nn.Module):
    """Elementwise work between products, of which a partitioner can choose what to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.gate = nn.Linear(32, 64)
        self.down = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.gate(x)) * self.up(x).tanh())
        return y


GIVEN = (torch.randn(128, 32), torch.randint(8, (128,)))


def test_what_the_graph_keeps_is_what_the_allocator_sees() -> None:
    estimated = estimate_memory(Gated(), GIVEN, F.cross_entropy, compile=True)
    measured = measure_memory(Gated(), GIVEN, F.cross_entropy, compile=True)
    assert estimated.activations == pytest.approx(measured.activations, rel=0.02)
    assert estimated.peak == pytest.approx(measured.peak, rel=0.2)
    eager = estimate_memory(Gated(), GIVEN, F.cross_entropy)
    assert estimated.activations < eager.activations  # or nothing was compiled


@pytest.mark.usefixtures("without_inductor")
def test_the_packed_graph_keeps_codes() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]})
    arguments = (GIVEN, F.cross_entropy, "none", plan, "packed", True)
    estimated = estimate_memory(model, *arguments)
    measured = measure_memory(model, *arguments)
    assert estimated.activations == pytest.approx(measured.activations, rel=0.02)
    plain = estimate_memory(model, GIVEN, F.cross_entropy, "none", compile=True)
    assert estimated.activations < 0.6 * plain.activations


def test_an_estimate_leaves_torch_compile_as_it_was() -> None:
    """A dispatch mode around compiled code makes Dynamo give up on that code for good."""
    torch.compiler.reset()
    estimate_memory(Gated(), GIVEN, F.cross_entropy, compile=True)
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, inputs: list[Tensor]) -> GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(Gated(), backend=backend, fullgraph=True)(GIVEN[0])
    assert len(graphs) == 1


def test_a_model_in_several_graphs_is_told_so() -> None:
    class Broken(Gated):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    with pytest.raises(MemoryEstimateError, match="does not compile into one graph"):
        estimate_memory(Broken(), GIVEN, F.cross_entropy, compile=True)


# --- lifetimes ---


def graph_of(function: object, *inputs: Tensor) -> GraphModule:
    traced: GraphModule = make_fx(function, tracing_mode="fake")(*inputs)  # type: ignore[arg-type]
    return traced


X = torch.randn(256, 256)
SIZE = 4 * 256 * 256


def test_elementwise_work_takes_no_memory_but_for_its_result() -> None:
    assert extra_bytes(graph_of(lambda x: (x.sin() + 1).exp() * 2, X), releases_inputs=False) == SIZE


def test_operands_and_results_of_products_take_memory() -> None:
    # sin(x), the first product, cos of it, the second: sin(x) is gone by then, and cos is written over the product.
    assert extra_bytes(graph_of(lambda x: (x.sin() @ x).cos() @ x, X), releases_inputs=False) == 2 * SIZE


def test_reductions_take_their_result_only() -> None:
    assert extra_bytes(graph_of(lambda x: x.exp().sum(0), X), releases_inputs=False) == 4 * 256


def test_a_backward_pass_lets_go_of_what_was_kept_for_it() -> None:
    graph = graph_of(lambda a, b: (a @ b).sin() @ b, X, X.clone())
    kept = extra_bytes(graph, releases_inputs=False)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            node.name = f"saved_{node.name}"
    assert extra_bytes(graph, releases_inputs=True) == kept - SIZE
