"""Plans from the configs of other frameworks, to ask bitplan what a present recipe does.

The plan is an ordinary document: its rules can be measured, priced and compared, and changed by hand. What a config
says and a plan cannot is returned as notes. Only torchao's configs are Python; a file with one is run because the user
names it. JSON and YAML files are read as data.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bitplan.analysis.targets import find_callable, import_file, parse_file_name
from bitplan.errors import MissingPackageError, PlanError, nearest_names
from bitplan.files import parse_json
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans import OPERANDS, PASSES, SLOTS, Plan


@dataclass(frozen=True)
class ImportedPlan:
    """A plan made from another framework's config, and what of the config it leaves out."""

    plan: Plan
    notes: tuple[str, ...] = ()


def import_plan(source: str | Path | Mapping[str, Any] | Any, format: str) -> ImportedPlan:
    """The plan of another framework's config.

    :param source: a file; a config that is loaded already; of ``torchao`` also a recipe's name or ``file.py:NAME``,
        which is **run** and has a ``Float8LinearConfig`` of that name.
    :param format: a name of :data:`IMPORT_FORMATS`.
    """
    if format not in IMPORT_FORMATS:
        raise PlanError(f"there is no import format {format!r}; {nearest_names(str(format), IMPORT_FORMATS)}")
    notes: list[str] = []
    rules = IMPORT_FORMATS[format](source, notes)
    if not any(rule.get("keep") is None for rule in rules):
        raise PlanError(f"this {format} config rounds nothing, so that there is no plan to make of it.")
    name = str(source) if isinstance(source, (str, Path)) else "a config"
    document = {"version": 1, "made_by": {"imported_from": format, "source": name}, "rules": rules}
    return ImportedPlan(Plan.from_dict(document), tuple(dict.fromkeys(notes)))


#: Rules as a plan document has them.
Rules = list[dict[str, Any]]


def _rule(match: str | Sequence[str], **places: Any) -> dict[str, Any]:
    """A rule for linear layers. Other frameworks do not mind a rule that finds nothing."""
    patterns = match if isinstance(match, str) else match[0] if len(match) == 1 else list(match)
    return {"match": patterns, "op": "linear", **places, "strict": False}


def _read_document(source: Any, parse: Callable[[str], Any], format: str) -> dict[str, Any]:
    """The mapping in a file, or the one that was given."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise PlanError(f"a {format} config is a file or a mapping, not {type(source).__name__}.")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"there is no file {path}.") from None
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise PlanError(f"{path} is no {format} config: {first}.") from None
    if not isinstance(content, dict):
        raise PlanError(f"{path} is no {format} config: it is no mapping.")
    return content


def _only(mapping: Any, keys: Sequence[str], where: str) -> dict[str, Any]:
    """The mapping; raises if it is none or has other keys."""
    if not isinstance(mapping, dict):
        raise PlanError(f"{where} must be a mapping, not {type(mapping).__name__}.")
    for key in mapping:
        if key not in keys:
            raise PlanError(f"{where} has the unknown key {key!r}; {nearest_names(str(key), keys)}")
    return mapping


# --- torchao


_TORCHAO_FIELDS = {
    "fprop.x": "cast_config_input",
    "fprop.w": "cast_config_weight",
    "dgrad.dy": "cast_config_grad_output",
    "dgrad.w": "cast_config_weight_for_grad_input",
    "wgrad.dy": "cast_config_grad_output_for_grad_weight",
    "wgrad.x": "cast_config_input_for_grad_weight",
}
_FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


def _from_torchao(source: Any, notes: list[str]) -> Rules:
    config = _torchao_config(source)
    quantizers: dict[str, Any] = {}
    for slot, field in _TORCHAO_FIELDS.items():
        cast = getattr(config, field)
        if cast.scaling_type.value == "disabled":
            continue
        dtype = str(cast.target_dtype).removeprefix("torch.")
        if dtype not in _FORMATS:
            raise PlanError(f"{field} casts to {dtype}, and plans are made of {' and '.join(_FORMATS)} only.")
        scale = "tensor" if cast.scaling_granularity.value == "tensorwise" else "vector"
        power = {"power_of_two": True} if config.round_scales_to_power_of_2 else {}
        quantizers[slot] = {"format": _FORMATS[dtype], "scale": scale, **power}
    if config.enable_fsdp_float8_all_gather:
        notes.append("enable_fsdp_float8_all_gather: weights are gathered as they are")
    if config.pad_inner_dim:
        notes.append("pad_inner_dim: shapes are not padded")
    notes.append(
        "all linear layers have the config: name those of module_filter_fn in match, or add keep: true for others"
    )
    return [_rule("*", **_with_shared_operands(quantizers))] if quantizers else []


def _torchao_config(source: Any) -> Any:
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError as error:
        raise MissingPackageError(
            "configs of torchao are read by torchao, which is not installed: run 'pip install \"bitplan[torchao]\"'."
        ) from error
    if isinstance(source, Float8LinearConfig):
        return source
    file = parse_file_name(str(source)) if isinstance(source, (str, Path)) else None
    if file is not None:
        path, name = file
        if not path.is_file():
            raise PlanError(f"there is no file {path}: a torchao config is named as file.py:NAME.")
        module = import_file(path, PlanError)
        config = getattr(module, name or "config", None)
        if not isinstance(config, Float8LinearConfig):
            config = find_callable(module, path, name or "config", "Float8LinearConfig", PlanError)()
        if isinstance(config, Float8LinearConfig):
            return config
        raise PlanError(f"{path}:{name or 'config'} is a {type(config).__name__}, and no Float8LinearConfig.")
    try:
        return Float8LinearConfig.from_recipe_name(str(source))
    except (AssertionError, ValueError):
        recipes = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
        raise PlanError(
            f"torchao has no recipe {str(source)!r}; {nearest_names(str(source), recipes)} "
            f"(A config of your own is named as file.py:NAME.)"
        ) from None


def _with_shared_operands(quantizers: Mapping[str, Any]) -> dict[str, Any]:
    """Slots as a rule has them: an operand with one scale per tensor is rounded once for both of its products."""
    places: dict[str, Any] = {}
    for tensor, (first, second) in OPERANDS.items():
        quantizer = quantizers.get(first)
        if quantizer is not None and quantizer == quantizers.get(second) and quantizer["scale"] == "tensor":
            places[tensor] = quantizer
        else:
            places |= {slot: quantizers[slot] for slot in (first, second) if slot in quantizers}
    return places


# --- compressed-tensors


_CONFIG_KEYS = (
    *("quant_method", "quantization_status", "format", "config_groups", "ignore", "kv_cache_scheme", "version"),
    *("global_compression_ratio", "sparsity_config", "transform_config", "moe_sparsity_config", "dequantize"),
    *("use_optimized_inference", "run_compressed"),
)
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
_ARGUMENT_KEYS = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)


def _from_compressed_tensors(source: Any, notes: list[str]) -> Rules:
    document = _read_document(source, parse_json, "compressed-tensors")
    config = document.get("quantization_config", document)
    _only(config, _CONFIG_KEYS, "quantization_config")
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        raise PlanError("a compressed-tensors config has config_groups, and this has none.")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"):
        if config.get(key):
            notes.append(f"{key} is left out")
    rules = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise PlanError(f"config_groups.{name} names the scheme of a preset: write out its weights and inputs.")
        _only(group, _GROUP_KEYS, f"config_groups.{name}")
        if group.get("output_activations"):
            notes.append(f"config_groups.{name}: output_activations are left out")
        places = {}
        for slot, key in (("fprop.x", "input_activations"), ("fprop.w", "weights")):
            if group.get(key) is not None:
                places[slot] = _quantizer_of(group[key], slot, f"config_groups.{name}.{key}", notes)
        match = _name_patterns(group.get("targets"), "Linear", f"config_groups.{name}.targets", notes)
        if match and places:
            rules.append(_rule(match, **places))
    ignored = _name_patterns(config.get("ignore"), "", "ignore", notes)
    if ignored:
        rules.append(_rule(ignored, keep=True))
    return rules


def _name_patterns(targets: Any, class_name: str, where: str, notes: list[str]) -> list[str]:
    """Targets of a group as patterns of a plan; `class_name` stands for all linear layers."""
    patterns: list[str] = []
    if targets is None:
        return patterns
    if not isinstance(targets, list):
        raise PlanError(f"{where} must be a list of names, not {type(targets).__name__}.")
    for text in map(str, targets):
        if class_name and text == class_name:
            patterns.append("*")
        elif text.startswith("re:"):
            patterns.append(f"{text}.*")  # theirs need not fit to the end
        elif text[:1].isupper() and "." not in text:
            notes.append(f"the class {text} in targets or ignore is left out: plans match linear layers by their paths")
        else:
            patterns.append(text)
    return patterns


def _quantizer_of(arguments: Any, slot: str, where: str, notes: list[str]) -> Any:
    args = _only(arguments, _ARGUMENT_KEYS, where)
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    strategy, size = args.get("strategy"), args.get("group_size")
    for key, number in (("num_bits", bits), ("group_size", size)):
        if isinstance(number, bool) or not isinstance(number, int | None):
            raise PlanError(f"{where}.{key} must be a whole number, not {number!r}.")
    if strategy is None:
        strategy = "tensor" if size is None else "group" if size > 0 else "channel"
    block_format = _FLOAT_BLOCKS.get((bits, size))
    if kind == "float" and block_format is not None and (bits != 8 or "uint8" in str(args.get("scale_dtype"))):
        return block_format
    if kind == "float" and bits != 8:
        raise PlanError(f"{where}: there is no quantizer for float {bits} with {strategy} scales.")
    quantizer: dict[str, Any] = {"format": f"int{bits}" if kind == "int" else "e4m3"}
    if strategy in ("tensor", "attn_head"):
        quantizer["scale"] = "tensor"
    elif strategy in ("channel", "token"):
        quantizer["scale"] = "vector"
    elif strategy in ("group", "tensor_group"):
        quantizer |= {"scale": "block", "block": size}
    elif strategy == "block":
        structure = args.get("block_structure")
        if not isinstance(structure, list) or len(structure) != 2:
            raise PlanError(f"{where}.block_structure must be two numbers, rows and columns, not {structure!r}.")
        rows, columns = structure
        quantizer |= {"scale": "block", "block": [rows, columns]}
    else:
        raise PlanError(f"{where} has the unknown strategy {strategy!r}.")
    if not args.get("symmetric", True):
        quantizer["range"] = "minmax"
    if slot == "fprop.x" and not args.get("dynamic", False):
        notes.append(f"{where}: scales are current ones, not from calibration")
    return quantizer


_FLOAT_BLOCKS: dict[Any, str] = {(8, 32): "mxfp8", (4, 32): "mxfp4", (4, 16): "nvfp4", (6, 32): "mxfp6"}


# --- Megatron


_FLAGS = ("override_quantized_autocast", "override_nonquantized_autocast", "tp_only_amax_red", "fp8_param", "fp4_param")
_KINDS = {bool: "truth value", str: "name"}
_RECIPE_KEYS = (
    *("fp8_quantization_recipe", "fp4_quantization_recipe", "custom_recipe_factory", "fp8_format"),
    *_FLAGS,
)


def _from_megatron(source: Any, notes: list[str]) -> Rules:
    document = _read_document(source, yaml.safe_load, "megatron")
    _only(document, ("configs", "matchers"), "the file")
    configs = {
        name: _megatron_places(config, f"configs.{name}", notes)
        for name, config in _mapping(document.get("configs"), "configs").items()
    }
    rules = []
    for name, matcher in _mapping(document.get("matchers"), "matchers").items():
        where = f"matchers.{name}"
        _only(matcher, ("config", "type", "pattern", "enabled"), where)
        if not matcher.get("enabled", False):  # what Megatron does where it is not said
            notes.append(f"{where} is not enabled and left out")
            continue
        if matcher.get("type") != "glob" or not isinstance(matcher.get("pattern"), str):
            raise PlanError(f"{where} must have type: glob and a pattern.")
        config = matcher.get("config")
        if not isinstance(config, str):
            raise PlanError(f"{where}.config must be a name, not {type(config).__name__}.")
        if config not in configs:
            raise PlanError(f"{where}: {config!r} is not among the configs; {nearest_names(config, configs)}")
        rules.append(_rule(_glob_expression(matcher["pattern"]), **configs[config]))
    notes.append("layers without a match have the precision of Megatron's command line, and are left alone here")
    return rules[::-1]  # the first match wins there, the last here


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"a megatron config has a mapping under {where}, and this has none.")
    return value


def _glob_expression(pattern: str) -> str:
    """A glob for the whole path, where a plan's also means everything beneath.

    >>> _glob_expression("*.linear_qkv"), _glob_expression("*")
    ('re:.*\\\\.linear_qkv', '*')
    """
    if pattern == "*":
        return pattern
    pieces = re.split(r"(\[!?\]?[^\]]*\]|\*+|\?)", pattern)
    # Without the "(?s:" and ")\\Z" around it; the whole pattern at once would get groups between its stars.
    return "re:" + "".join(fnmatch.translate(piece)[4:-3] for piece in pieces)


def _megatron_places(config: Any, where: str, notes: list[str]) -> dict[str, Any]:
    """What a rule says for a config; ``keep`` for BF16."""
    _only(config, ("transformer_engine_config_type", "training_recipe", "evaluation_recipe"), where)
    if config.get("transformer_engine_config_type") != "TEQuantizationParams" or "training_recipe" not in config:
        raise PlanError(f"{where} needs transformer_engine_config_type: TEQuantizationParams and a training_recipe.")
    recipe = _only(config["training_recipe"], _RECIPE_KEYS, f"{where}.training_recipe")
    places = _recipe_places(recipe, f"{where}.training_recipe", notes)
    if "evaluation_recipe" in config and config["evaluation_recipe"] != recipe:
        evaluation = _only(config["evaluation_recipe"], _RECIPE_KEYS, f"{where}.evaluation_recipe")
        if not _recipe_name(evaluation, f"{where}.evaluation_recipe") and "keep" not in places:
            places = {place: _without_evaluation(quantizer) for place, quantizer in places.items()}
        else:
            notes.append(f"{where}: evaluation has the formats of training")
    return places


def _recipe_name(recipe: Mapping[str, Any], where: str) -> str | None:
    """The recipe that is named, after a look at the values of all keys, as Megatron itself refuses them."""
    for key, value in recipe.items():
        kind = bool if key in _FLAGS else str
        if value is not None and not isinstance(value, kind):
            raise PlanError(f"{where}.{key} must be a {_KINDS[kind]}, not {type(value).__name__}.")
    names = [recipe[key] for key in ("fp8_quantization_recipe", "fp4_quantization_recipe") if recipe.get(key)]
    if len(names) > 1:
        raise PlanError(f"{where} has an FP8 recipe and an FP4 recipe: keep one of them.")
    if recipe.get("fp8_format", "e4m3") not in ("e4m3", "hybrid"):
        raise PlanError(f"{where}.fp8_format is {recipe['fp8_format']!r}; it must be e4m3 or hybrid.")
    return names[0] if names else None


def _recipe_places(recipe: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    name = _recipe_name(recipe, where)
    gradient = "e5m2" if recipe.get("fp8_format", "e4m3") == "hybrid" else "e4m3"
    if name is None:
        return {"keep": True}
    if not recipe.get("override_nonquantized_autocast", False):
        notes.append(f"{where} counts under --fp8-format or --fp4-format only; here it always does")
    if not recipe.get("override_quantized_autocast", True):
        notes.append(f"{where} does not count under --fp8-format or --fp4-format; here it always does")
    if name == "tensorwise":
        forward = {"format": "e4m3", "scale": "tensor"}
        return {"x": forward, "w": forward, "dy": {"format": gradient, "scale": "tensor"}}
    if name == "blockwise":
        block = {"scale": "block", "power_of_two": True}
        tile = {"format": "e4m3", **block, "block": [128, 128]}
        lines = {
            tensor: {"format": gradient if tensor == "dy" else "e4m3", **block, "block": 128} for tensor in OPERANDS
        }
        return {slot: lines[OPERAND_OF_SLOT[slot].tensor] for slot in SLOTS if not slot.endswith(".w")} | {"w": tile}
    if name == "mxfp8":
        if gradient == "e4m3":
            return dict.fromkeys(PASSES, "mxfp8")
        return {slot: "mxfp8e5m2" if OPERAND_OF_SLOT[slot].tensor == "dy" else "mxfp8" for slot in SLOTS}
    if name == "nvfp4":
        gradient_of = {"format": "nvfp4", "rounding": "stochastic"}
        rotation = {"rotate": "hadamard", "rotate_size": 16}
        return {
            "fprop.x": "nvfp4",
            "w": {"format": "nvfp4", "block": [16, 16]},
            "dgrad.dy": gradient_of,
            "wgrad.dy": {**gradient_of, **rotation},
            "wgrad.x": {"format": "nvfp4", **rotation},
        }
    if name == "custom":
        raise PlanError(f"{where} is made by {recipe.get('custom_recipe_factory')}, Python code that is not read.")
    if name == "delayed":
        raise PlanError(f"{where}: Megatron has no delayed scales in this file; choose tensorwise.")
    raise PlanError(f"{where} has the unknown recipe {name!r}; {nearest_names(name, _RECIPES)}")


_RECIPES = ("tensorwise", "blockwise", "mxfp8", "nvfp4", "custom")


def _without_evaluation(quantizer: Any) -> Any:
    return {**({"format": quantizer} if isinstance(quantizer, str) else quantizer), "eval": "off"}


#: By the names that ``--from`` takes.
IMPORT_FORMATS: dict[str, Callable[[Any, list[str]], Rules]] = {
    "torchao": _from_torchao,
    "compressed-tensors": _from_compressed_tensors,
    "megatron": _from_megatron,
}
