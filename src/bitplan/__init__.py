"""bitplan decides how many bits every tensor of a PyTorch training run gets, where and when.

Number formats (:func:`format`), rounding onto them (:func:`quantize`) and keeping tensors in them (:func:`pack`); plans
(:class:`Plan`), the tensors of a model (:func:`sites`), and a plan at work on a model (:func:`attach`).
"""

import logging

from bitplan._version import __version__
from bitplan.attach import Attachment, attach
from bitplan.errors import BitplanError, BitplanWarning, FormatError, PlanError, QuantizeError
from bitplan.formats import BlockFormat, FloatFormat, Format, IntFormat
from bitplan.live import LiveFormat
from bitplan.names import format
from bitplan.packing import Packed, pack
from bitplan.plan import Plan
from bitplan.quantizer import Quantizer, quantize
from bitplan.scaling import Scaling
from bitplan.sites import Site, sites

logging.getLogger("bitplan").addHandler(logging.NullHandler())

__all__ = [
    "Attachment",
    "BitplanError",
    "BitplanWarning",
    "BlockFormat",
    "FloatFormat",
    "Format",
    "FormatError",
    "IntFormat",
    "LiveFormat",
    "Packed",
    "Plan",
    "PlanError",
    "QuantizeError",
    "Quantizer",
    "Scaling",
    "Site",
    "__version__",
    "attach",
    "format",
    "pack",
    "quantize",
    "sites",
]
