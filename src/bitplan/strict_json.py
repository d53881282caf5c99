"""JSON as RFC 8259 has it, which knows no NaN and no infinities: they are written as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``.

Strings rather than null, so that nothing is lost: Python's ``float`` and JavaScript's ``Number`` both read them back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def json_text(content: Any) -> str:
    """`content` as one strict JSON document."""
    return json.dumps(strict(content), indent=2, allow_nan=False)


def json_line(content: Any) -> str:
    """`content` as one line of a file of JSON lines.

    >>> json_line({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": "NaN"}\\n'
    """
    return json.dumps(strict(content), allow_nan=False) + "\n"


def strict(content: Any) -> Any:
    """`content` in values that strict JSON has."""
    if isinstance(content, float) and not math.isfinite(content):
        return "NaN" if math.isnan(content) else "Infinity" if content > 0 else "-Infinity"
    if isinstance(content, Mapping):
        return {str(key): strict(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [strict(value) for value in content]
    return str(content) if isinstance(content, Path) else content
