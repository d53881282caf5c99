"""A plan for inference: the configs of compressed-tensors (vLLM, Transformers) and of ModelOpt, and rounded weights.

A trained model is served with the forward operands that it was trained with. Backward operands have no counterpart.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from bitplan.errors import MissingPackageError, PlanError
from bitplan.files import json_text, sync
from bitplan.gemm.axes import resolve
from bitplan.integrations.export.layers import (
    LinearLayer,
    Omissions,
    Operand,
    PlannedModel,
    group_by_treatment,
    note_rounding,
    operand_site,
)
from bitplan.integrations.export.text import FileHeader, layer_globs
from bitplan.numerics.formats import BlockFormat, IntFormat

# --- compressed-tensors: the config


#: bitplan's block formats -> bits and values per scale.
_BLOCKS = {"mxfp8": (8, 32), "mxfp4": (4, 32), "nvfp4": (4, 16)}
#: The class name that stands for all linear layers.
_ALL_LINEAR = "Linear"


def write_compressed_tensors(planned: PlannedModel, header: FileHeader, omissions: Omissions) -> tuple[str, int]:
    """The JSON text of ``quantization_config``, and the number of layers that it quantizes."""
    config, count = compressed_tensors_config(planned, omissions)
    return f"{json_text(config)}\n", count


def compressed_tensors_config(planned: PlannedModel, omissions: Omissions) -> tuple[dict[str, Any], int]:
    schemes = {layer.path: _scheme_text(layer, omissions) for layer in planned.layers}
    groups = group_by_treatment({path: scheme for path, scheme in schemes.items() if scheme is not None})
    config_groups = {}
    for number, (scheme, paths) in enumerate(groups.items()):
        config_groups[f"group_{number}"] = {
            "targets": [_ALL_LINEAR] if len(groups) == 1 else paths,
            **json.loads(scheme),
        }
    formats = {group["format"] for group in config_groups.values()}
    config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": config_groups,
        "ignore": [path for path, scheme in schemes.items() if scheme is None],
    }
    return config, sum(scheme is not None for scheme in schemes.values())


def _scheme_text(layer: LinearLayer, omissions: Omissions) -> str | None:
    """The scheme of a layer as JSON, which can be compared and hashed; None where the layer is left as it is."""
    x, w = layer.operands["fprop.x"], layer.operands["fprop.w"]
    if w is None:
        if x is not None:
            omissions.add(
                operand_site(layer, "fprop.x"),
                "compressed-tensors rounds the inputs of layers with rounded weights only: left as it is",
            )
        return None
    if layer.shares_weight_with is not None:
        omissions.add(
            operand_site(layer, "fprop.w"), f"the weight is that of {layer.shares_weight_with}, too: left as it is"
        )
        return None
    weights = _arguments(layer, "fprop.w", omissions)
    inputs = None if x is None else _arguments(layer, "fprop.x", omissions)
    if weights is None or (x is not None and inputs is None):
        return None
    name = w.quantizer.target.name
    scheme = {"weights": weights, "input_activations": inputs, "format": _packing(name, weights, inputs)}
    return json.dumps(scheme)


def _arguments(layer: LinearLayer, slot: str, omissions: Omissions) -> dict[str, Any] | None:
    """QuantizationArgs of an operand; None where there are none for it."""
    operand = layer.operands[slot]
    assert operand is not None
    spec, site, is_weight = operand.quantizer, operand_site(layer, slot), slot == "fprop.w"
    target, granularity = spec.target, operand.granularity(slot)
    if not (target.name in ("e4m3", *_BLOCKS) or (isinstance(target, IntFormat) and 2 <= target.bits <= 8)):
        omissions.add(site, f"compressed-tensors has no {target.name}: the layer is left as it is")
        return None
    if isinstance(spec.block, tuple) and spec.block[0] > 1:
        omissions.add(site, f"weights are written with lines of inputs only ({spec}): the layer is left as it is")
        return None
    note_rounding(layer, slot, omissions, "compressed-tensors")
    arguments: dict[str, Any] = {
        "num_bits": target.bits if isinstance(target, IntFormat) else 8,
        "type": "int" if isinstance(target, IntFormat) else "float",
        "symmetric": True,
        "dynamic": not is_weight,
    }
    if target.name in _BLOCKS:
        bits, size = _BLOCKS[target.name]
        arguments |= {"num_bits": bits, "strategy": "group", "group_size": size, "scale_dtype": "torch.uint8"}
        if target.name == "nvfp4":
            arguments |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
            arguments |= {} if is_weight else {"dynamic": "local"}
            if not is_weight:
                omissions.add(site, "compressed-tensors has a scale of the whole input from calibration")
    elif granularity == "block":
        arguments |= {"strategy": "group", "group_size": spec.block[1] if isinstance(spec.block, tuple) else spec.block}
    elif granularity == "vector":
        arguments["strategy"] = "channel" if is_weight else "token"
    else:
        arguments["strategy"] = "tensor"
        if granularity != "tensor":
            omissions.add(site, f"compressed-tensors has no such scale ({spec}): one per tensor instead")
    if granularity == "other" and target.name in _BLOCKS:
        omissions.add(site, f"compressed-tensors has blocks along the inputs only ({spec})")
    group_size = arguments.get("group_size")
    if group_size is not None and layer.in_features % group_size:
        omissions.add(
            site, f"compressed-tensors has whole blocks of {group_size} inputs only: the layer is left as it is"
        )
        return None
    return arguments


def _packing(name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> str:
    """The layout of the stored weight."""
    if name in _BLOCKS:
        return {"mxfp8": "mxfp8-quantized", "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}[name]
    if weights["type"] == "float":
        return "naive-quantized" if inputs is None else "float-quantized"
    return "pack-quantized" if inputs is None else "int-quantized"


# --- compressed-tensors: the weights


def write_weights(planned: PlannedModel, model: nn.Module, folder: Path) -> None:
    """A folder with ``config.json`` and ``model.safetensors``: weights are rounded, and stored as codes and scales."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingPackageError(
            "weights are written by safetensors, which is not installed: run 'pip install safetensors'."
        ) from error
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PlanError("the model is on the meta device and has no weights to export: give one with its weights.")
    config, _ = compressed_tensors_config(planned, Omissions())
    packings = _packing_by_layer(config, planned)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for layer in planned.layers:
        packing = packings.get(layer.path)
        if packing is not None:
            prefix = f"{layer.path}." if layer.path else ""
            operand = layer.operands["fprop.w"]
            assert operand is not None
            weight = state.pop(f"{prefix}weight")
            stored = _stored_weight(operand, weight, packing)
            state |= {f"{prefix}{name}": tensor for name, tensor in stored.items()}
    tensors, seen = {}, set()
    for name, tensor in state.items():  # safetensors refuses tensors that share memory
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key in seen and tensor.numel():
            continue
        seen.add(key)
        tensors[name] = tensor.contiguous().cpu()
    with _fresh_folder(folder) as fresh:
        _write_config(model, config, fresh)
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})


def _packing_by_layer(config: Mapping[str, Any], planned: PlannedModel) -> dict[str, str]:
    packings: dict[str, str] = {}
    for group in config["config_groups"].values():
        paths = group["targets"]
        if paths == [_ALL_LINEAR]:
            paths = [layer.path for layer in planned.layers if layer.path not in config["ignore"]]
        packings |= dict.fromkeys(paths, group["format"])
    return packings


def _stored_weight(operand: Operand, weight: Tensor, packing: str) -> dict[str, Tensor]:
    """The tensors that stand for a weight."""
    spec = operand.quantizer
    if operand.granularity("fprop.w") not in ("tensor", "vector", "block") or spec.range == "minmax":
        raise PlanError(f"weights in {spec} cannot be stored for compressed-tensors: give them scale: vector.")
    if packing in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        raise PlanError(
            f"bitplan stores weights in int2 to int8, e4m3 and mxfp8, not in {spec.target.name}: drop weights."
        )
    quantizer = resolve(spec, operand.place, "linear", weight.dim())
    if spec.rounding == "stochastic":
        raise PlanError("stochastic rounding of weights has no stored result: give fprop.w rounding: nearest.")
    encoded = quantizer.encode(weight.float())
    elements, scale = encoded.elements, encoded.scales[0]
    if elements.shape != weight.shape:  # blocks: (outputs, blocks, values)
        elements, scale = elements.reshape(weight.shape), scale.reshape(*scale.shape[:-1])
    if isinstance(quantizer.format, BlockFormat):
        return {"weight": elements.to(torch.float8_e4m3fn), "weight_scale": scale.to(torch.uint8)}
    scale = scale.reshape(1) if spec.scale == "tensor" else scale
    if packing == "pack-quantized":
        bits = spec.target.bits
        return {
            "weight_packed": pack_integers(elements.to(torch.int32), bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
    dtype = torch.int8 if isinstance(quantizer.format, IntFormat) else torch.float8_e4m3fn
    return {"weight": elements.to(dtype), "weight_scale": scale}


def pack_integers(values: Tensor, bits: int) -> Tensor:
    """Rows of signed integers as 32-bit words, without gaps, lowest bits first.

    >>> pack_integers(torch.tensor([[-8, 7, 0]]), 4).tolist()
    [[2288]]
    """
    rows, columns = values.shape
    words = -(-columns * bits // 32)
    codes = (values + (1 << (bits - 1))).to(torch.int64)
    places = torch.arange(bits, device=values.device)
    stream = (codes.unsqueeze(-1) >> places & 1).reshape(rows, columns * bits)
    stream = nn.functional.pad(stream, (0, words * 32 - columns * bits)).reshape(rows, words, 32)
    weights = torch.ones(32, dtype=torch.int64, device=values.device) << torch.arange(32, device=values.device)
    return (stream * weights).sum(-1).to(torch.int32)


def _write_config(model: nn.Module, quantization: Mapping[str, Any], folder: Path) -> None:
    """``config.json``: the quantization, and the rest of the config of a model of Transformers."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    content = {} if to_dict is None else {"architectures": [type(model).__name__]} | to_dict()
    content = json.loads(json.dumps(content, default=str)) | {"quantization_config": dict(quantization)}
    if to_dict is not None and content["architectures"] is None:
        content["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(f"{json_text(content)}\n", encoding="utf-8")


@contextmanager
def _fresh_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end, or disappears."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(f"{folder} is there already: name a folder that is empty or not there.")
    target = folder.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise PlanError(f"cannot make the folder {folder} ({error.strerror}): name another one.") from None
    try:
        yield fresh
        mask = os.umask(0)
        os.umask(mask)
        fresh.chmod(0o777 & ~mask)  # temporary folders, and files of safetensors, are the owner's alone
        for file in fresh.iterdir():
            file.chmod(0o666 & ~mask)
            sync(file)
        os.replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


# --- ModelOpt


def write_modelopt(planned: PlannedModel, header: FileHeader, omissions: Omissions) -> tuple[str, int]:
    """The YAML text of a quantize config, and the number of layers that it quantizes."""
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    quantized: set[str] = set()
    for slot, quantizer in (("fprop.w", "weight_quantizer"), ("fprop.x", "input_quantizer")):
        configs = {layer.path: _modelopt_config(layer, slot, omissions) for layer in planned.layers}
        for config, paths in group_by_treatment(configs).items():
            if config is None:
                continue
            quantized.update(paths)
            for pattern in layer_globs(paths, planned.module_paths):
                name = f"{pattern}.{quantizer}" if pattern else quantizer
                entries.append({"quantizer_name": name, "cfg": _with_integer_keys(json.loads(config)), "enable": True})
    body = yaml.safe_dump(
        {"quant_cfg": entries, "algorithm": "max"}, sort_keys=False, default_flow_style=None, width=100_000
    )
    return f"{header.comment('#')}\n{body}", len(quantized)


def _modelopt_config(layer: LinearLayer, slot: str, omissions: Omissions) -> str | None:
    """QuantizerAttributeConfig of an operand as JSON; None where it is left as it is."""
    operand = layer.operands[slot]
    if operand is None:
        return None
    spec, site, is_weight = operand.quantizer, operand_site(layer, slot), slot == "fprop.w"
    target, granularity = spec.target, operand.granularity(slot)
    rows, columns = spec.block if isinstance(spec.block, tuple) else (1, spec.block)
    if target.name in _MODELOPT_BLOCKS:
        if rows > 1:
            omissions.add(site, f"modelopt's {target.name} has blocks along the inputs only ({spec})")
        note_rounding(layer, slot, omissions, "modelopt")
        bits, size, scale = _MODELOPT_BLOCKS[target.name]
        return json.dumps({"num_bits": bits, "block_sizes": {"-1": size, "type": "dynamic", "scale_bits": scale}})
    if not (target.name == "e4m3" or (isinstance(target, IntFormat) and 2 <= target.bits <= 8)):
        omissions.add(site, f"modelopt has no {target.name} with such scales: left as it is")
        return None
    note_rounding(layer, slot, omissions, "modelopt")
    config: dict[str, Any] = {"num_bits": target.bits if isinstance(target, IntFormat) else _E4M3}
    if not is_weight:  # the type of block_sizes means something else: block formats of the hardware
        config["type"] = "dynamic"
    if granularity == "block":
        return json.dumps(config | {"block_sizes": {"-1": columns, **({"-2": rows} if rows > 1 else {})}})
    if granularity == "vector":
        return json.dumps(config | ({"axis": 0} if is_weight else {"block_sizes": {"-1": None}}))
    if granularity != "tensor":
        omissions.add(site, f"modelopt has no such scale ({spec}): one per tensor instead")
    return json.dumps(config | {"axis": None})


# ModelOpt's own loader of recipes also takes the text e4m3, mtq.quantize() only exponent and mantissa bits.
_E4M3, _E2M1, _E8M0 = [4, 3], [2, 1], [8, 0]
#: bitplan's block formats -> num_bits, values per scale, scale_bits.
_MODELOPT_BLOCKS = {
    "mxfp8": (_E4M3, 32, _E8M0),
    "mxfp4": (_E2M1, 32, _E8M0),
    "mxint8": (8, 32, _E8M0),
    "nvfp4": (_E2M1, 16, _E4M3),
}


def _with_integer_keys(config: dict[str, Any]) -> dict[str, Any]:
    """JSON has texts as keys, and the axes of blocks are numbers."""
    blocks = config.get("block_sizes")
    if blocks is None:
        return config
    return config | {"block_sizes": {int(key) if key in ("-1", "-2") else key: size for key, size in blocks.items()}}
