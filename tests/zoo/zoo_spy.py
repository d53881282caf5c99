"""An independent look at the operands of products, below autograd.

:class:`ProductSpy` is a ``TorchDispatchMode``: it sees every aten product of a step, forward and backward, with the
values that are multiplied. Whether they lie on a format's grid is decided here by torch's own float8 casts and by
counting levels; no rounding code of bitplan takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "ConstantSpy",
    "IntegerProducts",
    "OffGrid",
    "ProductSpy",
    "SoftmaxSpy",
    "is_on_float_grid",
    "is_on_integer_grid",
]

aten = torch.ops.aten

#: Products and the positions of their operands.
PRODUCTS: dict[Any, tuple[int, ...]] = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.mv: (0, 1),
    aten.dot: (0, 1),
    aten.addmm: (1, 2),
    aten.addmv: (1, 2),
    aten.addbmm: (1, 2),
    aten.baddbmm: (1, 2),
    aten._grouped_mm: (0, 1),
    aten.convolution: (0, 1),
    aten.convolution_backward: (0, 1, 2),
}
#: Copies that torch makes by itself, of a transposed input that a linear layer flattens for instance.
COPIES = {aten.clone, aten._unsafe_view}
#: Operations that multiply inside, where nothing can be rounded.
FUSED = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_fused_attention_overrideable,
    aten.mkldnn_rnn_layer,
    aten.mkldnn_rnn_layer_backward,
}


def is_on_float_grid(x: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> bool:
    """Whether all values are values of `dtype`, a float8 type of torch, times one scale.

    :param power_of_two: the scale is a power of two, and the answer exact. Otherwise any scale will do, and values may
        be off by a few units in the last place of float32.
    """
    values = x.detach().double().flatten().unique()
    values = values[values != 0]
    if len(values) == 0:
        return True
    if not values.isfinite().all():
        return False
    amax = values.abs().max()
    if power_of_two:
        # The largest magnitude lies in one of the type's binades.
        top = torch.frexp(torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)).exponent
        lowest = torch.frexp(torch.tensor(torch.finfo(dtype).smallest_normal, dtype=torch.float64)).exponent - 3
        binade = torch.frexp(amax).exponent
        return any(
            _is_exact(torch.ldexp(values, torch.tensor(exponent) - binade), dtype)
            for exponent in range(int(top), int(lowest) - 1, -1)
        )
    return any(_is_close(values * (value / amax), dtype) for value in _positive_values(dtype).flip(0))


def _is_exact(values: Tensor, dtype: torch.dtype) -> bool:
    return bool((values.float().to(dtype).double() == values).all())


def _is_close(values: Tensor, dtype: torch.dtype) -> bool:
    nearest = values.float().to(dtype).double()
    return bool(((values - nearest).abs() <= 1e-5 * values.abs().clamp(min=1e-9)).all())


def _positive_values(dtype: torch.dtype) -> Tensor:
    codes = torch.arange(1, 128, dtype=torch.uint8).view(dtype).double()
    return codes[codes.isfinite()].sort().values


def is_on_integer_grid(x: Tensor, levels: int = 256) -> bool:
    """Whether all values are equidistant levels, at most `levels` of them: per tensor, or per row of one axis."""
    if not x.isfinite().all():
        return False
    return _is_equidistant(x.double().flatten(), levels) or any(
        all(_is_equidistant(row.double().flatten(), levels) for row in x.unbind(axis))
        for axis in range(x.dim())
        if x.dim() > 1
    )


def _is_equidistant(values: Tensor, levels: int) -> bool:
    # Sums of several roundings differ in the last bit of float32: these are one level.
    values = values.unique()
    span = values[-1] - values[0] if len(values) else torch.zeros(())
    if span == 0:
        return True
    steps = torch.arange(1, levels, dtype=torch.float64)[:, None]
    places = (values - values[0]) / span * steps
    error = (places - places.round()).abs().amax(dim=1)
    precision = 2.0**-21 * values.abs().max() / span * steps[:, 0]
    return bool((error <= precision.clamp(min=1e-4, max=0.02)).any())


@dataclass(frozen=True)
class OffGrid:
    """A product whose operand was not rounded."""

    op: str
    backward: bool
    module: str
    operand: str
    shape: tuple[int, ...]
    finite: bool

    def __str__(self) -> str:
        where = "backward" if self.backward else f"forward of {self.module or 'the model'}"
        what = "is off the grid" if self.finite else "is not finite"
        return f"{self.op} in {where}: {self.operand} {[*self.shape]} {what}"


class ProductSpy(TorchDispatchMode):
    """Collects the products of a step with an operand that is off the grid.

    Products of constants (positions by inverse frequencies, for instance) are left out: a product counts if one of its
    operands depends on a parameter or on a floating-point input of the model.

    :param model: its parameters, and modules for reports.
    :param inputs: the batch.
    :param is_on_grid: of a tensor, and whether the product is one of the backward pass.
    :param inputs_are_rounded: the plan rounds operands, and therefore inputs of the model too; otherwise it rounds
        results of operations, and an operand that is an input of the model is left out.
    :param reports_fused: report fused operations too, whose products nothing can have rounded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Any,
        is_on_grid: Callable[[Tensor, bool], bool],
        *,
        inputs_are_rounded: bool,
        reports_fused: bool,
        checks_backward: bool = True,
    ) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._inside: list[str] = []
        self._is_on_grid = is_on_grid
        self._inputs_are_rounded = inputs_are_rounded
        self._reports_fused = reports_fused
        self._checks_backward = checks_backward
        floats = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self._inputs = {_storage(tensor) for tensor in floats}
        self._dependent = self._inputs | {_storage(parameter) for parameter in model.parameters()}
        # Storages are told apart by their addresses, which must not be used again within the step.
        self._alive: list[Tensor] = []
        self.backward = False
        self.products = 0
        self.off_grid: list[OffGrid] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> ProductSpy:
        modules = torch.nn.modules.module
        self._hooks = [
            modules.register_module_forward_pre_hook(self._enter_module),
            modules.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        self._inside.append(self._names.get(module, ""))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in PRODUCTS:
            self._look(packet, _operands(packet, args))
        elif packet in FUSED and self._reports_fused:
            self.products += 1
            self._report(packet, "its products", args[0])
        result = func(*args, **(kwargs or {}))
        self._follow(packet, args, kwargs, result)
        return result

    def _follow(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Floats that are computed from a dependent tensor are dependent."""
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._alive.extend(results)
        sources = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if any(_storage(tensor) in self._dependent for tensor in sources):
            numbers = (tensor for tensor in results if tensor.is_floating_point() or tensor.is_complex())
            self._dependent.update(_storage(tensor) for tensor in numbers)
        if packet in COPIES and _storage(args[0]) in self._inputs:
            self._inputs.update(_storage(tensor) for tensor in results)

    def _look(self, packet: Any, operands: list[tuple[str, Tensor]]) -> None:
        if self.backward and not self._checks_backward:
            return
        if not self.backward and not any(_storage(tensor) in self._dependent for _, tensor in operands):
            return
        self.products += 1
        for name, tensor in operands:
            if tensor.numel() == 0 or (not self._inputs_are_rounded and self._is_exempt(tensor)):
                continue
            if not self._is_on_grid(tensor, self.backward):
                self._report(packet, name, tensor)

    def _is_exempt(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage in self._inputs or (not self.backward and storage not in self._dependent)

    def _report(self, packet: Any, operand: str, tensor: Tensor) -> None:
        module = self._inside[-1] if self._inside else ""
        finite = bool(tensor.isfinite().all())
        name = packet.__name__
        self.off_grid.append(OffGrid(name, self.backward, module, operand, tuple(tensor.shape), finite))


def _operands(packet: Any, args: Sequence[Any]) -> list[tuple[str, Tensor]]:
    if packet is aten.convolution_backward:
        dgrad, wgrad, _ = args[10]
        used = [("dy", args[0])] + [("x", args[1])] * wgrad + [("w", args[2])] * dgrad
        return used if dgrad or wgrad else []
    names = ("left operand", "right operand")
    return [(name, args[place]) for name, place in zip(names, PRODUCTS[packet], strict=True)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class SoftmaxSpy(TorchDispatchMode):
    """Collects softmax results with queries and keys in the last two dimensions: attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten._softmax, aten._safe_softmax) and result.dim() >= 3:
            self.weights.append(result.detach().clone())
        return result


class ConstantSpy(TorchDispatchMode):
    """Collects what must not depend on a plan: indices of embeddings, and angles of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        place = {aten.embedding: 1, aten.cos: 0, aten.sin: 0}.get(func.overloadpacket)
        if place is not None:
            self.constants.append((func.overloadpacket.__name__, args[place].detach().clone()))
        return func(*args, **(kwargs or {}))


class IntegerProducts(TorchDispatchMode):
    """Counts products of integer matrix units."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is aten._int_mm
        return func(*args, **(kwargs or {}))
