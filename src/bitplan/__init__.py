"""bitplan decides how many bits every tensor of a PyTorch training run gets, where and when.

The floor of it is here: number formats (:func:`format`), rounding onto them (:func:`quantize`) and keeping
tensors in them (:func:`pack`).
"""

import logging

from bitplan._version import __version__
from bitplan.errors import BitplanError, BitplanWarning, FormatError, QuantizeError
from bitplan.formats import BlockFormat, FloatFormat, Format, IntFormat
from bitplan.live import LiveFormat
from bitplan.names import format
from bitplan.packing import Packed, pack
from bitplan.quantizer import Quantizer, quantize
from bitplan.scaling import Scaling

logging.getLogger("bitplan").addHandler(logging.NullHandler())

__all__ = [
    "BitplanError",
    "BitplanWarning",
    "BlockFormat",
    "FloatFormat",
    "Format",
    "FormatError",
    "IntFormat",
    "LiveFormat",
    "Packed",
    "QuantizeError",
    "Quantizer",
    "Scaling",
    "__version__",
    "format",
    "pack",
    "quantize",
]
