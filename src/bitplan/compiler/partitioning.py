"""Which tensors a compiled packed model saves for its backward pass.

torch.compile partitions the joint graph into forward and backward; tensors that cross the cut are saved. Its min-cut
rule minimises bytes but avoids recomputation, and so saves tensors in full precision that could be restored from their
codes. Here the codes decide:

* a code that only expensive operations can restore (a GEMM's rounded output) is saved;
* pointwise results of saved codes, further codes among them, are recomputed;
* after :data:`LONGEST_CHAIN` recomputed codes in a row the next one is saved. Without that, the backward pass of a
  residual network would begin by recomputing it from the first layer on, with all of it in memory at once.

Reductions (means, scales) are small and saved, and so are casts of small parameters and inputs, as autocast makes them:
launching their kernels again costs more than the bytes are worth. Everything else is left to torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from bitplan.compiler import moments_fusion as fusing
from bitplan.compiler.moments_fusion import KEPT, fold_batch_norms, fuse_moments
from bitplan.compiler.torch_private import (
    CustomPartitionerFn,
    functorch_config,
    get_default_op_list,
    get_hash_for_files,
    min_cut_rematerialization_partition,
)

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


class PackedPartitioner(CustomPartitionerFn):
    """Torch's min-cut partitioner, with nodes marked to be saved or recomputed."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if fold_batch_norms(gm.graph):
            gm.recompile()
        mark_saved_nodes(gm.graph)
        with functorch_config.patch(PARTITIONER_OPTIONS):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if fuse_moments(forward.graph):
            forward.recompile()
        return forward, backward

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, fusing.__file__), f"{LONGEST_CHAIN} {LARGEST_CAST}")


def mark_saved_nodes(graph: fx.Graph) -> None:
    """Mark the nodes of a joint graph as saved or recomputed, with torch's selective-checkpointing metadata."""
    backward = backward_nodes(graph)
    forward = [node for node in graph.nodes if node not in backward and node.op == "call_function"]
    recomputable = _Recomputable(forward)
    pending = [source for node in backward for source in node.all_input_nodes if source not in backward]
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in recomputable.saved or _is_small_cast(node) or node.meta.get(KEPT):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node in recomputable.levels and node.op == "call_function":
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
            pending.extend(node.all_input_nodes)


class _Recomputable:
    """Which forward nodes the backward pass can cheaply recompute, and through how many codes."""

    def __init__(self, forward: list[fx.Node]) -> None:
        self._kinds = get_default_op_list()
        #: Nodes that pointwise operations compute from saved ones -> codes in a row.
        self.levels: dict[fx.Node, int] = {}
        #: Codes that are saved.
        self.saved: set[fx.Node] = set()
        for node in forward:
            self._classify(node)

    def _classify(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        is_code = _is_code(node)
        if not self._is_cheap(node):
            if is_code:
                self.saved.add(node)
                self.levels[node] = 0
            return
        levels = [self._level(source) for source in inputs]
        cheap_levels = [level for level in levels if level is not None]
        if len(cheap_levels) < len(levels):  # an input can only be restored by expensive operations
            if is_code:
                self.saved.add(node)
                self.levels[node] = 0
            return
        level = max(cheap_levels, default=0) + is_code
        if level > LONGEST_CHAIN:
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
        if self._is_small(node) or self._kinds.is_compute_intensive(node) or self._kinds.is_random(node):
            return False
        if getattr(node.target, "_overloadpacket", None) in _REARRANGING:
            return True
        # Several results are views of one tensor, or those of a reduction, which reads its whole input again.
        is_single = isinstance(node.meta.get("val"), Tensor) or self._kinds.is_view(node)
        return is_single and bool(self._kinds.is_recomputable(node))

    def _is_small(self, node: fx.Node) -> bool:
        """Whether it is a reduction's result, which is saved."""
        if not isinstance(node.meta.get("val"), Tensor) or self._kinds.is_view(node):
            return False
        made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
        largest = max((elements_of(source) for source in made_by.all_input_nodes), default=0)
        return elements_of(node) <= largest * SMALL_SHARE


def _is_small_cast(node: fx.Node) -> bool:
    """Whether it is a dtype conversion of a small parameter or input."""
    if node.target is not torch.ops.prims.convert_element_type.default or elements_of(node) > LARGEST_CAST:
        return False
    return node.all_input_nodes[0].op == "placeholder"


def _is_code(node: fx.Node) -> bool:
    """Whether it is the last node in a low-precision dtype before its values are converted back."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in _CODE_TYPES:
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
