"""Plans whose runs have a state, for tests of trainers: a run that lost it ends with other bits."""

from __future__ import annotations

from typing import Any

#: Delayed scales and stochastic rounding.
HISTORY: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "match": "*",
            "op": "linear",
            "x": {"format": "e4m3", "scale": "tensor", "history": 4},
            "w": {"format": "int4", "scale": "tensor", "rounding": "stochastic"},
            "dy": {"format": "int8", "scale": "tensor", "rounding": "stochastic"},
        }
    ],
}
#: Weights in 3 bits for the first half of a run, then in 8.
SCHEDULE: dict[str, Any] = {
    "version": 1,
    "schedules": {"cycle": {"name": "steps", "bits": [3, 8], "at": ["50%"]}},
    "rules": [{"match": "*", "op": "linear", "w": {"format": "int", "bits": "cycle", "scale": "tensor"}}],
}
