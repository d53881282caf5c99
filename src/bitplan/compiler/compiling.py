"""Compiling a planned model: which backend takes its graphs, what they keep for the backward pass, what is guarded.

Inductor compiles in any case. Packed execution cuts graphs by the plan's codes
(:mod:`bitplan.compiler.packed_backend`),
native execution by what is to be spared (:mod:`bitplan.compiler.native_backend`), and emulation leaves the cut to
torch.
Before every call torch checks whether its graph still holds: of all that a plan says, it checks one word a module
(:mod:`bitplan.compiler.tracing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bitplan.compiler import torch_private
from bitplan.compiler.packed_backend import BACKEND
from bitplan.compiler.tracing import guarded_by_version
from bitplan.plans.execution import ExecutionOptions, Native
from bitplan.runtime.installation import Installation

if TYPE_CHECKING:
    from bitplan.compiler.native_backend import RecomputePolicy
    from bitplan.compiler.torch_private import CustomPartitionerFn


class Compiler:
    """Compiles a model with a plan in it, as its execution wants it."""

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
            options={"guard_filter_fn": guarded_by_version, **settings},
        )

    def _backend(self) -> Any:
        if self.execution.kind == "packed":
            return BACKEND
        if self.execution.kind != "native":
            return "inductor"
        from bitplan.compiler.native_backend import native_backend

        sparing = self._sparing()
        return "inductor" if sparing.is_plain else native_backend(sparing)

    def partitioner(self) -> CustomPartitionerFn | None:
        """What cuts a graph into forward and backward; None: torch's own."""
        if self.execution.kind == "packed":
            from bitplan.compiler.partitioning import PackedPartitioner

            return PackedPartitioner()
        from bitplan.compiler.native_backend import RecomputePartitioner

        sparing = self._sparing()
        return None if sparing.is_plain else RecomputePartitioner(sparing)

    def _sparing(self) -> RecomputePolicy:
        from bitplan.compiler.native_backend import RecomputePolicy

        places = (place for action in self.installation.actions() for place in action.places.values())
        codes = any(place.keeps_codes for place in places)
        recomputed = recomputed_by(self.execution)
        return RecomputePolicy("activations" in recomputed, "products" in recomputed, codes)


def recomputed_by(execution: ExecutionOptions) -> frozenset[str]:
    """What compiled code recomputes in the backward pass: a subset of weights, activations and products."""
    return execution.recomputed if isinstance(execution, Native) else frozenset()


def recast_operands(execution: ExecutionOptions) -> tuple[str, ...]:
    """The operands of linear layers that compiled code casts again in the backward pass instead of saving codes."""
    recomputed = recomputed_by(execution)
    operands = {"x": "activations", "w": "weights"}
    return tuple(operand for operand, name in operands.items() if name in recomputed)
