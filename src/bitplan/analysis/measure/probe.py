"""Looking at every product of a training step, forward and backward, while it runs on a copy of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bitplan.analysis.measure.candidate import Planned, Tried
from bitplan.analysis.measure.figures import group_figures, needs_whole
from bitplan.analysis.measure.result import Row, row_of
from bitplan.capture.decompositions import DECOMPOSITIONS
from bitplan.capture.ops import FUSED, PRODUCTS
from bitplan.capture.scopes import Interceptor, Scope, state_of
from bitplan.compiler.torch_private import DisableTorchFunction
from bitplan.errors import MetricError, QuantizeError
from bitplan.gemm.layouts import layout_of
from bitplan.gemm.matrices import Layout, SampledOperand
from bitplan.gemm.sampling import Sampling
from bitplan.numerics.wire_format import op_site, site_path
from bitplan.plans import Plan

#: Sampled values of one side that are measured at once: what a CPU's caches hold, or on a GPU what keeps it busy.
_AT_ONCE = {True: 2**17, False: 2**21}

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
#: Operations that multiply, in a way that is not looked into.
_OTHER_PRODUCTS = {
    **dict.fromkeys(("sparse_matmul",), "one of its operands is sparse"),
    **dict.fromkeys(
        ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), "a recurrent cell of its own is not opened"
    ),
    **dict.fromkeys(("tensordot", "inner", "addbmm", "addmv", "bilinear"), "write it as matmul or einsum of two"),
}


class Probe(Interceptor):
    """An interceptor that changes nothing, and measures every product it sees."""

    def __init__(
        self,
        candidates: tuple[Tried, ...],
        sampling: Sampling,
        stage: str = "now",
        step: int = 0,
        plan: Plan | None = None,
    ) -> None:
        self.candidates = candidates
        self.sampling = sampling
        self.stage = stage
        self.step = step
        #: Whose own formats are tried as well.
        self.plan = plan
        self.rows: list[Row] = []
        self.skipped: dict[str, str] = {}
        self._met: dict[str, _Product] = {}
        #: Sampled passes by all that must be alike for them to be measured together.
        self._waiting: dict[Any, list[tuple[_Product, tuple[SampledOperand, SampledOperand]]]] = {}
        self._recurrences = _Recurrences()

    def decomposition_of(self, scope: Scope, op: str) -> Callable[..., Any] | None:
        """Fused operations are opened, for the products inside."""
        if op not in DECOMPOSITIONS or op not in FUSED:
            return None

        def opened(*args: Any, **kwargs: Any) -> Any:
            try:
                return DECOMPOSITIONS[op](*args, **kwargs)
            except QuantizeError as error:  # packed sequences, projections
                self.skipped[f"{state_of(scope.module).path}/{op}"] = str(error)
                with DisableTorchFunction():
                    return getattr(torch, op)(*args, **kwargs)

        return opened

    def on_operation(
        self, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        self.look(scope, op, index, args, kwargs, result)
        return result

    def look(self, scope: Scope, op: str, index: int, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Measure the operation if it is a product, and its gradients once they come."""
        label = site_path(state_of(scope.module).path, op_site(op, index))
        if op not in PRODUCTS:
            if op in _OTHER_PRODUCTS:
                self.skipped.setdefault(label, _OTHER_PRODUCTS[op])
            return
        if scope.inside in _RECURRENT:
            first = self._recurrences.first_of(label, args)
            if first is None:
                return
            label = first
        previous = self._met.get(label)
        if previous is not None:
            # A module's second call, or a checkpointed region made again: the first is what is looked at. Reentrant
            # checkpointing has no gradients before the second time.
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
        self._met[label] = product = _Product(self, label, op, layout, x, w, scope.inside)
        product.measure("fprop")
        product.follow(result)

    def note(self, product: _Product, pass_: str) -> None:
        with torch.no_grad(), _plain_functions():
            draw = self.sampling.draw(product.label, pass_, product.tensors["x"].device)
            pair = product.layout.operands(pass_, product.tensors, self.sampling, draw)
            if needs_whole(pass_, product.candidates):
                self._measure(pass_, product.op, product.candidates, [(product, pair)])
                return
            light = pair[0].light(), pair[1].light()
        kinds = [(operand.values.shape, operand.values.dtype, operand.values.device) for operand in light]
        self._waiting.setdefault((pass_, product.candidates, *kinds), []).append((product, light))

    def finish(self) -> None:
        """Measure all that was sampled: products whose rows have the same shapes together."""
        with torch.no_grad(), _plain_functions():
            for (pass_, candidates, kind, *_), waiting in self._waiting.items():
                most = max(1, _AT_ONCE[kind[2].type == "cpu"] // max(kind[0].numel(), 1))
                for start in range(0, len(waiting), most):
                    # No candidate that waits needs to know the operation.
                    self._measure(pass_, "", candidates, waiting[start : start + most])
        self._waiting = {}

    def _measure(
        self,
        pass_: str,
        op: str,
        candidates: tuple[Tried, ...],
        group: list[tuple[_Product, tuple[SampledOperand, SampledOperand]]],
    ) -> None:
        found = group_figures(pass_, op, [pair for _, pair in group], candidates, self.sampling.seed)
        for (product, _), (sums, figures) in zip(group, found, strict=True):
            self.rows += [
                row_of(product.label, pass_, sums, pass_figures, self.stage, self.step, product.inside)
                for pass_figures in figures
            ]


class _Recurrences:
    """Of the products that a recurrent layer makes step by step, the one in the middle: the first sees but zeros.

    An opened layer multiplies its input by a weight for all steps at once, and then its state by another at each step.
    """

    def __init__(self) -> None:
        self._steps = 1
        self._first: dict[tuple[str, int], str] = {}
        self._count: dict[str, int] = {}

    def first_of(self, label: str, args: Any) -> str | None:
        """What the product is called if it is to be looked at, which is what its weight's first one was called."""
        x, w = args[:2]
        if x.dim() == 3:
            self._steps = x.shape[0]
            return label
        name = self._first.setdefault((label.rpartition("/")[0], w.data_ptr()), label)
        self._count[name] = self._count.get(name, 0) + 1
        return name if self._count[name] == (self._steps + 1) // 2 else None


class _Product:
    """One product between its forward and its backward pass."""

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
        own = None if probe.plan is None else Planned.of(probe.plan, module, numbered, inside)
        self.candidates = probe.candidates if own is None else (*probe.candidates, own)

    def measure(self, pass_: str) -> None:
        try:
            self.probe.note(self, pass_)
        except MetricError as error:
            self.probe.skipped.setdefault(self.label, str(error))

    def follow(self, result: Any) -> None:
        """Measure the backward products when the result's gradient comes."""
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


@contextmanager
def _plain_functions() -> Any:
    with DisableTorchFunction():
        yield
