"""Optimizer state in plain tensors and numbers, that any program can read without bitplan or torchao.

A moment that torchao keeps in few bits becomes a mapping, ::

    {"format": "int8", "codes": ..., "scale": ..., "qmap": ..., "shape": [...], "signed": True, "dtype": "float32"}

Values are counted in rows of the tensor, and blocks of neighbours share a scale: with N values and S scales, each block
has N / S. What a value is follows from the format:

- ``int8``: codes (uint8) are places in the table `qmap`: ``qmap[code] * scale``;
- ``int4``: the same, two codes in a byte, the first in the high four bits;
- ``e4m3``: codes are of the type float8_e4m3fn, and there is no table: ``code * scale``.

In torch, for all three::

    codes = state["codes"]
    if state["format"] == "int4":
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    values = codes.float() if state["format"] == "e4m3" else state["qmap"][codes.int()]
    values = (values.view(len(state["scale"]), -1) * state["scale"].view(-1, 1)).view(state["shape"])

All else is as torch's own ``state_dict()`` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bitplan.errors import PlanError

#: torchao's class of a moment -> the plan's word for it.
_FORMATS = {"OptimState8bit": "int8", "OptimState4bit": "int4", "OptimStateFp8": "e4m3"}
#: What a group of parameters says of torch's ways to make the same step.
_IMPLEMENTATION = ("foreach", "fused", "capturable")
#: The dtypes that a state may name: it may come from a file, and looking any name up in torch would import submodules.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def _format_of(value: object) -> str | None:
    """The format of a moment that torchao keeps in few bits. Told by its class's name: torchao may be missing."""
    return _FORMATS.get(type(value).__name__) if type(value).__module__.startswith("torchao.") else None


def is_small(value: object) -> bool:
    """Whether this is a moment in few bits, or one device's part of it."""
    return _format_of(getattr(value, "_local_tensor", value)) is not None


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state in plain tensors and numbers; of torch's own optimizers their ``state_dict()``.

    As with torch's, the tensors are those that the next step changes: write them, or clone them, before.
    """
    state = optimizer.state_dict()
    per_parameter = {key: {name: _plain(value) for name, value in each.items()} for key, each in state["state"].items()}
    return {**state, "state": per_parameter}


def _plain(value: Any) -> Any:
    target = _format_of(value)
    if target is None:
        return value
    plain: dict[str, Any] = {"format": target, "codes": value.codes, "scale": value.scale}
    if target != "e4m3":
        plain |= {"qmap": value.qmap, "signed": value.signed}
    return {**plain, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def decoded(plain: Mapping[str, Any]) -> Tensor:
    """The values of one moment of :func:`plain_state`, by the formula of this module's words."""
    codes, scale = plain["codes"], plain["scale"]
    if plain["format"] == "int4":
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    values: Tensor = codes.float() if plain["format"] == "e4m3" else plain["qmap"][codes.int()]
    scaled: Tensor = values.view(len(scale), -1) * scale.view(-1, 1)
    return scaled.view(plain["shape"])


def load_plain_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Let `optimizer` go on, bit for bit, where :func:`plain_state` was taken from one of its kind."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    small = {
        key: {name: _small(value, optimizer) for name, value in each.items()} for key, each in state["state"].items()
    }
    _require_fit(optimizer, parameters, small)
    groups = [dict(group) for group in state["param_groups"]]
    # How a step is made is this optimizer's own affair: the state may come from another device, or an older version.
    for group, own in zip(groups, optimizer.param_groups, strict=False):  # torch says where they do not fit
        group.update({name: own[name] for name in _IMPLEMENTATION if name in own})
    optimizer.load_state_dict({**state, "state": small, "param_groups": groups})
    _lie_as_parameters(optimizer)
    if _block_size(optimizer) is not None:
        for group in optimizer.param_groups:  # torchao wants a tensor, which steps may not be shared with
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).clone()


def _lie_as_parameters(optimizer: Optimizer) -> None:
    """Give moments the memory layout of their parameters, which files do not know, and fused steps rely on."""
    for parameter, each in optimizer.state.items():
        for name, value in each.items():
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape and not is_small(value)
            if is_moment and value.stride() != parameter.stride():
                each[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _block_size(optimizer: Any) -> int | None:
    """How many values share a scale; None of optimizers that keep their state in full."""
    return optimizer.block_size if type(optimizer).__module__.startswith("torchao.") else None


def _small(value: Any, optimizer: Optimizer) -> Any:
    """torchao's form of a plain moment; other values as they are."""
    if not isinstance(value, Mapping) or "codes" not in value:
        return value.clone() if isinstance(value, Tensor) else value
    if _block_size(optimizer) is None:
        raise PlanError(
            f"this state was kept in {value['format']}, and {type(optimizer).__name__} keeps its state in full: make "
            f"the optimizer by run.optimizer() with the plan of then."
        )
    import torchao.optim.subclass_4bit as four
    import torchao.optim.subclass_8bit as eight
    import torchao.optim.subclass_fp8 as float8

    dtype = _DTYPES[value["dtype"]]
    codes, scale = value["codes"].clone(), value["scale"].clone()
    if value["format"] == "e4m3":
        return float8.OptimStateFp8(codes, scale, dtype)
    qmap = value["qmap"].clone()
    if value["format"] == "int4":
        return four.OptimState4bit(codes, scale, qmap, value["signed"], torch.Size(value["shape"]), dtype)
    return eight.OptimState8bit(codes, scale, qmap, value["signed"], dtype)


def _require_fit(optimizer: Any, parameters: list[Tensor], state: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise where a moment has another form than this optimizer would have given it."""
    if _block_size(optimizer) is None:
        return
    for key, each in state.items():
        for name, value in each.items():
            if name == "step" or key >= len(parameters):
                continue
            wanted = optimizer._new_buffer(parameters[key].detach(), name == "exp_avg")
            same = type(wanted) is type(value) and wanted.shape == value.shape
            if not same or (is_small(value) and wanted.block_size != value.block_size):
                raise PlanError(
                    f"the state's {name} of parameter {key} is kept otherwise than {type(optimizer).__name__} does: "
                    f"load the state of an optimizer of the same kind, for the same parameters."
                )
