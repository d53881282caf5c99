"""Compiled models on fake tensors: what is kept is what the partitioned graph says.

``torch.compile`` traces forward and backward as one graph and cuts it in two; what crosses the cut is kept. Here all of
that happens as it would, with Inductor's own decompositions, passes and partitioner under the settings in force, on
fake tensors. Only the last stage, which would generate and compile kernels, is exchanged for one that runs the two
graphs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from bitplan.attach import Attachment
from bitplan.errors import AccountError
from bitplan.graphs.allowances import many_graphs
from bitplan.graphs.packed_backend import compile_packed
from bitplan.memory.lifetimes import extra_bytes
from bitplan.memory.walk import Walk


def compiled_on_fakes(model: nn.Module, run: Attachment | None, walk: Walk) -> Callable[..., Any]:
    """The model, compiled but for its kernels; it tells `walk` what its kernels would need."""

    @wraps(compile_packed)  # by whose name a packed model knows that its graphs are in the right hands
    def backend(graph: GraphModule, example_inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        partitioner = None if run is None else run.partitioner()
        settings = None if partitioner is None else {"custom_partitioner_fn": partitioner}
        return compile_fx(graph, list(example_inputs), inner_compile=_last_stage(walk), config_patches=settings)

    forward = torch.compile(model, backend=backend, fullgraph=True)

    def called(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import Unsupported

        try:
            with many_graphs(), walk.without_mode():
                return forward(*args, **kwargs)
        except Unsupported as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise AccountError(
                f"the model does not compile into one graph ({reason}), from which its memory is read: predict it "
                f"uncompiled, or measure."
            ) from error

    return called


def _last_stage(walk: Walk) -> Callable[..., Any]:
    def last_stage(graph: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        extra = extra_bytes(graph, releases_inputs=bool(settings.get("is_backward")))

        def on_fakes(inputs: list[Any]) -> Any:
            given = list(inputs)
            inputs.clear()  # the caller's list is what keeps the tensors of a backward pass
            with walk.looking_away(extra):
                outputs = graph(*given)
            walk.see(tree_leaves(outputs))
            return outputs

        on_fakes._boxed_call = True  # type: ignore[attr-defined]
        return on_fakes

    return last_stage
