"""Operands of a product as rows of matrices, sampled for measurement.

:func:`layout_of` gives the layout of a call: linear layers, ``matmul`` and einsums of two tensors are products of
matrices (:class:`Matrices`). A convolution is one, too, of which only the sampled rows are unfolded
(:class:`Convolution`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bitplan.errors import MetricError, QuantizeError
from bitplan.gemm.products import product_of
from bitplan.gemm.sampling import Draw, Sampling
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans.match import PASSES


def layout_of(op: str, args: Any, kwargs: dict[str, Any], x: Tensor, w: Tensor) -> Layout:
    """The layout of a product's call; :class:`MetricError` if it is not supported."""
    if op == "linear":
        return linear_layout()
    if op == "einsum":
        return einsum_layout(args[0], x, w)
    if not op.startswith("conv"):
        return matmul_layout(x, w)
    try:
        product, _ = product_of(op, args, kwargs)
    except QuantizeError as error:
        raise MetricError(str(error)) from error
    return Convolution(*product.settings)


#: From an operand, or a rounded copy of it, to its sampled rows: (matrices, rows, terms).
Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SampledOperand:
    """Sampled rows of an operand, with the amax of their scales."""

    slot: str
    #: The whole tensor.
    whole: Tensor
    gather: Gather
    #: The amax of each sampled row's scale group: (matrices, rows, 1).
    vector_amax: Tensor
    #: The amax of the whole tensor.
    tensor_amax: Tensor
    #: Terms of the sum before sampling.
    length: int
    #: Elements of the whole tensor.
    elements: int

    @cached_property
    def values(self) -> Tensor:
        return self.gather(self.whole)

    def light(self) -> SampledOperand:
        """The same without the whole tensor, so that it can be released."""
        return replace(self, whole=self.values, gather=lambda tensor: tensor)


class Layout(Protocol):
    """The rows of both operands of a product, for each pass."""

    def operands(
        self, pass_: str, tensors: dict[str, Tensor], sampling: Sampling, draw: Draw
    ) -> tuple[SampledOperand, SampledOperand]: ...


def amax(x: Tensor, *dims: int) -> Tensor:
    """The largest magnitude, along some dimensions (which are kept) or of all."""
    if not x.numel():
        return x.new_zeros(())
    if dims:
        return torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True))
    low, high = torch.aminmax(x)
    return torch.maximum(high, -low)


View = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Matrices:
    """y = x w as (batch, M, K) times (batch, K, N)."""

    x: View
    w: View
    #: dy, in the shape (batch, M, N).
    dy: View

    def operands(
        self, pass_: str, tensors: dict[str, Tensor], sampling: Sampling, draw: Draw
    ) -> tuple[SampledOperand, SampledOperand]:
        def transposed(view: View) -> View:
            return lambda tensor: view(tensor).transpose(1, 2)

        views = {
            "fprop": (self.x, transposed(self.w)),
            "dgrad": (self.dy, self.w),
            "wgrad": (transposed(self.dy), transposed(self.x)),
        }
        left, right = views[pass_]
        slots = PASSES[pass_]
        wholes = [tensors[OPERAND_OF_SLOT[slot].tensor] for slot in slots]
        shapes = [view(whole).shape for view, whole in zip((left, right), wholes, strict=True)]
        (matrices, rows, length), columns = shapes[0], shapes[1][1]
        if shapes[1] != (matrices, columns, length):
            raise MetricError(f"its operands have shapes that do not fit together: {list(map(tuple, shapes))}")
        counts = sampling.sizes(matrices, rows, columns)
        batch = draw.indices(counts[0], matrices)
        terms = None if length <= sampling.terms else draw.indices(sampling.terms, length)
        left_rows, right_rows = draw.indices(counts[1], rows), draw.indices(counts[2], columns)
        return (
            _matrix_operand(slots[0], wholes[0], left, batch, left_rows, terms, length),
            _matrix_operand(slots[1], wholes[1], right, batch, right_rows, terms, length),
        )


def _matrix_operand(
    slot: str, whole: Tensor, view: View, batch: Tensor, rows: Tensor, terms: Tensor | None, length: int
) -> SampledOperand:
    def whole_rows(tensor: Tensor) -> Tensor:
        return view(tensor)[batch[:, None], rows[None, :]]

    def gather(tensor: Tensor) -> Tensor:
        return _select_terms(whole_rows(tensor), terms)

    return SampledOperand(slot, whole, gather, amax(whole_rows(whole), -1), amax(whole), length, whole.numel())


def linear_layout() -> Matrices:
    return Matrices(_flat, lambda w: w.t()[None], _flat)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, -1, tensor.shape[-1])


def matmul_layout(x: Tensor, w: Tensor) -> Matrices:
    def rows(tensor: Tensor) -> Tensor:  # a vector on the left is a row
        return tensor[None] if x.dim() == 1 else tensor

    if w.dim() <= 2:

        def flat_dy(dy: Tensor) -> Tensor:
            return dy.reshape(1, -1, w.shape[-1] if w.dim() == 2 else 1)

        return Matrices(lambda x: _flat(rows(x)), lambda w: (w if w.dim() == 2 else w[:, None])[None], flat_dy)
    batch = torch.broadcast_shapes(x.shape[:-2], w.shape[:-2])  # type: ignore[no-untyped-call]

    def broadcast(tensor: Tensor) -> Tensor:
        return tensor.expand(*batch, *tensor.shape[-2:]).reshape(-1, *tensor.shape[-2:])

    def batched_dy(dy: Tensor) -> Tensor:
        return broadcast(dy.unsqueeze(-2) if x.dim() == 1 else dy)

    return Matrices(lambda x: broadcast(rows(x)), broadcast, batched_dy)


def einsum_layout(equation: Any, x: Tensor, w: Tensor) -> Matrices:
    """An einsum of two tensors as a product of matrices: each index is a batch, row, column or summed index."""
    if not isinstance(equation, str) or "." in equation:
        raise MetricError("its equation is not a text of single letters")
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    if not arrow:
        out = "".join(letter for letter in sorted(left + right) if (left + right).count(letter) == 1)
    sizes = {**dict(zip(left, x.shape, strict=True)), **dict(zip(right, w.shape, strict=True))}
    shared = [letter for letter in left if letter in right]
    batch = [letter for letter in shared if letter in out]
    summed = [letter for letter in shared if letter not in out]
    rows = [letter for letter in left if letter not in right]
    columns = [letter for letter in right if letter not in left]
    has_diagonal = any(len(set(term)) != len(term) for term in (left, right))
    if has_diagonal or any(letter not in out for letter in (*rows, *columns)):
        raise MetricError("it takes a diagonal, or sums one operand alone")

    def view(term: str, *groups: list[str]) -> View:
        order = [term.index(letter) for group in groups for letter in group]
        shape = [math.prod(sizes[letter] for letter in group) for group in groups]
        return lambda tensor: tensor.permute(order).reshape(shape)

    return Matrices(
        view(left, batch, rows, summed), view(right, batch, summed, columns), view(out, batch, rows, columns)
    )


# --- Convolutions


@dataclass(frozen=True)
class Convolution:
    """A convolution with the settings of ``torch.convolution``, in their order.

    For a plain convolution, *a* is the input and *b* the output: each element of b is a sum over a patch of a, each
    element of a's gradient a sum over the positions of b that it contributes to, and each element of the weight
    gradient a sum over all positions of all samples. For a transposed convolution b is the input and a the output.
    """

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def operands(
        self, pass_: str, tensors: dict[str, Tensor], sampling: Sampling, draw: Draw
    ) -> tuple[SampledOperand, SampledOperand]:
        w = tensors["w"]
        grids = {name: _Grid(tensors[name], w.dim()) for name in ("x", "dy") if name in tensors}
        if pass_ == "wgrad":
            b, a = (grids["x"], grids["dy"]) if self.transposed else (grids["dy"], grids["x"])
            rows_b, rows_a, length = self._weight_gradient_rows(w, b, a, sampling, draw)
            left, right = (rows_a, rows_b) if self.transposed else (rows_b, rows_a)
        else:
            # fprop of a plain convolution sums over patches of a, and so does dgrad of a transposed one.
            over_patches = (pass_ == "fprop") != self.transposed
            data = grids["x" if pass_ == "fprop" else "dy"]
            input_size, kernel = grids["x"].size, tuple(w.shape[2:])
            size = input_size if pass_ == "dgrad" else self._output_size(input_size, kernel)
            left, right, length = self._image_rows(w, data, size, over_patches, sampling, draw)
        operands = [
            SampledOperand(slot, whole, rows.gather, rows.vector_amax, rows.tensor_amax, length, whole.numel())
            for slot, rows in zip(PASSES[pass_], (left, right), strict=True)
            for whole in (tensors[OPERAND_OF_SLOT[slot].tensor],)
        ]
        return operands[0], operands[1]

    def _image_rows(
        self, w: Tensor, data: _Grid, image_size: tuple[int, ...], over_patches: bool, sampling: Sampling, draw: Draw
    ) -> tuple[_Rows, _Rows, int]:
        """Rows of images (or their gradient) and of weights, whose products are elements of images of `image_size`."""
        offsets = _offsets(tuple(w.shape[2:]), w.device)
        channels_a, channels_b = w.shape[1], w.shape[0] // self.groups  # in a group
        depth, columns = (channels_a, channels_b) if over_patches else (channels_b, channels_a)
        length, area = depth * len(offsets), math.prod(image_size)
        counts = sampling.sizes(self.groups, data.samples * area, columns)
        groups = draw.indices(counts[0], self.groups)
        elements, weight_rows = draw.indices(counts[1], data.samples * area), draw.indices(counts[2], columns)
        terms = None if length <= sampling.terms else draw.indices(sampling.terms, length)
        sample = elements // area
        positions = _coordinates(elements % area, image_size)
        index, is_inside = self._neighbours(positions, offsets, data.size, not over_patches)
        channels = groups[:, None] * depth + torch.arange(depth, device=w.device)

        def gather_data(tensor: Tensor) -> Tensor:
            flat = _batched(tensor, w.dim()).flatten(2)
            patches = flat[sample[None, :, None, None], channels[:, None, :, None], index[None, :, None, :]]
            return _select_terms(torch.where(is_inside[None, :, None, :], patches, 0.0).flatten(2), terms)

        def whole_weights(tensor: Tensor) -> Tensor:
            # group, channel of b, channel of a, offset
            grouped: Tensor = tensor.reshape(self.groups, -1, *tensor.shape[1:])[groups].flatten(3)
            rows = grouped[:, weight_rows] if over_patches else grouped[:, :, weight_rows].transpose(1, 2)
            return rows.flatten(2)

        if over_patches:
            weight_amax = amax(whole_weights(w), -1)
        else:  # one scale for a channel of a in all groups, as in plans
            weight_amax = amax(w.transpose(0, 1).flatten(1), -1)[weight_rows][None].expand(len(groups), -1, 1)
        data_amax = data.channel_amax.amax(1)[sample][None, :, None].expand(len(groups), -1, 1)
        return (
            _Rows(gather_data, data_amax, data.channel_amax.amax()),
            _Rows(lambda tensor: _select_terms(whole_weights(tensor), terms), weight_amax, amax(w)),
            length,
        )

    def _weight_gradient_rows(
        self, w: Tensor, b: _Grid, a: _Grid, sampling: Sampling, draw: Draw
    ) -> tuple[_Rows, _Rows, int]:
        """Rows of b and of a, whose products are elements of the weight gradient."""
        kernel = _offsets(tuple(w.shape[2:]), w.device)
        area, per_group, pairs = math.prod(b.size), w.shape[0] // self.groups, w.shape[1] * len(kernel)
        counts = sampling.sizes(self.groups, per_group, pairs)
        groups = draw.indices(counts[0], self.groups)
        from_b, from_a = draw.indices(counts[1], per_group), draw.indices(counts[2], pairs)
        terms = draw.indices(sampling.terms, b.samples * area)
        sample, flat = terms // area, terms % area
        offsets = kernel[from_a % len(kernel)]
        index, is_inside = self._neighbours(_coordinates(flat, b.size), offsets, a.size, False)
        channels_b = groups[:, None] * per_group + from_b
        channels_a = groups[:, None] * w.shape[1] + from_a // len(kernel)

        def gather_b(tensor: Tensor) -> Tensor:
            images = _batched(tensor, w.dim()).flatten(2)
            return images[sample[None, None, :], channels_b[:, :, None], flat[None, None, :]]

        def gather_a(tensor: Tensor) -> Tensor:
            images = _batched(tensor, w.dim()).flatten(2)
            values = images[sample[None, None, :], channels_a[:, :, None], index.t()[None]]
            return torch.where(is_inside.t()[None], values, 0.0)

        rows_b = _Rows(gather_b, b.channel_amax.amax(0)[channels_b][..., None], b.channel_amax.amax())
        rows_a = _Rows(gather_a, a.channel_amax.amax(0)[channels_a][..., None], a.channel_amax.amax())
        return rows_b, rows_a, b.samples * area

    def _neighbours(
        self, positions: Tensor, offsets: Tensor, size: tuple[int, ...], is_backward: bool
    ) -> tuple[Tensor, Tensor]:
        """Flat positions (rows, offsets) that an element of b is computed from or, backward, that one of a contributes
        to; and whether each is inside the image."""
        device = positions.device
        stride, padding, dilation = (
            torch.tensor(setting, device=device) for setting in (self.stride, self.padding, self.dilation)
        )
        start, shift = positions[:, None, :], offsets[None, :, :] * dilation
        if is_backward:
            shifted = start + padding - shift
            is_inside = (shifted % stride == 0).all(-1)
            shifted = shifted.div(stride, rounding_mode="floor")
        else:
            shifted = start * stride + shift - padding
            is_inside = torch.ones(shifted.shape[:2], dtype=torch.bool, device=device)
        is_inside &= ((shifted >= 0) & (shifted < torch.tensor(size, device=device))).all(-1)
        flat = torch.zeros(shifted.shape[:2], dtype=torch.long, device=device)
        for axis, length in enumerate(size):
            flat = flat * length + shifted[..., axis].clamp(0, length - 1)
        return flat, is_inside

    def _output_size(self, input_size: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
        output_size = []
        for axis, (size, width) in enumerate(zip(input_size, kernel, strict=True)):
            span, pad, stride = self.dilation[axis] * (width - 1) + 1, self.padding[axis], self.stride[axis]
            if self.transposed:
                output_size.append((size - 1) * stride - 2 * pad + span + self.output_padding[axis])
            else:
                output_size.append((size + 2 * pad - span) // stride + 1)
        return tuple(output_size)


class _Rows(NamedTuple):
    """The function that gathers rows of a tensor, and the amax of their scales."""

    gather: Gather
    vector_amax: Tensor
    tensor_amax: Tensor


class _Grid:
    """Images or their gradient: (samples, channels, ...)."""

    def __init__(self, tensor: Tensor, dims: int) -> None:
        self.tensor = _batched(tensor, dims)
        self.samples = self.tensor.shape[0]
        self.size = tuple(self.tensor.shape[2:])

    @cached_property
    def channel_amax(self) -> Tensor:
        """The amax of each channel of each sample."""
        return amax(self.tensor.flatten(2), -1)[..., 0]


def _batched(tensor: Tensor, dims: int) -> Tensor:
    """An unbatched image as a batch of one."""
    return tensor[None] if tensor.dim() == dims - 1 else tensor


def _offsets(kernel: tuple[int, ...], device: torch.device) -> Tensor:
    """All positions in a kernel: (count, dimensions)."""
    return _coordinates(torch.arange(math.prod(kernel), device=device), kernel)


def _coordinates(flat: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.stack(torch.unravel_index(flat, sizes), -1)


def _select_terms(rows: Tensor, terms: Tensor | None) -> Tensor:
    return rows if terms is None else rows[..., terms]
