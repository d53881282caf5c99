"""What the executions emulate, packed and native do differently, as the runtime sees it: :class:`Execution`.

The runtime decides what is rounded and rounds it. An execution decides how saved tensors are stored, which products
run on low-precision units and how a model is compiled. Implementations are in :mod:`bitplan.executions`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bitplan.capture.recording import Operation
from bitplan.plans import Decision
from bitplan.plans.execution import ExecutionOptions
from bitplan.runtime.op_context import OpContext
from bitplan.tables import Table

if TYPE_CHECKING:
    from bitplan.compiler.torch_private import CustomPartitionerFn
    from bitplan.gemm.products import Product
    from bitplan.runtime.frozen import FrozenOperand
    from bitplan.runtime.head_loss import HeadLoss
    from bitplan.runtime.rounding_op import OpRounding, RoundingOp

Decide = Callable[[str, str], Decision]


class AttentionCall(NamedTuple):
    """The arguments of ``F.scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


#: What happens to the operands of its two products: queries and keys, probabilities and values.
AttentionProducts = tuple["OpRounding", "OpRounding"]


@dataclass(frozen=True)
class CompilerSettings:
    """How :meth:`bitplan.Attachment.compile` compiles a model."""

    #: The backend of ``torch.compile``: a name or a function.
    backend: Any = "inductor"
    #: Partitions a graph into forward and backward; None: torch's own partitioner.
    partitioner: CustomPartitionerFn | None = None
    #: Options of Inductor.
    options: dict[str, Any] = field(default_factory=dict)


class PreparedProduct(Protocol):
    """What an execution has worked out for one product before the model runs."""

    def facts(self) -> Hashable:
        """Everything that tracing reads of it: compiled graphs are guarded by it."""
        ...

    @property
    def is_for_product(self) -> bool:
        """Whether it is for :meth:`Execution.product`; otherwise for the fused operation that the product is in."""
        ...


class Execution(Protocol):
    """How a plan is executed. One object for each attachment."""

    #: Rounded tensors are marked with quantizer and scales, so that they can be saved in the format's own bits.
    packs_saved_tensors: bool
    #: Frozen weights are stored in few bits, where a plan says so; otherwise their values are rounded.
    stores_frozen_weights: bool
    #: Compiled graphs may save the codes of rounded activations.
    saves_activation_codes: bool
    #: Attention that a plan writes out may run in one kernel all the same, see :meth:`attention`.
    has_attention: bool
    #: Statistics are gathered, or formats may change by hand: values must be rounded one by one.
    is_watched: bool

    @property
    def options(self) -> ExecutionOptions: ...

    def facts(self) -> Hashable:
        """Everything that tracing reads of it: compiled graphs are guarded by it."""
        ...

    def around_call(self) -> AbstractContextManager[None]:
        """The context of an eager call of the outermost module, if tensors are packed or the model is sharded."""
        ...

    def check_compilation(self) -> None:
        """Called while torch.compile traces a module, if :attr:`packs_saved_tensors`: raise for other backends."""
        ...

    def eager_function(self, op: str, func: Callable[..., Any]) -> Callable[..., Any]:
        """A function with the same result as `func` that saves less for the backward pass, or `func` itself."""
        ...

    def relu(self, x: Tensor, forward: RoundingOp | None, backward: RoundingOp | None, context: OpContext) -> Tensor:
        """ReLU with its output and its gradient rounded."""
        ...

    def prepare(self, decision: Decision, op: str) -> PreparedProduct | None:
        """What :meth:`product` needs for a product of that operation; None: it is always emulated."""
        ...

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
        """The product of a call with its operands rounded; None: it is emulated. Called for prepared products."""
        ...

    def runs_attention(self, call: AttentionCall, products: AttentionProducts, training: bool) -> bool:
        """Whether :meth:`attention` computes this call; asked only if :attr:`has_attention`."""
        ...

    def attention(
        self, call: AttentionCall, products: AttentionProducts, contexts: tuple[OpContext, OpContext]
    ) -> Tensor:
        """Scaled-dot-product attention with the operands of both products rounded."""
        ...

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
        """A prepared product with a weight that is stored in few bits; None: it is emulated."""
        ...

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
        """The loss of a head in chunks of tokens, with the operands of its product rounded."""
        ...

    def check(
        self,
        operations: Sequence[Operation],
        decide: Decide,
        device: torch.device,
        split_modules: Collection[str] = (),
    ) -> None:
        """Warn of, or reject, recorded operations that cannot be executed this way.

        :param split_modules: paths of modules whose parameters tensor parallelism splits.
        """
        ...

    def fallbacks(
        self,
        operations: Sequence[Operation],
        decide: Decide,
        device: torch.device,
        split_modules: Collection[str] = (),
    ) -> Table[Any]:
        """The products that are emulated instead, and why."""
        ...

    def compiler_settings(self, ops: Iterable[RoundingOp], options: dict[str, Any]) -> CompilerSettings:
        """How a model with these rounding ops is compiled, given the options of Inductor that the user wants."""
        ...
