"""Fake tensors: shapes, types and devices without data, so that what does not fit into memory can be run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map


class Faker:
    """Turns tensors into fake ones: shape, type and device without data."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        #: id of a fake sparse tensor -> how many values the real one held.
        self.nonzeros: dict[int, int] = {}

    def fake(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
            return tensor
        twin = self.mode.from_tensor(tensor.detach())
        if tensor.layout != torch.strided:
            self.nonzeros[id(twin)] = tensor._nnz()
        return twin.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else twin


class FakeInputs:
    """What a model was called with, to be recorded later; no data is kept alive."""

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.faker = Faker()
        self.args = tree_map(self.faker.fake, args)
        self.kwargs = tree_map(self.faker.fake, kwargs)
