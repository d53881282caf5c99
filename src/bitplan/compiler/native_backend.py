"""Inductor, with the graph of a native model cut so that its backward pass keeps little.

Codes of products' operands cost a byte an element. Where a linear layer's input is a norm or an activation function of
something that the backward pass keeps anyway, computing it again and casting it again costs time instead
(``recompute="inputs"``). Products of the codes can be made again, too (``recompute="products"``). Activations
that the plan rounds are kept as their codes, as packed execution keeps them.
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

#: Where a cast's arguments name the tensor that it waits for.
_AFTER = [argument.name for argument in torch.ops.bitplan.float8_cast.default._schema.arguments].index("after")

#: Under this name a node remembers what it was traced with; Inductor lays out its arguments like that.
_SEEN = "eager_input_vals"


@dataclass(frozen=True)
class RecomputePolicy:
    """What a native graph keeps less of."""

    #: Inputs of linear layers are computed and cast again.
    inputs: bool = True
    #: So are halves of gates, by their products.
    products: bool = False
    #: Activations that the plan has rounded are kept as codes.
    codes: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether torch's own cut will do."""
        return not (self.inputs or self.products or self.codes)


class RecomputePartitioner(CustomPartitionerFn):
    """Torch's partitioner, told what to keep and what to compute again."""

    def __init__(self, sparing: RecomputePolicy = RecomputePolicy()) -> None:  # noqa: B008 - it is frozen
        self.sparing = sparing

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        gm.graph = fx_graph_cse(gm.graph)  # as torch's partitioner does first: marks on twins would be lost
        if self.sparing.codes:
            if fold_batch_norms(gm.graph):
                gm.recompile()
            mark_saved_nodes(gm.graph)
        if self.sparing.inputs:
            mark_recomputed_inputs(gm.graph)
            order_recasts(gm.graph)
        if self.sparing.products:
            mark_recomputed_products(gm.graph)
        with functorch_config.patch(PARTITIONER_OPTIONS):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if self.sparing.codes and fuse_moments(forward.graph):
            forward.recompile()
        return forward, backward

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, partitioning.__file__, fusing.__file__), str(self.sparing))


def mark_recomputed_inputs(graph: fx.Graph) -> None:
    """Set torch's own marks for selective checkpointing on what leads to a cast of the backward pass.

    From each such cast back to what the backward pass reads for another reason, or what is not cheap, or is small: the
    moments of a norm are kept. One of several results is marked with the operation that made them, which cannot be
    kept: torch finds no cut where only the result is marked, and the operation is one that it would not run again.
    Masks are torch's choice: dropout's are made of random numbers, which would be kept instead, in four times the
    bytes.
    """
    kinds = get_default_op_list()
    backward = backward_nodes(graph)
    casts = {node for node in backward if node.target is torch.ops.bitplan.float8_cast.default}
    waiting = [cast.args[0] for cast in casts]
    while waiting:
        node = waiting.pop()
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
        waiting.extend(made_by.all_input_nodes)


def mark_recomputed_products(graph: fx.Graph) -> None:
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


def order_recasts(graph: fx.Graph) -> None:
    """Of what a layer casts when its gradient comes, let the others wait for the largest that is cast again.

    Else Inductor would compute a gate's result once more together with the gate's gradients, which have the same
    factors: then all of these lie in memory at once, in full.
    """
    again: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is torch.ops.bitplan.float8_cast.default and isinstance(after := _after(node), fx.Node):
            again.setdefault(after, []).append(node)
    for gradient, casts in again.items():
        first, *others = sorted(casts, key=lambda cast: -elements_of(cast.all_input_nodes[0]))
        part = next(iter(first.users))
        waiting = [*others, *(each for each in _readers(gradient) if each.target is first.target and each not in casts)]
        earliest = min(waiting, default=first)
        if earliest < first and all(given < earliest for given in first.all_input_nodes):
            earliest.prepend(first)
            earliest.prepend(part)
        for other in waiting:
            if part < other and _after(other) in (None, gradient):
                _wait_for(other, part)


def _wait_for(cast: fx.Node, what: fx.Node) -> None:
    cast.args = (*_filled(cast.args), what)
    if _SEEN in cast.meta:
        args, kwargs = cast.meta[_SEEN]
        cast.meta[_SEEN] = (*_filled(args), what.meta["val"]), kwargs


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A cast's arguments before the last: what was not given has been left out."""
    return (*args[:_AFTER], *[None] * (_AFTER - len(args)))


def _after(cast: fx.Node) -> Any:
    return cast.args[_AFTER] if len(cast.args) > _AFTER else None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node, behind views of it."""
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
def native_backend(sparing: RecomputePolicy) -> Callable[..., Callable[..., Any]]:
    """The backend of torch.compile that cuts graphs so; the same one for the same settings, so that graphs are found
    again."""

    def compile_native(
        gm: fx.GraphModule, example_inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        cut = {"custom_partitioner_fn": RecomputePartitioner(sparing)}
        settings = {**list_mode_options(mode or "default"), **with_kernel_inlining(options), **cut}
        compiled: Any = compile_fx(gm, example_inputs, config_patches=settings)
        return compiled  # type: ignore[no-any-return]

    return compile_native
