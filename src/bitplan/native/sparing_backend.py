"""Inductor, with the graph of a native model cut so that its backward pass casts again what it can have cheaply.

Kept codes cost a byte an element. Where a linear layer's input is a norm or an activation function of something that
the backward pass keeps anyway, computing it again and casting it again costs time instead (``spare_memory="inputs"``).
Products of the codes can be made again, too (``spare_memory="products"``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from bitplan.launching import with_opening
from bitplan.partitioning import LIFTED_BANS, SMALL_SHARE, backward_nodes, elements_of


class SparingPartitioner(CustomPartitionerFn):
    """Torch's partitioner, told what to compute again."""

    def __init__(self, products: bool = False) -> None:
        """`products`: whether these are, too."""
        self.products = products

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        gm.graph = fx_graph_cse(gm.graph)  # as torch's partitioner does first: marks on twins would be lost
        mark_what_is_computed_again(gm.graph)
        if self.products:
            mark_products(gm.graph)
        with functorch_config.patch(LIFTED_BANS):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,), str(self.products))


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
        _mark(node)
        waiting.extend(node.all_input_nodes)


def mark_products(graph: fx.Graph) -> None:
    """The same for products: of several of one input all but the first, where only pointwise operations read them.

    Those are the halves of a gate, the largest tensors of a perceptron. The operands' codes are made again with them.
    """
    kinds = get_default_op_list()
    backward = backward_nodes(graph)
    of_input: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten._scaled_mm.default and node not in backward:
            of_input.setdefault(node.args[0], []).append(node)
    others = (product for readers in of_input.values() for product in readers[1:])
    waiting = [product for product in others if all(map(kinds.is_fusible, _readers(product)))]
    while waiting:
        node = waiting.pop()
        is_cast = node.target is torch.ops.bitplan.float8_cast.default
        if node.op != "call_function" or "recompute" in node.meta or not (is_cast or elements_of(node) > 1):
            continue
        _mark(node)
        waiting.extend([] if is_cast else node.all_input_nodes)  # what is cast is kept, or marked already


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node, behind views of it."""
    for user in node.users:
        if get_default_op_list().is_view(user):
            yield from _readers(user)
        else:
            yield user


def _mark(node: fx.Node) -> None:
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta.setdefault("ac_graph_id", 0)


def compile_sparing(
    gm: fx.GraphModule,
    example_inputs: Any,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph with Inductor, casting again in its backward pass."""
    return _compiled(gm, example_inputs, mode, options, SparingPartitioner())


def compile_sparing_products(
    gm: fx.GraphModule,
    example_inputs: Any,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The same, and some products are made again, too."""
    return _compiled(gm, example_inputs, mode, options, SparingPartitioner(products=True))


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Any,
    mode: str | None,
    options: dict[str, Any] | None,
    partitioner: SparingPartitioner,
) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    cut = {"custom_partitioner_fn": partitioner}
    settings = {**list_mode_options(mode or "default"), **with_opening(options), **cut}
    compiled: Any = compile_fx(gm, example_inputs, config_patches=settings)
    return compiled  # type: ignore[no-any-return]
