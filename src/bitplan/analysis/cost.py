"""The cost of a training step under a plan, estimated without running it: bit operations, bytes, mean bits.

**Bit operations.** A product of m multiply-accumulates between operands of a and b bits costs m a b. Training has
three products for each forward one, so a layer costs

    m (b(fprop.x) b(fprop.w) + b(dgrad.dy) b(dgrad.w) + b(wgrad.dy) b(wgrad.x)),

which for q forward and q_b backward bits is m (q^2 + 2 q q_b). In units of 10^9 these are the *GBitOPs* of cyclic
precision training (Fu et al. 2021, arXiv 2101.09868); divided by 32^2 they are the *effective MACs* of Wolfe &
Kyrillidis 2024 (arXiv 2403.02243). As there, the input gradient of a layer counts even for the first layer, for
which autograd does not compute it. Norms, the optimizer, quantization and memory traffic are not counted. For a product
of two activations only the gradients that exist are counted.

The bits of an operand are those of its slot's quantizer, if a rule sets one; otherwise those of the incoming tensor: of
the weight's quantizer, of the activation quantizer of the producer, or of its dtype. For block formats the bits of an
element count.

**Bytes** of weights, activations and their gradients: every site once, views not at all (Lee, Sharma & Aiken 2023,
arXiv 2301.13464). A value has the bits of its quantizer, including its share of a block scale, or of its dtype. Scales
per tensor, channel or vector, rounded copies for slots, optimizer state and workspaces are not counted. This is not a
peak: the tensors of a step are not all alive at once.

**Low-precision ratio** of the same paper: 2 (B16 - B) / B16, where B is the bits of all these tensors and B16 their
bits at 16 bits per value. 0 means all 16 bits, 1 all 8 bits, negative more than 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from bitplan.analysis.sites import Site, sites_of_operations
from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.recording import Operation, record, scripted_modules
from bitplan.capture.selectors import plan_for_model
from bitplan.errors import CostError
from bitplan.gemm.macs import Multiplication, multiplications
from bitplan.gemm.operand_quantizers import (
    OperandQuantizers,
    decisions_for,
    operand_quantizers,
    training_passes,
)
from bitplan.numerics.formats import BlockFormat
from bitplan.plans import ROLES, Decision
from bitplan.plans.loading import PlanSource, find_plan
from bitplan.plans.spec import QuantizerSpec
from bitplan.tables import html_table

#: Baselines: name -> bits of every value.
BASELINES = {"fp32": 32, "bf16": 16}
#: Bits of the "high" precision that the low-precision ratio is relative to.
HIGH_BITS = 16

Decide = Callable[[str, str], Decision]


@dataclass(frozen=True)
class TensorCost:
    """The sum over all tensors of a class, such as weights."""

    tensors: int = 0
    elements: int = 0
    bits: float = 0.0

    @property
    def bytes(self) -> float:
        return self.bits / 8

    @property
    def mean_bits(self) -> float:
        return self.bits / self.elements if self.elements else 0.0

    def __add__(self, other: TensorCost) -> TensorCost:
        return TensorCost(self.tensors + other.tensors, self.elements + other.elements, self.bits + other.bits)


@dataclass(frozen=True)
class Cost:
    """The cost of one or more training steps; the cost of a run is ``sum(costs, Cost())``."""

    #: MACs of the forward products.
    forward_macs: int = 0
    #: MACs of all three products of training.
    training_macs: int = 0
    #: By the formula in the module's docstring.
    bit_operations: int = 0
    #: weight, activation, grad_activation, grad_weight -> their tensors.
    tensors: Mapping[str, TensorCost] = field(default_factory=lambda: dict.fromkeys(ROLES, TensorCost()))
    steps: int = 0

    def __post_init__(self) -> None:
        if set(self.tensors) != set(ROLES):
            raise CostError(f"a cost has the tensor classes {', '.join(ROLES)}, not {', '.join(self.tensors)}.")

    def __add__(self, other: Cost) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(
            self.forward_macs + other.forward_macs,
            self.training_macs + other.training_macs,
            self.bit_operations + other.bit_operations,
            {role: self.tensors[role] + other.tensors[role] for role in ROLES},
            self.steps + other.steps,
        )

    def times(self, steps: int) -> Cost:
        """The cost of that many steps."""
        return Cost(
            self.forward_macs * steps,
            self.training_macs * steps,
            self.bit_operations * steps,
            {
                role: TensorCost(part.tensors * steps, part.elements * steps, part.bits * steps)
                for role, part in self.tensors.items()
            },
            self.steps * steps,
        )

    @property
    def gbitops(self) -> float:
        """Bit operations in units of 10^9."""
        return self.bit_operations / 1e9

    @property
    def effective_macs(self) -> float:
        """Bit operations in units of a MAC of two 32-bit numbers."""
        return self.bit_operations / 32**2

    @property
    def relative(self) -> float:
        """Bit operations relative to the same products in FP32."""
        return self.bit_operations / self.baseline_bit_operations("fp32") if self.training_macs else 0.0

    def baseline_bit_operations(self, name: str) -> int:
        """Bit operations with every operand in ``fp32`` or ``bf16``."""
        return self.training_macs * BASELINES[name] ** 2

    @property
    def total(self) -> TensorCost:
        """All four classes together."""
        return sum(self.tensors.values(), TensorCost())

    @property
    def mean_bits(self) -> float:
        return self.total.mean_bits

    @property
    def low_precision_ratio(self) -> float:
        high = self.total.elements * HIGH_BITS
        return 2 * (high - self.total.bits) / high if high else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; bytes are those of all steps together."""
        classes = {**self.tensors, "total": self.total}
        return {
            "steps": self.steps,
            "macs": {"forward": self.forward_macs, "training": self.training_macs},
            "bit_operations": {
                "plan": self.bit_operations,
                **{name: self.baseline_bit_operations(name) for name in BASELINES},
            },
            "gbitops": self.gbitops,
            "effective_macs": self.effective_macs,
            "relative_to_fp32": self.relative,
            "tensors": {role: part.tensors for role, part in classes.items()},
            "elements": {role: part.elements for role, part in classes.items()},
            "bytes": {
                "plan": {role: part.bytes for role, part in classes.items()},
                **{
                    name: {role: part.elements * bits / 8 for role, part in classes.items()}
                    for name, bits in BASELINES.items()
                },
            },
            "mean_bits": {role: part.mean_bits for role, part in classes.items()},
            "low_precision_ratio": self.low_precision_ratio,
        }

    def rows(self) -> list[tuple[str, float, float, float]]:
        """(quantity, under the plan, in FP32, in BF16) for a table."""
        fp32, bf16 = (self.baseline_bit_operations(name) / 1e9 for name in ("fp32", "bf16"))
        mebibyte = 8 * 2**20
        return [
            ("GBitOPs", self.gbitops, fp32, bf16),
            *(
                (f"{role}, MiB", part.bits / mebibyte, part.elements * 32 / mebibyte, part.elements * 16 / mebibyte)
                for role, part in {**self.tensors, "all tensors": self.total}.items()
            ),
            ("mean bits", self.mean_bits, 32.0, 16.0),
            ("low-precision ratio", self.low_precision_ratio, -2.0, 0.0),
        ]

    def __str__(self) -> str:
        lines = [f"{'':<22}{'plan':>14}{'FP32':>14}{'BF16':>14}"]
        lines += [f"{name:<22}" + "".join(f"{value:>14,.3f}" for value in values) for name, *values in self.rows()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        names, plan, fp32, bf16 = zip(*self.rows(), strict=True)
        return html_table({"": names, "plan": plan, "FP32": fp32, "BF16": bf16})


def estimate_cost(
    model: nn.Module,
    plan: PlanSource,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    steps: int | None = None,
) -> Cost:
    """Estimate the cost of a training step of `model` under `plan` (a plan, a preset's name or a file).

    `batch` and `loss` are as in :func:`bitplan.list_sites`.

    :param steps: the number of steps of a whole run; required for plans that change over time.

    >>> import torch
    >>> cost = estimate_cost(nn.Linear(100, 10), "fp8-linear", torch.randn(5, 100))
    >>> cost.forward_macs, cost.bit_operations == 3 * 5000 * 8 * 8
    (5000, True)
    """
    resolved = find_plan(plan)
    for path in scripted_modules(model):
        raise CostError(
            f"{path or 'the model'} is scripted, so its products cannot be recorded: estimate its cost unscripted."
        )
    if steps is not None and steps < 1:
        raise CostError(f"steps is {steps}; a run has at least 1.")
    if resolved.moves and steps is None:
        raise CostError("this plan changes over time: pass the number of steps of the run.")
    resolved = plan_for_model(resolved, model, batch, loss)
    operations = record(model, batch, loss, opens=partial(is_decomposed, resolved))
    if not resolved.moves:
        return step_cost(operations, resolved.decide).times(steps or 1)
    assert steps is not None
    periods = resolved.periods(steps).items()
    return sum(
        (step_cost(operations, resolved.in_phase(phase).decide).times(count) for phase, count in periods), Cost()
    )


def step_cost(
    operations: Sequence[Operation], decide: Decide, promoted: Mapping[str, QuantizerSpec | None] | None = None
) -> Cost:
    """The cost of a step with the recorded operations.

    :param decide: ``plan.decide``, or the decisions of a plan at some step.
    :param promoted: site -> quantizer of promoted tensors, which replaces that of `decide`.
    """
    promoted = {} if promoted is None else promoted
    planned = decisions_for(operations, decide)
    decisions = [
        _with_promoted(decision, operation.label, promoted)
        for operation, decision in zip(operations, planned, strict=True)
    ]
    forward = training = bit_operations = 0
    for operation, operands in operand_quantizers(operations, decisions):
        for product in multiplications(operation):
            passes = training_passes(operation, product)
            forward += product.macs
            training += product.macs * len(passes)
            bit_operations += product.macs * sum(
                _bits(operands, left, product) * _bits(operands, right, product) for left, right in passes
            )
    labels = {operation.label: decision for operation, decision in zip(operations, planned, strict=True)}
    tensors = dict.fromkeys(ROLES, TensorCost())
    for site in sites_of_operations(list(operations)):
        if site.role in ROLES:
            name = site.name.partition("[")[0]  # the outputs of an operation are promoted together
            quantizer = labels[f"{site.module}/{site.op}"][site.role].quantizer
            tensors[site.role] += _tensor_cost(site, promoted.get(name, quantizer))
    return Cost(forward, training, bit_operations, tensors, steps=1)


def _with_promoted(decision: Decision, label: str, promoted: Mapping[str, QuantizerSpec | None]) -> Decision:
    if not promoted:
        return decision
    choices = {
        key: replace(choice, quantizer=promoted[f"{label}:{key}"])
        for key, choice in decision.choices.items()
        if f"{label}:{key}" in promoted
    }
    return replace(decision, choices={**decision.choices, **choices})


def _tensor_cost(site: Site, quantizer: QuantizerSpec | None) -> TensorCost:
    bits = site.dtype.itemsize * 8.0 if quantizer is None else stored_bits(quantizer)
    return TensorCost(1, site.elements, site.elements * bits)


def stored_bits(quantizer: QuantizerSpec) -> float:
    """Bits of a stored value, with its share of the block scale: 8 bits in MX and NVFP4, a float32 for ``scale: block``
    of other formats.

    >>> stored_bits(QuantizerSpec("mxfp4")), stored_bits(QuantizerSpec("int4", scale="block", block=64))
    (4.25, 4.5)
    >>> stored_bits(QuantizerSpec("nvfp4", block=(16, 16)))
    4.03125
    """
    target, block = quantizer.target, quantizer.block
    if block is None:
        return target.bits_per_value
    size = block if isinstance(block, int) else block[0] * block[1]
    return target.element.bits + 8 / size if isinstance(target, BlockFormat) else target.bits_per_value + 32 / size


def _bits(operands: OperandQuantizers, slot: str, product: Multiplication) -> int:
    """How many bits an operand has when it is multiplied."""
    quantizer = operands.of(slot, product)
    return _dtype_bits(operands.tensor(slot, product)) if quantizer is None else quantizer.target.bits


def _dtype_bits(tensor: Tensor) -> int:
    return tensor.dtype.itemsize * 8
