"""How a model is split over processes: DDP, FSDP2 and tensor parallelism by axis, applied with torch's own functions.

:class:`Sharding` names the axes and their sizes; :func:`shard_model` applies tensor parallelism first and FSDP2
afterwards, as torch requires. Modules are sharded where users shard them: every block of the model by itself, and the
rest together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bitplan.errors import TargetError, nearest_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Axis -> what its processes share, the outermost first.
AXES = {
    "ddp": "every process has the whole model (with fsdp: its shard), gradients are averaged",
    "fsdp": "parameters, gradients and optimizer state are split, weights are gathered block by block",
    "tp": "linear layers are split",
}
#: Names of dtypes on the command line.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sharding:
    """The number of processes along each axis, and the dtypes of FSDP's mixed precision."""

    ddp: int = 1
    fsdp: int = 1
    tp: int = 1
    #: Of gathered weights and of computation; None: that of the parameters.
    param_dtype: torch.dtype | None = None
    #: Of gradients while they are reduced; None: that of the gradients.
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise TargetError(f"{axis}={size!r}: the number of processes along an axis is a whole number from 1.")
        if self.ddp > 1 and self.tp > 1 and self.fsdp == 1:
            raise TargetError(
                "torch does not combine DDP with tensor parallelism: use fsdp in place of ddp, or in addition to it."
            )
        if self.fsdp == 1 and (self.param_dtype is not None or self.reduce_dtype is not None):
            raise TargetError("the dtypes of gathered weights and reduced gradients are FSDP's: shard with fsdp=N.")

    @classmethod
    def parse(
        cls, text: str, param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
    ) -> Sharding:
        """The sharding that a text such as ``fsdp=64,tp=8`` describes.

        >>> Sharding.parse("fsdp=64,tp=8").world, Sharding.parse("none").world
        (512, 1)
        """
        sizes: dict[str, int] = {}
        for part in [] if text == "none" else text.split(","):
            axis, _, size = (piece.strip() for piece in part.partition("="))
            if axis not in AXES:
                raise TargetError(
                    f"there is no axis {axis!r} in {text!r}; {nearest_names(axis, AXES)}, as in fsdp=64,tp=8"
                )
            if axis in sizes:
                raise TargetError(f"{text!r} names the axis {axis} twice.")
            if not size.isascii() or not size.isdigit():
                raise TargetError(f"{part.strip()!r} is no size of an axis: write it as {axis}=8.")
            sizes[axis] = int(size)
        return cls(**sizes, param_dtype=param_dtype, reduce_dtype=reduce_dtype)

    @property
    def axes(self) -> dict[str, int]:
        """Axis -> processes, the outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def used_axes(self) -> dict[str, int]:
        """The axes with more than one process."""
        return {axis: size for axis, size in self.axes.items() if size > 1}

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.ddp * self.fsdp * self.tp

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.used_axes.items()) or "none"

    def make_mesh(self, device_type: str) -> DeviceMesh:
        """The device mesh of all axes; needs an initialized process group."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, tuple(self.axes.values()), mesh_dim_names=tuple(AXES))


#: Of a single process.
UNSHARDED = Sharding()


def shard_model(model: nn.Module, sharding: Sharding, mesh: DeviceMesh) -> None:
    """Split the model's linear layers along ``tp`` and its parameters along ``fsdp``, in place.

    Along ``ddp`` alone nothing is done: :class:`torch.nn.parallel.DistributedDataParallel` wraps the model instead.
    """
    if sharding.tp > 1:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(model, mesh["tp"], tensor_parallel_styles(model, sharding.tp))
    if sharding.fsdp > 1:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        data_parallel = mesh["ddp", "fsdp"] if sharding.ddp > 1 else mesh["fsdp"]
        policy = MixedPrecisionPolicy(sharding.param_dtype, sharding.reduce_dtype)
        for module in [*sharded_blocks(model), model]:
            fully_shard(module, mesh=data_parallel, mp_policy=policy)


def sharded_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that FSDP gathers by themselves.

    For models of transformers those of the classes in ``_no_split_modules``; otherwise the entries of the outermost
    ``nn.ModuleList`` and ``nn.Sequential`` containers that have parameters.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    if classes:
        # By all base classes, since attach and fully_shard derive classes of their own.
        blocks = [m for m in model.modules() if classes.intersection(base.__name__ for base in type(m).__mro__)]
    else:
        blocks = [*_entries(model)]
    return [*dict.fromkeys(block for block in blocks if block is not model)]


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_block = isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList)
        if is_block and next(child.parameters(), None) is not None:
            yield child
        elif not is_block:
            yield from _entries(child)


# --- Tensor parallelism


def _styles() -> dict[str, Callable[[nn.Module], Any]]:
    """Style by the name that plans of transformers use -> a function that makes torch's style for a module."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def gathers(module: nn.Module) -> Any:
        return ColwiseParallel(output_layouts=Replicate())

    return {
        "colwise": lambda module: ColwiseParallel(),
        "colwise_rep": gathers,
        "colwise_gather_output": gathers,
        "rowwise": lambda module: RowwiseParallel(),
        "rowwise_rep": lambda module: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda module: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": lambda module: SequenceParallel(),
    }


def tensor_parallel_styles(model: nn.Module, size: int) -> dict[str, Any]:
    """Module path -> torch's parallel style, from the model's ``tp_plan``.

    Models of transformers have one: a mapping from module path, with ``*``, to ``colwise``, ``rowwise`` and the like.
    """
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise TargetError(
            f"{type(model).__name__} does not say which layers tensor parallelism splits: give the model an attribute "
            f'tp_plan, such as {{"layers.*.up": "colwise", "layers.*.down": "rowwise"}}, or shard with fsdp alone.'
        )
    styles = _styles()
    selected: dict[str, Any] = {}
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(path)
        style = next((style for pattern, style in plan.items() if fnmatchcase(path, pattern)), None)
        if style is None or style == "replicate":
            continue
        if style not in styles:
            raise TargetError(
                f"the tp_plan of {type(model).__name__} splits {path} by {style!r}, which is not supported here; "
                f"{nearest_names(style, styles)}"
            )
        if style != "sequence_parallel":
            _require_divisible(path, module, style, size)
        selected[path] = styles[style](module)
    if not selected:
        raise TargetError(f"no module of {type(model).__name__} matches its tp_plan: name modules of the model in it.")
    for path in selected:
        for parameter in model.get_submodule(path).parameters(recurse=False):
            if not selected.keys() >= set(users[id(parameter)]):
                tied = " and ".join(users[id(parameter)])
                raise TargetError(
                    f"{tied} share a parameter, and the tp_plan splits only one of them: untie them, or name both."
                )
    return selected


def _require_divisible(path: str, module: nn.Module, style: str, size: int) -> None:
    """Raise where the split dimension of a linear layer or an embedding is not a multiple of the processes."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | nn.Embedding) or weight is None:
        raise TargetError(
            f"the tp_plan splits {path}, which is a {type(module).__name__}: torch splits linear layers and embeddings."
        )
    dimension = 1 if isinstance(module, nn.Linear) and style.startswith("rowwise") else 0
    if weight.shape[dimension] % size:
        raise TargetError(
            f"{path} has {weight.shape[dimension]} {'inputs' if dimension else 'outputs'}, no multiple of tp={size}: "
            f"use a tp that divides them."
        )
