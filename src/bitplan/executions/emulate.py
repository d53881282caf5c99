"""The execution ``emulate``: rounded values, the model's own arithmetic, nothing saved. Also the base of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bitplan.capture.recording import Operation
from bitplan.executions.packed.saved_tensors import SavedTensorPacker
from bitplan.gemm.products import Product
from bitplan.plans import Decision
from bitplan.plans.execution import Emulate, ExecutionOptions
from bitplan.runtime.autograd import rounded_relu
from bitplan.runtime.execution import (
    AttentionCall,
    AttentionProducts,
    CompilerSettings,
    Decide,
    PreparedProduct,
)
from bitplan.runtime.frozen import FrozenOperand
from bitplan.runtime.head_loss import HeadLoss
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding, RoundingOp
from bitplan.tables import Table


class EmulateExecution:
    """Rounds values and computes in the model's own precision."""

    packs_saved_tensors = False
    stores_frozen_weights = False
    saves_activation_codes = False
    has_attention = False
    is_watched = False

    def __init__(self, options: ExecutionOptions = Emulate()) -> None:  # noqa: B008 - frozen
        self.options = options
        self.packer = SavedTensorPacker(packs=self.packs_saved_tensors)

    def facts(self) -> Hashable:
        return self.options.kind

    def around_call(self) -> AbstractContextManager[None]:
        return self.packer.hooks()

    def check_compilation(self) -> None:
        pass

    def eager_function(self, op: str, func: Callable[..., Any]) -> Callable[..., Any]:
        return func

    def relu(self, x: Tensor, forward: RoundingOp | None, backward: RoundingOp | None, context: OpContext) -> Tensor:
        return rounded_relu(x, forward, backward, context)

    def prepare(self, decision: Decision, op: str) -> PreparedProduct | None:
        return None

    def product(
        self,
        op: str,
        args: Any,
        kwargs: dict[str, Any],
        x: Tensor,
        w: Tensor,
        rounding: OpRounding,
        context: OpContext,
        weight_key: Tensor | None,
    ) -> Tensor | None:
        return None

    def runs_attention(self, call: AttentionCall, products: AttentionProducts, training: bool) -> bool:
        return False

    def attention(
        self, call: AttentionCall, products: AttentionProducts, contexts: tuple[OpContext, OpContext]
    ) -> Tensor:
        raise AssertionError("emulation decomposes attention, so this is not called.")

    def frozen_product(
        self,
        product: Product,
        x: Tensor,
        bias: Tensor | None,
        decoded: Tensor,
        operand: FrozenOperand,
        rounding: OpRounding,
        context: OpContext,
        weight_key: Tensor | None,
    ) -> Tensor | None:
        return None

    def head_loss(
        self,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        loss: HeadLoss,
        rounding: OpRounding,
        context: OpContext,
        weight_key: Tensor | None,
    ) -> Tensor:
        return loss.rounded(x, w, bias, rounding, context, weight_key)

    def check(
        self,
        operations: Sequence[Operation],
        decide: Decide,
        device: torch.device,
        split_modules: Collection[str] = (),
    ) -> None:
        pass

    def fallbacks(
        self,
        operations: Sequence[Operation],
        decide: Decide,
        device: torch.device,
        split_modules: Collection[str] = (),
    ) -> Table[Any]:
        return Table([], {})

    def compiler_settings(self, ops: Iterable[RoundingOp], options: dict[str, Any]) -> CompilerSettings:
        return CompilerSettings(options=options)
