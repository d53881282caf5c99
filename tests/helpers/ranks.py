"""A function on several processes that form a group, forked from a server that imports torch once for all."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Imported by the server before it forks: in a process that is spawned, they take 5 s of CPU time each time.
IMPORTED_ONCE = [
    "functorch.compile",  # and torch._dynamo
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "bitplan.executions.native",
    "bitplan.executions.packed",
    "bitplan.lab.train",
    "bitplan.planners.auto",
    "transformers.models.llama.modeling_llama",
]


def start_processes(function: Callable[..., None], arguments: tuple[Any, ...], world: int) -> None:
    """Call ``function(rank, *arguments)`` in each of `world` processes; raises what one of them raises.

    The server keeps the environment that its first caller had.
    """
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    torch.multiprocessing.start_processes(function, arguments, nprocs=world, start_method="forkserver")


def on_ranks(world: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on every rank of a group of gloo.

    :param folder: an empty folder for the store of the group and the results.
    """
    start_processes(_work, (world, function, folder, arguments), world)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(world)]


def _work(rank: int, world: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        torch.save(function(rank, *arguments), folder / str(rank))
        dist.barrier()  # none may leave while another still talks to it
    finally:
        dist.destroy_process_group()
