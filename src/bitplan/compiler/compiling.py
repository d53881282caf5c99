"""Compiling a planned model: the backend of its execution, recomputation in the backward pass, and guards.

Inductor compiles in every case. Packed and native execution bring partitioners of their own
(:mod:`bitplan.compiler.partitioning`); emulation uses torch's. Of all that a plan decides, a compiled graph guards one
version per module (:mod:`bitplan.compiler.tracing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bitplan.compiler import torch_private
from bitplan.compiler.backends import BACKEND, native_backend
from bitplan.compiler.tracing import keep_guards
from bitplan.plans.execution import ExecutionOptions, Native
from bitplan.runtime.installation import Installation

if TYPE_CHECKING:
    from bitplan.compiler.partitioning import RecomputePolicy
    from bitplan.compiler.torch_private import CustomPartitionerFn


class Compiler:
    """Compiles a model that a plan is attached to, as its execution requires."""

    def __init__(self, execution: ExecutionOptions, installation: Installation) -> None:
        self.execution = execution
        self.installation = installation

    def compile(
        self,
        module: nn.Module,
        *,
        fullgraph: bool,
        mode: str | None,
        dynamic: bool | None,
        options: dict[str, Any] | None,
    ) -> Any:
        """See :meth:`bitplan.runtime.attachment.Attachment.compile`."""
        self.installation.require_place()
        self.installation.rounder.recast_in_backward = recast_operands(self.execution)
        self.installation.tell_compiled_code()
        settings = {**({} if mode is None else torch_private.list_mode_options(mode, dynamic)), **(options or {})}
        backend = self._backend()
        if self.execution.kind == "native" and backend == "inductor":
            from bitplan.compiler.launching import with_kernel_inlining

            settings = with_kernel_inlining(settings)
        return torch.compile(
            module,
            fullgraph=fullgraph,
            dynamic=dynamic,
            backend=backend,
            options={"guard_filter_fn": keep_guards, **settings},
        )

    def _backend(self) -> Any:
        if self.execution.kind == "packed":
            return BACKEND
        if self.execution.kind != "native":
            return "inductor"
        policy = self._recompute_policy()
        return "inductor" if policy.is_plain else native_backend(policy)

    def partitioner(self) -> CustomPartitionerFn | None:
        """The partitioner of this execution; None for torch's own."""
        from bitplan.compiler.partitioning import PackedPartitioner, RecomputePartitioner

        if self.execution.kind == "packed":
            return PackedPartitioner()
        policy = self._recompute_policy()
        return None if policy.is_plain else RecomputePartitioner(policy)

    def _recompute_policy(self) -> RecomputePolicy:
        from bitplan.compiler.partitioning import RecomputePolicy

        places = (place for action in self.installation.actions() for place in action.places.values())
        codes = any(place.keeps_codes for place in places)
        recomputed = recomputed_by(self.execution)
        return RecomputePolicy("activations" in recomputed, "products" in recomputed, codes)


def recomputed_by(execution: ExecutionOptions) -> frozenset[str]:
    """What compiled code recomputes in the backward pass: any of weights, activations and products."""
    return execution.recomputed if isinstance(execution, Native) else frozenset()


def recast_operands(execution: ExecutionOptions) -> tuple[str, ...]:
    """The operands of linear layers that compiled code recasts in the backward pass instead of saving their codes."""
    recomputed = recomputed_by(execution)
    operands = {"x": "activations", "w": "weights"}
    return tuple(operand for operand, name in operands.items() if name in recomputed)
