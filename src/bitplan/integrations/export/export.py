"""Writing a plan in the format of another framework: the formats by name, and the one function behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bitplan.errors import PlanError, nearest_names
from bitplan.files import write_whole
from bitplan.integrations.export.layers import (
    Omission,
    Omissions,
    PlannedModel,
    find_layers,
    omission_lines,
    require_exported,
)
from bitplan.integrations.export.serving import write_compressed_tensors, write_modelopt, write_weights
from bitplan.integrations.export.text import FileHeader
from bitplan.integrations.export.torchao import write_torchao, write_torchtitan
from bitplan.integrations.export.transformer_engine import write_megatron, write_te_debug, write_transformer_engine
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan

#: Returns the text of a file and the number of layers that it changes, and adds what it leaves out.
Writer = Callable[[PlannedModel, FileHeader, Omissions], tuple[str, int]]


@dataclass(frozen=True)
class ExportFormat:
    """A framework that plans are written for."""

    write: Writer
    #: The versions whose interface the file has; the last is written unless another is asked for.
    versions: tuple[str, ...]
    is_for_inference: bool = False


#: By the names that ``--to`` takes.
EXPORT_FORMATS: dict[str, ExportFormat] = {
    "torchao": ExportFormat(write_torchao, ("0.18",)),
    "torchtitan": ExportFormat(write_torchtitan, ("0.3",)),
    "transformer-engine": ExportFormat(write_transformer_engine, ("2.20",)),
    "te-debug": ExportFormat(write_te_debug, ("2.20",)),
    "megatron": ExportFormat(write_megatron, ("0.16", "2026-08")),
    "compressed-tensors": ExportFormat(write_compressed_tensors, ("0.20",), is_for_inference=True),
    "modelopt": ExportFormat(write_modelopt, ("0.47",), is_for_inference=True),
}


@dataclass(frozen=True)
class Export:
    """A plan in the format of another framework."""

    #: The framework and its version, such as ``torchao 0.18``.
    format: str
    #: The contents of the file.
    text: str
    #: How many linear layers the file changes.
    layers: int
    #: What the plan says and the file does not do.
    omissions: tuple[Omission, ...] = field(default=())

    @property
    def lines(self) -> list[str]:
        """One line for each kind of omission."""
        return omission_lines(self.omissions)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the file, all of it or nothing."""
        try:
            write_whole(Path(path), self.text)
        except (OSError, ValueError) as error:
            raise PlanError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.") from None

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "layers": self.layers,
            "omissions": [{"site": omission.site, "reason": omission.reason} for omission in self.omissions],
            "text": self.text,
        }

    def __str__(self) -> str:
        return self.text


def export_plan(
    plan: Plan | str,
    to: str,
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    *,
    strict: bool = False,
    version: str | None = None,
    weights: str | PathLike[str] | None = None,
    step: int | None = None,
    steps: int | None = None,
    target: str | None = None,
) -> Export:
    """The plan for `model` in the format of another framework; `batch` and `loss` as in :func:`bitplan.list_sites`.

    :param to: a name of :data:`EXPORT_FORMATS`.
    :param strict: raise where the format cannot express all that the plan says about the model.
    :param version: of the framework, if not the newest that is known.
    :param weights: of ``compressed-tensors``: a folder for the model with rounded weights.
    :param step: of a plan that changes over time, the step of `steps` to export. By default what comes first, and for
        inference what comes last.
    :param target: how a command names the model, for the file's comment and its own test.
    """
    export_format = _find_format(to, version)
    if weights is not None and to != "compressed-tensors":
        raise PlanError(f"weights are written for compressed-tensors only, not for {to}: drop weights (--weights).")
    resolved = find_plan(plan)
    planned = find_layers(
        resolved, model, batch, loss, step=step, steps=steps, is_for_inference=export_format.is_for_inference
    )
    omissions = Omissions()
    for omission in planned.omissions:
        if not (export_format.is_for_inference and omission.is_training_only):
            omissions.add(*omission)
    title = f"{to} {version or export_format.versions[-1]}"
    name = plan if isinstance(plan, str) else resolved.name or resolved.origin
    plan_name = "a plan made in Python" if name is None else f"the plan {name}"

    def header() -> FileHeader:
        return FileHeader(title, plan_name, target, tuple(omission_lines(tuple(omissions))))

    export_format.write(planned, header(), omissions)  # the omissions of the format itself
    text, layers = export_format.write(planned, header(), omissions)
    require_exported(layers, to, planned, tuple(omissions))
    if strict and (lines := omission_lines(tuple(omissions))):
        more = f" ({len(lines) - 1} more lines without strict)" if len(lines) > 1 else ""
        raise PlanError(f"{to} cannot express all of the plan: {lines[0]}{more}: change the plan, or drop strict.")
    if weights is not None:
        write_weights(planned, model, Path(weights))
    return Export(title, text, layers, tuple(omissions))


def _find_format(name: str, version: str | None) -> ExportFormat:
    if name not in EXPORT_FORMATS:
        raise PlanError(f"there is no export format {name!r}; {nearest_names(name, EXPORT_FORMATS)}")
    export_format = EXPORT_FORMATS[name]
    if version is not None and version not in export_format.versions:
        raise PlanError(
            f"bitplan does not know {name} {version}: it writes for {name} {' and '.join(export_format.versions)}."
        )
    return export_format
