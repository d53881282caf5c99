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
from bitplan.errors import PlanError, nearest_names
from bitplan.runtime.installation import Installation

if TYPE_CHECKING:
    from bitplan.compiler.native_backend import Sparing
    from bitplan.compiler.torch_private import CustomPartitionerFn

#: What compiled native execution casts again in its backward pass, by how much memory it is to spare.
SPARING: dict[str, tuple[str, ...]] = {
    "no": (),
    "weights": ("w",),
    "activations": ("x",),
    "inputs": ("x", "w"),
    "products": ("x", "w"),
}


class Compiler:
    """Compiles a model with a plan in it, as its execution wants it."""

    def __init__(self, execution: str, installation: Installation) -> None:
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
        spare_memory: str,
    ) -> Any:
        """See :meth:`bitplan.runtime.attachment.Attachment.compile`."""
        if spare_memory not in SPARING:
            raise PlanError(f"there is no spare_memory={spare_memory!r}; {nearest_names(str(spare_memory), SPARING)}")
        if spare_memory != "no" and self.execution != "native":
            raise PlanError("spare_memory goes with execution='native': give attach() that, too, or drop it.")
        self.installation.require_place()
        self.installation.rounder.casts_again = SPARING[spare_memory]
        self.installation.tell_compiled_code()
        settings = {**({} if mode is None else torch_private.list_mode_options(mode, dynamic)), **(options or {})}
        backend = self._backend(spare_memory)
        if self.execution == "native" and backend == "inductor":
            from bitplan.compiler.launching import with_opening

            settings = with_opening(settings)
        return torch.compile(
            module,
            fullgraph=fullgraph,
            dynamic=dynamic,
            backend=backend,
            options={"guard_filter_fn": guarded_by_version, **settings},
        )

    def _backend(self, spare_memory: str) -> Any:
        if self.execution == "packed":
            return BACKEND
        if self.execution != "native":
            return "inductor"
        from bitplan.compiler.native_backend import native_backend

        sparing = self._sparing(spare_memory)
        return "inductor" if sparing.is_plain else native_backend(sparing)

    def partitioner(self, spare_memory: str) -> CustomPartitionerFn | None:
        """What cuts a graph into forward and backward; None: torch's own."""
        if self.execution == "packed":
            from bitplan.compiler.partitioning import PackedPartitioner

            return PackedPartitioner()
        from bitplan.compiler.native_backend import SparingPartitioner

        sparing = self._sparing(spare_memory)
        return None if sparing.is_plain else SparingPartitioner(sparing)

    def _sparing(self, spare_memory: str) -> Sparing:
        from bitplan.compiler.native_backend import Sparing

        places = (place for action in self.installation.actions() for place in action.places.values())
        codes = any(place.keeps_codes for place in places)
        return Sparing("x" in SPARING[spare_memory], spare_memory == "products", codes)
