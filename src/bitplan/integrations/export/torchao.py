"""A plan as Python that converts linear layers to torchao's ``Float8Linear``, and as torchtitan's converters.

torchao's six casts are a plan's six operands. Its restrictions: both operands of a product are FP8 or neither, an
operand has one dtype in both of its products, scales are current ones of a tensor or along the summed axis, and one
config serves one call. So a plan with k distinct treatments becomes k calls with disjoint filters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bitplan.errors import PlanError
from bitplan.integrations.export.layers import (
    LinearLayer,
    Omissions,
    PlannedModel,
    group_by_treatment,
    keep_whole_products,
    note_rounding,
    operand_site,
)
from bitplan.integrations.export.text import FileHeader, python_strings
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans import OPERANDS, PASSES, SLOTS

#: The fields of Float8LinearConfig by slot.
CAST_FIELDS = {
    "fprop.x": "cast_config_input",
    "fprop.w": "cast_config_weight",
    "dgrad.dy": "cast_config_grad_output",
    "wgrad.x": "cast_config_input_for_grad_weight",
    "dgrad.w": "cast_config_weight_for_grad_input",
    "wgrad.dy": "cast_config_grad_output_for_grad_weight",
}
#: The fields of Float8LinearConfig by pass.
GEMM_FIELDS = {"fprop": "gemm_config_output", "dgrad": "gemm_config_grad_input", "wgrad": "gemm_config_grad_weight"}

#: torch's dtypes by format.
DTYPES = {"e4m3": "torch.float8_e4m3fn", "e5m2": "torch.float8_e5m2"}
#: What an operand has that is nowhere cast, because torchao's ``DISABLED`` casts have a dtype, too.
_DEFAULT_FORMAT = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}


class _Cast(NamedTuple):
    format: str
    granularity: str
    power_of_two: bool


Treatment = tuple[tuple[str, _Cast | None], ...]


def write_torchao(planned: PlannedModel, header: FileHeader, omissions: Omissions) -> tuple[str, int]:
    """The Python file, and the number of layers that it converts."""
    treatments: dict[str, Treatment] = {}
    for layer in planned.layers:
        casts = _casts(layer, "torchao", omissions)
        if any(casts.values()):
            treatments[layer.path] = tuple(casts.items())
    calls = [
        f"    (\n{_config_text(dict(treatment), planned.fast_passes)}\n        {python_strings(paths, 8)},\n    ),"
        for treatment, paths in group_by_treatment(treatments).items()
    ]
    text = _TORCHAO.format(header=header.comment("#"), treatments="\n".join(calls))
    if header.target is not None:
        text += _TORCHAO_MAIN.format(target=header.target)
    return text, len(treatments)


def _casts(layer: LinearLayer, target: str, omissions: Omissions) -> dict[str, _Cast | None]:
    """The cast of each operand, as torchao can do them."""
    casts: dict[str, _Cast | None] = dict.fromkeys(SLOTS)
    for slot, operand in layer.operands.items():
        if operand is None:
            continue
        spec, site = operand.quantizer, operand_site(layer, slot)
        name = spec.target.name
        if name not in DTYPES:
            omissions.add(site, f"{target} multiplies in e4m3 and e5m2, not in {name}: left as it is")
            continue
        note_rounding(layer, slot, omissions, target)
        granularity = operand.granularity(slot)
        if granularity == "none":
            omissions.add(site, f"{target} always scales: one scale per tensor instead of none")
        elif granularity in ("block", "other"):
            omissions.add(site, f"{target} has no such scale ({spec}): one along the summed axis instead")
        casts[slot] = _Cast(name, "tensor" if granularity in ("none", "tensor") else "vector", spec.power_of_two)
    # GPUs have no product of two E5M2 matrices.
    keep_whole_products(layer, casts, omissions, target, lambda first, second: "e4m3" in (first.format, second.format))
    for tensor, (first, second) in OPERANDS.items():
        first_cast, second_cast = casts[first], casts[second]
        if first_cast is not None and second_cast is not None and first_cast.format != second_cast.format:
            pass_ = OPERAND_OF_SLOT[second].pass_
            omissions.add(
                operand_site(layer, second),
                f"{target} has one dtype for {tensor} ({first_cast.format} in {first}): {pass_} is left as it is",
            )
            casts.update(dict.fromkeys(PASSES[pass_]))
    powers = {cast.power_of_two for cast in casts.values() if cast is not None}
    if len(powers) == 2:
        omissions.add(layer.path, f"{target} has power-of-two scales for all operands of a layer or for none: for none")
        casts = {slot: cast and cast._replace(power_of_two=False) for slot, cast in casts.items()}
    return casts


def _config_text(casts: Mapping[str, _Cast | None], fast_passes: Sequence[str]) -> str:
    lines = ["        dict("]
    for slot, field in CAST_FIELDS.items():
        cast = casts[slot]
        tensor = OPERAND_OF_SLOT[slot].tensor
        if cast is None:
            others = [casts[other] for other in OPERANDS[tensor] if casts[other] is not None]
            name = others[0].format if others and others[0] is not None else _DEFAULT_FORMAT[tensor]
            disabled = f"scaling_type=ScalingType.DISABLED, target_dtype={DTYPES[name]}"
            lines.append(f"            {field}=CastConfig({disabled}),")
        else:
            granularity = {"tensor": "TENSORWISE", "vector": "AXISWISE"}[cast.granularity]
            lines.append(
                f"            {field}=CastConfig(\n                "
                f"scaling_granularity=ScalingGranularity.{granularity}, target_dtype={DTYPES[cast.format]}\n"
                f"            ),"
            )
    for pass_, field in GEMM_FIELDS.items():
        lines.append(f"            {field}=Float8GemmConfig(use_fast_accum={pass_ in fast_passes}),")
    is_power = any(cast is not None and cast.power_of_two for cast in casts.values())
    lines.append(f"            round_scales_to_power_of_2={is_power},")
    return "\n".join([*lines, "        ),"])


_TORCHAO = '''\
{header}
"""FP8 training of a model's linear layers by torchao: ``model = convert(model)`` before the optimizer is made."""

import torch
from torch import nn
from torchao.float8 import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
from torchao.float8.config import ScalingGranularity

# (arguments of Float8LinearConfig, module paths of the layers that it is for)
TREATMENTS = [
{treatments}
]


def convert(model: nn.Module, *, emulate: bool = False) -> nn.Module:
    """Convert the linear layers. emulate: compute in float32 on rounded values, for machines without FP8 units."""
    linear = {{path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, nn.Linear)}}
    missing = sorted(set().union(*(paths for _, paths in TREATMENTS)) - linear)
    if missing:
        raise ValueError(f"the model has no nn.Linear {{missing[0]!r}} ({{len(missing)}} of the layers are missing)")
    for arguments, paths in TREATMENTS:
        model = convert_to_float8_training(
            model,
            config=Float8LinearConfig(emulate=emulate, **arguments),
            module_filter_fn=lambda module, path, paths=frozenset(paths): path in paths,
        )
    return model
'''

_TORCHAO_MAIN = """

if __name__ == "__main__":
    from torchao.float8.float8_linear import Float8Linear

    from bitplan.analysis.memory.step import TrainingStep, split_call
    from bitplan.lab.targets import load_target

    target = load_target({target!r})
    model = convert(target.model, emulate=not torch.cuda.is_available())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = TrainingStep(model, split_call(target.batch, target.loss), target.loss, optimizer=None)
    loss = step.loss_of_batch()
    loss.backward()
    optimizer.step()
    for path, module in model.named_modules():
        if isinstance(module, Float8Linear):
            print(f"{{path}}: {{module.extra_repr()}}")
    print(f"one step: loss {{loss.item():.4f}}")
"""


# --- torchtitan


def write_torchtitan(planned: PlannedModel, header: FileHeader, omissions: Omissions) -> tuple[str, int]:
    """The Python file with the list of converters, and the number of layers that they convert."""
    families = {layer.path: _torchtitan_family(layer, omissions) for layer in planned.layers}
    counts = {family: list(families.values()).count(family) for family in families.values() if family is not None}
    if not counts:
        return "", 0
    chosen = max(counts, key=lambda family: counts[family])
    for path, family in families.items():
        if family not in (None, chosen):
            omissions.add(
                path or "the model", f"torchtitan has one recipe for all layers, and most have {chosen}: left as it is"
            )
    converted = [path for path, family in families.items() if family == chosen]
    others = [
        layer.path
        for layer in planned.layers
        if families[layer.path] != chosen and (chosen == "mxfp8" or _has_dimensions_of_fp8(layer))
    ]
    if chosen == "mxfp8":
        converter = "MXFP8LinearConverter"
        arguments = f"fqns={python_strings(_substrings(converted, others), 8)}"
    else:
        converter = "Float8LinearConverter"
        arguments = f'recipe_name="{chosen}",\n        filter_fqns={python_strings(_substrings(others, converted), 8)}'
    return _TORCHTITAN.format(header=header.comment("#"), converter=converter, arguments=arguments), len(converted)


def _torchtitan_family(layer: LinearLayer, omissions: Omissions) -> str | None:
    """``rowwise``, ``rowwise_with_gw_hp`` or ``mxfp8``; None for a layer that is left as it is."""
    if not layer.is_rounded:
        return None
    names = {slot: operand.quantizer.target.name for slot, operand in layer.operands.items() if operand is not None}
    if set(names.values()) == {"mxfp8"} and len(names) == len(SLOTS):
        for slot in SLOTS:
            note_rounding(layer, slot, omissions, "torchtitan")
        return "mxfp8"
    casts = _casts(layer, "torchtitan", omissions)
    is_cast = {pass_: casts[slots[0]] is not None for pass_, slots in PASSES.items()}
    if not is_cast["fprop"] or not is_cast["dgrad"]:
        if any(is_cast.values()):
            omissions.add(layer.path, "torchtitan's recipes have FP8 in fprop and dgrad at least: left as it is")
        return None
    if not _has_dimensions_of_fp8(layer):
        omissions.add(layer.path, "torchtitan leaves out layers with dimensions that 16 does not divide")
        return None
    recipe = "rowwise" if is_cast["wgrad"] else "rowwise_with_gw_hp"
    for slot, cast in casts.items():
        if cast is None:
            continue
        site = operand_site(layer, slot)
        granularity = "tensor" if recipe == "rowwise_with_gw_hp" and slot == "dgrad.w" else "vector"
        if cast.format != "e4m3":
            omissions.add(site, f"torchtitan's {recipe} has e4m3, not {cast.format}")
        if cast.granularity != granularity:
            omissions.add(site, f"torchtitan's {recipe} has scales per {granularity}, not per {cast.granularity}")
        if not cast.power_of_two:
            omissions.add(site, f"torchtitan's {recipe} rounds scales to powers of two")
    return recipe


def _has_dimensions_of_fp8(layer: LinearLayer) -> bool:
    """Whether torchtitan's Float8LinearConverter takes the layer."""
    return layer.in_features % 16 == 0 and layer.out_features % 16 == 0


def _substrings(paths: Sequence[str], others: Sequence[str]) -> list[str]:
    """Texts of which one is in every one of `paths` and none is in any of `others`, which is how torchtitan chooses.

    >>> _substrings(["layers.0.router", "head"], ["layers.0.w1", "layers.0.w2"])
    ['router', 'head']
    """
    chosen: list[str] = []
    for path in paths:
        if any(text in path for text in chosen):
            continue
        parts = path.split(".")
        candidates = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        text = next((text for text in candidates if text and not any(text in other for other in others)), None)
        if text is None:
            other = next(other for other in others if path in other)
            raise PlanError(
                f"torchtitan chooses layers by parts of their names, and {path!r} is a part of {other!r}, which has "
                f"another treatment: rename one of them, or give both the same formats."
            )
        chosen.append(text)
    return chosen


_TORCHTITAN = '''\
{header}
"""Converters of torchtitan: ``model_registry(flavor, converters=CONVERTERS)`` in a config function.

Compiled models want ``model_compile_enabled=True``.
"""

from torchtitan.components.quantization import {converter}

CONVERTERS = [
    {converter}.Config(
        {arguments},
    )
]
'''
