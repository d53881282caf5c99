"""A backend of torch.compile that runs the two graphs of AOTAutograd as they are: Inductor takes seconds for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import bitplan
from bitplan.compiler.tracing import keep_guards


def compile_without_inductor(run: bitplan.Attachment, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as ``run.compile()`` has it, with the same guards, partitioner and decompositions."""
    monkeypatch.setattr("bitplan.executions.packed.execution.refuse_other_backends", lambda: None)

    def as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=run.partitioner() or min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    run._installation.update_versions()
    return torch.compile(model, fullgraph=True, backend=backend, options={"guard_filter_fn": keep_guards})
