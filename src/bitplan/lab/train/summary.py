"""The progress and the summary of a run, its record of sites, and its TensorBoard events."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch

from bitplan.analysis.cost import Cost
from bitplan.errors import RunError
from bitplan.lab.train.session import Session
from bitplan.plans import ROLES
from bitplan.runtime.attach import Attachment
from bitplan.runtime.rounding_op import Promoted
from bitplan.runtime.statistics import Statistics

# --- TensorBoard events, where tensorboard is installed

log = logging.getLogger("bitplan")


class Events:
    """Receives the lines of metrics.jsonl and ignores them."""

    def add(self, line: Mapping[str, Any]) -> None:
        return None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Receives measured values by name."""

    def close(self) -> None:
        return None

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardEvents(Events):
    """Writes every value as a scalar."""

    def __init__(self, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides later steps of an earlier attempt.
        writer: Any = SummaryWriter
        self._writer = writer(str(folder), purge_step=after + 1 if after else None)

    def add(self, line: Mapping[str, Any]) -> None:
        kind = "evaluation" if line.get("evaluation") else "training"
        for name, value in line.items():
            if name not in ("step", "evaluation"):
                self._writer.add_scalar(f"{kind}/{name}", value, line["step"])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"measured/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


def open_events(folder: Path, after: int) -> Events:
    """Events of the steps that follow step `after`."""
    if importlib.util.find_spec("tensorboard") is None:
        return Events()
    try:
        return TensorBoardEvents(folder, after)
    except Exception as error:  # an optional package that fails must not stop a run
        log.info("no TensorBoard events are written: %s", error)
        return Events()


# --- ``sites.json``: the format of every tensor, and the statistics of its rounding


def planned_sites(run: Attachment) -> list[dict[str, Any]]:
    """Every tensor, and the operands that a rule covers."""
    return [
        {
            "site": row.site.name,
            "role": row.site.role,
            "format": row.words,
            "rule": row.where or f"rules[{row.rule}]" if row.rule is not None else None,
            "elements": row.site.elements,
        }
        for row in run.table()
        if row.site.role in ROLES or row.rule is not None
    ]


def measured_sites(session: Session) -> list[dict[str, Any]]:
    """The same with rounding statistics of the last batch, which take another pass without a step."""
    sites = planned_sites(session.run)
    if not session.run.plan.all_rules:
        return sites
    session.observe()
    session.step -= 1
    try:
        session.forward_backward()
        session.run.step()
        seen = session.run.stats()
    except torch.OutOfMemoryError:  # uncompiled it may need more than the run did, and the statistics are optional
        return sites
    finally:
        session.step += 1
    return with_statistics(sites, seen)


def with_statistics(sites: Iterable[dict[str, Any]], statistics: Mapping[str, Statistics]) -> list[dict[str, Any]]:
    """The records of sites with what rounding did there."""
    remaining, records = dict(statistics), []
    for site in sites:
        # Of several weights or results of an operation the largest has the record, and is listed first.
        label, _, shown = site["site"].rpartition(":")
        own = remaining.pop(f"{label}:{site['role']}", None) if "(" not in shown else None
        records.append({**site, **statistics_record(own)} if own and site["format"] is not None else site)
    return records


def statistics_record(statistics: Statistics) -> dict[str, float]:
    return {name: getattr(statistics, name) for name in ("overflow", "underflow", "error")}


# --- What steps have cost


def cost_sums(cost: Cost) -> tuple[float, ...]:
    """MACs and bit operations of all products, elements and bits of all tensors."""
    return cost.training_macs, cost.bit_operations, cost.total.elements, cost.total.bits


def bits_since(cost: Cost, earlier: Sequence[float]) -> dict[str, float]:
    """The width of products' operands and the mean width of tensors, in the steps since the sums were `earlier`."""
    macs, bit_operations, elements, bits = (now - then for now, then in zip(cost_sums(cost), earlier, strict=True))
    return {
        "bits": math.sqrt(bit_operations / macs) if macs else 0.0,
        "mean_bits": bits / elements if elements else 0.0,
    }


def share_of_run(cost: Cost, steps: int) -> float:
    """Bit operations as a share of what a run of `steps` steps needs in FP32."""
    whole = cost.baseline_bit_operations("fp32") / max(cost.steps, 1) * steps
    return cost.bit_operations / whole if whole else 0.0


def cost_figures(cost: Cost) -> dict[str, Any]:
    """The ``cost`` and the ``memory`` of a summary."""
    bf16 = cost.baseline_bit_operations("bf16")
    return {
        "cost": {
            "bitops": cost.bit_operations,
            "relative_to_fp32": cost.relative,
            "relative_to_bf16": cost.bit_operations / bf16 if bf16 else 0.0,
            "mean_bits": cost.mean_bits,
            "low_precision_ratio": cost.low_precision_ratio,
        },
        "memory": {role: part.bytes / max(cost.steps, 1) for role, part in cost.tensors.items()},
    }


#: *finished*: all steps are made. *stopped*: on request; can be resumed. *diverged*: the loss or the weights are no
#: longer finite, and a second attempt would give the same.
Status = Literal["finished", "stopped", "diverged"]

Phase = Literal["training", "evaluating", "searching"]


@dataclass(frozen=True)
class Progress:
    """How far a run is; passed to ``on_progress`` after every step."""

    #: Steps made, and steps of the whole run.
    step: int
    steps: int
    #: *searching*: the loss was not finite, and steps are repeated to find the cause.
    phase: Phase
    #: Of the last step; None before the first.
    loss: float | None
    #: The task's metric at the last evaluation; None before the first.
    metric: float | None
    #: The width of both operands at which recent products would have cost the same.
    bits: float
    #: Bit operations so far, as a share of what the whole run would need in FP32.
    cost: float
    #: The most bytes held so far, measured.
    peak: int
    #: Since the run was first started, without interruptions.
    seconds: float
    #: In measured runs: the largest median backward error of the plan's formats (without a plan: of E4M3).
    error: float | None = None
    #: The text of the last alarm.
    alarm: str | None = None
    #: Tensors promoted so far, as of the last line of ``metrics.jsonl``.
    promoted: int = 0


@dataclass(frozen=True)
class PromotionRecord:
    """A promoted tensor, as files record it; see :class:`bitplan.runtime.rounding_op.Promoted`."""

    site: str
    step: int
    measure: str
    share: float
    to: str

    @classmethod
    def of(cls, promoted: Promoted) -> PromotionRecord:
        return cls(promoted.site, promoted.step, promoted.measure, promoted.share, promoted.to)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PromotionRecord:
        """The inverse of ``dataclasses.asdict``."""
        texts = {name: str(content[name]) for name in ("site", "measure", "to")}
        return cls(step=int(content["step"]), share=float(content["share"]), **texts)


@dataclass(frozen=True)
class Summary:
    """The result of a run: the contents of its ``summary.json``."""

    folder: Path
    status: Status
    #: Steps made.
    step: int
    #: The figures of the last evaluation.
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: The best value of the task's metric at any evaluation.
    best: float | None = None
    #: Of the last step.
    loss: float | None = None
    #: bitops, relative_to_fp32, relative_to_bf16, mean_bits and low_precision_ratio of the steps made.
    cost: Mapping[str, float] = field(default_factory=dict)
    #: Bytes of each class of a step's tensors in the plan's formats: counted by :mod:`bitplan.analysis.cost`, not
    #: measured.
    memory: Mapping[str, float] = field(default_factory=dict)
    #: The most bytes held, measured: on a GPU by torch's allocator, else by the whole process.
    peak: int = 0
    seconds: float = 0.0
    #: Why it is not finished.
    why: str | None = None
    #: In a diverged run: the first tensor that was not finite.
    site: str | None = None
    #: Tensors that were promoted, in the order of time.
    promotions: tuple[PromotionRecord, ...] = ()

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise RunError(f"a run is {', '.join(get_args(Status))}, not {self.status!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``summary.json`` holds them."""
        return {
            "status": self.status,
            "step": self.step,
            "metrics": dict(self.metrics),
            "best": self.best,
            "loss": self.loss,
            "cost": dict(self.cost),
            "memory": dict(self.memory),
            "peak": self.peak,
            "seconds": self.seconds,
            **({} if self.why is None else {"why": self.why}),
            **({} if self.site is None else {"site": self.site}),
            **({"promotions": [asdict(promotion) for promotion in self.promotions]} if self.promotions else {}),
        }

    @classmethod
    def from_dict(cls, folder: Path, content: Mapping[str, Any]) -> Summary:
        """The summary from the JSON of :meth:`to_dict`; raises ValueError or KeyError where it is damaged."""
        for name in ("why", "site"):
            if not isinstance(content.get(name, ""), str):
                raise ValueError(f"{name} must be a text")
        return cls(
            folder=folder,
            status=content["status"],
            step=int(content["step"]),
            metrics=_numbers(content["metrics"]),
            best=_number(content["best"]),
            loss=_number(content["loss"]),
            cost=_amounts(content["cost"]),
            memory=_amounts(content["memory"]),
            **_amounts({name: content[name] for name in ("peak", "seconds")}),
            why=content.get("why"),
            site=content.get("site"),
            promotions=tuple(map(PromotionRecord.from_dict, content.get("promotions", ()))),
        )


def _number(value: Any) -> Any:
    """A number or null; values that are not finite are strings in JSON, which ``float`` reads."""
    if value is None or type(value) in (int, float):
        return value
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    raise ValueError(f"{value!r} is no number")


def _numbers(content: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: _number(value) for name, value in content.items()}
    if None in numbers.values():
        raise ValueError("null is no number")
    return numbers


def _amounts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that were counted or measured, which are finite."""
    amounts = _numbers(content)
    if not all(map(math.isfinite, amounts.values())):
        raise ValueError("an amount is finite")
    return amounts
