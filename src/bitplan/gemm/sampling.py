"""Seeded sampling of a product's elements, so that measurement costs little.

An element of a product is the dot product of a row of the left operand and a row of the (transposed) right one. A few
rows of each side give many elements. Of very long sums, such as those of weight gradients over all tokens or pixels of
a batch, some terms are sampled. The error is then that of a shorter sum, for all candidates alike, and the number of
terms is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bitplan.errors import MetricError
from bitplan.numerics.noise import key_of
from bitplan.numerics.wire_format import text_hash


@dataclass(frozen=True)
class Sampling:
    """The number of sampled rows and terms of each product."""

    #: Rows of each operand; for batched products (attention) half as many, of several matrices.
    rows: int = 16
    #: The largest number of terms of a sum.
    terms: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "terms"):
            if getattr(self, name) < 1:
                raise MetricError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.seed < 0:
            raise MetricError(f"a seed is at least 0, not {self.seed}.")

    def draw(self, product: str, pass_: str, device: torch.device) -> Draw:
        """The generator for a pass of a product, which depends only on the seed and the names."""
        return Draw(key_of(self.seed, text_hash(product), text_hash(pass_)), device)

    def sizes(self, matrices: int, rows: int, columns: int) -> tuple[int, int, int]:
        """The number of sampled matrices, rows of the left operand and rows of the right operand."""
        if matrices == 1:
            return 1, min(self.rows, rows), min(self.rows, columns)
        left, right = (min(max(self.rows // 2, 1), size) for size in (rows, columns))
        return min(matrices, max(4, self.rows**2 // max(left * right, 1))), left, right


class Draw:
    """Draws indices from its own generator, so that torch's random state does not change."""

    def __init__(self, key: tuple[int, int], device: torch.device) -> None:
        low, high = (number % 2**32 for number in key)
        self._generator = torch.Generator().manual_seed(high << 32 | low)
        self._device = device

    def indices(self, count: int, size: int) -> Tensor:
        """At most `count` distinct indices below `size`, sorted."""
        if count >= size:
            return torch.arange(size, device=self._device)
        if count * 8 > size:
            drawn = torch.randperm(size, generator=self._generator)[:count]
        else:  # a permutation of all indices would be slow
            drawn = torch.unique(torch.randint(size, (2 * count,), generator=self._generator))
            drawn = drawn[torch.randperm(len(drawn), generator=self._generator)[:count]]
        return drawn.sort().values.to(self._device)
