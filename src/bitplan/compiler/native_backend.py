"""The backend of compiled native models: Inductor, with a partitioner that recomputes instead of saving.

Saved codes of GEMM operands cost a byte per element. Where a linear layer's input is a norm or an activation function
of a tensor that is saved anyway, it can be recomputed and cast again (``recompute="inputs"``). GEMMs of saved codes can
be recomputed, too (``recompute="products"``). Activations that the plan rounds are saved as codes, as in packed
execution.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from bitplan.compiler import moments_fusion as fusing
from bitplan.compiler import partitioning
from bitplan.compiler.launching import with_kernel_inlining
from bitplan.compiler.moments_fusion import fold_batch_norms, fuse_moments
from bitplan.compiler.partitioning import (
    PARTITIONER_OPTIONS,
    SMALL_SHARE,
    backward_nodes,
    elements_of,
    mark_saved_nodes,
)
from bitplan.compiler.torch_private import (
    CustomPartitionerFn,
    compile_fx,
    functorch_config,
    fx_graph_cse,
    get_default_op_list,
    get_hash_for_files,
    list_mode_options,
    min_cut_rematerialization_partition,
)

#: Position of a cast's argument `after`, the tensor that it waits for.
_AFTER = [argument.name for argument in torch.ops.bitplan.float8_cast.default._schema.arguments].index("after")

#: Key of a node's metadata: the arguments it was traced with, whose memory layout Inductor reproduces.
_TRACED_ARGUMENTS = "eager_input_vals"


@dataclass(frozen=True)
class RecomputePolicy:
    """What a native graph recomputes, and what it saves as codes."""

    #: Inputs of linear layers are recomputed and cast again.
    inputs: bool = True
    #: The GEMMs of gate halves are recomputed.
    products: bool = False
    #: Activations that the plan rounds are saved as codes.
    codes: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether torch's default partitioner does it."""
        return not (self.inputs or self.products or self.codes)


class RecomputePartitioner(CustomPartitionerFn):
    """Torch's min-cut partitioner, with nodes marked to be saved or recomputed."""

    def __init__(self, policy: RecomputePolicy = RecomputePolicy()) -> None:  # noqa: B008 - it is frozen
        self.policy = policy

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        gm.graph = fx_graph_cse(gm.graph)  # torch's partitioner does it first: marks on duplicates would be lost
        if self.policy.codes:
            if fold_batch_norms(gm.graph):
                gm.recompile()
            mark_saved_nodes(gm.graph)
        if self.policy.inputs:
            mark_recomputed_inputs(gm.graph)
            order_recasts(gm.graph)
        if self.policy.products:
            mark_recomputed_products(gm.graph)
        with functorch_config.patch(PARTITIONER_OPTIONS):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if self.policy.codes and fuse_moments(forward.graph):
            forward.recompile()
        return forward, backward

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, partitioning.__file__, fusing.__file__), str(self.policy))


def mark_recomputed_inputs(graph: fx.Graph) -> None:
    """Mark the inputs of casts in the backward pass to be recomputed, with torch's selective-checkpointing metadata.

    Marks from each such cast back to nodes that the backward pass reads for another reason, that are expensive, or that
    are small: the moments of a norm are saved. A getitem is marked together with the operation behind it: torch finds
    no cut where only the getitem is marked. Masks are left to torch: dropout's are made of random numbers, which would
    be saved instead, in four times the bytes.
    """
    kinds = get_default_op_list()
    backward = backward_nodes(graph)
    casts = {node for node in backward if node.target is torch.ops.bitplan.float8_cast.default}
    pending = [cast.args[0] for cast in casts]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function" or node in backward or "recompute" in node.meta:
            continue
        is_read = any(user in backward and user not in casts for user in _readers(node))
        made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
        largest = max(map(elements_of, made_by.all_input_nodes), default=0)
        is_small = elements_of(node) <= largest * SMALL_SHARE
        if is_read or is_small or _is_mask(node):
            continue
        if kinds.is_compute_intensive(made_by) or not kinds.is_recomputable(made_by):
            continue
        _mark(node)
        _mark(made_by)
        pending.extend(made_by.all_input_nodes)


def mark_recomputed_products(graph: fx.Graph) -> None:
    """Mark GEMMs to be recomputed: of several with one input all but the first, if only pointwise operations read them.

    Those are the halves of a gate, the largest tensors of an MLP. Their operands are cast again.
    """
    kinds = get_default_op_list()
    backward = backward_nodes(graph)
    gemms_by_input: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten._scaled_mm.default and node not in backward:
            gemms_by_input.setdefault(node.args[0], []).append(node)
    others = (gemm for gemms in gemms_by_input.values() for gemm in gemms[1:])
    pending = [gemm for gemm in others if all(map(kinds.is_fusible, _readers(gemm)))]
    while pending:
        node = pending.pop()
        is_cast = node.target is torch.ops.bitplan.float8_cast.default
        if node.op != "call_function" or "recompute" in node.meta or not (is_cast or elements_of(node) > 1):
            continue
        _mark(node)
        pending.extend([] if is_cast else node.all_input_nodes)  # a cast's input is saved, or marked already


def order_recasts(graph: fx.Graph) -> None:
    """Order the casts of a layer's backward pass: the largest tensor that is cast again comes first.

    Otherwise Inductor fuses the recomputation of a gate's output with the gate's gradients, which have the same
    factors, and all of them are in memory at once, in full precision.
    """
    recasts: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.bitplan.float8_cast.default and isinstance(after := _after(node), fx.Node):
            recasts.setdefault(after, []).append(node)
    for gradient, casts in recasts.items():
        first, *others = sorted(casts, key=lambda cast: -elements_of(cast.all_input_nodes[0]))
        part = next(iter(first.users))
        waiting = [
            *others,
            *(reader for reader in _readers(gradient) if reader.target is first.target and reader not in casts),
        ]
        earliest = min(waiting, default=first)
        if earliest < first and all(source < earliest for source in first.all_input_nodes):
            earliest.prepend(first)
            earliest.prepend(part)
        for other in waiting:
            if part < other and _after(other) in (None, gradient):
                _wait_for(other, part)


def _wait_for(cast: fx.Node, awaited: fx.Node) -> None:
    cast.args = (*_filled(cast.args), awaited)
    if _TRACED_ARGUMENTS in cast.meta:
        args, kwargs = cast.meta[_TRACED_ARGUMENTS]
        cast.meta[_TRACED_ARGUMENTS] = (*_filled(args), awaited.meta["val"]), kwargs


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A cast's arguments before `after`, with None for those that were left out."""
    return (*args[:_AFTER], *[None] * (_AFTER - len(args)))


def _after(cast: fx.Node) -> Any:
    return cast.args[_AFTER] if len(cast.args) > _AFTER else None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a node and of its views."""
    for user in node.users:
        if get_default_op_list().is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _mark(node: fx.Node) -> None:
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta.setdefault("ac_graph_id", 0)


@cache
def native_backend(policy: RecomputePolicy) -> Callable[..., Callable[..., Any]]:
    """The torch.compile backend of a policy; cached, because torch reuses graphs only of the same backend object."""

    def compile_native(
        gm: fx.GraphModule, example_inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        partitioning_options = {"custom_partitioner_fn": RecomputePartitioner(policy)}
        settings = {**list_mode_options(mode or "default"), **with_kernel_inlining(options), **partitioning_options}
        compiled: Any = compile_fx(gm, example_inputs, config_patches=settings)
        return compiled  # type: ignore[no-any-return]

    return compile_native
