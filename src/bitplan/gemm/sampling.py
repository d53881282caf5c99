"""Which elements of a product are looked at: a seeded few, so that looking costs little.

An element of a product is a sum over two vectors, a row of the left operand and a row of the (transposed) right one. A
few rows of each side give many elements. Sums of very many terms, which those of a weight's gradient are (all tokens or
pixels of a batch), are cut to a seeded choice of their terms: an error of such a sum is that of a shorter one, the same
for all candidates, and the row says how many terms it had.
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
    """How much of each product is looked at."""

    #: Rows of each operand; products of many matrices (attention) have half as many of several of them.
    rows: int = 16
    #: The most terms of a sum.
    terms: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "terms"):
            if getattr(self, name) < 1:
                raise MetricError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.seed < 0:
            raise MetricError(f"a seed is at least 0, not {self.seed}.")

    def draw(self, product: str, pass_: str, device: torch.device) -> Draw:
        """The choices for one pass of one product: the same for the same seed and name, whatever else is random."""
        return Draw(key_of(self.seed, text_hash(product), text_hash(pass_)), device)

    def sizes(self, matrices: int, rows: int, columns: int) -> tuple[int, int, int]:
        """How many matrices of a product, rows of the left and of the right operand are looked at."""
        if matrices == 1:
            return 1, min(self.rows, rows), min(self.rows, columns)
        of_left, of_right = (min(max(self.rows // 2, 1), size) for size in (rows, columns))
        return min(matrices, max(4, self.rows**2 // max(of_left * of_right, 1))), of_left, of_right


class Draw:
    """A generator of its own, so that nobody else's moves."""

    def __init__(self, key: tuple[int, int], device: torch.device) -> None:
        low, high = (number % 2**32 for number in key)
        self._generator = torch.Generator().manual_seed(high << 32 | low)
        self._device = device

    def some(self, count: int, of: int) -> Tensor:
        """`count` different numbers below `of`, in order; all of them where there are no more."""
        if count >= of:
            return torch.arange(of, device=self._device)
        if count * 8 > of:
            chosen = torch.randperm(of, generator=self._generator)[:count]
        else:  # few of many: a permutation of all would take longer than all that follows
            chosen = torch.unique(torch.randint(of, (2 * count,), generator=self._generator))
            chosen = chosen[torch.randperm(len(chosen), generator=self._generator)[:count]]
        return chosen.sort().values.to(self._device)
