"""A backend of torch.compile that runs the two graphs of AOTAutograd as they are: Inductor takes seconds for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

import bitplan


def compile_packed(run: bitplan.Attachment, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as ``run.compile()`` has it, with the same partitioner and decompositions, but without Inductor."""
    monkeypatch.setattr("bitplan.executions.packed.execution.refuse_other_backends", lambda: None)

    def as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    partitioner = run.partitioner()
    assert partitioner is not None
    backend = aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partitioner, decompositions=select_decomp_table()
    )
    return torch.compile(model, fullgraph=True, backend=backend)
