"""Foreign libraries' roundings, for tests of ours; imported where they are asked: without them a test skips."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitplan.numerics.formats import FloatFormat, Overflow
from bitplan.numerics.reference import Rounding

GFLOAT_MODES: dict[Rounding, str] = {"nearest": "TiesToEven", "nearest-away": "TiesToAway", "toward-zero": "TowardZero"}
#: Of ml_dtypes or numpy.
ML_DTYPES = {
    "e5m2": "float8_e5m2",
    "e4m3": "float8_e4m3fn",
    "e4m3ieee": "float8_e4m3",
    "e3m4": "float8_e3m4",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


def ml_dtype(name: str) -> Any:
    """A type of ml_dtypes, or numpy's own."""
    return getattr(pytest.importorskip("ml_dtypes"), name, None) or np.dtype(name)


def in_gfloat(target: FloatFormat, more_exponent_bits: int = 0) -> Any:
    """The same format there."""
    gfloat = pytest.importorskip("gfloat")
    return gfloat.FormatInfo(
        target.name,
        k=target.bits + more_exponent_bits,
        precision=target.mantissa_bits + 1,
        bias=target.exponent_bias,
        is_signed=True,
        domain=gfloat.Domain.Extended if target.specials == "ieee" else gfloat.Domain.Finite,
        has_nz=True,
        num_high_nans={"ieee": (1 << target.mantissa_bits) - 1, "fn": 1, "none": 0}[target.specials],
        has_subnormals=True,
        is_twos_complement=False,
    )


def by_gfloat(
    x: np.ndarray[Any, Any], target: FloatFormat, rounding: Rounding, overflow: Overflow
) -> np.ndarray[Any, Any]:
    """Rounded by gfloat's vector code: its scalar one adds 1/2 to find ties away, which rounds in the last place."""
    gfloat = pytest.importorskip("gfloat")
    mode = gfloat.RoundMode[GFLOAT_MODES[rounding]]
    with np.errstate(over="ignore", invalid="ignore"):
        if overflow == "special" and target.specials == "none":
            # gfloat refuses here and bitplan answers infinity, so round as if there were more binades above.
            rounded = gfloat.round_ndarray(in_gfloat(target, more_exponent_bits=1), x, mode, sat=True)
            beyond = np.where((rounding == "toward-zero") & np.isfinite(x), target.max, np.inf)
            return np.where(np.abs(rounded) > target.max, np.copysign(beyond, x), rounded)
        return np.asarray(gfloat.round_ndarray(in_gfloat(target), x, mode, sat=overflow == "saturate"))
