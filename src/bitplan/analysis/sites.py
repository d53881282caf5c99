"""Sites: every tensor of a training step, with a name that is the same in every run.

:func:`list_sites` runs the model on fake tensors (:mod:`bitplan.capture.recording`). Forward tensors come first, in
execution order, then gradients in the order of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.capture.recording import Operation, record
from bitplan.numerics.wire_format import FPROP, OPERAND_OF_SLOT, op_site, parameter_suffix
from bitplan.plans import SLOTS
from bitplan.tables import Table


@dataclass(frozen=True)
class Site:
    """A tensor of a training step."""

    #: Such as ``layer1.0.conv1/conv2d.0:activation``.
    name: str
    module: str
    #: The operation, numbered among those of its name in the module: ``conv2d.0``.
    op: str
    #: weight, activation, grad_activation, grad_weight, or an operand slot such as ``fprop.x``.
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: The site that produced this tensor; None for inputs and parameters.
    producer: str | None = None
    #: The activations that are computed from this tensor.
    consumers: tuple[str, ...] = ()
    #: The parameter's name, for weights and their gradients.
    parameter: str | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def __str__(self) -> str:
        return self.name


#: Columns of a table of sites.
SITE_COLUMNS: dict[str, Callable[[Site], Any]] = {
    "site": lambda site: site.name,
    "shape": lambda site: "x".join(map(str, site.shape)) or "scalar",
    "dtype": lambda site: str(site.dtype).removeprefix("torch."),
    "bytes": lambda site: site.bytes,
}


def list_sites(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None) -> Table[Site]:
    """List every tensor of a training step.

    `batch` is the model's input, or (inputs, target) for a loss that takes a target. Views are not listed. Parameters
    are listed with the first operation that uses them.
    """
    operations = record(model, batch, loss)
    return Table(sites_of_operations(operations), SITE_COLUMNS, empty="no sites: the model runs no operation")


def sites_of_operations(operations: list[Operation]) -> list[Site]:
    """:func:`list_sites` for recorded operations."""
    consumers: dict[int, list[str]] = {}
    for operation in operations:
        for source in operation.inputs:
            consumers.setdefault(source, []).append(f"{operation.label}:activation")
    forward: list[Site] = []
    backward: list[list[Site]] = []
    used: set[str] = set()
    for number, operation in enumerate(operations):
        grads: list[Site] = []
        producer = f"{operations[operation.inputs[0]].label}:activation" if operation.inputs else None
        for name, tensor in operation.parameters:
            if name in used or not tensor.is_floating_point():
                continue
            used.add(name)
            tensor = operation.wholes.get(name, tensor)
            suffix = f"weight{parameter_suffix(name.rpartition('.')[2])}"
            forward.append(_site(operation, suffix, "weight", tensor, None, (f"{operation.label}:activation",), name))
            if tensor.requires_grad:
                grads.append(_site(operation, f"grad_{suffix}", "grad_weight", tensor, parameter=name))
        if operation.operands is not None:
            x, w = operation.operands
            tensors = {"x": x, "w": w, "dy": operation.outputs[0]}
            for slot in SLOTS:
                pass_, operand = OPERAND_OF_SLOT[slot]
                if pass_ == FPROP or operation.needs_grad:
                    site = _site(operation, slot, slot, tensors[operand], producer if operand == "x" else None)
                    (forward if pass_ == FPROP else grads).append(site)
        for position, tensor in enumerate(operation.outputs):
            suffix = "activation" if len(operation.outputs) == 1 else f"activation[{position}]"
            readers = tuple(consumers.get(number, ()))
            forward.append(_site(operation, suffix, "activation", tensor, producer, readers))
            if operation.needs_grad:
                grads.insert(0, _site(operation, f"grad_{suffix}", "grad_activation", tensor))
        backward.append(grads)
    return [*forward, *(site for grads in reversed(backward) for site in grads)]


def _site(
    operation: Operation,
    suffix: str,
    role: str,
    tensor: Tensor,
    producer: str | None = None,
    consumers: tuple[str, ...] = (),
    parameter: str | None = None,
) -> Site:
    return Site(
        name=f"{operation.label}:{suffix}",
        module=operation.module,
        op=op_site(operation.op, operation.index),
        role=role,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        producer=producer,
        consumers=tuple(dict.fromkeys(consumers)),
        parameter=parameter,
    )
