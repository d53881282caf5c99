"""The execution ``packed``: the numbers of emulation, with saved tensors stored in the format's own bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bitplan.capture.ops import PRODUCTS
from bitplan.compiler.backends import (
    BACKEND,
    compile_packed_aggressively,
    refuse_other_backends,
    register_backend,
)
from bitplan.executions.emulate import EmulateExecution
from bitplan.executions.packed.recompute import memory_saving, rounded_bit_relu, sequential_convolution
from bitplan.plans.execution import Packed
from bitplan.runtime.execution import CompilerSettings
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounded_mark import copy_mark, packable
from bitplan.runtime.rounding_op import RoundingOp
from bitplan.runtime.weights import map_tensors


class PackedExecution(EmulateExecution):
    """Packs saved tensors: eagerly by hooks of autograd, compiled by the partitioner of the graph."""

    packs_saved_tensors = True
    stores_frozen_weights = True

    def __init__(self, options: Packed) -> None:
        super().__init__(options)
        self.packed = options
        register_backend()

    def check_compilation(self) -> None:
        refuse_other_backends()

    def eager_function(self, op: str, func: Callable[..., Any]) -> Callable[..., Any]:
        if op not in PRODUCTS:
            return memory_saving(op, func)
        if op.startswith("conv"):
            func = sequential_convolution(op, func)
        return lambda *args, **kwargs: func(
            *map_tensors(_cast_by_autocast, args),
            **{key: map_tensors(_cast_by_autocast, value) for key, value in kwargs.items()},
        )

    def relu(self, x: Tensor, forward: RoundingOp | None, backward: RoundingOp | None, context: OpContext) -> Tensor:
        if torch.compiler.is_compiling():
            return super().relu(x, forward, backward, context)
        return rounded_bit_relu(x, forward, backward, context)

    def compiler_settings(self, ops: Iterable[RoundingOp], options: dict[str, Any]) -> CompilerSettings:
        from bitplan.compiler.partitioning import PackedPartitioner

        if self.packed.recompute is not None:
            return CompilerSettings(compile_packed_aggressively, PackedPartitioner(is_aggressive=True), options)
        return CompilerSettings(BACKEND, PackedPartitioner(), options)


def _cast_by_autocast(tensor: Tensor) -> Tensor:
    """A rounded operand in the dtype that autocast would cast it to, cast here so that the copy is marked, too."""
    device = tensor.device.type
    if tensor.dtype != torch.float32 or not torch.is_autocast_enabled(device) or packable(tensor) is None:
        return tensor
    cast = tensor.to(torch.get_autocast_dtype(device))
    copy_mark(cast, tensor)
    return cast
