"""What a plan does to the linear layers of a model: the one pass that all exporters start from.

Other frameworks choose formats layer by layer, by module path. :func:`find_layers` turns a plan, with its rules,
selectors and schedules, into the six operands of every ``nn.Linear`` of a model. Everything else that the plan says
becomes an :class:`Omission`: a line that tells what an exported file leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.analysis.explain import Explanation, explain_operations, plan_at
from bitplan.capture.decompositions import is_decomposed
from bitplan.capture.recording import Operation, record, scripted_modules
from bitplan.capture.selectors import plan_for_model
from bitplan.errors import PlanError
from bitplan.gemm.axes import resolve, summed_axes
from bitplan.gemm.macs import multiplications
from bitplan.gemm.operand_quantizers import OperandQuantizers, decisions_for, operand_quantizers
from bitplan.numerics.formats import BlockFormat
from bitplan.numerics.scaling import reduced_dims
from bitplan.numerics.wire_format import OPERAND_OF_SLOT, op_site, site_path
from bitplan.plans import PASSES, SLOTS, Plan, QuantizerSpec
from bitplan.plans.execution import Native, Packed
from bitplan.plans.schedules import FINE_STEPS, Position
from bitplan.runtime.coverage import RuleCoverage, require_interceptable

# --- What a file leaves out


class Omission(NamedTuple):
    """Something that a plan says and an exported file does not do."""

    #: A site such as ``model.layers.0.mlp.act_fn/silu.0:activation``, a layer's operand, or a key of the plan.
    site: str
    reason: str
    #: Inference does nothing of the kind, so that files for inference leave nothing out.
    is_training_only: bool = False


#: So many sites of one reason are named; the others are counted.
_NAMED_SITES = 3


def omission_lines(omissions: Sequence[Omission]) -> list[str]:
    """One line for each reason, with the sites that it is about."""
    sites_by_reason: dict[str, list[str]] = {}
    for omission in omissions:
        sites_by_reason.setdefault(omission.reason, []).append(omission.site)
    lines = []
    for reason, sites in sites_by_reason.items():
        more = f" and {len(sites) - _NAMED_SITES} more" if len(sites) > _NAMED_SITES else ""
        lines.append(f"{', '.join(sites[:_NAMED_SITES])}{more}: {reason}")
    return lines


class Omissions:
    """Collects omissions, each of them once."""

    def __init__(self) -> None:
        self._rows: dict[Omission, None] = {}

    def add(self, site: str, reason: str, is_training_only: bool = False) -> None:
        self._rows[Omission(site, reason, is_training_only)] = None

    def __iter__(self) -> Iterator[Omission]:
        return iter(self._rows)


# --- Layers and their operands


Granularity = Literal["none", "tensor", "vector", "block", "other"]


@dataclass(frozen=True)
class Operand:
    """How a plan rounds one operand of one of a layer's products."""

    quantizer: QuantizerSpec
    #: The slot or class of tensors at which it is rounded, which decides the values that share a scale.
    place: str

    def granularity(self, slot: str) -> Granularity:
        """Which values share a scale, as seen by the product of `slot`.

        ``vector``: all along the axes that the product sums over; ``block``: neighbours along them; ``none``: no
        scale. Everything else is ``other``: a scale that hardware cannot factor out of the sum.

        >>> Operand(QuantizerSpec("e4m3", scale="channel"), "fprop.w").granularity("fprop.w")
        'vector'
        """
        dims = 2 if OPERAND_OF_SLOT[slot].tensor == "w" else 3
        quantizer = resolve(self.quantizer, self.place, "linear", dims)
        summed = summed_axes(slot, "linear", dims)
        scaling = quantizer.scaling
        if isinstance(quantizer.format, BlockFormat) or (scaling is not None and scaling.granularity == "block"):
            axis = quantizer.axis if scaling is None else scaling.axis
            if isinstance(axis, tuple):
                shape = quantizer.block if scaling is None else scaling.block
                is_square = isinstance(shape, tuple) and shape[0] == shape[1] and set(axis) >= {summed[-1]}
                return "block" if is_square or axis[1] == summed[-1] else "other"
            return "block" if (-1 if axis is None else axis) % dims == summed[-1] else "other"
        if scaling is None:
            return "none"
        if scaling.granularity == "tensor":
            return "tensor"
        reduced = reduced_dims(torch.empty((1,) * dims, device="meta"), scaling)
        return "vector" if set(reduced) == set(summed) else "other"


@dataclass(frozen=True)
class LinearLayer:
    """An ``nn.Linear`` of a model and the six operands of its products under a plan."""

    path: str
    in_features: int
    out_features: int
    #: By slot; None where the operand is not rounded.
    operands: Mapping[str, Operand | None]
    #: Another parameter that is the same tensor as the weight.
    shares_weight_with: str | None = None

    @property
    def is_rounded(self) -> bool:
        return any(operand is not None for operand in self.operands.values())


@dataclass(frozen=True)
class PlannedModel:
    """The linear layers of a model under a plan, and what the plan says beyond them."""

    layers: tuple[LinearLayer, ...]
    omissions: tuple[Omission, ...]
    #: The passes whose FP8 products accumulate in reduced precision.
    fast_passes: tuple[str, ...]
    #: The paths of all modules of the model. A pattern must not fit one that is not meant.
    module_paths: tuple[str, ...]
    #: Whether the layers are those of the last step, because the plan changes over time and no step was chosen.
    is_at_end: bool = False


def find_layers(
    plan: Plan,
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    *,
    step: int | None = None,
    steps: int | None = None,
    is_for_inference: bool = False,
) -> PlannedModel:
    """The linear layers of `model` under a plan; arguments as of :func:`bitplan.explain`.

    :param is_for_inference: of a plan that changes over time, take its last step, unless `step` says otherwise.
    """
    plan = plan_for_model(plan, model, batch, loss)
    require_interceptable(plan, model)
    operations = record(model, batch, loss, opens=partial(is_decomposed, plan))
    coverage = RuleCoverage(plan, scripted_modules(model))
    coverage.note_recorded(operations)
    coverage.require_effect(waits=coverage.covers_scripted_module)
    is_at_end = step is None and is_for_inference and plan.moves
    if is_at_end:
        momentary = plan.at(Position(FINE_STEPS - 1, FINE_STEPS), fixed=True)
    else:
        momentary = plan if step is None else plan_at(plan, step, steps)

    omissions = Omissions()
    linear_modules = {
        path: module for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)
    }
    calls = _calls_of_layers(operations, linear_modules)
    operands_by_path: dict[str, dict[str, Operand | None]] = {}
    decisions = decisions_for(operations, momentary.decide)
    for number, (operation, quantizers) in enumerate(operand_quantizers(operations, decisions)):
        if number not in calls:
            continue
        operands = _operands_of(operation, quantizers)
        first = operands_by_path.setdefault(operation.module, operands)
        if first != operands:
            omissions.add(operation.label, "a layer that is called several times is rounded as in its first call")
    layers = []
    first_paths: dict[int, str] = {}
    names_of: dict[int, list[str]] = {}
    for name, owner in model.named_modules():  # a module with several paths counts once
        for own_name, parameter in owner.named_parameters(recurse=False):
            names_of.setdefault(id(parameter), []).append(f"{name}.{own_name}".removeprefix("."))
    for path, module in linear_modules.items():
        # A module with several paths is recorded under its first.
        first_path = first_paths.setdefault(id(module), path)
        unrounded: dict[str, Operand | None] = dict.fromkeys(SLOTS)
        operands = operands_by_path.get(first_path, unrounded)
        own_name = f"{first_path}.weight".removeprefix(".")
        shared = next((name for name in names_of[id(module.weight)] if name != own_name), None)
        layers.append(LinearLayer(path, module.in_features, module.out_features, operands, shared))

    layer_sites = {
        (operations[number].module, op_site(operations[number].op, operations[number].index)) for number in calls
    }
    for row in explain_operations(plan, operations, momentary.decide):
        _note_site(row, layer_sites, linear_modules, omissions)
    _note_keys(plan, omissions)
    execution = plan.declared_execution
    fast_passes = execution.fast_passes if isinstance(execution, Native) else ()
    module_paths = tuple(path for path, _ in model.named_modules(remove_duplicate=False))
    return PlannedModel(tuple(layers), tuple(omissions), fast_passes, module_paths, is_at_end)


def _calls_of_layers(operations: Sequence[Operation], linear_modules: Mapping[str, nn.Module]) -> set[int]:
    """Numbers of the operations that are the product of an ``nn.Linear`` with its own weight."""
    return {
        number
        for number, operation in enumerate(operations)
        if operation.op == "linear"
        and operation.module in linear_modules
        and any(name.rpartition(".")[2] == "weight" for name, _ in operation.parameters)
    }


def _operands_of(operation: Operation, quantizers: OperandQuantizers) -> dict[str, Operand | None]:
    """The six operands of a recorded linear layer that are rounded to a coarser grid than their dtype's."""
    operands: dict[str, Operand | None] = dict.fromkeys(SLOTS)
    (product,) = multiplications(operation)
    decision = quantizers.decision
    for slot in SLOTS:
        pass_, tensor = OPERAND_OF_SLOT[slot]
        spec = quantizers.of(slot, product)
        if spec is None or (pass_ != "fprop" and not operation.needs_grad):
            continue
        if spec.holds_every_value_of(quantizers.tensor(slot, product).dtype):
            continue
        arriving = {"x": "activation", "w": "weight", "dy": "grad_activation"}[tensor]
        place = arriving if decision[slot].quantizer is None else decision.shared.get(tensor, slot)
        operands[slot] = Operand(spec, place)
    return operands


# --- What the plan says beyond the operands of linear layers


def _note_site(
    row: Explanation, layer_sites: set[tuple[str, str]], linear_modules: Mapping[str, nn.Module], omissions: Omissions
) -> None:
    site, spec = row.site, row.quantizer
    if row.frozen is not None:
        omissions.add(site.name, f"the frozen weight is stored in {row.frozen} by bitplan only")
    if spec is None:
        return
    is_weight_of_layer = (
        site.role == "weight" and site.module in linear_modules and (site.parameter or "").endswith("weight")
    )
    is_backward = site.role.startswith(("dgrad", "wgrad", "grad"))
    if (site.role in SLOTS and (site.module, site.op) in layer_sites) or is_weight_of_layer:
        if row.over_time is not None:
            omissions.add(site.name, f"it changes over time ({row.over_time}), exported as {spec}", is_backward)
        elif spec.moved_by is not None:
            omissions.add(
                site.name, f"its bits follow a schedule ({spec.moved_by}), exported with {spec.bits} bits", is_backward
            )
        if spec.promote is not None:
            omissions.add(site.name, f"it is not promoted ({spec.promote})", is_backward)
        if spec.eval != "same":
            omissions.add(site.name, f"evaluation rounds as training does (eval: {spec.eval})", is_backward)
    elif site.role in SLOTS:
        op = site.op.split(".")[0]
        where = " outside of nn.Linear modules" if op == "linear" else ""
        omissions.add(site.name, f"operands of {op}{where} are rounded by bitplan only ({row.words})", is_backward)
    elif site.role == "activation":
        omissions.add(site.name, f"the saved activation is not rounded ({row.words})", is_backward)
    else:
        tensor = {"weight": "the parameter", "grad_weight": "the gradient of the parameter"}.get(
            site.role, "the gradient"
        )
        omissions.add(site.name, f"{tensor} is not rounded ({row.words})", is_backward)


def _note_keys(plan: Plan, omissions: Omissions) -> None:
    """What is said by keys of the plan other than its rules."""
    if plan.optimizer_rule is not None:
        omissions.add(
            "optimizer", f"the optimizer's state stays as it is ({plan.optimizer_rule.state} under bitplan)", True
        )
    if plan.declared_loss == "chunked":
        omissions.add("loss", "the loss is not computed in chunks", True)
    execution = plan.declared_execution
    if isinstance(execution, Packed):
        omissions.add("execution", "saved tensors are not packed", True)
    elif isinstance(execution, Native) and execution.recompute:
        recomputed = execution.recompute if isinstance(execution.recompute, str) else ", ".join(execution.recompute)
        omissions.add("execution", f"nothing is recomputed in the backward pass (recompute: {recomputed})", True)


# --- Shared by exporters


def note_rounding(
    layer: LinearLayer,
    slot: str,
    omissions: Omissions,
    target: str,
    *,
    stochastic: bool = False,
    delayed: bool = False,
    rotated: bool = False,
) -> None:
    """Note what a target that rounds to nearest, with symmetric current scales, does not do of an operand.

    :param stochastic: the target rounds this operand stochastically.
    :param delayed: the target takes its scale from previous steps.
    :param rotated: the target rotates this operand.
    """
    operand = layer.operands[slot]
    assert operand is not None
    spec, site = operand.quantizer, operand_site(layer, slot)
    if spec.rounding != "nearest" and not stochastic:
        omissions.add(site, f"{target} rounds to nearest, not {spec.rounding}")
    if spec.rotate is not None and not rotated:
        omissions.add(site, f"the operand is exported for {target} without its rotation ({spec})")
    if spec.history is not None and not delayed:
        omissions.add(site, f"{target} has current scales only, none of {spec.history} past steps")
    if spec.range == "minmax" or getattr(spec.target, "affine", False):
        omissions.add(site, f"{target} has scales from the amax only, none from minimum and maximum")


def keep_whole_products(
    layer: LinearLayer,
    casts: dict[str, Any],
    omissions: Omissions,
    target: str,
    can_multiply: Callable[[Any, Any], bool],
) -> None:
    """Drop the casts of products of which only one operand is cast, or whose two formats cannot be multiplied."""
    for pass_, slots in PASSES.items():
        first, second = (casts[slot] for slot in slots)
        if first is None and second is None:
            continue
        if first is None or second is None:
            rounded = slots[0] if second is None else slots[1]
            omissions.add(
                operand_site(layer, rounded), f"{target} rounds both operands of {pass_} or neither: left as it is"
            )
        elif not can_multiply(first, second):
            for slot in slots:
                omissions.add(
                    operand_site(layer, slot), f"{target} cannot multiply the formats of {pass_}: left as it is"
                )
        else:
            continue
        casts.update(dict.fromkeys(slots))


def operand_site(layer: LinearLayer, slot: str) -> str:
    """The operand's site, such as ``model.layers.0.mlp.down_proj/linear.0:fprop.x``."""
    return f"{site_path(layer.path, op_site('linear', 0))}:{slot}"


def require_exported(count: int, target: str, planned: PlannedModel, omissions: Sequence[Omission]) -> None:
    """Raise where nothing of a plan can be exported.

    :param omissions: of the plan, and after them those of the target.
    """
    if count:
        return
    of_plan = set(planned.omissions)
    of_target = omission_lines([omission for omission in omissions if omission not in of_plan])
    if of_target:
        reason = of_target[-1]
    else:
        when = "at the end of a run it" if planned.is_at_end else "it"
        reason = f"{when} rounds no operand of an nn.Linear layer that {target} could round"
    other_step = "export another step of the run" if planned.is_at_end else "choose another target"
    raise PlanError(
        f"the plan has nothing that {target} can do ({reason}): give formats of {target} to operands of nn.Linear "
        f"layers, or {other_step}."
    )


def group_by_treatment(treatments: Mapping[str, Any]) -> dict[Any, list[str]]:
    """Treatment -> the paths of the layers that have it, in the order of the model."""
    groups: dict[Any, list[str]] = {}
    for path, treatment in treatments.items():
        groups.setdefault(treatment, []).append(path)
    return groups
