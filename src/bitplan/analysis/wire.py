"""Bytes on the wire: what FSDP2 or DistributedDataParallel sends of a model's weights and gradients under a plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from bitplan.plans.communication import Communication


@dataclass(frozen=True)
class WireBytes:
    """Bytes of one pass through the weights and of one reduction of the gradients, of the whole model."""

    parameters: int
    gathered: int
    reduced: int

    @property
    def gathered_per_parameter(self) -> float:
        return self.gathered / max(self.parameters, 1)

    @property
    def reduced_per_parameter(self) -> float:
        return self.reduced / max(self.parameters, 1)


def wire_bytes(model: nn.Module, communication: Communication | None) -> WireBytes:
    """What every process receives when weights are gathered once, and sends when gradients are reduced once.

    A group of two or more processes leaves out its own share. FSDP2 gathers twice a step where it reshards after the
    forward pass; an all-reduce, as of DistributedDataParallel, counts twice.

    >>> from bitplan.plans.communication import Gather
    >>> wire_bytes(nn.Linear(1000, 10, bias=False), Communication(Gather("e4m3"))).gathered_per_parameter
    1.004
    """
    gather = None if communication is None else communication.gather
    reduce = None if communication is None else communication.reduce
    parameters = gathered = reduced = 0
    for parameter in model.parameters():
        count, size = parameter.numel(), parameter.numel() * parameter.element_size()
        parameters += count
        rows = parameter.shape[0] if parameter.dim() else 1
        gathered += size if gather is None or parameter.dim() < 2 else gather.bytes_of(rows, count // max(rows, 1))
        if parameter.requires_grad:
            reduced += size if reduce is None else reduce.bytes_of(count)
    return WireBytes(parameters, gathered, reduced)
