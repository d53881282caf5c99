"""Sites: every tensor of one training step, by a name that stays the same from run to run.

:func:`sites` runs the model once on fake tensors (:mod:`bitplan.capture.recording`). Forward tensors come in the order
they are made, then the gradients in the order the backward pass makes them.
"""

from __future__ import annotations

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
    """One tensor of training."""

    #: Such as ``layer1.0.conv1/conv2d.0:activation``.
    name: str
    module: str
    #: The operation with its number among its equals in the module: ``conv2d.0``.
    op: str
    #: weight, activation, grad_activation, grad_weight, or an operand slot such as ``fprop.x``.
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: Name of the site whose tensor this one is or comes from; None for inputs and parameters.
    producer: str | None = None
    #: Names of the activations that this tensor goes into.
    consumers: tuple[str, ...] = ()
    #: The parameter's name, of weights and their gradients.
    parameter: str | None = None

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

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
    """Every tensor of one training step.

    `batch` is what the model takes, or (inputs, target) where the loss wants both. Views make no site. Parameters
    are listed with the operation that uses them first.
    """
    operations = record(model, batch, loss)
    return Table(sites_of(operations), SITE_COLUMNS, empty="no sites: the model runs no operation")


def sites_of(operations: list[Operation]) -> list[Site]:
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
            short = name.rsplit(".", 1)[-1]
            role = f"weight{parameter_suffix(short)}"
            forward.append(_site(operation, role, "weight", tensor, None, (f"{operation.label}:activation",), name))
            if tensor.requires_grad:
                grad_role = role.replace("weight", "grad_weight", 1)
                grads.append(_site(operation, grad_role, "grad_weight", tensor, None, (), name))
        if operation.operands is not None:
            x, w = operation.operands
            of = {"x": x, "w": w, "dy": operation.outputs[0]}
            for slot in SLOTS:
                pass_, operand = OPERAND_OF_SLOT[slot]
                if pass_ == FPROP or operation.needs_grad:
                    (forward if pass_ == FPROP else grads).append(
                        _site(operation, slot, slot, of[operand], producer if operand == "x" else None, (), None)
                    )
        for position, tensor in enumerate(operation.outputs):
            number_of = "" if len(operation.outputs) == 1 else f"[{position}]"
            forward.append(
                _site(
                    operation,
                    f"activation{number_of}",
                    "activation",
                    tensor,
                    producer,
                    tuple(consumers.get(number, ())),
                    None,
                )
            )
            if operation.needs_grad:
                grads.insert(
                    0, _site(operation, f"grad_activation{number_of}", "grad_activation", tensor, None, (), None)
                )
        backward.append(grads)
    return [*forward, *(site for grads in reversed(backward) for site in grads)]


def _site(
    operation: Operation,
    shown: str,
    role: str,
    tensor: Tensor,
    producer: str | None,
    consumers: tuple[str, ...],
    parameter: str | None,
) -> Site:
    return Site(
        name=f"{operation.label}:{shown}",
        module=operation.module,
        op=op_site(operation.op, operation.index),
        role=role,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        producer=producer,
        consumers=tuple(dict.fromkeys(consumers)),
        parameter=parameter,
    )
