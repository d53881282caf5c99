"""Convolutions as products of matrices: which of them have a path to the units, and how their tensors become matrices.

With its channels last an image is a matrix already, pixels by channels, and a 1x1 convolution is the product of a
linear layer. A larger kernel is *unfolded*: a row for each pixel of the result holds all that the kernel sees from
there, so that codes (a byte each) are written as many times as the kernel has places. The gradient of the input is
itself a convolution, of the result's gradient by the kernel turned around, where no stride leaves gaps. Unfolded
matrices live as long as their product; for the backward pass the codes of the image itself are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitplan.executions.native.gemm import Codes, Form
from bitplan.gemm.products import Product

#: Sizes along the axes of an image.
Sizes = Sequence[int]


def is_pointwise(settings: tuple[Any, ...], w: Tensor) -> bool:
    """Whether a convolution with such settings, as ``product_of`` gives them, looks at one pixel at a time."""
    return all(size == 1 for size in w.shape[2:]) and not any(settings[1])


def obstacle(settings: tuple[Any, ...], x: Tensor, w: Tensor) -> str | None:
    """Why none of a convolution's passes has a path to the units; None where some have."""
    _, _, _, is_transposed, _, groups = settings
    if is_transposed:
        return "transposed convolutions have no path to the units"
    if groups != 1:
        return f"convolutions in groups ({groups}) have no path to the units"
    if x.dim() != w.dim():
        return "an image without its batch has no path to the units"
    if not has_channels_last(x):
        how = "do model.to(memory_format=torch.channels_last) and the same to its input"
        return f"its input has not its channels last: {how}"
    return None


def obstacle_of_dgrad(settings: tuple[Any, ...], w: Tensor) -> str | None:
    """Why the gradient of the input, alone of the three, has no path to the units."""
    if is_pointwise(settings, w):
        return None
    stride, padding, dilation = settings[:3]
    if any(step != 1 for step in stride):
        return "a stride leaves gaps in the gradient of the result"
    if any(at > reach for at, reach in zip(padding, _reaches(w.shape[2:], dilation), strict=True)):
        return "the padding is wider than the kernel"
    return None


def places_of(image: Sizes, kernel: Sizes, settings: tuple[Any, ...]) -> list[int]:
    """The sizes of a convolution's result, along the axes of its images.

    >>> places_of((9, 9), (3, 1), ([2, 2], [1, 0], [1, 1], False, [0, 0], 1))
    [5, 5]
    """
    given = zip(image, kernel, *settings[:3], strict=True)
    return [(size + 2 * at - spread * (wide - 1) - 1) // step + 1 for size, wide, step, at, spread in given]


def has_channels_last(x: Tensor) -> bool:
    """Whether pixels by channels is a view of the image, or of a part of its channels."""
    if x.stride(1) != 1:
        return False
    step = 0
    for axis in (*range(x.dim() - 1, 1, -1), 0):
        if x.shape[axis] == 1:
            continue
        if step == 0:
            step = x.stride(axis)
            if step < x.shape[1]:
                return False
        elif x.stride(axis) != step:
            return False
        step *= x.shape[axis]
    return True


def unfolded(image: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
    """(samples, \\*places, channels) of one byte an element -> (samples x places of the result, kernel x channels).

    >>> image = torch.tensor([1, 2, 3], dtype=torch.int8).reshape(1, 3, 1)
    >>> unfolded(image, (3,), (1,), (1,), (1,)).tolist()
    [[0, 1, 2], [1, 2, 3], [2, 3, 0]]
    """
    codes = image.view(torch.int8)  # torch moves bytes of any meaning, but pads only some types
    if any(padding):
        codes = torch.nn.functional.pad(codes, (0, 0, *(at for size in reversed(padding) for at in (size, size))))
    for axis, (size, step, spread) in enumerate(zip(kernel, stride, dilation, strict=True), start=1):
        codes = codes.unfold(axis, spread * (size - 1) + 1, step)
        if spread > 1:
            codes = codes[..., ::spread]
    dims = len(kernel)
    seen = codes.permute(*range(dims + 1), *range(dims + 2, 2 * dims + 2), dims + 1)
    places = math.prod(seen.shape[: dims + 1])
    return seen.reshape(places, math.prod(seen.shape[dims + 1 :])).view(image.dtype)


class Convolution(Form):
    """How the tensors of a convolution become matrices, and its matrices tensors."""

    features = 1

    def __init__(self, product: Product, kernel: Sizes, channels_last: bool = True) -> None:
        self.product = product
        self.channels_last = channels_last
        self.kernel = tuple(kernel)
        stride, padding, dilation = product.settings[:3]
        self.stride, self.padding, self.dilation = tuple(stride), tuple(padding), tuple(dilation)
        #: Whether a row of the input is a row of the product, if of every so many places only.
        self.is_pointwise = all(size == 1 for size in kernel) and not any(padding)

    def sizes(self, one: str, x: Sizes, w: Sizes) -> tuple[int, int, int]:
        under = math.prod(self.kernel)
        pixels, outputs, inputs = x[0] * math.prod(self._places(x)), w[0], w[1]
        if one == "fprop":
            return pixels, under * inputs, outputs
        if one == "wgrad":
            return outputs, pixels, under * inputs
        return (pixels if self.is_pointwise else x[0] * math.prod(x[2:])), under * outputs, inputs

    def seen(self, codes: Codes, x: Sizes) -> Codes:
        if self.is_pointwise:
            return self._thinned(codes, x)
        return self._unfolded(codes, (x[0], *x[2:]), self._places(x), self.stride, self.padding)

    def seen_backward(self, codes: Codes, x: Sizes) -> Codes:
        if self.is_pointwise:
            return codes
        padding = [reach - at for at, reach in zip(self.padding, _reaches(self.kernel, self.dilation), strict=True)]
        return self._unfolded(codes, (x[0], *self._places(x)), x[2:], (1,) * len(self.kernel), padding)

    def weight(self, codes: Codes, w: Sizes) -> Codes:
        scale = codes.scale if codes.scale.dim() == 0 else codes.scale.reshape(w[0], -1)[:, :1]
        return Codes(codes.values.reshape(w[0], -1), scale)

    def weight_backward(self, codes: Codes, w: Sizes) -> Codes:
        if self.is_pointwise:
            return codes
        places = tuple(range(1, len(self.kernel) + 1))
        turned = codes.values.view(torch.int8).reshape(w[0], *self.kernel, w[1]).flip(places)
        values = turned.permute(*places, 0, len(places) + 1).reshape(-1, w[1])
        return Codes(values.view(codes.values.dtype), codes.scale)

    def result(self, rows: Tensor, x: Sizes) -> Tensor:
        return self._image(rows.reshape(x[0], *self._places(x), -1))

    def grad_x(self, rows: Tensor, x: Sizes) -> Tensor:
        if not self.is_pointwise or all(step == 1 for step in self.stride):
            return self._image(rows.reshape(x[0], *x[2:], x[1]))
        whole = rows.new_zeros(x[0], *x[2:], x[1])
        whole[self._kept_places()] = rows.reshape(x[0], *self._places(x), x[1])
        return self._image(whole)

    def _image(self, pixels: Tensor) -> Tensor:
        image = pixels.movedim(-1, 1)
        return image if self.channels_last else image.contiguous()

    def like_x(self, dy: Tensor, x: Sizes) -> Tensor:
        return dy.new_empty(x[0], *x[2:], x[1]).movedim(-1, 1) if self.channels_last else dy.new_empty(x)

    def grad_w(self, matrix: Tensor, w: Sizes) -> Tensor:
        return matrix.reshape(w[0], *self.kernel, w[1]).movedim(-1, 1)

    def _places(self, x: Sizes) -> list[int]:
        """The sizes of the result."""
        return places_of(x[2:], self.kernel, self.product.settings)

    def _kept_places(self) -> tuple[slice, ...]:
        return (slice(None), *(slice(None, None, step) for step in self.stride))

    def _thinned(self, codes: Codes, x: Sizes) -> Codes:
        """The rows of those pixels that a stride does not leave out."""
        if all(step == 1 for step in self.stride):
            return codes
        kept = self._kept_places()
        values = codes.values.reshape(x[0], *x[2:], x[1])[kept].reshape(-1, x[1])
        scale = codes.scale
        if scale.dim() and scale.shape[0] > 1:
            scale = scale.reshape(x[0], *x[2:], 1)[kept].reshape(-1, 1)
        return Codes(values, scale)

    def _unfolded(self, codes: Codes, given: Sizes, places: Sizes, stride: Sizes, padding: Sizes) -> Codes:
        values = unfolded(codes.values.reshape(*given, -1), self.kernel, stride, padding, self.dilation)
        scale = codes.scale
        if scale.dim() and scale.shape[0] > 1:  # one for each sample
            scale = scale.reshape(given[0], -1)[:, :1].expand(-1, math.prod(places)).reshape(-1, 1)
        elif scale.dim() and scale.shape[1] > 1:  # one for each channel
            scale = scale.repeat(1, math.prod(self.kernel))
        return Codes(values, scale)


def _reaches(kernel: Sizes, dilation: Sizes) -> list[int]:
    """How far the last place of a kernel lies from the first."""
    return [spread * (size - 1) for size, spread in zip(kernel, dilation, strict=True)]
