"""The state of a run in one safetensors file; reading it executes no code.

Tensors are tensors of the file. All other values are JSON in its metadata, with references to the tensors, so that one
file that is written at once holds the whole state. Trainer integrations write it beside a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.errors import RunError
from bitplan.files import fresh_file, parse_json

#: The name of the file beside a trainer's checkpoint.
STATE_FILE = "bitplan.safetensors"
#: The key of the metadata that holds everything but tensors.
_METADATA = "bitplan_state"

# Keys that mark values without a JSON type.
_TENSOR, _TUPLE, _ITEMS, _FLOAT = "$tensor", "$tuple", "$items", "$float"


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write what ``run.state_dict()`` returned; the file is complete and on disk when this returns."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode_state(state, "state", tensors), allow_nan=False)
    try:
        with fresh_file(path) as fresh:
            fresh.touch()
            mode = fresh.stat().st_mode  # from the user's umask; safetensors would make it private
            save_file(storable_tensors(tensors), fresh, metadata={_METADATA: text})
            fresh.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"cannot write {path} ({error}): name a folder that has space and that you may write to."
        ) from error


def load_state(path: Path) -> dict[str, Any]:
    """What :func:`save_state` has written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, since the pages of the file are read-only.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        state = decode_state(parse_json(metadata[_METADATA]), tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise RunError(
            f"{path} cannot be read ({type(error).__name__}): resume from a checkpoint before it."
        ) from error
    if not isinstance(state, dict):
        raise RunError(f"{path} holds no state of a run: resume from a checkpoint before it.")
    return state


def storable_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory: tied weights are written under each of their names."""
    storable: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise RunError(f"a checkpoint cannot hold {name}, a tensor of layout {tensor.layout}: make it dense.")
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        storable[name] = plain.clone() if address in taken else plain
        taken.add(address)
    return storable


def encode_state(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go into `tensors`, named by their path."""
    if isinstance(value, Tensor):
        while name in tensors:  # {"a.b": x, "a": {"b": y}} would give one name to both
            name += "~"
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode_state(item, f"{name}.{key}", tensors) for key, item in value.items()}
        pairs = [[encode_state(k, name, tensors), encode_state(v, f"{name}.{k}", tensors)] for k, v in value.items()]
        return {_ITEMS: pairs}
    if isinstance(value, (list, tuple)):
        items = [encode_state(item, f"{name}.{position}", tensors) for position, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    raise RunError(
        f"a checkpoint cannot hold {name}, a {type(value).__name__}: keep tensors, numbers, texts, lists and mappings."
    )


def decode_state(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`encode_state`."""
    if isinstance(value, list):
        return [decode_state(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(decode_state(item, tensors) for item in value[_TUPLE])
    if _ITEMS in value:
        return {decode_state(key, tensors): decode_state(item, tensors) for key, item in value[_ITEMS]}
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {key: decode_state(item, tensors) for key, item in value.items()}
