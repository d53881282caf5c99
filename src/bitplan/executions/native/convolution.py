"""Convolutions as GEMMs: which of them have a native path, and how their tensors become matrices.

With channels last an image is a matrix already, pixels by channels, and a 1x1 convolution is the GEMM of a linear
layer. A larger kernel is lowered by im2col, on codes: the workspace is kernel area x 1 byte per input element. The
gradient of the input is itself a convolution, of the output gradient by the flipped kernel, unless the stride is
larger than 1. The workspace lives as long as its GEMM; for the backward pass the codes of the image are saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitplan.executions.native.gemm import Codes, GemmLayout
from bitplan.gemm.products import Product

#: Sizes along the axes of an image.
Sizes = Sequence[int]


def is_pointwise(settings: tuple[Any, ...], w: Tensor) -> bool:
    """Whether a convolution with these settings (of ``product_of``) is 1x1 without padding."""
    return all(size == 1 for size in w.shape[2:]) and not any(settings[1])


def why_convolution_not_native(settings: tuple[Any, ...], x: Tensor, w: Tensor) -> str | None:
    """Why none of a convolution's passes has a native path; None where some have."""
    _, _, _, is_transposed, _, groups = settings
    if is_transposed:
        return "transposed convolutions have no native path"
    if groups != 1:
        return f"convolutions in groups ({groups}) have no native path"
    if x.dim() != w.dim():
        return "an image without its batch has no native path"
    if not is_channels_last(x):
        fix = "do model.to(memory_format=torch.channels_last) and the same to its input"
        return f"its input has not its channels last: {fix}"
    return None


def why_dgrad_not_native(settings: tuple[Any, ...], w: Tensor) -> str | None:
    """Why the gradient of the input, alone of the three passes, has no native path."""
    if is_pointwise(settings, w):
        return None
    stride, padding, dilation = settings[:3]
    if any(step != 1 for step in stride):
        return "a stride leaves gaps in the output gradient"
    if any(pad > extent for pad, extent in zip(padding, _kernel_extents(w.shape[2:], dilation), strict=True)):
        return "the padding is wider than the kernel"
    return None


def output_sizes(image: Sizes, kernel: Sizes, settings: tuple[Any, ...]) -> list[int]:
    """Spatial sizes of a convolution's output.

    >>> output_sizes((9, 9), (3, 1), ([2, 2], [1, 0], [1, 1], False, [0, 0], 1))
    [5, 5]
    """
    axes = zip(image, kernel, *settings[:3], strict=True)
    return [
        (size + 2 * pad - spacing * (kernel_size - 1) - 1) // step + 1 for size, kernel_size, step, pad, spacing in axes
    ]


def is_channels_last(x: Tensor) -> bool:
    """Whether (pixels, channels) is a view of the image, or of a slice of its channels."""
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


def im2col(image: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
    """(samples, \\*spatial, channels), one byte per element -> (samples x output pixels, kernel area x channels).

    >>> image = torch.tensor([1, 2, 3], dtype=torch.int8).reshape(1, 3, 1)
    >>> im2col(image, (3,), (1,), (1,), (1,)).tolist()
    [[0, 1, 2], [1, 2, 3], [2, 3, 0]]
    """
    codes = image.view(torch.int8)  # torch pads int8, but not float8
    if any(padding):
        codes = torch.nn.functional.pad(codes, (0, 0, *(pad for size in reversed(padding) for pad in (size, size))))
    for axis, (size, step, spacing) in enumerate(zip(kernel, stride, dilation, strict=True), start=1):
        codes = codes.unfold(axis, spacing * (size - 1) + 1, step)
        if spacing > 1:
            codes = codes[..., ::spacing]
    dims = len(kernel)
    patches = codes.permute(*range(dims + 1), *range(dims + 2, 2 * dims + 2), dims + 1)
    pixels = math.prod(patches.shape[: dims + 1])
    return patches.reshape(pixels, math.prod(patches.shape[dims + 1 :])).view(image.dtype)


class ConvGemmLayout(GemmLayout):
    """Converts between the tensors of a convolution and the matrices of its GEMMs."""

    features = 1

    def __init__(self, product: Product, kernel: Sizes, channels_last: bool = True) -> None:
        self.product = product
        self.channels_last = channels_last
        self.kernel = tuple(kernel)
        stride, padding, dilation = product.settings[:3]
        self.stride, self.padding, self.dilation = tuple(stride), tuple(padding), tuple(dilation)
        #: Whether no im2col is needed; with a stride, some rows of the input are left out.
        self.is_pointwise = all(size == 1 for size in kernel) and not any(padding)

    def gemm_shape(self, gemm_pass: str, x: Sizes, w: Sizes) -> tuple[int, int, int]:
        area = math.prod(self.kernel)
        pixels, outputs, inputs = x[0] * math.prod(self._output_sizes(x)), w[0], w[1]
        if gemm_pass == "fprop":
            return pixels, area * inputs, outputs
        if gemm_pass == "wgrad":
            return outputs, pixels, area * inputs
        return (pixels if self.is_pointwise else x[0] * math.prod(x[2:])), area * outputs, inputs

    def x_matrix(self, codes: Codes, x: Sizes) -> Codes:
        if self.is_pointwise:
            return self._strided_rows(codes, x)
        return self._im2col(codes, (x[0], *x[2:]), self._output_sizes(x), self.stride, self.padding)

    def dy_matrix(self, codes: Codes, x: Sizes) -> Codes:
        if self.is_pointwise:
            return codes
        extents = _kernel_extents(self.kernel, self.dilation)
        padding = [extent - pad for pad, extent in zip(self.padding, extents, strict=True)]
        return self._im2col(codes, (x[0], *self._output_sizes(x)), x[2:], (1,) * len(self.kernel), padding)

    def w_matrix(self, codes: Codes, w: Sizes) -> Codes:
        scale = codes.scale if codes.scale.dim() == 0 else codes.scale.reshape(w[0], -1)[:, :1]
        return Codes(codes.values.reshape(w[0], -1), scale)

    def w_matrix_backward(self, codes: Codes, w: Sizes) -> Codes:
        if self.is_pointwise:
            return codes
        spatial = tuple(range(1, len(self.kernel) + 1))
        flipped = codes.values.view(torch.int8).reshape(w[0], *self.kernel, w[1]).flip(spatial)
        values = flipped.permute(*spatial, 0, len(spatial) + 1).reshape(-1, w[1])
        return Codes(values.view(codes.values.dtype), codes.scale)

    def output(self, rows: Tensor, x: Sizes) -> Tensor:
        return self._image(rows.reshape(x[0], *self._output_sizes(x), -1))

    def grad_x(self, rows: Tensor, x: Sizes) -> Tensor:
        if not self.is_pointwise or all(step == 1 for step in self.stride):
            return self._image(rows.reshape(x[0], *x[2:], x[1]))
        grad = rows.new_zeros(x[0], *x[2:], x[1])
        grad[self._strided_pixels()] = rows.reshape(x[0], *self._output_sizes(x), x[1])
        return self._image(grad)

    def _image(self, pixels: Tensor) -> Tensor:
        image = pixels.movedim(-1, 1)
        return image if self.channels_last else image.contiguous()

    def empty_like_x(self, dy: Tensor, x: Sizes) -> Tensor:
        return dy.new_empty(x[0], *x[2:], x[1]).movedim(-1, 1) if self.channels_last else dy.new_empty(x)

    def grad_w(self, matrix: Tensor, w: Sizes) -> Tensor:
        return matrix.reshape(w[0], *self.kernel, w[1]).movedim(-1, 1)

    def _output_sizes(self, x: Sizes) -> list[int]:
        """Spatial sizes of the output."""
        return output_sizes(x[2:], self.kernel, self.product.settings)

    def _strided_pixels(self) -> tuple[slice, ...]:
        return (slice(None), *(slice(None, None, step) for step in self.stride))

    def _strided_rows(self, codes: Codes, x: Sizes) -> Codes:
        """The rows of the pixels that the stride does not skip."""
        if all(step == 1 for step in self.stride):
            return codes
        strided = self._strided_pixels()
        values = codes.values.reshape(x[0], *x[2:], x[1])[strided].reshape(-1, x[1])
        scale = codes.scale
        if scale.dim() and scale.shape[0] > 1:
            scale = scale.reshape(x[0], *x[2:], 1)[strided].reshape(-1, 1)
        return Codes(values, scale)

    def _im2col(self, codes: Codes, image: Sizes, output: Sizes, stride: Sizes, padding: Sizes) -> Codes:
        values = im2col(codes.values.reshape(*image, -1), self.kernel, stride, padding, self.dilation)
        scale = codes.scale
        if scale.dim() and scale.shape[0] > 1:  # one per sample
            scale = scale.reshape(image[0], -1)[:, :1].expand(-1, math.prod(output)).reshape(-1, 1)
        elif scale.dim() and scale.shape[1] > 1:  # one per channel
            scale = scale.repeat(1, math.prod(self.kernel))
        return Codes(values, scale)


def _kernel_extents(kernel: Sizes, dilation: Sizes) -> list[int]:
    """The distance from a kernel's first element to its last, along each axis."""
    return [spacing * (size - 1) for size, spacing in zip(kernel, dilation, strict=True)]
