"""Other packages that round tensors to small floats, if they are installed.

A peer is a function from a format and a rounding to a callable, or None if it does not support that pair. Its results
need not equal ours (edge cases differ); only its time is measured.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitplan.numerics.formats import FloatFormat, get_format
from bitplan.numerics.reference import Rounding

Round = Callable[[Tensor], object]
Peer = Callable[[FloatFormat, Rounding], Round | None]

log = logging.getLogger(__name__)

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_ML_DTYPES = {
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e3m4": "float8_e3m4",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
}


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def torch_cast(target: FloatFormat, rounding: Rounding) -> Round | None:
    """torch's own conversion and back."""
    dtype = _TORCH.get(target.name)
    if dtype is None or rounding != "nearest":
        return None
    return lambda x: x.to(dtype).to(x.dtype)


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a peer that cannot be imported is not measured, whatever the reason
        log.info("%s is not measured: %s", module, error)
        return None


def ml_dtypes_cast(target: FloatFormat, rounding: Rounding) -> Round | None:
    """numpy's conversion with the ml_dtypes types."""
    package = _optional("ml_dtypes")
    name = _ML_DTYPES.get(target.name)
    if package is None or name is None or rounding != "nearest":
        return None
    dtype = getattr(package, name)
    return lambda x: x.numpy().astype(dtype).astype("float32")


def qtorch_round(target: FloatFormat, rounding: Rounding) -> Round | None:
    """QPyTorch: any exponent and mantissa; ties away from zero. Compiles its kernels when first imported."""
    quant = _optional("qtorch.quant")
    if quant is None or rounding not in ("nearest", "stochastic"):
        return None
    exponent, mantissa = target.exponent_bits, target.mantissa_bits
    return lambda x: quant.float_quantize(x, exponent, mantissa, rounding=rounding)


def gfloat_round(target: FloatFormat, rounding: Rounding) -> Round | None:
    """gfloat's vectorised rounding."""
    gfloat = _optional("gfloat")
    formats = _optional("gfloat.formats")
    names = {"e4m3": "ocp_e4m3", "e5m2": "ocp_e5m2", "e3m2": "ocp_e3m2", "e2m3": "ocp_e2m3", "e2m1": "ocp_e2m1"}
    info = getattr(formats, "format_info_" + names.get(target.name, target.name), None)
    if gfloat is None or info is None or rounding != "nearest":
        return None
    return lambda x: gfloat.round_ndarray(info, x.numpy(), gfloat.RoundMode.TiesToEven)


def torchao_mx(target: FloatFormat, rounding: Rounding) -> Round | None:
    """torchao's MX tensors and back; blocks of 32, so it does more than an unscaled rounding."""
    module = _optional("torchao.prototype.mx_formats.mx_tensor")
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(target.name)
    if module is None or dtype is None or rounding != "nearest":
        return None

    def there_and_back(x: Tensor) -> object:
        return module.MXTensor.to_mx(x, dtype, 32).dequantize(x.dtype)

    return there_and_back


#: Peers that run on the CPU only take numpy arrays.
CPU_PEERS: dict[str, Peer] = {
    "torch cast": torch_cast,
    "ml_dtypes": ml_dtypes_cast,
    "QPyTorch": qtorch_round,
    "gfloat": gfloat_round,
    "torchao MX": torchao_mx,
}
DEVICE_PEERS: dict[str, Peer] = {"torch cast": torch_cast, "torchao MX": torchao_mx}

#: Peers that torch.compile can fuse are also measured compiled.
COMPILED_PEERS = ("torch cast",)


def working_peers(target: str, rounding: Rounding, sample: Tensor) -> dict[str, Round]:
    """Every installed peer that rounds `sample` to `target` without an error."""
    peers = DEVICE_PEERS if sample.is_cuda else CPU_PEERS
    named = get_format(target)
    if not isinstance(named, FloatFormat):
        return {}
    working: dict[str, Round] = {}
    for name, peer in peers.items():
        call = peer(named, rounding)
        if call is None:
            continue
        try:
            call(sample)
        except Exception as error:  # a broken installation of a peer must not stop the measurement
            log.warning("%s is not measured for %s: %s", name, target, error)
            continue
        working[name] = call
    return working
