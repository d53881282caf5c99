"""What a search may choose: activations that the backward pass needs, and products that may run on low-precision units.

Both are recognised by what they are in the recorded graph (:class:`bitplan.capture.selectors.OperationGraph`), and put
into groups of the same operation in all layers: ``layers.*.mlp.up_proj/linear.0``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from bitplan.capture.constants import ACTIVATION
from bitplan.capture.ops import NORMS, POINTWISE
from bitplan.capture.recording import Operation
from bitplan.capture.selectors import OperationGraph
from bitplan.numerics.wire_format import op_site

#: Kinds of activations in the order in which they are worth rounding: the first are read by pointwise operations only,
#: so that codes cost the least time; the last are those that rounding saves the least for its time.
KINDS = ("gate", "residual", "product", "other")
#: Groups with a smaller share of all bytes are left alone.
_LEAST_SHARE = 0.002


class SiteKey(NamedTuple):
    """An operation of a module, as rules name it."""

    module: str
    op: str


@dataclass(frozen=True)
class ActivationGroup:
    """Results of one operation in all layers, of one kind, that the backward pass reads."""

    name: str
    #: One of :data:`KINDS`. ``gate``: a product that only pointwise operations read.
    kind: str
    #: Site -> bytes.
    bytes_by_site: tuple[tuple[SiteKey, int], ...]
    #: Bytes of a value.
    itemsize: int

    @property
    def bytes(self) -> int:
        return sum(count for _, count in self.bytes_by_site)


@dataclass(frozen=True)
class ProductGroup:
    """Linear layers of one shape in all layers."""

    name: str
    sites: tuple[SiteKey, ...]
    #: (tokens, inputs, outputs).
    shape: tuple[int, int, int]
    #: The last product of the model: a classifier or the head of a language model.
    is_last: bool


def fold(module: str) -> str:
    """A module path with the numbers of layers as ``*``.

    >>> fold("model.layers.11.mlp.up_proj")
    'model.layers.*.mlp.up_proj'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def activation_groups(operations: Sequence[Operation], is_compiled: bool) -> list[ActivationGroup]:
    """The groups that may be rounded, in the order of :data:`KINDS`, larger ones first.

    :param is_compiled: compiled graphs recompute pointwise operations and norms from saved tensors, so their results
        are not among them.
    """
    graph = OperationGraph(operations)
    members: dict[tuple[str, str, int], dict[SiteKey, int]] = {}
    for number, operation in enumerate(operations):
        kind = _kind(graph, number, is_compiled)
        if kind is None:
            continue
        (output,) = operation.outputs
        site = SiteKey(operation.module, op_site(operation.op, operation.index))
        name = f"{fold(operation.module)}/{site.op}"
        sites = members.setdefault((name, kind, output.dtype.itemsize), {})
        sites[site] = sites.get(site, 0) + output.numel() * output.dtype.itemsize
    groups = [ActivationGroup(name, kind, tuple(sites.items()), size) for (name, kind, size), sites in members.items()]
    total = sum(group.bytes for group in groups)
    large = [group for group in groups if group.bytes >= total * _LEAST_SHARE]
    return sorted(large, key=lambda group: (KINDS.index(group.kind), -group.bytes))


def _kind(graph: OperationGraph, number: int, is_compiled: bool) -> str | None:
    """The kind of an operation's result; None where rounding it saves nothing, or must not happen."""
    operation = graph.operations[number]
    is_activation = operation.kind == ACTIVATION and operation.needs_grad and operation.inside is None
    if not is_activation or len(operation.outputs) != 1 or operation.outputs[0].dim() < 2:
        return None
    if number not in graph.numbers("saved") or number in graph.numbers("last-product"):
        return None
    if number in graph.numbers("product"):
        return "gate" if number in graph.numbers("pointwise-readers") else "product"
    if number in graph.numbers("residual"):
        return "residual"
    is_recomputed = operation.op in POINTWISE or operation.op in NORMS
    return None if is_compiled and is_recomputed else "other"


def second_halves(operations: Sequence[Operation]) -> frozenset[SiteKey]:
    """Halves of gates whose product has the input of another half: ``Native(recompute="products")`` recomputes them."""
    graph = OperationGraph(operations)
    inputs: set[tuple[tuple[int, Any], ...]] = set()
    halves = set()
    for number in sorted(graph.numbers("gate") & graph.numbers("weight-product")):
        reads = tuple((read.source, read.part) for read in graph.activations(number))
        if reads in inputs:
            halves.add(SiteKey(operations[number].module, op_site(operations[number].op, operations[number].index)))
        inputs.add(reads)
    return frozenset(halves)


def product_groups(operations: Sequence[Operation]) -> list[ProductGroup]:
    """The linear layers of the model by shape and name, those with the most multiplications first."""
    graph = OperationGraph(operations)
    members: dict[tuple[str, tuple[int, int, int], bool], dict[SiteKey, None]] = {}
    for number in graph.numbers("weight-product"):
        operation = operations[number]
        if operation.op != "linear" or not operation.needs_grad or operation.operands is None:
            continue
        x, w = operation.operands
        shape = (prod(x.shape[:-1]), w.shape[1], w.shape[0])
        is_last = number in graph.numbers("last-product")
        site = SiteKey(operation.module, op_site(operation.op, operation.index))
        members.setdefault((f"{fold(operation.module)}/{site.op}", shape, is_last), {})[site] = None
    groups = [ProductGroup(name, tuple(sites), shape, last) for (name, shape, last), sites in members.items()]
    return sorted(groups, key=lambda group: -prod(group.shape) * len(group.sites))
