"""The processes that train one run together, started by torchrun; without it, this process alone.

All of them make the same steps, each on its part of the batch, and agree on everything that decides the run: its loss,
its metrics, whether it stops. The first one writes the run folder; the others write into a temporary folder.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from bitplan.analysis.sharding import UNSHARDED, Sharding, shard_model
from bitplan.compiler.torch_private import tree_leaves, tree_map_only
from bitplan.errors import BitplanError, RunError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from bitplan.lab.train.folder import RunFolder

Value = TypeVar("Value")

#: How the data-parallel processes share the model.
KINDS = ("fsdp", "ddp")
#: What errors of collectives say where another process has gone.
_LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|gloo|NCCL|Timed out|timed out|store", re.IGNORECASE)


class LostProcessError(RunError):
    """Another process of the run has ended."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run; this one is number `rank` of `count`."""

    sharding: Sharding = UNSHARDED
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def count(self) -> int:
        return self.sharding.world

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_parts(self) -> int:
        """The number of parts of a batch."""
        return self.sharding.ddp * self.sharding.fsdp

    @property
    def data_part(self) -> int:
        """The part of every batch that this process trains on."""
        return self.rank // self.sharding.tp

    # --- agreement ---

    def share(self, make: Callable[[], Value]) -> Value:
        """The first process's result; where it raises, the others exit without a message of their own."""
        if self.count == 1:
            return make()
        from torch.distributed import broadcast_object_list

        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[1] = make()
            except BitplanError as error:
                broadcast_object_list([str(error), None])
                raise
        broadcast_object_list(outcome)
        if outcome[0] is not None:
            sys.exit(2)
        value: Value = outcome[1]
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return flag if self.count == 1 else self._reduced(float(flag), maximum=True) > 0

    def mean(self, value: float) -> float:
        """The mean over all processes."""
        return value if self.count == 1 else self._reduced(value) / self.count

    def _reduced(self, value: float, maximum: bool = False) -> float:
        import torch.distributed as dist

        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        return float(total)

    # --- the model and its state ---

    def apply(self, model: nn.Module) -> nn.Module:
        """Split the model, in place; returns the module that training steps call."""
        if self.mesh is None:
            return model
        shard_model(model, self.sharding, self.mesh)
        if self.sharding.ddp > 1:
            return nn.parallel.DistributedDataParallel(model)
        return model

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the first one's buffers, such as the running means of batch norms.

        Those of an attached plan stay: its records are combined in every step.
        """
        if self.count > 1:
            import torch.distributed as dist

            for name, buffer in model.named_buffers():
                if not name.rpartition(".")[2].startswith("_bitplan"):
                    dist.broadcast(buffer, 0)

    def reshard(self, model: nn.Module) -> None:
        """Release what a forward pass without a backward pass has left gathered."""
        if self.sharding.fsdp > 1:
            from torch.distributed.fsdp import FSDPModule

            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def whole(self, state: Any) -> Any:
        """The state with every distributed tensor whole; all processes call this."""
        if self.mesh is None:
            return state
        from torch.distributed.tensor import DTensor

        return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), state)

    def split(self, model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`whole` for the state of a model."""
        own = model.state_dict()
        return {name: _split_like(own.get(name), tensor) for name, tensor in state.items()}

    def split_optimizer(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The inverse of :meth:`whole` for the state of an optimizer."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments = {
            index: {
                name: _split_like(parameters[int(index)], value)
                if _has_shape_of(value, parameters[int(index)])
                else value
                for name, value in values.items()
            }
            for index, values in state["state"].items()
        }
        return {**state, "state": moments}

    # --- data ---

    def part(self, batch: Any) -> Any:
        """This process's part of a batch: the first dimension of every tensor is split."""
        parts = self.data_parts
        if parts == 1:
            return batch
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        rows = {tensor.shape[0] if tensor.dim() and tensor.layout == torch.strided else None for tensor in tensors}
        if len(rows) != 1 or None in rows:
            raise RunError(
                "the task's batch cannot be split over processes, since its tensors do not have one row a sample: "
                "train it in one process, or with --tensor-parallel alone."
            )
        (count,) = rows
        assert count is not None
        if count % parts:
            raise RunError(
                f"a batch of {count} rows cannot be split evenly over {parts} processes: use --set batch=N with a "
                f"multiple of {parts}."
            )
        return tree_map_only(Tensor, lambda tensor: tensor.chunk(parts)[self.data_part], batch)

    # --- the run folder, output and errors ---

    @contextmanager
    def run_folder(self, path: str | os.PathLike[str]) -> Iterator[RunFolder]:
        """The run folder; in all but the first process a temporary one, with the checkpoints of the run."""
        from bitplan.lab.train.folder import RunFolder  # which imports the session, and that imports this module

        if self.is_first:
            yield RunFolder(path)
            return
        with tempfile.TemporaryDirectory(prefix="bitplan-") as temporary:
            folder = RunFolder(Path(temporary) / "run")
            folder.checkpoints = RunFolder(path).checkpoints
            yield folder

    @contextmanager
    def losses_reported(self, resume: Callable[[], str]) -> Iterator[None]:
        """Report in a sentence that another process has ended.

        :param resume: returns the command that resumes the run.
        """
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not _LOST.search(str(error)):
                raise
            raise LostProcessError(
                f"another of the {self.count} processes of this run has ended, or cannot be reached: run the same "
                f"command again to continue from the last checkpoint, as {resume()} does."
            ) from error


#: This process alone.
SINGLE = Processes()


def _has_shape_of(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def _split_like(own: Any, tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor) or tensor.shape != own.shape:
        return tensor  # where it does not fit, loading says so
    # Every process has read the whole tensor, so that nothing is sent.
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


# --- starting


def sharding_of(kind: str | None, tensor_parallel: int, processes: int) -> Sharding:
    """How `processes` processes share a run, as the options ``--shard`` and ``--tensor-parallel`` say."""
    if kind is not None and kind not in KINDS:
        raise RunError(f"there is no way to share a model named {kind!r}: use --shard fsdp or --shard ddp.")
    if tensor_parallel < 1 or processes % tensor_parallel:
        raise RunError(
            f"{processes} processes cannot be grouped by --tensor-parallel {tensor_parallel}: use a number that "
            f"divides {processes}."
        )
    rest = processes // tensor_parallel
    if kind is None and rest > 1:
        raise RunError(
            f"torchrun has started {processes} processes, of which {rest} get different data: say how they share the "
            f"model with --shard fsdp or --shard ddp."
        )
    return Sharding(ddp=rest, tp=tensor_parallel) if kind == "ddp" else Sharding(fsdp=rest, tp=tensor_parallel)


def started_processes() -> int:
    """The number of processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def joined_processes(sharding: Sharding, device: torch.device) -> Iterator[Processes]:
    """Join the other processes that torchrun has started; all but the first print nothing but errors."""
    if sharding.world == 1:
        yield Processes()
        return
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with ExitStack() as stack:
        if rank:
            silent = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(silent))
            stack.enter_context(redirect_stderr(silent))
        yield Processes(sharding, rank, sharding.make_mesh(device.type))
    dist.destroy_process_group()
