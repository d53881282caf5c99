"""Damage of rounding, to first order: what the rounding error of a tensor would do to the loss.

With error e and gradient g of an activation, the loss changes by the sum of e g to first order. Rounding errors of
different values are nearly independent and have no preferred sign, so the expected square of that change is the sum of
e^2 g^2. It adds up over tensors, which makes it a cost in a knapsack. All tensors and formats are scored in one forward
and one backward pass, without rounding anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bitplan.analysis.memory.fakes import copy_without_plan
from bitplan.analysis.targets import Target
from bitplan.capture.planned_classes import followed
from bitplan.capture.recording import call_arguments, call_loss, split_batch
from bitplan.capture.scopes import Interceptor, Scope, state_of
from bitplan.compiler.torch_private import tree_leaves, tree_map_only
from bitplan.numerics.quantizer import Quantizer
from bitplan.numerics.wire_format import op_site
from bitplan.planners.auto.groups import SiteKey

#: The gradient of a sample hardly depends on how many others there are, and the pass keeps every activation in memory.
_MOST_SAMPLES = 8

#: Site -> name of a quantizer -> expected squared change of the loss.
Damage = dict[SiteKey, dict[str, float]]


class _Probe(Interceptor):
    """Adds up e^2 g^2 of the results of chosen operations."""

    tags_constants = True

    def __init__(self, sites: frozenset[SiteKey], quantizers: Mapping[str, Quantizer]) -> None:
        self.sites = sites
        self.quantizers = quantizers
        self.sums: dict[SiteKey, dict[str, Tensor]] = {}

    def on_operation(
        self, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        site = SiteKey(state_of(scope.module).path, op_site(op, index))
        if site in self.sites and isinstance(result, Tensor) and result.requires_grad:
            values = result.detach()
            result.register_hook(lambda gradient: self._add(site, values, gradient))  # type: ignore[no-untyped-call]
        return result

    def _add(self, site: SiteKey, values: Tensor, gradient: Tensor) -> None:
        sums = self.sums.setdefault(site, {})
        for name, quantizer in self.quantizers.items():
            change = (quantizer.quantize(values) - values).float() * gradient.float()
            sums[name] = sums.get(name, torch.zeros((), device=values.device)) + change.square().sum()


def measure_damage(
    target: Target,
    sites: frozenset[SiteKey],
    quantizers: Mapping[str, Quantizer],
    autocast: torch.dtype | None = None,
) -> Damage:
    """The damage of each quantizer at each site, on a copy of the model and a few samples of its batch.

    Scores that are not finite are infinite: such a tensor is rounded last.
    """
    replica = copy_without_plan(target.model)
    probe = _Probe(sites, quantizers)
    inputs, expected = split_batch(_few_samples(target.batch), target.loss)
    args, kwargs = call_arguments(inputs)
    device = next(replica.parameters(), torch.empty(0)).device
    with torch.random.fork_rng(range(torch.cuda.device_count())), followed(replica, probe):
        with torch.autocast(device.type, autocast) if autocast else nullcontext():
            output = replica(*args, **kwargs)
            loss = output if target.loss is None else call_loss(target.loss, output, expected)
        (loss if loss.dim() == 0 else loss.float().square().mean()).backward()
    replica.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # trials may run in other processes
    return {site: {name: _finite(total) for name, total in sums.items()} for site, sums in probe.sums.items()}


def _finite(total: Tensor) -> float:
    value = float(total)
    return value if value < float("inf") else float("inf")  # NaN compares as False


def _few_samples(batch: Any) -> Any:
    """The first samples of a batch, where all of its tensors have one sample in each row."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    rows = {tensor.shape[0] if tensor.dim() and tensor.layout == torch.strided else 0 for tensor in tensors}
    if len(rows) != 1 or rows.pop() <= _MOST_SAMPLES:
        return batch  # nodes and edges of a graph, for example, are no samples
    return tree_map_only(Tensor, lambda tensor: tensor[:_MOST_SAMPLES], batch)
