"""The configuration of a run, as in ``run.json``: what decides its numbers, its command, versions and machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bitplan._version import __version__
from bitplan.analysis.sharding import UNSHARDED, Sharding
from bitplan.analysis.targets import file_sha256, parse_file_name
from bitplan.errors import RunError
from bitplan.executions.native.paths import NativeTerms
from bitplan.files import strict
from bitplan.lab.task_planners import AssignOptions
from bitplan.lab.tasks.task import Task
from bitplan.machine import describe_machine
from bitplan.plans import Plan
from bitplan.plans.execution import ExecutionOptions, execution_options

# --- Versions and machine, for run folders and bug reports

#: Packages that bitplan requires.
REQUIRED = ("torch", "numpy", "PyYAML", "typer", "rich")
#: Packages of its extras, and others that it uses if they are installed.
OPTIONAL = (
    "safetensors",
    "jinja2",
    "pillow",
    "triton",
    "tensorboard",
    "plotly",
    "transformers",
    "torchvision",
    "statsmodels",
    "vega_datasets",
    "gymnasium",
    "torchao",
    "ml_dtypes",
    "gfloat",
    "qtorch",
)
#: Processor flags that decide the speed of low precision.
FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")


def versions() -> dict[str, str]:
    """The versions that a run's numbers may depend on."""
    packages = {"bitplan": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "safetensors", "triton"):
        version = _version(package)
        if version is not None:
            packages[package] = version
    return packages


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, device and threads: with others a run may differ in its last bits."""
    described = describe_machine(device)
    described.pop("versions")
    return {**described, "threads": torch.get_num_threads()}


def environment() -> dict[str, Any]:
    """Everything that a bug report needs."""
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    return {
        "bitplan": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": {
            "name": describe_machine(torch.device("cpu"))["cpu"],
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "flags": cpu_flags(),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "packages": packages,
    }


def cpu_flags(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Which of :data:`FLAGS` the processor has; none where the system does not list them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    flags = {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
    return [flag for flag in FLAGS if flag in flags]


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


#: The version of run folders that this package reads and writes.
VERSION = 1
#: Steps between two lines of metrics.jsonl.
LOG_EVERY = 10


@dataclass(frozen=True)
class RunConfig:
    """The contents of ``run.json``."""

    task: str
    #: The task on the command line: its name, or ``my_task.py:MyTask``.
    task_source: str
    settings: Mapping[str, Any]
    #: The plan's name in tables and charts; None: no plan.
    plan: str | None
    #: As the user typed it.
    plan_source: str | None
    seed: int
    metric: Mapping[str, Any]
    #: The SHA-256 of the file that `task_source` names; None: the task is no file, or the run is older than this key.
    task_sha256: str | None = None
    execution: str = "emulate"
    device: str = "cpu"
    compile: bool = False
    #: How several processes share the run, such as ``fsdp=2,tp=2``.
    sharding: str = str(UNSHARDED)
    log_every: int = LOG_EVERY
    #: Steps between two measurements of every product (:mod:`bitplan.lab.train.monitor`); 0: none.
    measure_every: int = 0
    #: The measured sizes from which on GEMMs run natively, as of ``NativeTerms.crossover_record``; None: nothing was
    #: measured, or the run is older than this key.
    crossover: Mapping[str, Any] | None = None
    #: The name in tables and charts of a run without a plan; None: fp32.
    label: str | None = None
    #: Whether the run was recorded in a loop of its own (:func:`bitplan.record`), which only that loop can repeat.
    is_recorded: bool = False
    #: The folder of the run that this one is compared with, relative to its own; None: none was named.
    reference: str | None = None
    #: The command that reproduces the run in a new folder.
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise RunError(f"log_every is {self.log_every}; it must be at least 1.")
        if self.measure_every < 0:
            raise RunError(f"measure_every is {self.measure_every}; it must be at least 0 (which measures nothing).")
        # It is printed as part of a command to type, and a control character could hide what that command says.
        if not isinstance(self.task_source, str) or not self.task_source.isprintable():
            raise RunError(
                f"a run's task cannot be named {self.task_source!r}: a name such as my_task.py:MyTask has printable "
                f"characters only, so restore the run's run.json, or rename the file."
            )

    def to_dict(self) -> dict[str, Any]:
        return {"bitplan_run": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunConfig:
        """The inverse of :meth:`to_dict`; raises ValueError where an entry is missing or of another type."""
        values = {entry.name: content[entry.name] for entry in fields(cls) if entry.name in content}
        for name, (is_valid, expected) in _ENTRIES.items():
            if name not in values and name in _OPTIONAL_ENTRIES:
                continue
            if name not in values:
                raise ValueError(f"{name} is missing")
            if not is_valid(values[name]):
                raise ValueError(f"{name} must be {expected}, not {_short(values[name])}")
        return cls(**values)

    def identity(self, plan_text: str | None) -> dict[str, Any]:
        """What decides the numbers of a run: equal identities give equal runs. Checkpoints hold it.

        :param plan_text: the content of the run's ``plan.yaml``; None: no plan.
        """
        plan = None if plan_text is None else hashlib.sha256(plan_text.encode()).hexdigest()
        keys = [key for key in _DECISIVE if key not in ("log_every", "measure_every")]  # these only observe
        keys += ["sharding"] * (self.sharding != str(UNSHARDED))  # which older checkpoints do not have
        return {**{key: getattr(self, key) for key in keys}, "crossover": self.crossover, "plan_sha256": plan}

    def difference(self, other: RunConfig) -> str | None:
        """The first difference that changes the numbers of a run, as text; None where there is none.

        Plans and crossovers are not compared: a plan is compared by its content, and a crossover is the recorded one.
        """
        keys = (*_DECISIVE, "sharding")
        mine, theirs = ({key: getattr(config, key) for key in keys} for config in (self, other))
        return first_difference(mine, theirs)


#: Entries that decide the numbers of a run, besides its plan and its crossover.
_DECISIVE = ("task", "seed", "execution", "device", "compile", "log_every", "measure_every", "settings")


def first_difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first difference of two identities, as text; None where there is none.

    >>> first_difference({"seed": 0, "settings": {"lr": 0.1}}, {"seed": 0, "settings": {"lr": 0.2}})
    'lr=0.1, not 0.2'
    """
    for key in {**mine, **theirs}:
        own, other = mine.get(key), theirs.get(key)
        if own == other:
            continue
        if key == "settings" and isinstance(own, Mapping) and isinstance(other, Mapping):
            name = next(name for name in {**own, **other} if own.get(name) != other.get(name))
            return f"{name}={_short(own.get(name))}, not {_short(other.get(name))}"
        return f"{key} {_short(own)}, not {_short(other)}"
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_optional_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_settings(value: Any) -> bool:
    return isinstance(value, Mapping) and type(value.get("steps", 0)) is int


def _is_metric(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("name"), str)
        and value.get("better") in ("higher", "lower")
        and (type(value.get("trivial")) in (int, float) or value.get("trivial") in ("NaN", "Infinity", "-Infinity"))
    )


def _is_crossover(value: Any) -> bool:
    try:
        return value is None or bool(NativeTerms.from_crossover_record(value))
    except (ValueError, AttributeError):
        return False


#: Entry of run.json -> whether a value is valid, and what it must be.
_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "task": (_is_text, "a text"),
    "task_source": (_is_text, "a text"),
    "settings": (_is_settings, "a mapping, with a whole number of steps"),
    "plan": (_is_optional_text, "a text or null"),
    "plan_source": (_is_optional_text, "a text or null"),
    "seed": (_is_whole, "a whole number"),
    "metric": (_is_metric, "a mapping of name, better (higher or lower) and trivial, a number"),
    "task_sha256": (_is_optional_text, "a text or null"),
    "execution": (_is_text, "a text"),
    "device": (_is_text, "a text"),
    "compile": (lambda value: isinstance(value, bool), "true or false"),
    "sharding": (_is_text, "a text"),
    "log_every": (_is_whole, "a whole number"),
    "measure_every": (_is_whole, "a whole number"),
    "crossover": (_is_crossover, "null, or min_macs and min_channels, each a size for every backend"),
    "label": (_is_optional_text, "a text or null"),
    "is_recorded": (lambda value: isinstance(value, bool), "true or false"),
    "reference": (_is_optional_text, "a text or null"),
    "command": (_is_text, "a text"),
    "versions": (_is_mapping, "a mapping"),
    "machine": (_is_mapping, "a mapping"),
}
#: Entries that older runs may lack.
_OPTIONAL_ENTRIES = {
    entry.name for entry in fields(RunConfig) if entry.default is not MISSING or entry.default_factory is not MISSING
}


def resolve_execution(plan: Plan | None, execution: str | None) -> ExecutionOptions:
    """How a run executes its plan: the plan's own ``execution:``, unless `execution` names another; else emulation."""
    declared = None if plan is None else plan.declared_execution
    if declared is not None and execution in (None, declared.kind):
        return declared
    return execution_options(execution or "emulate")


def config_of(
    task: Task,
    plan: Plan | None,
    plan_source: str | None,
    task_source: str | None,
    *,
    execution: str | None,
    device: torch.device,
    compile: bool,
    log_every: int,
    measure_every: int = 0,
    sharding: Sharding = UNSHARDED,
) -> RunConfig:
    """The config of a run that is about to start on this machine."""

    source = task_source or task.name
    return RunConfig(
        task=task.name,
        task_source=source,
        settings=strict(asdict(task.settings)),  # as they will be read back
        plan=None if plan is None else plan_name(plan, plan_source),
        plan_source=plan_source,
        seed=task.seed,
        metric=strict(asdict(task.metric)),
        task_sha256=_task_sha256(task, source),
        execution=resolve_execution(plan, execution).kind,
        device=str(device),
        compile=compile,
        sharding=str(sharding),
        log_every=log_every,
        measure_every=measure_every,
        command=command_of(
            *(task, source, plan, plan_source),
            execution=execution,
            device=device,
            compile=compile,
            measure_every=measure_every,
            sharding=sharding,
        ),
        versions=versions(),
        machine=machine(device),
    )


def _task_sha256(task: Task, source: str) -> str | None:
    """The SHA-256 of the task's file: of the source that was executed, or else of the file as it is now."""
    task_file = parse_file_name(source)
    if task_file is None:
        return None
    return task.source_sha256 or (file_sha256(task_file[0]) if task_file[0].is_file() else None)


def plan_name(plan: Plan, source: str | None) -> str:
    """The name of a plan: its own, its preset's, or its file's.

    >>> plan_name(Plan(), "plans/cautious.yaml"), plan_name(Plan(name="bold"), "plans/x.yaml")
    ('cautious', 'bold')
    """
    if plan.name:
        return plan.name
    return "plan" if source is None else Path(source).stem


def program(processes: int) -> list[str]:
    """The beginning of a command that trains in so many processes.

    >>> program(1), program(2)
    (['bitplan'], ['torchrun', '--nproc-per-node', '2', '-m', 'bitplan'])
    """
    return ["bitplan"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes), "-m", "bitplan"]


def command_of(
    task: Task,
    source: str,
    plan: Plan | None,
    plan_source: str | None,
    *,
    execution: str | None,
    device: torch.device,
    compile: bool,
    measure_every: int = 0,
    sharding: Sharding = UNSHARDED,
) -> str:
    """The command that reproduces such a run; options with default values are left out."""
    arguments = [*program(sharding.world), "train", source]
    if sharding.world > 1:
        arguments += ["--shard", "ddp" if sharding.ddp > 1 else "fsdp"] * (sharding.ddp * sharding.fsdp > 1)
        arguments += ["--tensor-parallel", str(sharding.tp)] * (sharding.tp > 1)
    if (assigned := AssignOptions.of_source(plan_source)) is not None:
        arguments += assigned.command()
    elif plan_source is not None:
        arguments += ["--plan", plan_source]
    kind = resolve_execution(plan, execution).kind
    if kind != resolve_execution(plan, None).kind:
        arguments += ["--execution", kind]
    if device.type != "cpu":
        arguments += ["--device", str(device)]
    if compile:
        arguments.append("--compile")
    if measure_every:
        arguments += ["--measure-every", str(measure_every)]
    arguments += ["--seed", str(task.seed)]
    recipe = asdict(task.settings_class())
    for key, value in asdict(task.settings).items():
        if value != recipe.get(key):
            arguments += ["--set", f"{key}={value}"]
    return shlex.join(arguments)
