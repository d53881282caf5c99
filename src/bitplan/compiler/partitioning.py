"""What a compiled graph keeps for its backward pass (compiled execution ``packed``).

torch.compile cuts the graph of forward and backward in two, and what crosses the cut is kept in memory. Its own rule
weighs bytes but refuses to recompute much, and then keeps tensors in full that could be had from their codes. Here the
codes decide:

* a code that only heavy work can bring back (a product's rounded output) is kept;
* what pointwise operations make of kept codes is computed again, further codes among them;
* after :data:`LONGEST_CHAIN` codes in a row the next one is kept. Without that, a residual network would be recomputed
  from its first layer on when backward begins, and all of it would lie in memory in full at once.

Reductions (means, scales) are small and kept, and so are casts of small parameters and inputs, as autocast makes them:
to launch their kernels again would take longer than the bytes are worth. Everything else is torch's own choice.
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

#: How many codes in a row are computed again rather than kept.
LONGEST_CHAIN = 2
#: Parameters of at most so many elements are kept as they are cast.
LARGEST_CAST = 1 << 20
#: A tensor with at most this share of the elements of its inputs is small.
SMALL_SHARE = 1 / 8
_CODE_TYPES = frozenset((torch.uint8, torch.int8, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2))
#: Operations that move values about, which torch's rule does not count among the cheap ones.
_REARRANGING = frozenset(
    getattr(torch.ops.aten, name) for name in ("cat", "constant_pad_nd", "copy", "stack", "unbind")
)
#: What torch's rule is relieved of: recomputation that ends in a product's operand, and long chains of it.
PARTITIONER_OPTIONS = {"ban_recompute_long_fusible_chains": False, "ban_recompute_materialized_backward": False}


class PackedPartitioner(CustomPartitionerFn):
    """Torch's partitioner, told which nodes to keep and which to compute again."""

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
    """Set torch's own marks for selective checkpointing on the nodes of a joint graph."""
    backward = backward_nodes(graph)
    forward = [node for node in graph.nodes if node not in backward and node.op == "call_function"]
    again = _Recomputable(forward)
    wanted = [given for node in backward for given in node.all_input_nodes if given not in backward]
    seen: set[fx.Node] = set()
    while wanted:
        node = wanted.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in again.kept or _is_small_cast(node) or node.meta.get(KEPT):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node in again.levels and node.op == "call_function":
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)
            wanted.extend(node.all_input_nodes)


class _Recomputable:
    """Which nodes of the forward pass can be had cheaply in the backward pass, and by way of how many codes."""

    def __init__(self, forward: list[fx.Node]) -> None:
        self._kinds = get_default_op_list()
        #: Nodes that kept ones lead to by pointwise operations -> codes in a row.
        self.levels: dict[fx.Node, int] = {}
        #: Codes that are kept.
        self.kept: set[fx.Node] = set()
        for node in forward:
            self._judge(node)

    def _judge(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        is_code = _is_code(node)
        if not self._is_cheap(node):
            if is_code:
                self.kept.add(node)
                self.levels[node] = 0
            return
        levels = [self._level(given) for given in inputs]
        known = [level for level in levels if level is not None]
        if len(known) < len(levels):  # made of something that only heavy work can bring back
            if is_code:
                self.kept.add(node)
                self.levels[node] = 0
            return
        level = max(known, default=0) + is_code
        if level > LONGEST_CHAIN:
            self.kept.add(node)
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
        # Several results are parts of one tensor, or those of a reduction, which reads all of it once more.
        is_single = isinstance(node.meta.get("val"), Tensor) or self._kinds.is_view(node)
        return is_single and bool(self._kinds.is_recomputable(node))

    def _is_small(self, node: fx.Node) -> bool:
        """A reduction's result: kept as it is."""
        if not isinstance(node.meta.get("val"), Tensor) or self._kinds.is_view(node):
            return False
        made_by = node.all_input_nodes[0] if node.target is operator.getitem else node
        largest = max((elements_of(given) for given in made_by.all_input_nodes), default=0)
        return elements_of(node) <= largest * SMALL_SHARE


def _is_small_cast(node: fx.Node) -> bool:
    """Whether it is a parameter or an input in another type, of few elements."""
    if node.target is not torch.ops.prims.convert_element_type.default or elements_of(node) > LARGEST_CAST:
        return False
    return node.all_input_nodes[0].op == "placeholder"


def _is_code(node: fx.Node) -> bool:
    """Whether values go through a small type here: the last node of that type before they become numbers again."""
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
    """The nodes of the backward pass, in the graph's order: all that depend on a gradient that comes in."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_gradient or any(given in found for given in node.all_input_nodes):
            found[node] = None
    return found
