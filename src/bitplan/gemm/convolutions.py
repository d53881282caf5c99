"""Convolutions as the products of matrices that they are, without ever unfolding more than a few rows.

Of a plain convolution call its input *a*, its output *b*: each element of b is a sum over a patch of a, each element
of a's gradient one over the places of b that it went into, each element of the weight's gradient one over all places of
all samples. A transposed convolution is the same with x for b and y for a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.gemm.matrices import Gather, SampledOperand, largest
from bitplan.gemm.sampling import Draw, Sampling
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans.match import PASSES


@dataclass(frozen=True)
class Convolution:
    """The settings of ``torch.convolution``, in its order."""

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
            of_b, of_a, length = self._of_gradient(w, b, a, sampling, draw)
            left, right = (of_a, of_b) if self.transposed else (of_b, of_a)
        else:
            # fprop of a plain convolution sums over patches of a, and so does dgrad of a transposed one.
            over_patches = (pass_ == "fprop") != self.transposed
            data = grids["x" if pass_ == "fprop" else "dy"]
            of_x, kernel = grids["x"].places, tuple(w.shape[2:])
            places = of_x if pass_ == "dgrad" else self._places_of_y(of_x, kernel)
            left, right, length = self._of_images(w, data, places, over_patches, sampling, draw)
        found = [
            SampledOperand(slot, whole, rows.gather, rows.vector_amax, rows.tensor_amax, length, whole.numel())
            for slot, rows in zip(PASSES[pass_], (left, right), strict=True)
            for whole in (tensors[OPERAND_OF_SLOT[slot].tensor],)
        ]
        return found[0], found[1]

    def _of_images(
        self, w: Tensor, data: _Grid, places: tuple[int, ...], over_patches: bool, sampling: Sampling, draw: Draw
    ) -> tuple[_Rows, _Rows, int]:
        """Rows of images (or of their gradient) and of weights whose products are elements at `places`."""
        offsets = _offsets(tuple(w.shape[2:]), w.device)
        of_a, of_b = w.shape[1], w.shape[0] // self.groups  # channels in a group
        size, columns = (of_a, of_b) if over_patches else (of_b, of_a)
        length, area = size * len(offsets), math.prod(places)
        counts = sampling.sizes(self.groups, data.samples * area, columns)
        groups = draw.some(counts[0], self.groups)
        chosen, wanted = draw.some(counts[1], data.samples * area), draw.some(counts[2], columns)
        terms = None if length <= sampling.terms else draw.some(sampling.terms, length)
        sample = chosen // area
        index, inside = self._reached(_coordinates(chosen % area, places), offsets, data.places, not over_patches)
        channels = groups[:, None] * size + torch.arange(size, device=w.device)

        def of_data(tensor: Tensor) -> Tensor:
            flat = _batched(tensor, w.dim()).flatten(2)
            found = flat[sample[None, :, None, None], channels[:, None, :, None], index[None, :, None, :]]
            return _cut(torch.where(inside[None, :, None, :], found, 0.0).flatten(2), terms)

        def whole_weights(tensor: Tensor) -> Tensor:
            grouped: Tensor = tensor.reshape(self.groups, -1, *tensor.shape[1:])[groups].flatten(
                3
            )  # group, b, a, offset
            rows = grouped[:, wanted] if over_patches else grouped[:, :, wanted].transpose(1, 2)
            return rows.flatten(2)

        if over_patches:
            of_weights = largest(whole_weights(w), -1)
        else:  # one scale for a channel of a in all groups, as plans have it
            of_weights = largest(w.transpose(0, 1).flatten(1), -1)[wanted][None].expand(len(groups), -1, 1)
        scales = data.largest.amax(1)[sample][None, :, None].expand(len(groups), -1, 1)
        return (
            _Rows(of_data, scales, data.largest.amax()),
            _Rows(lambda tensor: _cut(whole_weights(tensor), terms), of_weights, largest(w)),
            length,
        )

    def _of_gradient(self, w: Tensor, b: _Grid, a: _Grid, sampling: Sampling, draw: Draw) -> tuple[_Rows, _Rows, int]:
        """Rows of b and of a whose products are elements of the weight's gradient."""
        kernel = _offsets(tuple(w.shape[2:]), w.device)
        area, per_group, pairs = math.prod(b.places), w.shape[0] // self.groups, w.shape[1] * len(kernel)
        counts = sampling.sizes(self.groups, per_group, pairs)
        groups = draw.some(counts[0], self.groups)
        from_b, from_a = draw.some(counts[1], per_group), draw.some(counts[2], pairs)
        terms = draw.some(sampling.terms, b.samples * area)
        sample, flat = terms // area, terms % area
        index, inside = self._reached(_coordinates(flat, b.places), kernel[from_a % len(kernel)], a.places, False)
        channels_b = groups[:, None] * per_group + from_b
        channels_a = groups[:, None] * w.shape[1] + from_a // len(kernel)

        def of_b(tensor: Tensor) -> Tensor:
            whole = _batched(tensor, w.dim()).flatten(2)
            return whole[sample[None, None, :], channels_b[:, :, None], flat[None, None, :]]

        def of_a(tensor: Tensor) -> Tensor:
            whole = _batched(tensor, w.dim()).flatten(2)
            found = whole[sample[None, None, :], channels_a[:, :, None], index.t()[None]]
            return torch.where(inside.t()[None], found, 0.0)

        rows_b = _Rows(of_b, b.largest.amax(0)[channels_b][..., None], b.largest.amax())
        rows_a = _Rows(of_a, a.largest.amax(0)[channels_a][..., None], a.largest.amax())
        return rows_b, rows_a, b.samples * area

    def _reached(self, place: Tensor, offsets: Tensor, size: tuple[int, ...], backwards: bool) -> tuple[Tensor, Tensor]:
        """Flat places (rows, offsets) that an element of b is made of or, `backwards`, that one of a went into; and
        whether each exists."""
        stride, padding, dilation = (
            torch.tensor(each, device=place.device) for each in (self.stride, self.padding, self.dilation)
        )
        at, by = place[:, None, :], offsets[None, :, :] * dilation
        if backwards:
            moved = at + padding - by
            inside = (moved % stride == 0).all(-1)
            moved = moved.div(stride, rounding_mode="floor")
        else:
            moved = at * stride + by - padding
            inside = torch.ones(moved.shape[:2], dtype=torch.bool, device=place.device)
        limit = torch.tensor(size, device=place.device)
        inside &= ((moved >= 0) & (moved < limit)).all(-1)
        flat = torch.zeros(moved.shape[:2], dtype=torch.long, device=place.device)
        for axis, length in enumerate(size):
            flat = flat * length + moved[..., axis].clamp(0, length - 1)
        return flat, inside

    def _places_of_y(self, places: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
        """The places of the result, from those of x."""
        found = []
        for axis, (size, width) in enumerate(zip(places, kernel, strict=True)):
            span, pad, stride = self.dilation[axis] * (width - 1) + 1, self.padding[axis], self.stride[axis]
            if self.transposed:
                found.append((size - 1) * stride - 2 * pad + span + self.output_padding[axis])
            else:
                found.append((size + 2 * pad - span) // stride + 1)
        return tuple(found)


class _Rows(NamedTuple):
    """How rows are taken of a tensor, and the largest magnitudes that their scales follow from."""

    gather: Gather
    vector_amax: Tensor
    tensor_amax: Tensor


class _Grid:
    """Images, or their gradient: (samples, channels, places)."""

    def __init__(self, tensor: Tensor, dims: int) -> None:
        self.tensor = _batched(tensor, dims)
        self.samples = self.tensor.shape[0]
        self.places = tuple(self.tensor.shape[2:])

    @cached_property
    def largest(self) -> Tensor:
        """The largest magnitude of each channel of each sample."""
        return largest(self.tensor.flatten(2), -1)[..., 0]


def _batched(tensor: Tensor, dims: int) -> Tensor:
    """An image alone as a batch of one."""
    return tensor[None] if tensor.dim() == dims - 1 else tensor


def _offsets(kernel: tuple[int, ...], device: torch.device) -> Tensor:
    """All places of a kernel: (count, dimensions)."""
    return _coordinates(torch.arange(math.prod(kernel), device=device), kernel)


def _coordinates(flat: Tensor, sizes: tuple[int, ...]) -> Tensor:
    found = []
    for size in reversed(sizes):
        found.append(flat % size)
        flat = flat // size
    return torch.stack(found[::-1], -1)


def _cut(rows: Tensor, terms: Tensor | None) -> Tensor:
    return rows if terms is None else rows[..., terms]
