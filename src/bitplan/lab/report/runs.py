"""Runs as read from their folders: only files are needed, so that a report can be made later and on another machine.

A run without a ``summary.json`` is *running* or *unfinished*, and its later values are absent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from bitplan.errors import RunError
from bitplan.files import parse_json
from bitplan.lab.compare.folder import read_comparison
from bitplan.lab.tasks.task import Metric
from bitplan.lab.train.folder import RunFolder, folders_in, is_number, read_lines, read_text
from bitplan.lab.train.summary import PromotionRecord

#: The depth of runs beneath a named folder, at most: runs/comparison/run.
_DEPTH = 3

Status = Literal["finished", "stopped", "diverged", "running", "unfinished"]


@dataclass(frozen=True)
class Point:
    """One line of a run's metrics."""

    step: int
    values: Mapping[str, float]
    #: On held-out data rather than while training.
    is_evaluation: bool = False


@dataclass(frozen=True)
class SiteRecord:
    """One tensor: its format, and the statistics of its rounding where they were recorded."""

    site: str
    role: str
    #: As in the plan, such as ``int8 channel``; None: not rounded.
    format: str | None
    rule: str | None = None
    overflow: float | None = None
    underflow: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Run:
    """One run, as its folder describes it."""

    folder: Path
    task: str
    #: Its name in its comparison, or its plan's name, or fp32.
    label: str
    seed: int
    metric: Metric
    status: Status
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: The plan's name; None: no plan at all.
    plan: str | None = None
    #: The resolved plan, as YAML.
    plan_text: str | None = None
    execution: str = "emulate"
    device: str = "cpu"
    compiled: bool = False
    #: The command that reproduces it.
    command: str = ""
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    #: Why it did not finish.
    why: str = ""
    step: int = 0
    #: The metric after the last step; None before the first evaluation.
    value: float | None = None
    best: float | None = None
    loss: float | None = None
    #: Bit operations so far, as a share of what FP32 would have needed for the same steps.
    relative_cost: float | None = None
    bit_operations: float | None = None
    #: The whole run's multiply-accumulates as a share of the reference run's; 1 without a reference.
    length: float = 1.0
    mean_bits: float | None = None
    #: Bytes by class of a step's tensors, in the plan's formats: counted, not measured.
    memory: Mapping[str, float] = field(default_factory=dict)
    #: The most bytes held, measured: on a GPU by torch's allocator, else by the whole process.
    peak: float | None = None
    seconds: float | None = None
    #: The median time of a step, measured between lines; None before the third.
    step_seconds: float | None = None
    #: 0: every tensor has 16 bits, 1: every tensor has 8; None before there is a summary.
    low_precision_ratio: float | None = None
    promotions: Sequence[PromotionRecord] = ()
    points: Sequence[Point] = ()
    sites: Sequence[SiteRecord] = ()
    #: The folder of the run that it is judged against; None: none was named.
    reference: Path | None = None

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def is_under_way(self) -> bool:
        """Whether it is running or can be resumed."""
        return self.status in ("stopped", "running", "unfinished")

    @property
    def total_cost(self) -> float | None:
        """Bit operations of the whole run as a share of what FP32 needs for the reference's run."""
        return None if self.relative_cost is None else self.relative_cost * self.length

    @property
    def planned_steps(self) -> int:
        """The steps of the whole run: of one that has not finished, those that it was started for."""
        steps = [self.settings.get(name) for name in ("steps", "hold")]
        numbers = [value for value in steps if isinstance(value, int) and not isinstance(value, bool) and value > 0]
        return self.step if self.is_finished or not numbers else sum(numbers)

    @property
    def fp32_operations(self) -> float | None:
        """The bit operations that FP32 would need for the whole run."""
        if not self.bit_operations or not self.relative_cost or not self.step:
            return None
        return self.bit_operations / self.relative_cost * self.planned_steps / self.step

    @property
    def total_memory(self) -> float | None:
        return sum(self.memory.values()) if self.memory else None

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of everything logged under that name."""
        points = [(point.step, point.values[name]) for point in self.points if name in point.values]
        return [step for step, _ in points], [value for _, value in points]


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Every run in these folders, which are runs, comparisons, or folders of them, with their references; each once."""
    runs: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise RunError(f"there is no folder {path}: name run folders, or folders that hold some.")
        beneath = list(_runs_beneath(path, _DEPTH))
        if not beneath:
            raise RunError(f"{path} holds no runs (a run folder has a run.json): name another folder.")
        for run in beneath:
            if run.reference is not None and RunFolder(run.reference).is_run:
                runs.setdefault(run.reference.resolve(), read_run(run.reference))
            runs.setdefault(run.folder.resolve(), run)
    return list(runs.values())


def read_run(path: Path, label: str | None = None) -> Run:
    """The run in a folder."""
    folder = RunFolder(path)
    config, summary, points = folder.config(), folder.summary(), _points(folder)
    times, status = read_lines(folder.times_file), folder.status()
    metric = _metric(config.metric, folder)
    cost = {} if summary is None else summary.cost
    value = _last(points, metric.name) if summary is None else summary.metrics.get(metric.name)
    return Run(
        folder=path,
        task=config.task,
        label=label or config.plan or config.label or "fp32",
        seed=config.seed,
        metric=metric,
        status=status,
        settings=config.settings,
        plan=config.plan,
        plan_text=folder.plan_text(),
        execution=config.execution,
        device=config.device,
        compiled=config.compile,
        command=config.command,
        versions=config.versions,
        machine=config.machine,
        why=(summary.why or "") if summary is not None else "it goes on" if status == "running" else "no summary yet",
        step=summary.step if summary is not None else points[-1].step if points else 0,
        value=value,
        best=None if summary is None else summary.best,
        loss=_last(points, "loss") if summary is None else summary.loss,
        relative_cost=_cost_so_far(points, config.settings) if summary is None else cost.get("relative_to_fp32"),
        bit_operations=cost.get("bitops"),
        mean_bits=_last(points, "mean_bits") if summary is None else cost.get("mean_bits"),
        memory={} if summary is None else summary.memory,
        peak=_last_time(times, "peak") if summary is None else float(summary.peak),
        seconds=_last_time(times, "seconds") if summary is None else summary.seconds,
        step_seconds=_step_seconds(times),
        low_precision_ratio=cost.get("low_precision_ratio"),
        promotions=() if summary is None else summary.promotions,
        points=points,
        sites=_sites(folder.sites_file),
        reference=None if config.reference is None else path / config.reference,
    )


def _runs_beneath(path: Path, depth: int) -> Iterator[Run]:
    if RunFolder(path).is_run:
        yield read_run(path)
        return
    if depth == 0:
        return
    comparison = read_comparison(path)
    labels = {} if comparison is None else comparison.labels
    # The runs of a comparison in its order, then all others.
    order = {name: number for number, name in enumerate(labels)}
    children = [child for child in folders_in(path) if not child.name.startswith(".")]
    for child in sorted(children, key=lambda child: order.get(child.name, len(order))):
        if child.name in labels and RunFolder(child).is_run:
            yield read_run(child, labels[child.name])
        else:
            yield from _runs_beneath(child, depth - 1)


def _cost_so_far(points: Sequence[Point], settings: Mapping[str, Any]) -> float | None:
    """Bit operations so far as a share of FP32's for the same steps; lines have them as a share of the whole run's."""
    point = next((point for point in reversed(points) if "cost" in point.values), None)
    steps = [settings.get(name) for name in ("steps", "hold")]
    total = sum(value for value in steps if isinstance(value, int) and not isinstance(value, bool))
    if point is None or not point.step:
        return None
    return point.values["cost"] * (max(total, point.step) / point.step if total else 1.0)


def _last_time(times: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next((float(line[name]) for line in reversed(times) if is_number(line.get(name))), None)


def _step_seconds(times: Sequence[Mapping[str, Any]]) -> float | None:
    """The median over intervals between lines, so that an evaluation in one of them, or a pause, does not count."""
    numbers = [(line["step"], line["seconds"]) for line in times if is_number(line.get("seconds"))]
    # The first step, which may compile, ends with the first line.
    paces = [(end - start) / (last - first) for (first, start), (last, end) in pairwise(numbers) if last > first]
    return statistics.median(paces) if len(paces) > 1 else None


def _points(folder: RunFolder) -> list[Point]:
    points = []
    for line in folder.metrics():
        values = {name: number for name, value in line.items() if (number := _number(value)) is not None}
        points.append(Point(int(values.pop("step")), values, bool(line.get("evaluation", False))))
    return points


def _sites(file: Path) -> list[SiteRecord]:
    if not file.exists():
        return []
    try:
        return [_site(record) for record in parse_json(read_text(file))]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{file} is damaged: restore it, or leave that run out.") from error


def _site(record: Mapping[str, Any]) -> SiteRecord:
    # A second weight of an operation has a role of its own: conv1/conv2d.0:weight(bias) is weight(bias).
    site, _, role = str(record["site"]).rpartition(":") if ":" in str(record["site"]) else ("", "", "")
    role = role if role.startswith(str(record["role"])) else str(record["role"])
    texts = {key: str(text) if (text := record.get(key)) else None for key in ("format", "rule")}
    return SiteRecord(
        site=site or str(record["site"]),
        role=role,
        format=texts["format"],
        rule=texts["rule"],
        overflow=_number(record.get("overflow")),
        underflow=_number(record.get("underflow")),
        error=_number(record.get("error")),
    )


def _metric(content: Mapping[str, Any], folder: RunFolder) -> Metric:
    trivial = _number(content.get("trivial"))
    better = content.get("better")
    if better not in ("higher", "lower"):
        raise RunError(f"{folder.run_file} is damaged: restore it, or leave that run out.")
    return Metric(str(content.get("name")), better, math.nan if trivial is None else trivial)


def _last(points: Sequence[Point], name: str) -> float | None:
    return next((point.values[name] for point in reversed(points) if name in point.values), None)


def _number(value: Any) -> float | None:
    """A number, or a string such as ``NaN`` that stands for one in strict JSON; None for everything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None
