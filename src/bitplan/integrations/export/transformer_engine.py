"""A plan for Transformer Engine: a factory of quantizers, nvdlfw_inspect's YAML, and Megatron's precision file.

All three choose layers by name. ``transformer-engine`` gives each operand its own quantizer; a row-wise and a
column-wise copy of x, w and dy are the six operands. ``te-debug`` rounds operands and multiplies in high precision.
``megatron`` has one recipe for a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from bitplan.integrations.export.layers import (
    LinearLayer,
    Omissions,
    PlannedModel,
    group_by_treatment,
    keep_whole_products,
    note_rounding,
    operand_site,
)
from bitplan.integrations.export.text import FileHeader, layer_expression, layer_globs, python_strings
from bitplan.plans import PASSES, SLOTS

# --- Transformer Engine: one quantizer per operand


#: Name of a tensor of a layer -> the slots of its row-wise and of its column-wise copy.
_COPIES = {
    "input": ("fprop.x", "wgrad.x"),
    "weight": ("fprop.w", "dgrad.w"),
    "grad_output": ("dgrad.dy", "wgrad.dy"),
}
_FP8 = {"e4m3": "kFloat8E4M3", "e5m2": "kFloat8E5M2"}
_MXFP8 = {"mxfp8": "kFloat8E4M3", "mxfp8e5m2": "kFloat8E5M2"}
#: The values that share a scale in Float8BlockQuantizer: tiles, and lines along the summed axis.
_TILE, _LINES = (128, 128), ((1, 128), 128)


class _Quantizer(NamedTuple):
    #: ``tensor``, ``delayed``, ``block``, ``mxfp8`` or ``nvfp4``: formats of one kind can be multiplied.
    kind: str
    dtype: str
    power_of_two: bool = False
    stochastic: bool = False
    history: int = 0
    margin: int = 0


def _can_multiply(first: _Quantizer, second: _Quantizer) -> bool:
    """Formats of one kind, but not two in E5M2, for which GPUs have no product."""
    alike = {"delayed": "tensor", "tile": "block"}
    kinds = {alike.get(quantizer.kind, quantizer.kind) for quantizer in (first, second)}
    return len(kinds) == 1 and {first.dtype, second.dtype} != {"e5m2"}


def write_transformer_engine(planned: PlannedModel, header: FileHeader, omissions: Omissions) -> tuple[str, int]:
    """The Python file with the recipe, and the number of layers that it quantizes."""
    treatments: dict[str, tuple[tuple[str, _Quantizer | None, _Quantizer | None], ...]] = {}
    for layer in planned.layers:
        quantizers = _quantizers(layer, omissions)
        if any(quantizers.values()):
            treatments[layer.path] = tuple(
                (tensor, quantizers[row], quantizers[column]) for tensor, (row, column) in _COPIES.items()
            )
    count = len(treatments)
    for layer in planned.layers:  # modules are also found by the end of their names
        if any(layer.path.endswith(f".{path}") for path in treatments):
            treatments.setdefault(layer.path, ())
    groups = group_by_treatment(treatments)
    rows = []
    for treatment, paths in groups.items():
        tensors = "\n".join(
            f'            "{tensor}": ({_quantizer_text(row, treatment)}, {_quantizer_text(column, treatment)}),'
            for tensor, row, column in treatment
        )
        rows.append(f"    (\n        {{\n{tensors}\n        }},\n        {python_strings(paths, 8)},\n    ),")
    return _RECIPE.format(header=header.comment("#"), treatments="\n".join(rows)), count


def _quantizers(layer: LinearLayer, omissions: Omissions) -> dict[str, _Quantizer | None]:
    quantizers: dict[str, _Quantizer | None] = {slot: _quantizer(layer, slot, omissions) for slot in SLOTS}
    keep_whole_products(layer, quantizers, omissions, "transformer-engine", _can_multiply)
    delayed = {
        slot: quantizer
        for slot, quantizer in quantizers.items()
        if quantizer is not None and quantizer.kind == "delayed"
    }
    # TE has delayed scales for both copies of a tensor only, with one history for a layer, e4m3 forward, and one
    # format of gradients.
    reason = None
    if any((quantizers[row] != quantizers[column]) for row, column in _COPIES.values() if {row, column} & set(delayed)):
        reason = "has delayed scales only where both operands of a tensor have the same"
    elif any(quantizer.dtype != "e4m3" for slot, quantizer in delayed.items() if not slot.endswith("dy")):
        reason = "has delayed scales for e4m3 only in the forward pass"
    elif len({(quantizer.history, quantizer.margin) for quantizer in delayed.values()}) > 1:
        reason = "has one history and margin for all delayed scales of a layer"
    if reason is not None:
        for slot, quantizer in delayed.items():
            omissions.add(operand_site(layer, slot), f"transformer-engine {reason}: current scales instead")
            quantizers[slot] = quantizer._replace(kind="tensor", history=0, margin=0)
    elif any(quantizer.power_of_two for quantizer in delayed.values()):
        omissions.add(layer.path, "transformer-engine's delayed scales are no powers of two")
    return quantizers


def _quantizer(layer: LinearLayer, slot: str, omissions: Omissions) -> _Quantizer | None:
    operand = layer.operands[slot]
    if operand is None:
        return None
    spec, site = operand.quantizer, operand_site(layer, slot)
    name, granularity = spec.target.name, operand.granularity(slot)
    is_stochastic = spec.rounding == "stochastic" and name == "nvfp4"
    if name not in (*_FP8, *_MXFP8, "nvfp4"):
        omissions.add(site, f"transformer-engine has no {name}: left as it is")
        return None
    note_rounding(layer, slot, omissions, "transformer-engine", stochastic=is_stochastic, delayed=True)
    if granularity == "other":
        omissions.add(
            site, f"transformer-engine has no such scale ({spec}): one for the tensor, or along the summed axis"
        )
    if name in _MXFP8:
        return _Quantizer("mxfp8", "e4m3" if name == "mxfp8" else "e5m2")
    if name == "nvfp4":
        if spec.block is not None:
            omissions.add(site, f"transformer-engine's quantizer is written with blocks of 16 ({spec})")
        return _Quantizer("nvfp4", "e2m1", stochastic=is_stochastic)
    if granularity == "block":
        if spec.block not in (*_LINES, _TILE):
            omissions.add(site, f"transformer-engine has blocks of 128 and of 128 x 128 only ({spec})")
        return _Quantizer("tile" if spec.block == _TILE else "block", name, spec.power_of_two)
    if granularity in ("none", "vector"):
        has = "a scale per vector" if granularity == "vector" else "no scale"
        omissions.add(site, f"transformer-engine has one scale per tensor, not {has}")
    if spec.history is not None:
        return _Quantizer("delayed", name, spec.power_of_two, history=spec.history, margin=spec.margin)
    return _Quantizer("tensor", name, spec.power_of_two)


def _quantizer_text(quantizer: _Quantizer | None, treatment: Any) -> str:
    if quantizer is None:
        return "partial(IdentityQuantizer)"
    if quantizer.kind == "delayed":
        gradients = {tensor: row for tensor, row, _ in treatment}["grad_output"]
        both = "E4M3" if gradients is not None and gradients.dtype == "e4m3" else "HYBRID"
        return f"partial(delayed, Format.{both}, {quantizer.history}, {quantizer.margin})"
    if quantizer.kind == "nvfp4":
        return f"partial(nvfp4, {quantizer.stochastic})"
    dtype = f"DType.{_FP8[quantizer.dtype]}"
    if quantizer.kind == "mxfp8":
        return f"partial(mxfp8, {dtype})"
    make = {"block": "fp8_block", "tile": "fp8_tile"}.get(quantizer.kind, "fp8_tensor")
    return f"partial({make}, {dtype}, {quantizer.power_of_two})"


_RECIPE = '''\
{header}
"""A recipe of Transformer Engine: ``with te.autocast(enabled=True, recipe=recipe): ...``

Modules are found by their ``name=``: a path below, perhaps with something in front. Other modules keep their precision.
"""

from functools import partial

import torch
from transformer_engine.common.recipe import CustomRecipe, Format
from transformer_engine.pytorch import DType
from transformer_engine.pytorch.quantization import DelayedScalingRequest
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer


def fp8_tensor(dtype, power_of_two):
    return Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), force_pow_2_scales=power_of_two)


def fp8_block(dtype, power_of_two):
    return Float8BlockQuantizer(
        dtype, rowwise=True, columnwise=True, force_pow_2_scales=power_of_two, block_scaling_dim=1
    )


def fp8_tile(dtype, power_of_two):
    return Float8BlockQuantizer(
        dtype, rowwise=True, columnwise=True, force_pow_2_scales=power_of_two, block_scaling_dim=2
    )


def mxfp8(dtype):
    return MXFP8Quantizer(dtype)


def nvfp4(stochastic):
    return NVFP4Quantizer(stochastic_rounding=stochastic)


def delayed(fp8_format, history, margin):
    return DelayedScalingRequest(fp8_format=fp8_format, amax_history_len=history, margin=margin)


# (quantizers of the row-wise and the column-wise copy of each tensor, names of the layers that have them)
TREATMENTS = [
{treatments}
]
TREATMENT_OF_LAYER = {{name: tensors for tensors, names in TREATMENTS for name in names}}


def treatment_of(name):
    """The treatment of a module by its name, or by the end of it."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((TREATMENT_OF_LAYER[end] for end in ends if end in TREATMENT_OF_LAYER), {{}})


def quantizer(role):
    """A quantizer, or a request for one, for a tensor of a module."""
    copies = None if role is None or role.module_type != "linear" else treatment_of(role.name).get(role.tensor_type)
    if copies is None:
        return IdentityQuantizer()
    rowwise, columnwise = copies
    if (rowwise.func, rowwise.args) == (columnwise.func, columnwise.args):
        return rowwise()
    return HybridQuantizer(rowwise_quantizer=rowwise(), columnwise_quantizer=columnwise())


recipe = CustomRecipe(qfactory=quantizer)
'''


# --- nvdlfw_inspect: operands are rounded, products are computed in high precision


# FakeQuant also lists MXFP8E4M3 and MXFP8E5M2, but TE 2.20 passes these texts on as a dtype, which raises.
_FAKE_QUANT = {"e4m3": "FP8E4M3", "e5m2": "FP8E5M2"}
_TENSORS = {"x": "activation", "w": "weight", "dy": "gradient"}


def write_te_debug(planned: PlannedModel, header: FileHeader, omissions: Omissions) -> tuple[str, int]:
    """The YAML text, and the number of layers whose operands it rounds."""
    treatments = {layer.path: _fake_quant_formats(layer, omissions) for layer in planned.layers}
    count = sum(bool(treatment) for treatment in treatments.values())
    document: dict[str, Any] = {}
    for treatment, paths in group_by_treatment(treatments).items():
        name = f"treatment_{len(document)}" if treatment else "not_rounded"
        document[name] = {
            "enabled": True,
            "layers": {
                "layer_name_regex_pattern": _anchored(layer_expression(paths, planned.module_paths), treatments)
            },
            "transformer_engine": _features(dict(treatment)),
        }
    return _yaml_text(document, header), count


def _anchored(expression: str, paths: Mapping[str, Any]) -> str:
    """The expression for whole names: it is searched for, and a layer in two sections is an error.

    ``infer_and_assign_layer_names`` puts ``model.`` in front of every module's path; names that a user assigns may be
    the paths themselves.
    """
    if not expression:  # the model itself is the layer
        return "^(model)?$"
    prefixed = {f"model.{path}" for path in paths}
    prefix = r"model\." if prefixed & set(paths) else r"(model\.)?"
    return f"^{prefix}({expression})$"


def _fake_quant_formats(layer: LinearLayer, omissions: Omissions) -> tuple[tuple[str, str], ...]:
    """(slot, TE's name of the format) of the operands that are rounded."""
    formats = []
    for slot, operand in layer.operands.items():
        if operand is None:
            continue
        spec, site = operand.quantizer, operand_site(layer, slot)
        name, granularity = spec.target.name, operand.granularity(slot)
        if name not in _FAKE_QUANT:
            omissions.add(site, f"te-debug has no {name}: left as it is")
            continue
        note_rounding(layer, slot, omissions, "te-debug")
        if granularity != "tensor":
            omissions.add(site, f"te-debug has one scale per tensor ({spec})")
        elif spec.power_of_two:
            omissions.add(site, "te-debug's scales are no powers of two")
        formats.append((slot, _FAKE_QUANT[name]))
    return tuple(formats)


def _features(formats: Mapping[str, str]) -> dict[str, Any]:
    """The features of a section. Products without a rounded operand must be taken out of FP8 explicitly."""
    if not formats:
        return {"DisableQuantizationLayer": {"enabled": True}}
    gemms = []
    for pass_, slots in PASSES.items():
        tensors = [
            {"tensor": _TENSORS[slot.partition(".")[2]], "quant_format": formats[slot]}
            for slot in slots
            if slot in formats
        ]
        if tensors:
            gemms.append({"gemm": pass_, "tensors_struct": tensors})
    features: dict[str, Any] = {"FakeQuant": {"enabled": True, "gemms_struct": gemms}}
    unrounded = [pass_ for pass_ in PASSES if pass_ not in {gemm["gemm"] for gemm in gemms}]
    if unrounded:
        features["DisableQuantizationGEMM"] = {"enabled": True, "gemms": unrounded}
    return features


# --- Megatron's --te-precision-config-file: one recipe per layer


_HIGH_PRECISION = "bf16"


def write_megatron(planned: PlannedModel, header: FileHeader, omissions: Omissions) -> tuple[str, int]:
    """The YAML text, and the number of layers that get a recipe."""
    recipes = {layer.path: _megatron_recipe(layer, omissions) for layer in planned.layers}
    count = sum(recipe != _HIGH_PRECISION for recipe in recipes.values())
    groups = group_by_treatment(recipes)
    configs: dict[str, Any] = {}
    matchers: dict[str, Any] = {}
    for recipe, paths in groups.items():
        if recipe == _HIGH_PRECISION:
            continue
        kind, name, fp8_format = recipe.partition("-")[0], *_MEGATRON[recipe]
        configs[recipe] = _megatron_config(
            {f"{'fp4' if kind == 'nvfp4' else 'fp8'}_quantization_recipe": name}
            | ({} if kind == "nvfp4" else {"fp8_format": fp8_format})
            # Without it the recipe is ignored where no --fp8-format or --fp4-format is on the command line.
            | {"override_nonquantized_autocast": True}
        )
        for pattern in layer_globs(paths, planned.module_paths):
            matchers[f"matcher_{len(matchers)}"] = _matcher(recipe, pattern)
    # The first match wins: whatever has no recipe above stays in BF16, also under --fp8-format.
    configs[_HIGH_PRECISION] = _megatron_config({})
    matchers["others"] = _matcher(_HIGH_PRECISION, "*")
    return _yaml_text({"configs": configs, "matchers": matchers}, header), count


#: Our name of a recipe -> Megatron's, and its fp8_format.
_MEGATRON = {
    "tensorwise-e4m3": ("tensorwise", "e4m3"),
    "tensorwise-hybrid": ("tensorwise", "hybrid"),
    "blockwise-e4m3": ("blockwise", "e4m3"),
    "blockwise-hybrid": ("blockwise", "hybrid"),
    "mxfp8-e4m3": ("mxfp8", "e4m3"),
    "mxfp8-hybrid": ("mxfp8", "hybrid"),
    "nvfp4": ("nvfp4", ""),
}


def _megatron_config(recipe: dict[str, Any]) -> dict[str, Any]:
    return {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}


def _matcher(config: str, pattern: str) -> dict[str, Any]:
    return {"config": config, "type": "glob", "pattern": pattern, "enabled": True}


def _megatron_recipe(layer: LinearLayer, omissions: Omissions) -> str:
    if not layer.is_rounded:
        return _HIGH_PRECISION
    rounded = {slot: operand for slot, operand in layer.operands.items() if operand is not None}
    if len(rounded) < len(SLOTS):
        missing = ", ".join(slot for slot in SLOTS if slot not in rounded)
        omissions.add(
            layer.path, f"megatron's recipes round all six operands of a layer ({missing} is not): left in BF16"
        )
        return _HIGH_PRECISION
    names = {slot: operand.quantizer.target.name for slot, operand in rounded.items()}
    forward = {name for slot, name in names.items() if not slot.endswith("dy")}
    backward = {name for slot, name in names.items() if slot.endswith("dy")}
    pair = (*forward, *backward) if len(forward) == len(backward) == 1 else ("", "")
    formats = {("e4m3", "e4m3"): "e4m3", ("e4m3", "e5m2"): "hybrid"}
    granularities = {slot: operand.granularity(slot) for slot, operand in rounded.items()}
    if pair in formats:
        kind = "blockwise" if set(granularities.values()) == {"block"} else "tensorwise"
        recipe = f"{kind}-{formats[pair]}"
    elif pair in (("mxfp8", "mxfp8"), ("mxfp8", "mxfp8e5m2")):
        recipe = "mxfp8-e4m3" if pair[1] == "mxfp8" else "mxfp8-hybrid"
    elif pair == ("nvfp4", "nvfp4"):
        recipe = "nvfp4"
    else:
        listed = ", ".join(dict.fromkeys(names.values()))
        omissions.add(layer.path, f"megatron has no recipe for these formats together ({listed}): left in BF16")
        return _HIGH_PRECISION
    _note_megatron(layer, recipe, granularities, omissions)
    return recipe


def _note_megatron(layer: LinearLayer, recipe: str, granularities: Mapping[str, str], omissions: Omissions) -> None:
    """What a recipe does otherwise than the plan."""
    for slot, granularity in granularities.items():
        operand = layer.operands[slot]
        assert operand is not None
        spec, site = operand.quantizer, operand_site(layer, slot)
        is_nvfp4 = recipe == "nvfp4"
        is_rotated = is_nvfp4 and slot.startswith("wgrad") and (spec.rotate, spec.rotate_size) == ("hadamard", 16)
        is_stochastic = is_nvfp4 and slot.endswith("dy")
        note_rounding(layer, slot, omissions, "megatron", stochastic=is_stochastic, rotated=is_rotated)
        if recipe.startswith("tensorwise"):
            if granularity != "tensor":
                omissions.add(site, f"megatron's tensorwise has one scale per tensor ({spec})")
            elif spec.power_of_two:
                omissions.add(site, "megatron's tensorwise scales are no powers of two")
        elif recipe.startswith("blockwise"):
            if slot.endswith("w") and spec.block != _TILE:
                omissions.add(site, f"megatron has a scale per 128 x 128 of a weight ({spec})")
            elif not slot.endswith("w") and spec.block not in _LINES:
                omissions.add(site, f"megatron has blocks of 128 of activations and gradients ({spec})")
            if not spec.power_of_two:
                omissions.add(site, "megatron's blockwise scales are powers of two")
        elif granularity == "other":
            omissions.add(site, f"megatron has blocks along the summed axis only ({spec})")
        if is_nvfp4:
            if slot.endswith("w"):
                if spec.block != (16, 16):
                    omissions.add(site, "megatron's nvfp4 has a scale per 16 x 16 of a weight")
            elif slot.startswith("wgrad") and not is_rotated:
                omissions.add(site, "megatron's nvfp4 has random Hadamard transforms in wgrad")
            if slot.endswith("dy") and spec.rounding != "stochastic":
                omissions.add(site, "megatron's nvfp4 rounds gradients stochastically")


def _yaml_text(document: Mapping[str, Any], header: FileHeader) -> str:
    body: str = yaml.safe_dump(
        dict(document), sort_keys=False, default_flow_style=False, allow_unicode=True, width=100_000
    )
    return f"{header.comment('#')}\n{body}"
