"""Measures the error of every candidate in every product of a training step, on a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.analysis.measure.candidate import PLANNED, Candidate, check_candidates
from bitplan.analysis.measure.pass_metrics import Metric, metric_registry
from bitplan.analysis.measure.probe import Probe
from bitplan.analysis.measure.result import Measurement, Row, average_rows
from bitplan.capture.planned_classes import followed, unwrapped
from bitplan.capture.recording import call_arguments, call_loss, inputs_of, split_batch
from bitplan.capture.scopes import Scope, loss_holder
from bitplan.capture.selectors import plan_for_model
from bitplan.errors import MetricError
from bitplan.gemm.sampling import Sampling
from bitplan.numerics.noise import preserve_rng_state
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan

#: Batches that are measured, if there are more.
MAX_BATCHES = 4


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor] | None = None,
    candidates: Iterable[str | Candidate] | None = None,
    *,
    plan: Plan | str | None = None,
    rows: int = Sampling.rows,
    terms: int = Sampling.terms,
    seed: int = 0,
    stage: str = "now",
    step: int = 0,
    target: str | None = None,
    metrics: Mapping[str, Metric] | Iterable[str] = (),
) -> Measurement:
    """Measure the error of each candidate in every product of `model`: fprop, dgrad and wgrad.

    A copy of the model runs a forward and a backward pass on each batch; the model, its gradients and buffers, the
    optimizer and all random states do not change. An attached plan is not applied to the copy.

    :param batches: a list of batches or a loader, of which the first four are measured; a batch is as in
        :func:`bitplan.list_sites`. Metrics are means over batches.
    :param loss: a function of the output and, if it takes one, the target; None: the mean square of the outputs.
    :param candidates: pairs of formats, such as ``"e4m3 tensor"``, ``"e5m2/e4m3 tensor"`` (left and right operand) or
        ``"int8 vector stochastic-dy"``; by default :data:`DEFAULT_CANDIDATES`.
    :param plan: its formats are measured, too, as the candidate ``plan``; of a plan that changes over time, the first.
    :param rows: number of sampled rows of each operand.
    :param terms: the largest number of terms of a sum; of longer sums this many terms are sampled.
    :param seed: of the sampling and of stochastic rounding.
    :param stage: the name of this stage of training, after `step` steps.
    :param metrics: error metrics of your own (:func:`register_metric`): names, or functions by name.

    >>> result = measure(nn.Linear(64, 8), [torch.randn(32, 64)], candidates=["int8 vector", "e4m3 vector"])
    >>> [row.candidate for row in sorted(result.select(pass_="fprop"), key=lambda row: row.median)]
    ['int8 vector', 'e4m3 vector']
    """
    checked, sampling = check_candidates(candidates), Sampling(rows, terms, seed)
    own = metrics if isinstance(metrics, Mapping) else {name: metric_registry.find(name) for name in metrics}
    if isinstance(batches, (Tensor, dict)):
        raise MetricError("batches must be a list of batches or a loader: put a single batch into a list.")
    measured_rows: list[Row] = []
    skipped: dict[str, str] = {}
    is_empty = True
    planned: Plan | None = None
    for batch in islice(batches, MAX_BATCHES):
        if is_empty and plan is not None:
            planned = plan_for_model(find_plan(plan), model, batch, loss)
        is_empty = False
        probe = Probe(checked, sampling, stage, step, planned, own)
        with preserve_rng_state():
            probe_step(model, batch, loss, probe)
        measured_rows += probe.rows
        skipped |= probe.skipped
    if is_empty:
        raise MetricError("there is no batch to measure with.")
    if not measured_rows and not skipped:
        raise MetricError("the model has no product (linear, convolution, matmul, attention) to measure.")
    if planned is not None and all(row.candidate != PLANNED for row in measured_rows):
        raise MetricError("the plan rounds no operand of a product: leave it out, or name one that does.")
    return Measurement(average_rows(measured_rows), skipped, target)


def probe_step(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, probe: Probe) -> None:
    """Run a forward and a backward pass of a copy of `model` under `probe`; the caller preserves the random states."""
    try:
        replica = copy.deepcopy(unwrapped(model))
    except (RuntimeError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip().removesuffix(".")
        raise MetricError(f"the model cannot be copied ({reason}): keep no results of its own in it.") from error
    replica.zero_grad(set_to_none=True)
    inputs, target = split_batch(batch, loss)
    args, kwargs = call_arguments(inputs_of(model, inputs) if loss is None else inputs)
    with torch.enable_grad(), followed(replica, probe):
        output = replica(*args, **kwargs)
        with _loss_scope(probe):
            value = _mean_square(output) if loss is None else call_loss(loss, output, target)
        if not isinstance(value, Tensor):
            raise MetricError(f"the loss is a {type(value).__name__}, not a tensor: return a scalar tensor.")
        if value.requires_grad:  # inside, because checkpointed regions are recomputed here
            value.backward()  # type: ignore[no-untyped-call]
    probe.finish()


@contextmanager
def _loss_scope(probe: Probe) -> Iterator[None]:
    """Products of the loss are measured, too."""
    with Scope(probe, loss_holder(probe)):
        yield


def _mean_square(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.float().square().mean()
    tensors = list(output.values()) if isinstance(output, dict) else list(output)
    return torch.stack([tensor.float().square().mean() for tensor in tensors if isinstance(tensor, Tensor)]).sum()
