"""A backend of torch.compile that runs the two graphs of AOTAutograd as they are: Inductor takes seconds for each."""

from __future__ import annotations

from dataclasses import replace
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
from bitplan.executions.emulate import EmulateExecution
from bitplan.executions.native.execution import NativeExecution
from bitplan.executions.packed.execution import PackedExecution


def graph_backend(partitioner: Any) -> Any:
    """With Inductor's decompositions, and its own partitioner where `partitioner` is None."""

    def as_it_is(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=partitioner or min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )


def replace_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``run.compile()`` give its graphs to this backend: guards, partitioner and decompositions stay."""
    monkeypatch.setattr("bitplan.executions.packed.execution.refuse_other_backends", lambda: None)
    for execution in (EmulateExecution, PackedExecution, NativeExecution):
        original = execution.compiler_settings

        def settings(self: Any, ops: Any, options: Any, original: Any = original) -> Any:
            made = original(self, ops, options)
            return replace(made, backend=graph_backend(made.partitioner))

        monkeypatch.setattr(execution, "compiler_settings", settings)


def compile_without_inductor(run: bitplan.Attachment, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as ``run.compile()`` has it, with the same guards, partitioner and decompositions."""
    monkeypatch.setattr("bitplan.executions.packed.execution.refuse_other_backends", lambda: None)
    run._installation.update_versions()
    options = {"guard_filter_fn": keep_guards}
    return torch.compile(model, fullgraph=True, backend=graph_backend(run.partitioner()), options=options)
