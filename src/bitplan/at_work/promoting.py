"""Promotion at work: the sign that is watched at a tensor, and the choice between its two quantizers.

In emulate execution both roundings are computed and a number on the device chooses between them, so that nothing waits
and no graph is made anew. In packed execution the choice is made on the host, after a step: what is kept has the width
of one format only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bitplan.numbers import tensor_parts
from bitplan.numbers.quantizer import Quantizer
from bitplan.numbers.straight import Between, Span
from bitplan.plan.promotion import Promotion
from bitplan.plan.spec import QuantizerSpec
from bitplan.tracing import is_traced


class Either:
    """Two roundings of a tensor; the higher one where `flag`, a number on the device, is above 0."""

    def __init__(self, low: Quantizer, high: Callable[[Tensor], Tensor], flag: Tensor) -> None:
        self.low = low
        self.high = high
        self.flag = flag
        #: What the lower one made of the tensor, for the sign that is watched.
        self.low_values: Tensor | None = None

    def round_values(
        self,
        x: Tensor,
        bits: Tensor | None,
        row: Tensor | None = None,
        span: Span | None = None,
        between: Between | None = None,
    ) -> Tensor:
        self.low_values = self.low.round_values(x, bits, row, span, between)
        return torch.where(self.flag > 0, self.high(x), self.low_values)


def sign_of(promotion: Promotion, x: Tensor, low: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """(part, whole) of the watched sign, whose quotient is compared with :func:`limit_of`.

    Two numbers rather than their quotient, so that those of several ranks can be added up.

    :param low: `x` as its low format rounds it.
    :param threshold: from which magnitude on values overflow.
    """
    whole = (x.detach(), low.detach())
    # What is compared on the way is as large as `x`; a graph writes none of it down.
    pairs = (whole,) if is_traced() else tensor_parts.parts_of_both(*whole)
    signs = [_sign(promotion, before.float(), after, threshold) for before, after in pairs]
    if len(signs) == 1:
        return signs[0]
    parts, sizes = zip(*signs, strict=True)
    return torch.stack(parts).sum(), torch.stack(sizes).sum()


def _sign(promotion: Promotion, before: Tensor, low: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    if promotion.measure == "error":
        return (low.float() - before).square().sum(), before.square().sum()
    is_overflow = promotion.measure == "overflow"
    bad = before.abs() >= threshold if is_overflow else (low == 0) & (before != 0)
    count = bad.sum().float()
    return count, torch.full_like(count, before.numel())


def limit_of(promotion: Promotion) -> float:
    """What the quotient of :func:`sign_of` must reach: an error is compared by its square."""
    return promotion.limit**2 if promotion.measure == "error" else promotion.limit


@dataclass(frozen=True)
class Promoted:
    """A tensor that was promoted."""

    #: Such as ``layer1.0.conv1/conv2d.0:activation``.
    site: str
    #: The first step with its new quantizer, counted from 0.
    step: int
    #: overflow, underflow or error.
    measure: str
    #: What was reached.
    share: float
    #: The new quantizer; None where the tensor is left alone.
    target: QuantizerSpec | None

    @property
    def to(self) -> str:
        """The new quantizer in words."""
        return "unrounded" if self.target is None else str(self.target)

    def __str__(self) -> str:
        return f"{self.site}: {self.to} from step {self.step} on ({self.measure} {self.share:.3g})"


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of what all processes of a training hold; `values` itself where there is one process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        values = values.contiguous()
        dist.all_reduce(values)
    return values
