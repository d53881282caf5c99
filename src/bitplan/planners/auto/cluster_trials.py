"""Trials of a search as actors of a Ray cluster: each candidate has a CPU, and a share of a GPU, of some machine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from bitplan.cluster import Cluster, connected
from bitplan.planners.auto.trials import CandidateServer, Child, Failure, Outcome, Problem, ProcessTrials
from bitplan.plans import Plan


class ClusterTrials(ProcessTrials):
    """An actor for each candidate, as many at a time as the cluster has room for.

    Candidates are prepared side by side and measured one after the other. An actor ends with its group, because those
    that follow need its CPU and GPU; a candidate that is trained later is prepared again.
    """

    are_here = False

    def __init__(self, load: Callable[..., Problem], arguments: tuple[Any, ...], cluster: Cluster) -> None:
        """
        :param load: loads the problem in every process: a function of a module that all machines can import.
        """
        self._stack = ExitStack()
        self._ray = self._stack.enter_context(connected(cluster))
        resources = self._ray.cluster_resources()
        room = resources.get("CPU", 1.0)
        if cluster.gpus_per_run:
            room = min(room, resources.get("GPU", 0.0) / cluster.gpus_per_run)
        super().__init__(load, arguments, max(1, int(room)))
        self._actor = self._ray.remote(num_cpus=1, num_gpus=cluster.gpus_per_run, max_restarts=0)(_RemoteServer)

    def _measure_group(self, plans: Sequence[Plan | None]) -> Iterator[Outcome]:
        self._stop_children()
        try:
            yield from super()._measure_group(plans)
        finally:
            self._stop_children()

    def _new_child(self, plan: dict[str, Any] | None) -> Child:
        if len(self._children) >= self.most:
            self._stop_children()
        return _RemoteChild(self._ray, self._actor.remote(os.getcwd(), self.load, self.arguments, plan))

    def close(self) -> None:
        super().close()
        self._stack.close()


class _RemoteChild(Child):
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor, self._answers = ray, actor, deque[Any]()
        self._is_lost = False

    def send(self, *request: Any) -> None:
        self._answers.append(self._actor.answer.remote(*request))

    def receive(self) -> Any:
        try:
            return self._ray.get(self._answers.popleft())
        except self._ray.exceptions.RayTaskError as error:  # the target does not load there
            return Failure(str(error.cause))
        except self._ray.exceptions.RayError:
            self._is_lost = True
            return Failure("its process was killed, or its machine was lost")

    def is_alive(self) -> bool:
        return not self._is_lost

    def stop(self) -> None:
        self._ray.kill(self._actor)


class _RemoteServer(CandidateServer):
    """The server of a candidate in a worker of the cluster.

    :param directory: the driver's working directory, which names of files are relative to.
    """

    def __init__(self, directory: str, *arguments: Any) -> None:
        os.chdir(directory)
        torch.set_num_threads(1)  # the actor's share, and the same on every machine
        super().__init__(*arguments)
