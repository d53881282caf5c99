"""Trials that were measured before: the same search again uses them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from bitplan._version import __version__
from bitplan.capture.recording import Operation
from bitplan.executions.native.crossover import cache_file, machine_name
from bitplan.files import parse_json, write_whole
from bitplan.planners.auto.trials import Problem, Trial
from bitplan.plans import Plan

log = logging.getLogger("bitplan")


def fingerprint_of(problem: Problem, operations: Sequence[Operation]) -> str:
    """Everything that decides the time and memory of a step but the plan."""
    shapes = [
        (operation.label, [(tuple(tensor.shape), str(tensor.dtype)) for tensor in operation.outputs])
        for operation in operations
    ]
    weights = [
        (name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in problem.target.model.state_dict().items()
    ]
    optimizer = problem.optimizer
    kind = (
        optimizer if optimizer is None or isinstance(optimizer, str) else type(optimizer(problem.target.model)).__name__
    )
    threads = torch.get_num_threads()
    facts = (machine_name(problem.device), torch.__version__, __version__, kind, problem.compile, str(problem.autocast))
    return hashlib.sha256(repr((shapes, weights, facts, threads)).encode()).hexdigest()


class TrialCache:
    """Quiet trials by model, machine and plan, in a file beside the crossover tables."""

    def __init__(self) -> None:
        self.trials: dict[str, Trial] = {}
        try:
            content = parse_json(self._file().read_text(encoding="utf-8"))
            self.trials = {key: Trial(**row) for key, row in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # there is none, or it is damaged: everything is measured again

    def key(self, fingerprint: str, plan: Plan | None) -> str:
        text = "" if plan is None else json.dumps(plan.to_dict(), sort_keys=True)
        return hashlib.sha256(f"{fingerprint} {text}".encode()).hexdigest()

    def add(self, key: str, trial: Trial) -> None:
        if key in self.trials or not trial.is_quiet:
            return
        self.trials[key] = trial
        try:
            self._file().parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(), json.dumps({name: row.to_dict() for name, row in self.trials.items()}) + "\n")
        except OSError as error:
            log.info("trials are not cached, and will be measured again: %s", error)

    def _file(self) -> Path:
        return cache_file().with_name("trials.json")
