"""The quantizer that each operand of a recorded product has when it is multiplied.

An operand is rounded by its slot (``fprop.x``), or it arrives rounded: as a ``weight``, or as the ``activation`` of the
operation that made it. Views and casts continue their source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from bitplan.capture.decompositions import decision_for
from bitplan.capture.recording import Operation
from bitplan.gemm.macs import Multiplication
from bitplan.numerics.wire_format import OPERAND_OF_SLOT, op_site
from bitplan.plans import Decision
from bitplan.plans.spec import QuantizerSpec

Decide = Callable[[str, str], Decision]


def decisions_for(operations: Sequence[Operation], decide: Decide) -> list[Decision]:
    """What a plan (its ``decide``) says of each of these operations."""
    return [
        decision_for(decide, operation.module, op_site(operation.op, operation.index), operation.inside, operation.kind)
        for operation in operations
    ]


def training_passes(operation: Operation, product: Multiplication) -> list[tuple[str, str]]:
    """The products of training that this one stands for, as pairs of slots."""
    passes = [("fprop.x", "fprop.w")]
    if not operation.needs_grad:
        return passes
    is_layer = any(product.w is tensor for _, tensor in operation.parameters)
    if is_layer or product.x is None or product.x.requires_grad:
        passes.append(("dgrad.dy", "dgrad.w"))
    if product.w is None or product.w.requires_grad:
        passes.append(("wgrad.dy", "wgrad.x"))
    return passes


class OperandQuantizers:
    """The quantizers of the operands of one operation's products."""

    def __init__(self, operation: Operation, decision: Decision, decisions: Sequence[Decision], readers: int) -> None:
        """
        :param decisions: those of all operations that were recorded.
        :param readers: how many operations read the result of this one.
        """
        self.operation = operation
        self.decision = decision
        self.decisions = decisions
        self.readers = readers
        self.parameters = {id(tensor) for _, tensor in operation.parameters}

    def tensor(self, slot: str, product: Multiplication) -> Tensor:
        """A tensor of the operand's dtype: the operand itself, or the result where it is inside a fused operation."""
        operand = OPERAND_OF_SLOT[slot].tensor
        tensor = {"x": product.x, "w": product.w, "dy": None}[operand]
        return self.operation.outputs[0] if tensor is None else tensor

    def of(self, slot: str, product: Multiplication) -> QuantizerSpec | None:
        """The quantizer of an operand; None where it is not rounded."""
        quantizer = self.decision[slot].quantizer if self.operation.operands is not None else None
        if quantizer is not None:
            return quantizer
        operand = OPERAND_OF_SLOT[slot].tensor
        if operand == "dy":
            return self._of_gradient(product)
        return self._of_arriving(product.x if operand == "x" else product.w)

    def _of_arriving(self, tensor: Tensor | None) -> QuantizerSpec | None:
        if tensor is not None and id(tensor) in self.parameters:
            return self.decision["weight"].quantizer
        if tensor is not None and id(tensor) in self.operation.origins:
            return self.decisions[self.operation.origins[id(tensor)]]["activation"].quantizer
        return None

    def _of_gradient(self, product: Multiplication) -> QuantizerSpec | None:
        # Rounded where it leaves each consumer, the sum over several of them is not rounded again.
        is_sum = self.decision.grad_at == "consumer" and self.readers > 1
        return self.decision["grad_activation"].quantizer if product.is_result and not is_sum else None


def operand_quantizers(
    operations: Sequence[Operation], decisions: Sequence[Decision]
) -> Iterator[tuple[Operation, OperandQuantizers]]:
    """The quantizers of operands, operation by operation."""
    readers = Counter(source for operation in operations for source in operation.inputs)
    for number, (operation, decision) in enumerate(zip(operations, decisions, strict=True)):
        yield operation, OperandQuantizers(operation, decision, decisions, readers[number])
