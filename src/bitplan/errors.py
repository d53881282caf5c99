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


#: What other libraries and papers call it -> what it is called here; used where the latter is a possible name.
_OTHER_WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("layer", "layers", "module", "modules", "name", "path", "pattern"), ("match",)),
    **dict.fromkeys(("type", "layer_type", "operation", "ops"), ("op",)),
    **dict.fromkeys(("input", "inputs"), ("x", "fprop.x")),
    **dict.fromkeys(("output", "outputs"), ("activation",)),
    **dict.fromkeys(("gradient", "gradients", "grad", "grads"), ("grad_activation", "grad_weight", "dy")),
    **dict.fromkeys(("grad_output", "grad_out", "go"), ("dy", "grad_activation")),
    **dict.fromkeys(("forward", "fwd"), ("fprop",)),
    **dict.fromkeys(("backward", "bwd"), ("dgrad", "wgrad")),
    **dict.fromkeys(("dtype", "quantizer"), ("format",)),
    **dict.fromkeys(("num_bits", "width", "bitwidth"), ("bits",)),
    **dict.fromkeys(("group_size", "block_size", "groupsize"), ("block",)),
    **dict.fromkeys(("granularity", "scaling"), ("scale",)),
    **dict.fromkeys(("stochastic", "rounding_mode"), ("rounding",)),
    **dict.fromkeys(("symmetric", "affine", "zero_point"), ("range",)),
    **dict.fromkeys(("row", "rowwise", "per_row", "token", "per_token", "per-token"), ("vector",)),
    **dict.fromkeys(("group", "blockwise", "per_group"), ("block",)),
    **dict.fromkeys(("sr", "random"), ("stochastic",)),
    **dict.fromkeys(("rne", "rn", "even", "round"), ("nearest",)),
    **dict.fromkeys(("half", "float16"), ("fp16",)),
    **dict.fromkeys(("float32", "single", "full"), ("fp32",)),
    "bfloat16": ("bf16",),
    **dict.fromkeys(("fp8", "float8", "int8", "hardware"), ("native",)),
    **dict.fromkeys(("cosine", "cyclic_cosine"), ("CR",)),
    "constant": ("static",),
}


def nearest_names(wrong: str, known: Iterable[str], most: int = 3) -> str:
    """``"did you mean a, b or c?"`` for the known names closest to `wrong`, or the whole list when none is close."""
    names = list(known)
    meant = [name for name in _OTHER_WORDS.get(wrong.strip().lower(), ()) if name in names]
    close = meant or difflib.get_close_matches(wrong, names, n=most, cutoff=0.4)
    if not close:
        return f"known names are {', '.join(names)}"
    head = ", ".join(close[:-1])
    return f"did you mean {head + ' or ' if head else ''}{close[-1]}?"
