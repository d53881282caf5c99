"""Trials that were measured before: the same search again uses them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bitplan._version import __version__
from bitplan.capture.recording import Operation
from bitplan.executions.native.crossover import cache_file, machine_name
from bitplan.files import locked, parse_json, write_whole
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
        try:
            self.trials = {key: Trial(**row) for key, row in read_cache(self._file()).items()}
        except TypeError:
            self.trials = {}  # a damaged file: everything is measured again

    def key(self, fingerprint: str, plan: Plan | None) -> str:
        text = "" if plan is None else json.dumps(plan.to_dict(), sort_keys=True)
        return hashlib.sha256(f"{fingerprint} {text}".encode()).hexdigest()

    def add(self, key: str, trial: Trial) -> None:
        if key in self.trials or not trial.is_quiet:
            return
        self.trials[key] = trial
        add_to_cache(self._file(), {key: trial.to_dict()})

    def _file(self) -> Path:
        return cache_file().with_name("trials.json")


def read_cache(file: Path) -> dict[str, Any]:
    """The entries of a cache file; none where there is no file, or a damaged one: everything is measured again."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def add_to_cache(file: Path, entries: Mapping[str, Any]) -> None:
    """Add entries to a cache file, beside those that other searches have written in the meantime."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock")):
            write_whole(file, json.dumps({**read_cache(file), **entries}, indent=1) + "\n")
    except OSError as error:
        log.info("measurements are not cached, and will be repeated: %s", error)
