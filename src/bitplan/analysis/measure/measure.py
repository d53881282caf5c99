"""Measuring a model: what every candidate does to every product of a training step, without touching the training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.analysis.measure.candidate import Candidate, checked_candidates
from bitplan.analysis.measure.probe import Probe
from bitplan.analysis.measure.result import Measurement, Row, averaged
from bitplan.capture.recording import call_arguments, call_loss, split_batch
from bitplan.capture.scopes import Scope, followed, loss_holder, unwrapped
from bitplan.errors import MetricError
from bitplan.gemm.sampling import Sampling
from bitplan.numerics.noise import preserve_rng_state

#: Batches that are looked at where more are given.
MOST_BATCHES = 4


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[..., Tensor] | None = None,
    candidates: Iterable[str | Candidate] | None = None,
    *,
    rows: int = Sampling.rows,
    terms: int = Sampling.terms,
    seed: int = 0,
    stage: str = "now",
    step: int = 0,
    target: str | None = None,
) -> Measurement:
    """What each candidate does to every product of `model`, forward and in both products of the backward pass.

    A copy of the model makes one training step's forward and backward pass on each batch; the model, its gradients and
    buffers, the optimizer and all random states stay as they are. A plan that is attached rests meanwhile: the figures
    are those of formats on the model's own precision.

    :param batches: a list of batches, or a loader, of which the first four are taken; a batch as
        :func:`bitplan.list_sites` takes it. Figures are means over batches.
    :param loss: of the output and, if it wants one, the batch's target; None: the outputs' mean square.
    :param candidates: what to try, such as ``"e4m3 tensor"``, ``"e5m2/e4m3 tensor"`` (left and right operand) or
        ``"int8 vector stochastic-dy"``; by default :data:`DEFAULT_CANDIDATES`.
    :param rows: rows of each operand that are looked at.
    :param terms: the most terms of a sum; longer ones are cut to so many of theirs.
    :param seed: decides which rows and terms, and stochastic rounding.
    :param stage: how the rows call this moment of training, `step` steps into it.

    >>> found = measure(nn.Linear(64, 8), [torch.randn(32, 64)], candidates=["int8 vector", "e4m3 vector"])
    >>> [row.candidate for row in sorted(found.select(pass_="fprop"), key=lambda row: row.median)]
    ['int8 vector', 'e4m3 vector']
    """
    checked, sampling = checked_candidates(candidates), Sampling(rows, terms, seed)
    if isinstance(batches, (Tensor, dict)):
        raise MetricError("batches are a list of batches, or a loader: put a single batch into a list.")
    measured_rows: list[Row] = []
    skipped: dict[str, str] = {}
    is_empty = True
    for batch in islice(batches, MOST_BATCHES):
        is_empty = False
        probe = Probe(checked, sampling, stage, step)
        with preserve_rng_state():
            look_at_step(model, batch, loss, probe)
        measured_rows += probe.rows
        skipped |= probe.skipped
    if is_empty:
        raise MetricError("there is no batch to measure with.")
    if not measured_rows and not skipped:
        raise MetricError("the model has no product (linear, convolution, matmul, attention) to measure.")
    return Measurement(averaged(measured_rows), skipped, target)


def look_at_step(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, probe: Probe) -> None:
    """One forward and backward pass of a copy of `model` under `probe`; the caller keeps the random states."""
    try:
        twin = copy.deepcopy(unwrapped(model))
    except (RuntimeError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip().removesuffix(".")
        raise MetricError(f"the model cannot be copied ({reason}): keep no results of its own in it.") from error
    twin.zero_grad(set_to_none=True)
    inputs, target = split_batch(batch, loss)
    args, kwargs = call_arguments(inputs)
    with torch.enable_grad(), followed(twin, probe):
        output = twin(*args, **kwargs)
        with _loss_scope(probe):
            value = _mean_square(output) if loss is None else call_loss(loss, output, target)
        if not isinstance(value, Tensor):
            raise MetricError(f"the loss is a {type(value).__name__}, not a tensor, so that nothing can be sent back.")
        if value.requires_grad:  # inside, where checkpointed regions are made again
            value.backward()  # type: ignore[no-untyped-call]
    probe.finish()


@contextmanager
def _loss_scope(probe: Probe) -> Iterator[None]:
    """Where the loss's own products are seen, too."""
    with Scope(probe, loss_holder(probe)):
        yield


def _mean_square(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.float().square().mean()
    tensors = list(output.values()) if isinstance(output, dict) else list(output)
    return torch.stack([tensor.float().square().mean() for tensor in tensors if isinstance(tensor, Tensor)]).sum()
