"""What all tests of native execution stand on."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import bitplan
from bitplan import Plan
from bitplan.executions.native.backends import Float8Backend, Int8Backend


@pytest.fixture(autouse=True)
def _units_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unit computes on a CPU, if slowly: torch emulates what the chip lacks."""
    for unit in (Int8Backend, Float8Backend):
        monkeypatch.setattr(unit, "is_available", lambda self, device: device.type == "cpu")
    torch._dynamo.reset()


class Rewritten:
    """A backend of torch.compile that rewrites graphs for a CPU, and counts the operations of ours in them."""

    def __init__(self, partitioner: Any, *rewrites: Callable[[fx.Graph, str], object]) -> None:
        self.rewrites = rewrites
        #: Of each graph.
        self.seen: list[dict[str, int]] = []
        self.backend = aot_autograd(
            fw_compiler=lambda gm, arguments: self._noted(gm),
            bw_compiler=lambda gm, arguments: self._noted(gm),
            partition_fn=partitioner,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    def _noted(self, gm: fx.GraphModule) -> Any:
        for rewrite in self.rewrites:
            rewrite(gm.graph, "cpu")
        gm.graph.lint()
        gm.recompile()
        names = (str(node.target) for node in gm.graph.nodes)
        self.seen.append(dict(collections.Counter(name.split(".")[1] for name in names if name.startswith("bitplan."))))
        return torch._functorch.aot_autograd.make_boxed_func(gm.forward)

    def gradients(self, model: nn.Module, x: Tensor, plan: Plan, recompute: Any) -> list[Tensor]:
        """Of two steps under the plan: the first has no past."""
        torch._dynamo.reset()
        with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, recompute=recompute)) as run:
            run._execution.recast_in_backward = run.execution.recast_operands
            run._installation.update_versions()
            called = torch.compile(model, fullgraph=True, backend=self.backend)
            for _ in range(2):
                called(x).sum().backward()
                run.step()
        return [p.grad.float() for p in (x, *model.parameters()) if p.grad is not None]


@pytest.fixture
def rewriting() -> type[Rewritten]:
    return Rewritten
