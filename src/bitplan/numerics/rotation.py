"""Random Hadamard rotations of both operands of a product along its summed axis: x' = H S x, w' = H S w.

H S is orthogonal, so the product is the same in exact arithmetic, and an outlier is spread over all values of its tile
before these are rounded. S flips signs; the signs are the same in every tensor and run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.numerics.noise import random_bits
from bitplan.numerics.wire_format import SIGNS, text_hash

#: How many neighbours along the axis may be rotated together.
ROTATION_SIZES: tuple[int, ...] = tuple(1 << power for power in range(1, 11))


@dataclass(frozen=True)
class Rotation:
    """Which neighbours along an axis are rotated together."""

    axis: int
    size: int

    def apply(self, x: Tensor) -> Tensor:
        """`x` rotated, in its own shape and dtype, computed in float32 or wider.

        What an axis has beyond a multiple of the size is rotated in smaller tiles, the powers of two that add up to it.
        """
        return self._rotate_runs(x, lambda tiles: _hadamard(tiles * _signs(tiles)))

    def undo(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`apply`."""
        return self._rotate_runs(x, lambda tiles: _hadamard(tiles) * _signs(tiles))

    def _rotate_runs(self, x: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        last = x.movedim(self.axis, -1)
        work = last if x.dtype == torch.float64 else last.float()
        parts = []
        start = 0
        for count, size in _tiles(last.shape[-1], self.size):
            part = work.narrow(-1, start, count * size)
            parts.append(rotate(part.reshape(*part.shape[:-1], count, size)).reshape(part.shape))
            start += count * size
        rotated = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return rotated.to(x.dtype).movedim(-1, self.axis).contiguous()


def _tiles(length: int, size: int) -> Iterator[tuple[int, int]]:
    """(number, size) of the tiles of an axis.

    >>> list(_tiles(45, 16)), list(_tiles(3, 16))
    ([(2, 16), (1, 8), (1, 4), (1, 1)], [(1, 2), (1, 1)])
    """
    while length:
        if length >= size:
            yield length // size, size
        length %= size
        size //= 2


def _signs(tiles: Tensor) -> Tensor:
    """+1 or -1 for each value of a tile."""
    index = torch.empty(tiles.shape[-1], dtype=tiles.dtype, device=tiles.device)
    return 1 - 2 * (random_bits(index, text_hash(SIGNS)) & 1).to(tiles.dtype)


def _hadamard(tiles: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of the last axis, whose size is a power of two.

    By sums and differences, in an order that no compiler fuses differently.
    """
    size, half = tiles.shape[-1], 1
    while half < size:
        pairs = tiles.reshape(*tiles.shape[:-1], size // (2 * half), 2, half)
        first, second = pairs.unbind(-2)
        tiles = torch.stack((first + second, first - second), -2).reshape(tiles.shape)
        half *= 2
    return tiles * (1 / math.sqrt(size))
