"""Numbers and names as people read them, the same on the page, in the terminal and in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percent_words(share: float) -> str:
    """A share with two or three digits that matter.

    >>> percent_words(1.0), percent_words(0.0625), percent_words(0.00391), percent_words(0.9833)
    ('100 %', '6.2 %', '0.39 %', '98.3 %')
    """
    percent = 100 * share
    if not math.isfinite(percent):
        return number_words(share)
    digits = 0 if abs(percent) >= 99.95 else 1 if abs(percent) >= 1 else 2
    return f"{percent:.{digits}f} %"


def number_words(value: float) -> str:
    """A number with four digits that matter.

    >>> number_words(2.302585), number_words(0.00012), number_words(float("nan")), number_words(123456.0)
    ('2.303', '0.00012', 'NaN', '123,456')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration_words(seconds: float) -> str:
    """A time.

    >>> duration_words(3.21), duration_words(75.2), duration_words(7300)
    ('3.2 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names as a sentence lists them; a long list is cut.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(list("abcdefg"))
    ('a', 'a, b and c', 'a, b, c and 4 more')
    """
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
