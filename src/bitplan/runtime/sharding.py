"""Models whose tensors are spread over processes: what a plan has to know of their layout.

A plan rounds whole tensors. Under FSDP2 a weight is whole while its module runs. Where its memory is freed after the
forward pass, its rounded copy must not stay either: it is rounded again in the backward pass. Activations are those of
a micro-batch of their own, as under DistributedDataParallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitplan.compiler import torch_private
from bitplan.compiler.torch_patches import Undo, replace_attribute
from bitplan.compiler.torch_private import FSDP_REGISTER_POST_BACKWARD, tree_leaves

_OURS = "_bitplan"
#: The attribute of an unsharded parameter that says whether its memory is freed after the forward pass.
_IS_FREED = "_bitplan_is_freed"


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter of the module is spread over processes."""
    return any(hasattr(parameter, "device_mesh") for parameter in module.parameters())


def is_freed_after_forward(weight: Tensor) -> bool:
    """Whether FSDP2 has gathered the weight, and frees its memory between the forward and the backward pass."""
    return bool(getattr(weight, _IS_FREED, False))


@dataclass(frozen=True)
class Ranks:
    """The processes that train one model together."""

    #: Their groups; several where they form a mesh. None: all processes.
    groups: tuple[dist.ProcessGroup | None, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Ranks | None:
        """The processes that train `model`; None where there is one."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        mesh = next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)
        if mesh is None or not any(isinstance(module, torch.distributed.fsdp.FSDPModule) for module in model.modules()):
            return cls((None,))  # beside tensor parallelism alone there may be other copies of the model
        return cls(tuple(mesh.get_group(axis) for axis in range(mesh.ndim)))

    def largest(self, values: Tensor) -> Tensor:
        """The largest of all processes, element by element."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Tensor, op: Any) -> Tensor:
        values = values.contiguous()
        for group in self.groups:
            dist.all_reduce(values, op, group=group)
        return values


def follow_fsdp() -> Undo:
    """A patch of torch: before a sharded module runs, its weights and inputs are marked.

    ``fully_shard`` passes inputs through an autograd function, whose results are other Python objects: they keep what
    is known of the inputs.
    """
    group = torch_private.FSDPParamGroup  # imported when a model is sharded: that takes a second
    register = getattr(group, FSDP_REGISTER_POST_BACKWARD)

    def register_and_mark(self: Any, args: Any, kwargs: Any) -> Any:
        is_freed = self._reshard_after_forward
        for parameter in self.fsdp_params:
            setattr(parameter._unsharded_param, _IS_FREED, is_freed)
        results = register(self, args, kwargs)
        for before, after in zip(tree_leaves((args, kwargs)), tree_leaves(results), strict=True):
            if isinstance(before, Tensor) and after is not before:
                for name, value in vars(before).items():
                    if name.startswith(_OURS):
                        setattr(after, name, value)
        return results

    return replace_attribute(group, FSDP_REGISTER_POST_BACKWARD, register_and_mark)
