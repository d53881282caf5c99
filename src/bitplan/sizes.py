"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re

from bitplan.errors import BitplanError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
#: What may stand behind a number -> bytes; the decimal units are what vendors print on a card.
_FACTORS = {unit.lower(): 1024**power for power, unit in enumerate(_UNITS)} | {
    unit: 1000**power for power, unit in enumerate(("", "kb", "mb", "gb", "tb"))
}


def byte_text(count: float) -> str:
    """A size for people.

    >>> byte_text(999), byte_text(1536), byte_text(3 * 2**30)
    ('999 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def read_bytes(text: str) -> int:
    """The bytes that a text such as ``6GiB``, ``500 MB`` or ``1000000`` means.

    >>> read_bytes("6GiB"), read_bytes("1.5 kb")
    (6442450944, 1500)
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    if parts is None or parts[2].lower() not in _FACTORS:
        raise BitplanError(f"{text!r} is no number of bytes: write it as 6GiB, 500MB or 1000000.")
    count: int = round(float(parts[1]) * _FACTORS[parts[2].lower()])
    if count < 1:
        raise BitplanError(f"{text!r} is less than a byte: write it as 6GiB, 500MB or 1000000.")
    return count
