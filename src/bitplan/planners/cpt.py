"""The plan of cyclic precision training (Fu et al. 2021, arXiv 2101.09868; Wolfe & Kyrillidis 2024, arXiv 2403.02243).

The quantiser is that of the authors' code: integers over the min-max range. Weights have a range per output channel and
activations one per tensor, both with the bits of the step; evaluation uses a running mean of the ranges. The gradient
of each product's output is rounded once, per tensor, stochastically and with the highest bits, for both backward
products. Weight gradients, the update, norms, activation functions, sums, pooling and the loss are not rounded.

The kind of model decides which products are not rounded:

=============  ===============================================================================================
images         small ones (CIFAR): the last linear layer; large ones (ImageNet): the first convolution and the
               1x1 convolutions of shortcuts as well
convolutional  nothing: every convolution is quantised (as in the detectors of the papers)
recurrent      embedding, gates and cell; input, recurrent and decoder products are quantised
transformer    softmax, norms, GELU, embeddings; all linears and both products of attention are quantised, and so is
               the convolution of the patches of a vision transformer
graph          the neighbour sums, unless quantised aggregation is chosen; features have a range per node
=============  ===============================================================================================

The authors' code rounds more than that in recurrent, transformer and graph models, and so does ``as_published``: biases
are rounded like weights, both along the last axis; a tensor to which a graph layer adds its bias is rounded before,
and the gradient of that sum; the operands of attention have a range for every index but that of their last axis, also
in evaluation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from bitplan.analysis.cost import step_cost
from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import Operation, record
from bitplan.errors import PlanError
from bitplan.gemm.macs import RECURRENT, multiplications
from bitplan.plans import Plan, QuantizerSpec, Rule
from bitplan.plans.quantizer_use import Use
from bitplan.plans.schedules import Schedule, Static
from bitplan.plans.schedules import schedule as make_schedule
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES
from bitplan.plans.schedules.named import SCHEDULE_OPTIONS

Kind = Literal["images", "large images", "convolutional", "recurrent", "transformer", "graph", "plain"]
#: The operands that the quantiser rounds.
Operand = Literal["w", "x", "dy"]

OPERANDS: tuple[Operand, ...] = ("w", "x", "dy")

#: The name of the schedule in the plan.
SCHEDULE = "cpt"
#: Images with a longer side than this are treated like ImageNet's, others like CIFAR's.
_SMALL_SIDE = 64

_AGGREGATIONS = ("sparse_matmul", "index_add", "scatter_add", "scatter_reduce", "index_reduce", "segment_reduce")
#: Kinds of models in which the authors' code rounds more than products.
_ROUNDS_MORE: tuple[Kind, ...] = ("recurrent", "transformer", "graph")
#: Products of two activations.
_ACTIVATION_PRODUCTS = ("matmul", "bmm", "baddbmm", "scaled_dot_product_attention")
#: Products with a weight.
_WEIGHTED = ("linear", "addmm", *(op for op in PRODUCTS if op.startswith("conv")), *RECURRENT)


@dataclass(frozen=True)
class Widths:
    """The bits of each operand: a number or a schedule; None: not rounded."""

    w: int | Schedule | None
    x: int | Schedule | None
    dy: int | Schedule | None

    def schedules(self) -> dict[str, Schedule]:
        """The distinct schedules by name."""
        distinct = dict.fromkeys(width for width in (self.w, self.x, self.dy) if isinstance(width, Schedule))
        return {
            SCHEDULE if number == 0 else f"{SCHEDULE}{number + 1}": schedule for number, schedule in enumerate(distinct)
        }


def cpt_plan(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    *,
    schedule: str | Schedule = "CR",
    low: int = 3,
    high: int = 8,
    cycles: int = DEFAULT_CYCLES,
    period: str = "exact",
    gradient_bits: int | None = None,
    quantized_aggregation: bool = False,
    as_published: bool = False,
) -> Plan:
    """The papers' plan for `model`; `batch` and `loss` are as in :func:`bitplan.list_sites`.

    :param schedule: the name of a schedule, or a schedule (`low`, `high`, `cycles` and `period` are then ignored).
    :param period: the length of a cycle, ``exact``, ``published`` or ``truncated``.
    :param gradient_bits: by default the highest bits of the schedule; the papers' runs of ResNets at 3-6 bits have 8.
    :param quantized_aggregation: in graph networks, also round the features before the neighbour sums (Q-Agg).
    :param as_published: also round what the authors' code rounds beyond products, see the module's docstring.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    >>> [rule.to_data()["match"] for rule in cpt_plan(net, torch.randn(2, 3, 8, 8)).rules]
    ['*', '2']
    """
    if isinstance(schedule, str):
        options: dict[str, Any] = {"low": low, "high": high}
        if "cycles" in SCHEDULE_OPTIONS.get(schedule, SCHEDULE_OPTIONS.get(schedule.upper(), ())):
            options["cycles"] = cycles
            options |= {} if period == "exact" else {"period": period}
        schedule = make_schedule(schedule, **options)
    operations = record_operations(model, batch, loss)
    widths = Widths(schedule, schedule, gradient_bits or schedule.highest)
    name = f"cpt {schedule}" + (f", gradients {gradient_bits}" if gradient_bits else "")
    return make_plan(
        operations, widths, quantized_aggregation=quantized_aggregation, as_published=as_published, name=name
    )


def record_operations(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None) -> list[Operation]:
    """Record the operations of a training step, with recurrent layers and attention as single operations."""
    return record(model, batch, loss, opens=partial(is_decomposed, Plan()))


def make_plan(
    operations: Sequence[Operation],
    widths: Widths,
    *,
    quantized_aggregation: bool = False,
    as_published: bool = False,
    name: str | None = None,
) -> Plan:
    """The papers' plan for recorded operations with these widths; options as of :func:`cpt_plan`."""
    kind = classify_model(operations)
    present = {operation.op for operation in operations}
    weighted = [op for op in _WEIGHTED if op in present]
    if kind == "graph" and any(op.op == "matmul" and op.parameters for op in operations):
        weighted.append("matmul")
    paired = [op for op in _ACTIVATION_PRODUCTS if op in present] if kind == "transformer" else []
    if not weighted and not paired:
        raise PlanError("this model has no convolution, linear or recurrent layer: there is nothing to quantise.")
    names = widths.schedules()
    operands: dict[str, QuantizerSpec | None] = {
        operand: _make_quantizer(operand, getattr(widths, operand), names, kind) for operand in OPERANDS
    }
    is_published = as_published and kind in _ROUNDS_MORE
    if as_published and not is_published:
        raise PlanError(
            f"the authors' code rounds nothing more in {kind} models than this plan: drop the option, which is for "
            f"{', '.join(_ROUNDS_MORE)} models."
        )
    rules = []
    if weighted:
        rules.append(_make_rule(("*",), weighted, _with_biases(operands) if is_published else operands))
    if paired:
        x = _along_last_axis(operands["x"]) if is_published else operands["x"]
        rules.append(_make_rule(("*",), paired, {**operands, "x": x, "w": x}))
    if is_published and kind == "graph":
        rules += _bias_sum_rules(operations, operands)
    if quantized_aggregation:
        rules += _aggregation_rules(operations, kind, operands)
    exempt = find_exempt_modules(operations, kind)
    if exempt:
        rules.append(Rule(tuple(exempt), keep=True))
    return Plan(
        tuple(rules),
        name=name,
        description=f"Cyclic precision training, {kind}: {_describe_scope(kind, exempt, quantized_aggregation)}"
        + ("; biases and more as in the authors' code." if is_published else "."),
        made_by="bitplan plan cpt",
        schedules=names,
    )


def classify_model(operations: Sequence[Operation]) -> Kind:
    """The kind of model, judged by its operations."""
    present = {operation.op for operation in operations}
    if present.intersection(RECURRENT):
        return "recurrent"
    if present.intersection(_AGGREGATIONS):
        return "graph"
    convolutions = [op for op in operations if op.op.startswith("conv")]
    if convolutions and not _is_vision_transformer(operations):
        if "linear" not in present:
            return "convolutional"
        shape = convolutions[0].operands[0].shape if convolutions[0].operands else ()
        return "large images" if len(shape) > 2 and max(shape[2:]) > _SMALL_SIDE else "images"
    return "transformer" if present.intersection(_ACTIVATION_PRODUCTS) else "plain"


def _is_vision_transformer(operations: Sequence[Operation]) -> bool:
    """Whether attention is computed and convolutions, such as those of patches, do the smaller part of the work."""
    present = {operation.op for operation in operations}
    has_attention = "scaled_dot_product_attention" in present or (
        "softmax" in present and bool(present.intersection(_ACTIVATION_PRODUCTS))
    )
    if not has_attention:
        return False
    macs: Counter[bool] = Counter()
    for operation in operations:
        macs[operation.op.startswith("conv")] += sum(product.macs for product in multiplications(operation))
    return macs[True] < macs[False]


def find_exempt_modules(operations: Sequence[Operation], kind: Kind) -> list[str]:
    """The paths of modules whose products are not rounded."""
    exempt: list[str] = []
    if kind == "large images":
        exempt.append(next(op.module for op in operations if op.op.startswith("conv")))
        exempt += [op.module for op in operations if _is_shortcut(op)]
    if kind in ("images", "large images"):
        exempt.append([op.module for op in operations if op.op == "linear"][-1])
    return [path for path in dict.fromkeys(exempt) if path]


def _is_shortcut(operation: Operation) -> bool:
    if not operation.op.startswith("conv") or operation.operands is None:
        return False
    is_pointwise = all(side == 1 for side in operation.operands[1].shape[2:])
    return is_pointwise and any(part in ("downsample", "shortcut") for part in operation.module.split("."))


def _make_quantizer(
    operand: Operand, width: int | Schedule | None, names: dict[str, Schedule], kind: Kind
) -> QuantizerSpec | None:
    if width is None:
        return None
    if isinstance(width, int):
        spec = QuantizerSpec(f"int{width}", scale="tensor", range="minmax")
    else:
        schedule_name = next(name for name, schedule in names.items() if schedule == width)
        spec = QuantizerSpec("int", bits=schedule_name, scale="tensor", range="minmax")
    if operand == "w":
        return replace(spec, scale="channel")
    if operand == "dy":
        return replace(spec, rounding="stochastic")
    # A running mean needs a single range per tensor.
    return replace(spec, scale="vector") if kind == "graph" else replace(spec, eval="ema")


def _along_last_axis(spec: QuantizerSpec | None) -> QuantizerSpec | None:
    """A range for every index but that of the last axis, as the authors' code has it for tensors of any shape."""
    return None if spec is None else replace(spec, scale="vector", axis=-1, eval="same")


def _with_biases(operands: dict[str, QuantizerSpec | None]) -> dict[str, QuantizerSpec | None]:
    """The operands with all parameters rounded in the place of the weight: along the last axis, a bias has one range
    and a weight one for each output."""
    return {"weight": _along_last_axis(operands["w"]), "x": operands["x"], "dy": operands["dy"]}


def _bias_sum_rules(operations: Sequence[Operation], operands: dict[str, QuantizerSpec | None]) -> list[Rule]:
    """Rules for sums of a tensor and a bias: the tensor, the bias, and the gradient of the sum."""
    bias, x = _along_last_axis(operands["w"]), _along_last_axis(operands["x"])
    rules = []
    for operation in operations:
        if operation.op != "add" or not operation.parameters:
            continue
        roles = {"weight": bias, "grad_activation": operands["dy"]}
        rules.append(_make_rule((_exact_pattern(operation, operations),), (f"add.{operation.index}",), roles))
        for number in operation.inputs:
            producer = operations[number]
            name = (f"{producer.op}.{producer.index}",)
            rules.append(_make_rule((_exact_pattern(producer, operations),), name, {"activation": x}))
    return rules


def _make_rule(match: tuple[str, ...], ops: Sequence[str], operands: dict[str, QuantizerSpec | None]) -> Rule:
    return Rule(match, tuple(ops), tuple((operand, spec) for operand, spec in operands.items() if spec is not None))


def _aggregation_rules(
    operations: Sequence[Operation], kind: Kind, operands: dict[str, QuantizerSpec | None]
) -> list[Rule]:
    """Rules for the inputs of neighbour sums and for their gradients."""
    if kind != "graph":
        raise PlanError("this model sums over no neighbours: drop the quantised aggregation.")
    sources = {source for operation in operations if operation.op in _AGGREGATIONS for source in operation.inputs}
    roles = (("activation", operands["x"]), ("grad_activation", operands["dy"]))
    quantizers = tuple((role, spec) for role, spec in roles if spec is not None)
    rules = []
    for number in sorted(sources):
        producer = operations[number]
        rules.append(Rule((_exact_pattern(producer, operations),), (f"{producer.op}.{producer.index}",), quantizers))
    if not rules:
        raise PlanError("the neighbour sums of this model are of its inputs only: there is nothing to quantise.")
    return rules


def _exact_pattern(operation: Operation, operations: Sequence[Operation]) -> str:
    """A pattern for the module of the operation that matches no submodule with an operation of the same name."""
    module, name = operation.module, (operation.op, operation.index)
    prefix = f"{module}." if module else ""
    others = {other.module for other in operations if (other.op, other.index) == name and other.module != module}
    return f"re:{re.escape(module)}" if any(path.startswith(prefix) for path in others) else module


def _describe_scope(kind: Kind, exempt: Sequence[str], quantized_aggregation: bool) -> str:
    if not exempt:
        additions = {"transformer": ", and of attention,", "graph": ", and what neighbour sums are of,"}
        addition = additions.get(kind, "") if kind != "graph" or quantized_aggregation else ""
        return f"every product with a weight{addition} is quantised"
    return f"{', '.join(exempt)} stay{'s' * (len(exempt) == 1)} as {'it is' if len(exempt) == 1 else 'they are'}"


# --- A static plan of the same cost as a scheduled one: the control for whether changing the precision helps


#: The name of the static schedule of layers with one more bit.
RAISED = "raised"


def mean_bit_operations(operations: Sequence[Operation], plan: Plan, steps: int) -> float:
    """Average bit operations of a step in a run of `steps` steps."""
    periods = plan.periods(steps).items()
    total = sum(step_cost(operations, plan.in_phase(phase).decide).bit_operations * count for phase, count in periods)
    return total / steps


def equal_cost_plan(
    operations: Sequence[Operation],
    bit_operations: float,
    backward: int,
    *,
    name: str | None = None,
    quantized_aggregation: bool = False,
    as_published: bool = False,
) -> Plan:
    """The papers' quantiser with one or two adjacent constant widths, at a given cost.

    :param bit_operations: the cost of a step.
    :param backward: bits of gradients.
    :param quantized_aggregation: in graph networks, also round the inputs of neighbour sums, at the lower width.
    :param as_published: as of :func:`cpt_plan`; further roundings have the lower width.
    """

    def make_static(bits: int) -> Plan:
        widths = Widths(Static(bits), Static(bits), Static(backward))
        return make_plan(
            operations, widths, name=name, quantized_aggregation=quantized_aggregation, as_published=as_published
        )

    def count(plan: Plan) -> int:
        return step_cost(operations, plan.decide).bit_operations

    width = max((bits for bits in range(2, backward + 1) if count(make_static(bits)) <= bit_operations), default=None)
    if width is None:
        raise PlanError("no static width is as cheap as that: raise the schedule's lowest bits.")
    plan = make_static(width)
    if width == backward:
        return plan
    raised: list[str] = []
    budget = bit_operations - count(plan)
    macs = _macs_by_module(operations, plan)
    for module in sorted(macs, key=lambda module: macs[module], reverse=True):
        # The difference of q^2 + 2 q q_backward between this width and the next.
        extra = macs[module] * (2 * width + 1 + 2 * backward)
        if extra <= budget:
            raised.append(module)
            budget -= extra
    if not raised:
        return plan
    first = plan.rules[0]
    match = tuple(module for module in macs if module in raised)
    quantizers = tuple((key, _raise_bits(use) if key in ("w", "weight", "x") else use) for key, use in first.quantizers)
    schedules = {**plan.schedules, RAISED: Static(width + 1)}
    return replace(plan, rules=(first, Rule(match, first.op, quantizers), *plan.rules[1:]), schedules=schedules)


def saving_plan(operations: Sequence[Operation], saving: float, backward: int, **options: Any) -> Plan:
    """A static plan that saves this share of the bit operations of `backward` bits throughout.

    :param options: as of :func:`equal_cost_plan`.
    """
    if not 0 <= saving < 1:
        raise PlanError(f"a saving of {saving:g} does not exist: give a share of 0 to 1, such as 0.4.")
    widths = Widths(Static(backward), Static(backward), Static(backward))
    highest = make_plan(operations, widths, quantized_aggregation=options.get("quantized_aggregation", False))
    cost = step_cost(operations, highest.decide).bit_operations
    return equal_cost_plan(operations, (1 - saving) * cost, backward, **options)


def _raise_bits(use: Use) -> Use:
    assert isinstance(use, QuantizerSpec)
    return replace(use, bits=RAISED)


def _macs_by_module(operations: Sequence[Operation], plan: Plan) -> dict[str, int]:
    """MACs of the forward products that the plan's first rule quantises, by module."""
    exempt = find_exempt_modules(operations, classify_model(operations))
    macs: Counter[str] = Counter()
    for operation in operations:
        if operation.op in plan.rules[0].op and operation.module and operation.module not in exempt:
            macs[operation.module] += sum(product.macs for product in multiplications(operation))
    return macs
