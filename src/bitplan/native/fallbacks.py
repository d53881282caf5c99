"""Which products run on the machine's own units, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from bitplan.axes import resolve
from bitplan.formats import IntFormat
from bitplan.live import LiveFormat
from bitplan.native.operands import PASSES, sizes_of, summed_axes, varying_axes
from bitplan.native.units import Unit, suits
from bitplan.openings import decision_for, has_slots
from bitplan.ops import PRODUCTS
from bitplan.plan import Decision
from bitplan.plan.spec import QuantizerSpec
from bitplan.quantizer import Quantizer
from bitplan.sites import Operation


@dataclass(frozen=True)
class Fallback:
    """A pass of a product that is emulated."""

    #: Such as ``fc/linear.0``.
    site: str
    #: fprop, dgrad or wgrad.
    one: str
    reason: str

    def __str__(self) -> str:
        return f"{self.site}, {self.one}: {self.reason}"


@dataclass(frozen=True)
class Operand:
    """What a plan says of one operand of a pass."""

    slot: str
    #: The slot whose quantizer counts: that of its operand's other pass, where both share one rounded tensor.
    place: str
    spec: QuantizerSpec | None
    dims: int

    def quantizer(self) -> Quantizer | None:
        return None if self.spec is None else resolve(self.spec, self.place, "linear", self.dims)


def passes_of(decision: Decision, dims: int, units: Sequence[Unit]) -> dict[str, Unit | str]:
    """For each pass of a linear layer whose input has `dims` dimensions: the unit, or why it is emulated."""

    def operand(slot: str) -> Operand:
        place = decision.shared.get(slot.partition(".")[2], slot)
        return Operand(slot, place, decision[place].quantizer, 2 if slot.endswith(".w") else dims)

    return {one: unit_or_reason(operand(left), operand(right), units) for one, (left, right) in PASSES.items()}


def fallbacks_of(
    operations: Sequence[Operation],
    decide: Callable[[str, str], Decision],
    units: Sequence[Unit],
    least: int,
    kind: str = "cpu",
) -> list[Fallback]:
    """Every pass of every product with operand slots that is emulated; `least` multiplications are worth a unit.

    :param kind: of device.
    """
    found = []
    for operation in operations:
        decision = decision_for(decide, operation.module, f"{operation.op}.{operation.index}", operation.inside)
        if operation.op not in PRODUCTS or not has_slots(decision) or operation.operands is None:
            continue
        x, w = operation.operands
        if operation.op != "linear":
            reason = "only linear layers have a path to the units; this is emulated"
            found.append(Fallback(operation.label, "all passes", reason))
        elif x.numel() * w.shape[0] < least:
            found.append(Fallback(operation.label, "all passes", f"{_size(x, w)} is too small to gain by it"))
        else:
            chosen = passes_of(decision, x.dim(), units)
            sizes = {one: sizes_of(one, x.numel() // w.shape[1], w.shape[1], w.shape[0]) for one in chosen}
            for one, unit in chosen.items():
                if isinstance(unit, str):
                    found.append(Fallback(operation.label, one, unit))
                elif not suits(unit.name, kind, sizes[one]):
                    words = " x ".join(map(str, sizes[one]))
                    found.append(Fallback(operation.label, one, f"{words} does not suit the {unit.name} unit"))
    return found


def _size(x: Tensor, w: Tensor) -> str:
    return f"{x.numel() // max(x.shape[-1], 1)} x {x.shape[-1]} x {w.shape[0]}"


def unit_or_reason(left: Operand, right: Operand, units: Sequence[Unit]) -> Unit | str:
    """The unit that multiplies the two, or one sentence that says why none does."""
    quantizers = []
    for operand in (left, right):
        quantizer = operand.quantizer()
        if quantizer is None or operand.spec is None:
            return f"{operand.slot} has no format"
        if operand.spec.promote is not None:
            return f"{operand.slot} may be promoted"
        if quantizer.scaling is not None and quantizer.scaling.range == "minmax":
            return f"{operand.slot} counts from its least value (range: minmax), which the units do not"
        if quantizer.scaling is None and isinstance(quantizer.format, IntFormat):
            return f"{operand.slot} has no scale, and a NaN in it would become a number"
        varying = varying_axes(quantizer, operand.dims)
        if varying is None or varying & summed_axes(operand.slot, operand.dims):
            return f"the scale of {operand.slot} changes along the sum"
        quantizers.append(quantizer)
    targets = [quantizer.format for quantizer in quantizers if not isinstance(quantizer.format, LiveFormat)]
    for unit in units:
        if unit.takes(targets[0], targets[1]):
            return unit
    names = " by ".join(target.name for target in targets)
    known = ", ".join(unit.name for unit in units)
    return f"no unit here multiplies {names}" + (f" (there are {known})" if known else "")
