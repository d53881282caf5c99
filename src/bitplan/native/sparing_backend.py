"""Inductor, with the graph of a native model cut so that its backward pass casts again what it can have cheaply.

Kept codes cost a byte an element. Where a linear layer's input is a norm or an activation function of something that
the backward pass keeps anyway, computing it again and casting it again costs time instead (``spare_memory="all"``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from bitplan.partitioning import LIFTED_BANS, SMALL_SHARE, backward_nodes, elements_of


class SparingPartitioner(CustomPartitionerFn):
    """Torch's partitioner, told what to compute again."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        gm.graph = fx_graph_cse(gm.graph)  # as torch's partitioner does first: marks on twins would be lost
        mark_what_is_computed_again(gm.graph)
        with functorch_config.patch(LIFTED_BANS):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def mark_what_is_computed_again(graph: fx.Graph) -> None:
    """Set torch's own marks for selective checkpointing on what leads to a cast of the backward pass.

    From each such cast back to what the backward pass reads for another reason, or what is not cheap.
    """
    kinds = get_default_op_list()
    backward = backward_nodes(graph)
    casts = {node for node in backward if node.target is torch.ops.bitplan.float8_cast.default}
    waiting = [cast.args[0] for cast in casts]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function" or node in backward or "recompute" in node.meta:
            continue
        is_read = any(user in backward and user not in casts for user in node.users)
        largest = max(map(elements_of, node.all_input_nodes), default=0)
        is_small = elements_of(node) <= largest * SMALL_SHARE
        if is_read or is_small or kinds.is_compute_intensive(node) or not kinds.is_recomputable(node):
            continue
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        node.meta.setdefault("ac_graph_id", 0)
        waiting.extend(node.all_input_nodes)


def compile_sparing(
    gm: fx.GraphModule,
    example_inputs: Any,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph with Inductor, casting again in its backward pass."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    cut = {"custom_partitioner_fn": SparingPartitioner()}
    settings = {**list_mode_options(mode or "default"), **(options or {}), **cut}
    compiled: Any = compile_fx(gm, example_inputs, config_patches=settings)
    return compiled  # type: ignore[no-any-return]
