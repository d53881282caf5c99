"""The plan of cyclic precision training (Fu et al. 2021, arXiv 2101.09868; Wolfe & Kyrillidis 2024, arXiv 2403.02243).

Its quantiser, as the authors' code has it: integers between the least value and the largest. Weights per output channel
and activations per tensor at the bits of the step, evaluation with a running mean of the ranges; the gradient at each
product's output once, per tensor, by stochastic rounding at the highest bits, feeding both backward products. Gradients
of weights, the update, norms, activation functions, sums, pooling and the loss stay as they are.

Which products stay as they are follows from the kind of model:

=============  ===============================================================================================
images         small ones (CIFAR): the last linear layer; large ones (ImageNet): the first convolution and the
               1x1 convolutions of shortcuts as well
convolutional  nothing: every convolution is quantised (as in the detectors of the papers)
recurrent      embedding, gates and cell; input, recurrent and decoder products are quantised
transformer    softmax, norms, GELU, embeddings; all linears and both products of attention are quantised
graph          the neighbour sums, unless their features are to be quantised, too; features per node
=============  ===============================================================================================
"""

from __future__ import annotations

import re
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
from bitplan.gemm.macs import multiplications
from bitplan.plans import Plan, QuantizerSpec, Rule
from bitplan.plans.quantizer_use import Use
from bitplan.plans.schedules import Schedule, Static
from bitplan.plans.schedules import schedule as schedule_of
from bitplan.plans.schedules.cyclic import DEFAULT_CYCLES
from bitplan.plans.schedules.named import SCHEDULE_OPTIONS

Kind = Literal["images", "large images", "convolutional", "recurrent", "transformer", "graph", "plain"]
#: The three roundings of the quantiser, by the operand that each is of.
Operand = Literal["w", "x", "dy"]

OPERANDS: tuple[Operand, ...] = ("w", "x", "dy")

#: The name of the schedule in the plan.
SCHEDULE = "cpt"
#: Images with a side above this are ImageNet's rather than CIFAR's.
_SMALL_SIDE = 64

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_AGGREGATIONS = ("sparse_matmul", "index_add", "scatter_add", "scatter_reduce", "index_reduce", "segment_reduce")
#: Products of two activations.
_OF_ACTIVATIONS = ("matmul", "bmm", "baddbmm", "scaled_dot_product_attention")
#: Products with a weight.
_WEIGHTED = ("linear", "addmm", *(op for op in PRODUCTS if op.startswith("conv")), *_RECURRENT)


@dataclass(frozen=True)
class Widths:
    """How many bits each rounding has: a number, or a schedule. None: that one is left out."""

    w: int | Schedule | None
    x: int | Schedule | None
    dy: int | Schedule | None

    def schedules(self) -> dict[str, Schedule]:
        """The different schedules by name."""
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
    quantized_aggregation: bool = False,
) -> Plan:
    """The papers' plan for `model`; `batch` and `loss` as :func:`bitplan.list_sites` takes them.

    :param schedule: the name of one that a range describes, or a schedule itself (then `low`, `high` and `cycles` do
        not matter).
    :param quantized_aggregation: of graph networks, round the features before the neighbour sums as well (Q-Agg).

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    >>> [rule.to_data()["match"] for rule in cpt_plan(net, torch.randn(2, 3, 8, 8)).rules]
    ['*', '2']
    """
    if isinstance(schedule, str):
        options: dict[str, Any] = {"low": low, "high": high}
        if "cycles" in SCHEDULE_OPTIONS.get(schedule, SCHEDULE_OPTIONS.get(schedule.upper(), ())):
            options["cycles"] = cycles
        schedule = schedule_of(schedule, **options)
    operations = operations_of(model, batch, loss)
    widths = Widths(schedule, schedule, schedule.highest)
    return plan_of(operations, widths, quantized_aggregation=quantized_aggregation, name=f"cpt {schedule}")


def operations_of(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None) -> list[Operation]:
    """What one training step does, recurrent layers and attention as single operations."""
    return record(model, batch, loss, opens=partial(is_decomposed, Plan()))


def plan_of(
    operations: Sequence[Operation],
    widths: Widths,
    *,
    quantized_aggregation: bool = False,
    name: str | None = None,
) -> Plan:
    """The papers' plan for recorded operations, with the widths given."""
    kind = kind_of(operations)
    present = {operation.op for operation in operations}
    weighted = [op for op in _WEIGHTED if op in present]
    paired = [op for op in _OF_ACTIVATIONS if op in present] if kind == "transformer" else []
    if not weighted and not paired:
        raise PlanError("this model has no convolution, linear or recurrent layer: there is nothing to quantise.")
    names = widths.schedules()
    operands: dict[str, QuantizerSpec | None] = {
        operand: _quantizer(operand, getattr(widths, operand), names, kind) for operand in OPERANDS
    }
    rules = []
    if weighted:
        rules.append(_rule(("*",), weighted, operands))
    if paired:
        rules.append(_rule(("*",), paired, {**operands, "w": operands["x"]}))
    if quantized_aggregation:
        rules += _before_aggregations(operations, kind, operands)
    kept = exempt(operations, kind)
    if kept:
        rules.append(Rule(tuple(kept), keep=True))
    return Plan(
        tuple(rules),
        name=name,
        description=f"Cyclic precision training, {kind}: {_story(kind, kept, quantized_aggregation)}.",
        made_by="bitplan plan cpt",
        schedules=names,
    )


def kind_of(operations: Sequence[Operation]) -> Kind:
    """What sort of model does such operations."""
    present = {operation.op for operation in operations}
    if present.intersection(_RECURRENT):
        return "recurrent"
    if present.intersection(_AGGREGATIONS):
        return "graph"
    convolutions = [op for op in operations if op.op.startswith("conv")]
    if convolutions:
        if "linear" not in present:
            return "convolutional"
        shape = convolutions[0].operands[0].shape if convolutions[0].operands else ()
        return "large images" if len(shape) > 2 and max(shape[2:]) > _SMALL_SIDE else "images"
    return "transformer" if present.intersection(_OF_ACTIVATIONS) else "plain"


def exempt(operations: Sequence[Operation], kind: Kind) -> list[str]:
    """The paths of modules whose products stay as they are."""
    kept: list[str] = []
    if kind == "large images":
        kept.append(next(op.module for op in operations if op.op.startswith("conv")))
        kept += [op.module for op in operations if _is_shortcut(op)]
    if kind in ("images", "large images"):
        kept.append([op.module for op in operations if op.op == "linear"][-1])
    return [path for path in dict.fromkeys(kept) if path]


def _is_shortcut(operation: Operation) -> bool:
    if not operation.op.startswith("conv") or operation.operands is None:
        return False
    is_point = all(side == 1 for side in operation.operands[1].shape[2:])
    return is_point and any(part in ("downsample", "shortcut") for part in operation.module.split("."))


def _quantizer(
    operand: Operand, width: int | Schedule | None, names: dict[str, Schedule], kind: Kind
) -> QuantizerSpec | None:
    if width is None:
        return None
    if isinstance(width, int):
        number = QuantizerSpec(f"int{width}", scale="tensor", range="minmax")
    else:
        followed = next(name for name, schedule in names.items() if schedule == width)
        number = QuantizerSpec("int", bits=followed, scale="tensor", range="minmax")
    if operand == "w":
        return replace(number, scale="channel")
    if operand == "dy":
        return replace(number, rounding="stochastic")
    # A running mean is of one range for the whole tensor.
    return replace(number, scale="vector") if kind == "graph" else replace(number, eval="ema")


def _rule(match: tuple[str, ...], ops: Sequence[str], operands: dict[str, QuantizerSpec | None]) -> Rule:
    return Rule(match, tuple(ops), tuple((operand, spec) for operand, spec in operands.items() if spec is not None))


def _before_aggregations(
    operations: Sequence[Operation], kind: Kind, operands: dict[str, QuantizerSpec | None]
) -> list[Rule]:
    """Rules for the features that neighbour sums are of, and for the gradients that come back to them."""
    if kind != "graph":
        raise PlanError("this model sums over no neighbours: drop the quantised aggregation.")
    sources = {source for operation in operations if operation.op in _AGGREGATIONS for source in operation.inputs}
    places = (("activation", operands["x"]), ("grad_activation", operands["dy"]))
    quantizers = tuple((place, spec) for place, spec in places if spec is not None)
    rules = []
    for number in sorted(sources):
        made = operations[number]
        rules.append(Rule((_exactly(made, operations),), (f"{made.op}.{made.index}",), quantizers))
    if not rules:
        raise PlanError("the neighbour sums of this model are of its inputs only: there is nothing to quantise.")
    return rules


def _exactly(made: Operation, operations: Sequence[Operation]) -> str:
    """A pattern for the module of that operation, and for none beneath it that does the same."""
    beneath = f"{made.module}." if made.module else ""
    others = {op.module for op in operations if (op.op, op.index) == (made.op, made.index) and op.module != made.module}
    return f"re:{re.escape(made.module)}" if any(path.startswith(beneath) for path in others) else made.module


def _story(kind: Kind, kept: Sequence[str], quantized_aggregation: bool) -> str:
    if not kept:
        also = {"transformer": ", and of attention,", "graph": ", and what neighbour sums are of,"}
        and_these = also.get(kind, "") if kind != "graph" or quantized_aggregation else ""
        return f"every product with a weight{and_these} is quantised"
    return f"{', '.join(kept)} stay{'s' * (len(kept) == 1)} as {'it is' if len(kept) == 1 else 'they are'}"


# --- A static plan that costs what a plan over time costs: the control that asks whether *moving* precision helps


#: The schedule, which stays, of the layers with one bit more.
RAISED = "raised"


def mean_bit_operations(operations: Sequence[Operation], plan: Plan, steps: int) -> float:
    """What a step of a run of `steps` costs on average, in bit operations."""
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
) -> Plan:
    """The papers' quantiser with constant widths, at most two that are neighbours, at the price given.

    :param bit_operations: of a step.
    :param backward: bits of gradients.
    :param quantized_aggregation: of graph networks, round what is summed over neighbours, too, at the lower width.
    """

    def static(bits: int) -> Plan:
        widths = Widths(Static(bits), Static(bits), Static(backward))
        return plan_of(operations, widths, name=name, quantized_aggregation=quantized_aggregation)

    def price(plan: Plan) -> int:
        return step_cost(operations, plan.decide).bit_operations

    width = max((bits for bits in range(2, backward + 1) if price(static(bits)) <= bit_operations), default=None)
    if width is None:
        raise PlanError("no static width is as cheap as that: raise the schedule's lowest bits.")
    plan = static(width)
    if width == backward:
        return plan
    raised: list[str] = []
    budget = bit_operations - price(plan)
    macs = _macs_by_module(operations, plan)
    for module in sorted(macs, key=lambda module: macs[module], reverse=True):
        # q^2 + 2 q q_backward, from one width to the next.
        more = macs[module] * (2 * width + 1 + 2 * backward)
        if more <= budget:
            raised.append(module)
            budget -= more
    if not raised:
        return plan
    first = plan.rules[0]
    places = tuple(module for module in macs if module in raised)
    higher = tuple((place, _raised(use) if place in ("w", "x") else use) for place, use in first.quantizers)
    schedules = {**plan.schedules, RAISED: Static(width + 1)}
    return replace(plan, rules=(first, Rule(places, first.op, higher), *plan.rules[1:]), schedules=schedules)


def _raised(use: Use) -> Use:
    assert isinstance(use, QuantizerSpec)
    return replace(use, bits=RAISED)


def _macs_by_module(operations: Sequence[Operation], plan: Plan) -> dict[str, int]:
    """MACs of the forward products that the plan's first rule quantises, which are not left alone."""
    kept = exempt(operations, kind_of(operations))
    found: dict[str, int] = {}
    for operation in operations:
        if operation.op in plan.rules[0].op and operation.module and operation.module not in kept:
            macs = sum(product.macs for product in multiplications(operation))
            found[operation.module] = found.get(operation.module, 0) + macs
    return found
