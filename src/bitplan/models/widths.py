"""Channels of a network that was made narrower or wider."""

from __future__ import annotations

#: Up to this width channels are multiples of 4 rather than 8: narrow networks have few channels to lose.
_NARROW = 0.25


def scaled(channels: int, width: float) -> int:
    """`channels` times `width` as the nearest multiple of 8 (of 4 up to width 0.25), at least one such multiple and
    never under 90 % of the exact value.

    Source: the CIFAR networks of Lee, Sharma & Aiken 2023 (arXiv 2301.13464).

    >>> [scaled(64, width) for width in (1.0, 0.5, 0.25, 0.1)]
    [64, 32, 16, 8]
    """
    step = 4 if width <= _NARROW else 8
    exact = channels * width
    rounded = max(step, int(exact + step / 2) // step * step)
    return rounded if rounded >= 0.9 * exact else rounded + step
