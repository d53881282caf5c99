"""Models whose tensors are spread over processes: what a plan has to know of their layout.

A plan rounds whole tensors. Under FSDP2 a weight is whole while its module runs. Where its memory is freed after the
forward pass, its rounded copy must not stay either: it is rounded again in the backward pass. Activations are those of
a micro-batch of their own, as under DistributedDataParallel.

Under tensor parallelism a process has shards. Those of a DTensor are known: a shard is rounded with the scale of the
whole tensor, and where that is not enough, the tensor is gathered, rounded and split. Between two layers activations
are plain tensors, and whether they are shards is not known: a scale for the tensor is right in either case when it is
reduced over all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        meshes = [p.device_mesh for p in model.parameters() if is_distributed(p)]  # type: ignore[attr-defined]
        mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
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


def ranks_of_shards(model: nn.Module) -> Ranks | None:
    """The processes over which tensor parallelism splits tensors of `model`; None without."""
    return next((ranks for _, ranks in _split_parameters(model)), None)


def split_modules(model: nn.Module) -> frozenset[str]:
    """The paths of modules of which tensor parallelism splits a parameter."""
    return frozenset(name.rpartition(".")[0] for name, _ in _split_parameters(model))


def _split_parameters(model: nn.Module) -> Iterator[tuple[str, Ranks]]:
    """The names of parameters that tensor parallelism splits, and the processes that have the parts."""
    if not dist.is_available() or not dist.is_initialized():
        return
    fsdp_axes: dict[int, tuple[str, ...]] = {}
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            for group in param_groups(module):
                axes = group.mesh_info.mesh.mesh_dim_names or ()
                fsdp_axes.update((id(parameter.sharded_param), axes) for parameter in group.fsdp_params)
    for name, parameter in model.named_parameters():
        if is_distributed(parameter):
            mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
            names = mesh.mesh_dim_names or (None,) * mesh.ndim
            own = fsdp_axes.get(id(parameter))
            axes_of_shards = [
                axis for axis in range(mesh.ndim) if own is None or (names[axis] not in own and mesh.ndim > 1)
            ]
            if any(mesh.size(axis) > 1 for axis in axes_of_shards):
                yield name, Ranks(tuple(mesh.get_group(axis) for axis in axes_of_shards))


def param_groups(module: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together for this module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [state._fsdp_param_group]


# --- Rounding the tensors of tensor parallelism

_PLAIN = (Tensor, nn.Parameter)


def is_distributed(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def keep_buffers_local(model: nn.Module) -> None:
    """Make plain tensors of a plan's buffers, which ``parallelize_module`` distributes with those of the model."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name.startswith(_OURS):
                module._buffers[name] = local_part(buffer)


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: the tensor itself, or its part of a DTensor."""
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


#: Rounds what a process holds of a tensor, which may be spread over these processes.
RoundShard = Callable[[Tensor, Ranks | None], Tensor]


class RoundedDistributed(torch.autograd.Function):
    """A DTensor whose shards are rounded forward; backward the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Any, round_shard: RoundShard, needs_whole: Callable[[tuple[int, ...]], bool]) -> Tensor:
        return _rounded_shards(x, round_shard, needs_whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def rounded_distributed(x: Tensor, round_shard: RoundShard, needs_whole: Callable[[tuple[int, ...]], bool]) -> Tensor:
    """A DTensor rounded as the whole tensor would be; the gradient passes straight through.

    :param needs_whole: whether rounding needs more than the amax of a tensor that is split along these dimensions.
    """
    if x.requires_grad and torch.is_grad_enabled():
        rounded: Tensor = RoundedDistributed.apply(x, round_shard, needs_whole)  # type: ignore[no-untyped-call]
        return rounded
    with torch.no_grad():
        return _rounded_shards(x, round_shard, needs_whole)


def _rounded_shards(x: Any, round_shard: RoundShard, needs_whole: Callable[[tuple[int, ...]], bool]) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    if any(placement.is_partial() for placement in x.placements):  # terms of a sum, which is what is rounded
        x = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
    mesh, placements = x.device_mesh, x.placements
    axes = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    if axes and needs_whole(tuple(placements[axis].dim % x.dim() for axis in axes)):
        whole = round_shard(x.full_tensor(), None)
        replicas = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicas.redistribute(placements=placements)
    ranks = Ranks(tuple(mesh.get_group(axis) for axis in axes)) if axes else None
    rounded = round_shard(x.to_local(), ranks)
    return DTensor.from_local(rounded, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


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
