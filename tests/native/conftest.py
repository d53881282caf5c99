"""What all tests of native execution stand on."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
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
    """A backend of torch.compile that rewrites graphs for a CPU, and counts the operations of ours in them.

    :param switch: a constant of a module, without which each graph is rewritten a second time: both run on the same
        values and have the same results, bit for bit. Tracing the model again would take most of a test's time.
    """

    def __init__(
        self,
        partitioner: Any,
        *rewrites: Callable[[fx.Graph, str], object],
        switch: tuple[ModuleType, str] | None = None,
    ) -> None:
        self.rewrites, self.switch = rewrites, switch
        #: Of each graph, and of the same graphs without the switch.
        self.seen: list[dict[str, int]] = []
        self.seen_without: list[dict[str, int]] = []
        self.backend = aot_autograd(
            fw_compiler=lambda gm, arguments: self._noted(gm),
            bw_compiler=lambda gm, arguments: self._noted(gm),
            partition_fn=partitioner,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    def _noted(self, gm: fx.GraphModule) -> Any:
        plain = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        self.seen.append(self._rewritten(gm))
        if self.switch is None:
            return make_boxed_func(gm.forward)
        with patch.object(*self.switch, False):
            self.seen_without.append(self._rewritten(plain))

        def both(*arguments: Any) -> Any:
            copies = [item.clone() if isinstance(item, Tensor) else item for item in arguments]
            expected = [*plain.forward(*copies), *copies]
            results = gm.forward(*arguments)
            for ours, other in zip((*results, *arguments), expected, strict=True):
                assert torch.equal(ours.float(), other.float()) if isinstance(ours, Tensor) else ours == other
            return results

        return make_boxed_func(both)

    def _rewritten(self, gm: fx.GraphModule) -> dict[str, int]:
        for rewrite in self.rewrites:
            rewrite(gm.graph, "cpu")
        gm.graph.lint()
        gm.recompile()
        names = (str(node.target) for node in gm.graph.nodes)
        return dict(collections.Counter(name.split(".")[1] for name in names if name.startswith("bitplan.")))

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
