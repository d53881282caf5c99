"""A Ray cluster that comparisons and searches start their processes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

from bitplan.errors import MissingPackageError, RunError
from bitplan.machine import cores


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and what one run takes of it."""

    #: ``auto`` is the cluster that this machine belongs to, or else this machine alone; otherwise as Ray writes it.
    address: str = "auto"
    #: May be a fraction, for runs that share a GPU.
    gpus_per_run: float = 0.0

    def __post_init__(self) -> None:
        if self.gpus_per_run < 0:
            raise RunError(f"a run cannot take {self.gpus_per_run} GPUs: use 0 or more.")


@contextmanager
def connected(cluster: Cluster) -> Iterator[Any]:
    """Ray, connected to the cluster. Workers keep quiet: what they have to say is in the run folders."""
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "a cluster needs ray, which is not installed: run \"pip install 'bitplan[ray]'\"."
        ) from error
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # tasks without GPUs change nothing
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": "error"}
    with ExitStack() as stack:
        if not ray.is_initialized():
            try:
                ray.init(address=cluster.address, **quiet)
            except ConnectionError as error:
                if cluster.address != "auto":
                    raise RunError(
                        f"there is no Ray cluster at {cluster.address}: start one with `ray start --head`, or use "
                        f"--cluster auto."
                    ) from error
                os.environ.setdefault("RAY_worker_niceness", "0")  # as the processes of --jobs
                # In a folder of its own, so that no other command joins a cluster that ends with this one.
                folder = stack.enter_context(TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
                ray.init(address="local", num_cpus=cores(), include_dashboard=False, _temp_dir=folder, **quiet)
            stack.callback(ray.shutdown)
        total = ray.cluster_resources().get("GPU", 0)
        if cluster.gpus_per_run > total:
            raise RunError(
                f"the cluster has {total:g} GPUs, and a run asks for {cluster.gpus_per_run:g}: lower --gpus-per-run."
            )
        yield ray
