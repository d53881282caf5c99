"""Partitioners of packed and native execution: the tensors that a compiled model saves for its backward pass.

torch.compile partitions the joint graph into forward and backward; tensors that cross the cut are saved. Its min-cut
rule minimises bytes but avoids recomputation, and so saves tensors in full precision that could be restored from their
codes. :class:`PackedPartitioner` decides by the codes:

* a code that only expensive operations can restore (a GEMM's rounded output) is saved;
* pointwise results of saved codes, further codes among them, are recomputed;
* after :data:`LONGEST_CHAIN` recomputed codes in a row the next one is saved, if further codes are computed from it.
  Without that, the backward pass of a residual network would begin by recomputing it from the first layer on, with all
  of it in memory at once;
* a code of a tensor that the backward pass reads in full precision (attention's result) is recomputed from that tensor.

Reductions (means, scales) are small and saved, and so are casts of small parameters and inputs, as autocast makes them:
launching their kernels again costs more than the bytes are worth. Everything else is left to torch.

In native execution the saved codes of GEMM operands cost a byte per element. :class:`RecomputePartitioner` recomputes
and recasts the input of a linear layer where it is a norm or an activation function of a tensor that is saved anyway
(``recompute="inputs"``), and GEMMs of saved codes (``recompute="products"``). Activations that the plan rounds are
saved as codes, as in packed execution.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from bitplan.compiler import batch_norm_fusion, memory_order
from bitplan.compiler.batch_norm_fusion import ALWAYS_SAVED, fold_batch_norms, fuse_channel_stats
from bitplan.compiler.memory_order import save_in_memory_order
from bitplan.compiler.torch_private import (
    CustomPartitionerFn,
    functorch_config,
    fx_graph_cse,
    get_default_op_list,
    get_hash_for_files,
    min_cut_rematerialization_partition,
)
from bitplan.executions.native import float8_block_cast, float8_cast  # noqa: F401 - define the operations

#: The most codes in a row that are recomputed rather than saved.
LONGEST_CHAIN = 2
#: Casts of parameters with at most this many elements are saved.
LARGEST_CAST = 1 << 20
#: A tensor with at most this share of the elements of its inputs is small.
SMALL_SHARE = 1 / 8
_CODE_TYPES = frozenset((torch.uint8, torch.int8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2))
#: Operations that only move values, which torch does not list as recomputable.
_REARRANGING = frozenset(
    getattr(torch.ops.aten, name) for name in ("cat", "constant_pad_nd", "copy", "stack", "unbind")
)
#: Options of torch's partitioner: allow recomputation that ends in a GEMM operand, and long chains of it.
PARTITIONER_OPTIONS = {"ban_recompute_long_fusible_chains": False, "ban_recompute_materialized_backward": False}

#: The casts of GEMM operands -> the position of their argument `after`, the tensor that they wait for.
_CASTS: dict[Any, int] = {
    cast: [argument.name for argument in cast._schema.arguments].index("after")
    for cast in (torch.ops.bitplan.float8_cast.default, torch.ops.bitplan.float8_block_cast.default)
}
#: GEMMs with scales: for tensors and rows, and in newer torch versions for blocks.
_SCALED_GEMMS = tuple(
    getattr(torch.ops.aten, name).default for name in ("_scaled_mm", "_scaled_mm_v2") if hasattr(torch.ops.aten, name)
)

#: Key of a node's metadata: the arguments it was traced with, whose memory layout Inductor reproduces.
_TRACED_ARGUMENTS = "eager_input_vals"


class PackedPartitioner(CustomPartitionerFn):
    """Torch's min-cut partitioner, with nodes marked to be saved or recomputed.

    :param is_aggressive: what is not marked is recomputed wherever torch can, as by its ``aggressive_recomputation``.
    """

    def __init__(self, is_aggressive: bool = False) -> None:
        self.is_aggressive = is_aggressive

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if fold_batch_norms(gm.graph):
            gm.recompile()
        mark_saved_nodes(gm.graph)
        with functorch_config.patch({**PARTITIONER_OPTIONS, "aggressive_recomputation": self.is_aggressive}):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if fuse_channel_stats(forward.graph):
            forward.recompile()
        save_in_memory_order(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        settings = f"{LONGEST_CHAIN} {LARGEST_CAST} {self.is_aggressive}"
        return get_hash_for_files((__file__, batch_norm_fusion.__file__, memory_order.__file__), settings)


def mark_saved_nodes(graph: fx.Graph) -> None:
    """Mark the nodes of a joint graph as saved or recomputed, with torch's selective-checkpointing metadata."""
    backward = backward_nodes(graph)
    forward = [node for node in graph.nodes if node not in backward and node.op == "call_function"]
    recomputable = _Recomputable(forward, _read_unrounded(backward))
    pending = [source for node in backward for source in node.all_input_nodes if source not in backward]
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in recomputable.saved or _is_small_cast(node) or node.meta.get(ALWAYS_SAVED):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node in recomputable.levels and node.op == "call_function":
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
            pending.extend(node.all_input_nodes)


class _Recomputable:
    """The forward nodes that the backward pass can recompute cheaply, and through how many codes."""

    def __init__(self, forward: list[fx.Node], read_unrounded: set[fx.Node]) -> None:
        self._kinds = get_default_op_list()
        self._read_unrounded = read_unrounded
        #: Nodes that pointwise operations compute from saved ones -> codes in a row.
        self.levels: dict[fx.Node, int] = {}
        #: Codes that are saved, and unrounded results that have to be.
        self.saved: set[fx.Node] = set()
        self._in_chains = self._find_chains(forward)
        for node in forward:
            self._classify(node)

    def _find_chains(self, forward: list[fx.Node]) -> set[fx.Node]:
        """The nodes from which pointwise operations compute further codes; saving others shortens no chain."""
        in_chains: set[fx.Node] = set()
        for node in reversed(forward):
            if (node in in_chains or _is_code(node)) and not self._is_expensive(node):
                in_chains.update(node.all_input_nodes)
        return in_chains

    def _classify(self, node: fx.Node) -> None:
        is_code = _is_code(node)
        if not self._is_cheap(node):
            if is_code or node in self._read_unrounded:
                self.saved.add(node)
                self.levels[node] = 0
            return
        levels = [self._level(source) for source in node.all_input_nodes]
        cheap_levels = [level for level in levels if level is not None]
        if len(cheap_levels) < len(levels):  # an input can only be restored by expensive operations
            if is_code:
                self.saved.add(node)
                self.levels[node] = 0
            return
        level = max(cheap_levels, default=0) + is_code
        if level > LONGEST_CHAIN and node in self._in_chains:
            self.saved.add(node)
            level = 0
        self.levels[node] = level

    def _level(self, node: fx.Node) -> int | None:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            return 0
        if node in self.levels:
            return self.levels[node]
        return 0 if self._is_small(node) else None

    def _is_cheap(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return node.args[0] in self.levels
        if self._is_expensive(node):
            return False
        if getattr(node.target, "_overloadpacket", None) in _REARRANGING:
            return True
        # Several results are views of one tensor, or those of a reduction, which reads its whole input again.
        is_single = isinstance(node.meta.get("val"), Tensor) or self._kinds.is_view(node)
        return is_single and bool(self._kinds.is_recomputable(node))

    def _is_expensive(self, node: fx.Node) -> bool:
        kinds = self._kinds
        return self._is_small(node) or kinds.is_compute_intensive(node) or kinds.is_random(node)

    def _is_small(self, node: fx.Node) -> bool:
        """Whether it is a reduction's result, which is saved; sums of integers put the bits of codes together."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point() or self._kinds.is_view(node):
            return False
        producer = node.all_input_nodes[0] if node.target is operator.getitem else node
        if self._kinds.is_compute_intensive(producer):  # a product with a weight that is larger than its input
            return False
        largest = max((elements_of(source) for source in producer.all_input_nodes), default=0)
        return elements_of(node) <= largest * SMALL_SHARE


def _read_unrounded(backward: dict[fx.Node, None]) -> set[fx.Node]:
    """Forward results that expensive operations of the backward pass read as they are."""
    kinds = get_default_op_list()
    sources: set[fx.Node] = set()
    for node in backward:
        if node.op == "call_function" and not kinds.is_fusible(node) and node.target is not operator.getitem:
            for source in node.all_input_nodes:
                while kinds.is_view(source):
                    source = source.all_input_nodes[0]
                sources.add(source)
    return sources - backward.keys()


def _is_small_cast(node: fx.Node) -> bool:
    """Whether it is a dtype conversion of a small parameter or input."""
    if node.target is not torch.ops.prims.convert_element_type.default or elements_of(node) > LARGEST_CAST:
        return False
    return node.all_input_nodes[0].op == "placeholder"


def _is_code(node: fx.Node) -> bool:
    """Whether it is the last node in a low-precision dtype before its values are converted back; views do not count."""
    if _dtype(node) not in _CODE_TYPES or get_default_op_list().is_view(node):
        return False
    return any(_dtype(user) not in _CODE_TYPES for user in _users_behind_views(node))


def _users_behind_views(node: fx.Node) -> Iterable[fx.Node]:
    kinds = get_default_op_list()
    for user in node.users:
        if kinds.is_view(user) and _dtype(user) in _CODE_TYPES:
            yield from _users_behind_views(user)
        else:
            yield user


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def elements_of(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.numel()) if isinstance(value, Tensor) else 0


def backward_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes of the backward pass, in graph order: all that depend on an incoming gradient."""
    backward: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_gradient or any(source in backward for source in node.all_input_nodes):
            backward[node] = None
    return backward


# --- Native execution


@dataclass(frozen=True)
class RecomputePolicy:
    """The tensors that a native graph recomputes or saves as codes."""

    #: Inputs of linear layers are recomputed and cast again.
    inputs: bool = True
    #: The GEMMs of gate halves are recomputed.
    products: bool = False
    #: Activations that the plan rounds are saved as codes.
    codes: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether torch's default partitioner is enough."""
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
        if self.policy.codes and fuse_channel_stats(forward.graph):
            forward.recompile()
        save_in_memory_order(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, batch_norm_fusion.__file__, memory_order.__file__), str(self.policy))


def mark_recomputed_inputs(graph: fx.Graph) -> None:
    """Mark the inputs of casts in the backward pass to be recomputed, with torch's selective-checkpointing metadata.

    Marks from each such cast back to nodes that the backward pass reads for another reason, that are expensive, or that
    are small: the statistics of a norm are saved. A getitem is marked together with its operation, because torch finds
    no cut where only the getitem is marked. Masks are left to torch: dropout's are made of random numbers, which would
    be saved instead, in four times the bytes.
    """
    kinds = get_default_op_list()
    backward = backward_nodes(graph)
    casts = {node for node in backward if node.target in _CASTS}
    pending = [cast.args[0] for cast in casts]
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function" or node in backward or "recompute" in node.meta:
            continue
        is_read = any(user in backward and user not in casts for user in _readers(node))
        producer = node.all_input_nodes[0] if node.target is operator.getitem else node
        largest = max(map(elements_of, producer.all_input_nodes), default=0)
        is_small = elements_of(node) <= largest * SMALL_SHARE
        if is_read or is_small or _is_mask(node):
            continue
        if kinds.is_compute_intensive(producer) or not kinds.is_recomputable(producer):
            continue
        _mark(node)
        _mark(producer)
        pending.extend(producer.all_input_nodes)


def mark_recomputed_products(graph: fx.Graph) -> None:
    """Mark GEMMs to be recomputed: of several with one input all but the first, if only pointwise operations read them.

    Those are the halves of a gate, the largest tensors of an MLP. Their operands are cast again.
    """
    kinds = get_default_op_list()
    backward = backward_nodes(graph)
    gemms_by_input: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in _SCALED_GEMMS and node not in backward:
            gemms_by_input.setdefault(node.args[0], []).append(node)
    others = (gemm for gemms in gemms_by_input.values() for gemm in gemms[1:])
    pending = [gemm for gemm in others if all(map(kinds.is_fusible, _readers(gemm)))]
    while pending:
        node = pending.pop()
        is_cast = node.target in _CASTS
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
        if node.target in _CASTS and isinstance(after := _after(node), fx.Node):
            recasts.setdefault(after, []).append(node)
    for gradient, casts in recasts.items():
        first, *others = sorted(casts, key=lambda cast: -elements_of(cast.all_input_nodes[0]))
        part = next(iter(first.users))
        waiting = [
            *others,
            *(reader for reader in _readers(gradient) if reader.target in _CASTS and reader not in casts),
        ]
        earliest = min(waiting, default=first)
        if earliest < first and all(source < earliest for source in first.all_input_nodes):
            earliest.prepend(first)
            earliest.prepend(part)
        for other in waiting:
            if part < other and _after(other) in (None, gradient):
                _wait_for(other, part)


def _wait_for(cast: fx.Node, awaited: fx.Node) -> None:
    position = _CASTS[cast.target]
    cast.args = (*_filled(cast.args, position), awaited)
    if _TRACED_ARGUMENTS in cast.meta:
        args, kwargs = cast.meta[_TRACED_ARGUMENTS]
        cast.meta[_TRACED_ARGUMENTS] = (*_filled(args, position), awaited.meta["val"]), kwargs


def _filled(args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The first `count` arguments, with None for those that were left out."""
    return (*args[:count], *[None] * (count - len(args)))


def _after(cast: fx.Node) -> Any:
    position = _CASTS[cast.target]
    return cast.args[position] if len(cast.args) > position else None


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
