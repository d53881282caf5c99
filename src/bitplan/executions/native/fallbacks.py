"""Which products run on the machine's own units, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bitplan.capture.decompositions import decision_for, has_slots
from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import Operation
from bitplan.executions.native.backends import Unit, suits
from bitplan.executions.native.convolution import Convolution
from bitplan.executions.native.gemm import PASSES, Form, byte_of, summed_axes, varying_axes
from bitplan.executions.native.paths import TOO_NARROW, TOO_SMALL, Terms, obstacle_here, obstacle_of_pass, sees_one_row
from bitplan.gemm.axes import resolve
from bitplan.gemm.products import has_settings, product_of
from bitplan.numerics.formats import IntFormat
from bitplan.numerics.mutable_format import LiveFormat
from bitplan.numerics.quantizer import Quantizer
from bitplan.plans import Decision
from bitplan.plans.spec import QuantizerSpec


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
    #: ``linear`` or a convolution.
    op: str
    #: A row of the product sees one row of the operand: not where a kernel is larger than a pixel.
    sees_one_row: bool

    def quantizer(self) -> Quantizer | None:
        return None if self.spec is None else resolve(self.spec, self.place, self.op, self.dims)

    def summed_axes(self) -> set[int]:
        return summed_axes(self.slot, self.dims, self.op, self.sees_one_row)


def passes_of(
    decision: Decision, dims: int, units: Sequence[Unit], op: str = "linear", sees_one_row: bool = True
) -> dict[str, Unit | str]:
    """For each pass of a product whose input has `dims` dimensions: the unit, or why it is emulated."""

    def operand(slot: str) -> Operand:
        place = decision.shared.get(slot.partition(".")[2], slot)
        own = 2 if slot.endswith(".w") and op == "linear" else dims
        return Operand(slot, place, decision[place].quantizer, own, op, sees_one_row)

    return {one: unit_or_reason(operand(left), operand(right), units) for one, (left, right) in PASSES.items()}


def fallbacks_of(
    operations: Sequence[Operation],
    decide: Callable[[str, str], Decision],
    units: Sequence[Unit],
    terms: Terms,
    kind: str = "cpu",
) -> list[Fallback]:
    """Every pass of every product with operand slots that is emulated.

    :param terms: from where on a unit pays.
    :param kind: of device.
    """
    found = []
    for operation in operations:
        decision = decision_for(decide, operation.module, f"{operation.op}.{operation.index}", operation.inside)
        if operation.op not in PRODUCTS or not has_slots(decision) or operation.operands is None:
            continue
        found += _of_product(operation, decision, units, terms, kind)
    return found


def _of_product(
    operation: Operation, decision: Decision, units: Sequence[Unit], terms: Terms, kind: str
) -> list[Fallback]:
    assert operation.operands is not None
    op, (x, w) = operation.op, operation.operands
    if op != "linear" and not op.startswith("conv"):
        reason = "only linear layers and convolutions have a path to the units; this is emulated"
        return [Fallback(operation.label, "all passes", reason)]
    how = ""
    if op != "linear" and units and keeps_codes(decision) and x.dim() == w.dim():
        how = "; emulated, its input is kept as codes"
    args, kwargs = operation.details["args"], operation.details["kwargs"]
    if not has_settings(op, args, kwargs):
        reason = "padding='same' with an even kernel has no path to the units"
        return [Fallback(operation.label, "all passes", reason)]
    product, _ = product_of(op, args, kwargs)
    form = Form() if op == "linear" else Convolution(product, w.shape[2:])
    obstacle = obstacle_here(op, product.settings, x, w, terms)
    if obstacle is not None:
        if obstacle == TOO_SMALL:
            obstacle = f"{_words(form.sizes('fprop', x.shape, w.shape))} {obstacle}"
        return [Fallback(operation.label, "all passes", f"{obstacle}{how}")]
    found = []
    for one, unit in passes_of(decision, x.dim(), units, op, sees_one_row(op, product.settings, w)).items():
        sizes = form.sizes(one, x.shape, w.shape)
        if isinstance(unit, str):
            why: str | None = unit
        else:
            why = obstacle_of_pass(one, unit.name, op, product.settings, x, w, terms)
            if why == TOO_NARROW:
                why = f"a convolution from {w.shape[1]} to {w.shape[0]} channels {why}"
            elif why == TOO_SMALL:
                why = f"{_words(form.sizes('fprop', x.shape, w.shape))} {why}"
            elif why is None and not suits(unit.name, kind, sizes):
                why = f"{_words(sizes)} does not suit the {unit.name} unit"
        if why is not None:
            found.append(Fallback(operation.label, one, why))
    if len(found) == len(PASSES) and len({each.reason for each in found}) == 1:
        return [Fallback(operation.label, "all passes", found[0].reason + how)]
    return [replace(each, reason=each.reason + how) if each.one == "wgrad" else each for each in found]


def _words(sizes: tuple[int, int, int]) -> str:
    return " x ".join(map(str, sizes))


def keeps_codes(decision: Decision) -> bool:
    """Whether an emulated product has the codes of its input kept, a byte an element, for the weight's gradient."""
    spec = decision[decision.shared.get("x", "wgrad.x")].quantizer
    return spec is not None and byte_of(spec) is not None


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
        if varying is None or varying & operand.summed_axes():
            return f"the scale of {operand.slot} changes along the sum"
        quantizers.append(quantizer)
    targets = [quantizer.format for quantizer in quantizers if not isinstance(quantizer.format, LiveFormat)]
    for unit in units:
        if unit.takes(targets[0], targets[1]):
            return unit
    names = " by ".join(target.name for target in targets)
    known = ", ".join(unit.name for unit in units)
    return f"no unit here multiplies {names}" + (f" (there are {known})" if known else "")
