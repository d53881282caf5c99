"""The two bases every bitplan error and warning derives from.

A message is one sentence that says what is wrong *and what to do*; the command
line prints it as it stands and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BitplanError(Exception):
    """Something the user can mend; its text says how."""


class FormatError(BitplanError, ValueError):
    """A number format that does not exist, or cannot serve what it was asked for."""


class QuantizeError(BitplanError, ValueError):
    """A tensor, rounding or scale that do not fit together."""


class PlanError(BitplanError, ValueError):
    """A plan that cannot be read, contradicts itself or asks for what does not exist."""


class ScheduleError(BitplanError, ValueError):
    """A schedule that does not exist, contradicts itself or is asked about a step that no run has."""


class TargetError(BitplanError, ValueError):
    """A model, batch and loss that cannot be found, made or used together."""


class TaskError(BitplanError, ValueError):
    """A task, its settings or its data that cannot be found, read or used."""


class RunError(BitplanError):
    """A run that cannot be started, gone on with or read."""


class CostError(BitplanError, ValueError):
    """A product whose operations cannot be counted."""


class MemoryEstimateError(BitplanError, ValueError):
    """Memory that cannot be estimated, measured or added up."""


class MetricError(BitplanError, ValueError):
    """Figures of an error that cannot be taken of what was given."""


class TorchVersionError(BitplanError, ImportError):
    """A private torch symbol that the installed torch version does not have."""


class MissingPackageError(BitplanError, ImportError):
    """A package that an integration needs and that is not installed."""


class BitplanWarning(UserWarning):
    """Base of every warning bitplan issues, so that one filter can silence or raise them all."""


def nearest_names(wrong: str, known: Iterable[str], most: int = 3) -> str:
    """``"did you mean a, b or c?"`` for the known names closest to `wrong`, or the whole list when none is close."""
    names = list(known)
    close = difflib.get_close_matches(wrong, names, n=most, cutoff=0.4)
    if not close:
        return f"known names are {', '.join(names)}"
    head = ", ".join(close[:-1])
    return f"did you mean {head + ' or ' if head else ''}{close[-1]}?"
