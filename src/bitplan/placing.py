"""A target where it is to run, with as many samples as it is to have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bitplan.errors import TargetError
from bitplan.targets import Target


def placed(target: Target, device: torch.device, batch: int | None = None) -> Target:
    """The target on `device`, where GPUs like images channels-last; what lies on ``meta`` stays there.

    :param batch: samples of the batch, which is the first dimension of its tensors.
    """
    if batch is not None:
        _require_samples(target.batch)
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            fitted = value if batch is None else of_size(value, batch)
            there = fitted.device if fitted.is_meta else device
            return fitted.to(there, memory_format=layout if value.dim() == 4 else torch.preserve_format)
        if isinstance(value, (tuple, list)):
            return type(value)(moved(item) for item in value)
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        return value

    model = target.model
    if not any(parameter.is_meta for parameter in model.parameters()):
        model = model.to(device)
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        model = model.to(memory_format=layout)  # type: ignore[call-overload]
    return Target(model, moved(target.batch), target.loss)


def _require_samples(batch: Any) -> None:
    """Raise where the tensors of a batch are not of so many samples each: edges of a graph are not its nodes."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    lengths = {tensor.shape[0] for tensor in tensors if tensor.layout == torch.strided and tensor.dim() > 0}
    if len(lengths) > 1:
        words = " and ".join(map(str, sorted(lengths)))
        raise TargetError(
            f"a batch whose tensors have {words} rows is one whole and cannot be cut: leave its size as it is."
        )


def of_size(value: Tensor, batch: int) -> Tensor:
    """The first `batch` samples, repeated where there are fewer."""
    if value.layout != torch.strided:
        raise TargetError("a batch with a sparse tensor is one whole and cannot be cut: leave its size as it is.")
    if value.dim() == 0:
        return value
    repeats = -(-batch // value.shape[0])
    return value.repeat(repeats, *[1] * (value.dim() - 1))[:batch]


def batch_size(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return int(batch.shape[0])
