"""Measures every product of a training step, forward and backward, while it runs on a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitplan.analysis.measure.candidate import FormatPair, Planned
from bitplan.analysis.measure.pass_metrics import Metric, measure_products, needs_whole_operands
from bitplan.analysis.measure.result import Row, make_row
from bitplan.capture.decompositions import DECOMPOSITIONS
from bitplan.capture.ops import FUSED, PRODUCTS
from bitplan.capture.scopes import Interceptor, Scope, state_of
from bitplan.compiler.torch_private import DisableTorchFunction
from bitplan.errors import MetricError, QuantizeError
from bitplan.gemm.layouts import Layout, SampledOperand, layout_of
from bitplan.gemm.macs import RECURRENT
from bitplan.gemm.sampling import Sampling
from bitplan.numerics.wire_format import op_site, site_path
from bitplan.plans import Plan

#: Sampled values of an operand that are measured at once, by whether the device is a CPU: what fits into its caches, or
#: enough to keep a GPU busy.
_GROUP_VALUES = {True: 2**17, False: 2**21}

#: Products that are not measured -> why.
_OTHER_PRODUCTS = {
    **dict.fromkeys(("sparse_matmul",), "one of its operands is sparse"),
    **dict.fromkeys(
        ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), "single recurrent cells are not decomposed"
    ),
    **dict.fromkeys(("tensordot", "inner", "addbmm", "addmv", "bilinear"), "write it as matmul or einsum of two"),
}


class Probe(Interceptor):
    """An interceptor that changes nothing and measures every product."""

    def __init__(
        self,
        candidates: tuple[FormatPair, ...],
        sampling: Sampling,
        stage: str = "now",
        step: int = 0,
        plan: Plan | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.candidates = candidates
        self.metrics = metrics
        self.sampling = sampling
        self.stage = stage
        self.step = step
        #: The plan whose formats are measured as another candidate.
        self.plan = plan
        self.rows: list[Row] = []
        self.skipped: dict[str, str] = {}
        self._products: dict[str, _Product] = {}
        #: Sampled passes, by the properties that passes measured together must share.
        self._pending: dict[Any, list[tuple[_Product, tuple[SampledOperand, SampledOperand]]]] = {}
        self._recurrences = _Recurrences()

    def decomposition_of(self, scope: Scope, op: str) -> Callable[..., Any] | None:
        """Fused operations are decomposed, to measure the products inside."""
        if op not in DECOMPOSITIONS or op not in FUSED:
            return None

        def decomposed(*args: Any, **kwargs: Any) -> Any:
            try:
                return DECOMPOSITIONS[op](*args, **kwargs)
            except QuantizeError as error:  # packed sequences, projections
                self.skipped[f"{state_of(scope.module).path}/{op}"] = str(error)
                with DisableTorchFunction():
                    return getattr(torch, op)(*args, **kwargs)

        return decomposed

    def on_operation(
        self, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        self._measure_operation(scope, op, index, args, kwargs, result)
        return result

    def _measure_operation(
        self, scope: Scope, op: str, index: int, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Measure the operation if it is a product, and its backward products when the gradient arrives."""
        label = site_path(state_of(scope.module).path, op_site(op, index))
        if op not in PRODUCTS:
            if op in _OTHER_PRODUCTS:
                self.skipped.setdefault(label, _OTHER_PRODUCTS[op])
            return
        if scope.inside in RECURRENT:
            selected = self._recurrences.select(label, args)
            if selected is None:
                return
            label = selected
        previous = self._products.get(label)
        if previous is not None:
            # Another call of the module, or recomputation of a checkpointed region: only the first call is measured.
            # With reentrant checkpointing only the recomputed region has gradients.
            previous.follow(result)
            return
        if op == "einsum" and len(args) != 3:
            if len(args) > 3:
                self.skipped.setdefault(label, "it is a product of more than two tensors")
            return
        (x_at, x_name), (w_at, w_name) = PRODUCTS[op]
        x = args[x_at] if len(args) > x_at else kwargs[x_name]
        w = args[w_at] if len(args) > w_at else kwargs[w_name]
        if x.layout != torch.strided or w.layout != torch.strided:
            self.skipped.setdefault(label, "one of its operands is sparse")
            return
        try:
            layout = layout_of(op, args, kwargs, x, w)
        except MetricError as error:
            self.skipped.setdefault(label, str(error))
            return
        self._products[label] = product = _Product(self, label, op, layout, x, w, scope.inside)
        product.measure("fprop")
        product.follow(result)

    def add_pass(self, product: _Product, pass_: str) -> None:
        with torch.no_grad(), DisableTorchFunction():
            draw = self.sampling.draw(product.label, pass_, product.tensors["x"].device)
            pair = product.layout.operands(pass_, product.tensors, self.sampling, draw)
            if needs_whole_operands(pass_, product.candidates):
                self._measure(pass_, product.op, product.candidates, [(product, pair)])
                return
            sampled = pair[0].light(), pair[1].light()
        properties = [(operand.values.shape, operand.values.dtype, operand.values.device) for operand in sampled]
        self._pending.setdefault((pass_, product.candidates, *properties), []).append((product, sampled))

    def finish(self) -> None:
        """Measure all sampled passes, together where their rows have the same shapes."""
        with torch.no_grad(), DisableTorchFunction():
            for (pass_, candidates, (shape, _, device), _), pending in self._pending.items():
                size = max(1, _GROUP_VALUES[device.type == "cpu"] // max(shape.numel(), 1))
                for start in range(0, len(pending), size):
                    # Candidates of sampled passes do not depend on the operation.
                    self._measure(pass_, "", candidates, pending[start : start + size])
        self._pending = {}

    def _measure(
        self,
        pass_: str,
        op: str,
        candidates: tuple[FormatPair, ...],
        group: list[tuple[_Product, tuple[SampledOperand, SampledOperand]]],
    ) -> None:
        results = measure_products(pass_, op, [pair for _, pair in group], candidates, self.sampling.seed, self.metrics)
        for (product, _), (reduction, metrics) in zip(group, results, strict=True):
            self.rows += [
                make_row(product.label, pass_, reduction, pass_metrics, self.stage, self.step, product.inside)
                for pass_metrics in metrics
            ]


class _Recurrences:
    """Selects the middle one of the products that a recurrent layer computes step by step: the first sees only zeros.

    A decomposed layer multiplies its input by a weight for all steps at once, and its state by another in each step.
    """

    def __init__(self) -> None:
        self._steps = 1
        self._first: dict[tuple[str, int], str] = {}
        self._count: dict[str, int] = {}

    def select(self, label: str, args: Any) -> str | None:
        """The label for the product if it is to be measured: that of the first product with its weight."""
        x, w = args[:2]
        if x.dim() == 3:
            self._steps = x.shape[0]
            return label
        name = self._first.setdefault((label.rpartition("/")[0], w.data_ptr()), label)
        self._count[name] = self._count.get(name, 0) + 1
        return name if self._count[name] == (self._steps + 1) // 2 else None


class _Product:
    """A product between its forward and its backward pass."""

    def __init__(
        self, probe: Probe, label: str, op: str, layout: Layout, x: Tensor, w: Tensor, inside: str | None
    ) -> None:
        self.probe = probe
        self.label = label
        self.op = op
        self.layout = layout
        self.inside = inside
        self.needs = {"dgrad": x.requires_grad, "wgrad": w.requires_grad}
        self.tensors = {"x": x.detach(), "w": w.detach()}
        self._is_followed = False
        module, _, numbered = label.rpartition("/")
        planned = None if probe.plan is None else Planned.of(probe.plan, module, numbered, inside)
        self.candidates = probe.candidates if planned is None else (*probe.candidates, planned)

    def measure(self, pass_: str) -> None:
        try:
            self.probe.add_pass(self, pass_)
        except MetricError as error:
            self.probe.skipped.setdefault(self.label, str(error))

    def follow(self, result: Any) -> None:
        """Measure the backward products when the gradient of the result arrives."""
        if self._is_followed or not isinstance(result, Tensor) or not result.requires_grad:
            return
        self._is_followed = True
        result.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, dy: Tensor) -> None:
        self.tensors["dy"] = dy.detach()
        for pass_, is_needed in self.needs.items():
            if is_needed:
                self.measure(pass_)
        self.tensors = {}
