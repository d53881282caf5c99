"""bitplan decides how many bits every tensor of a PyTorch training run gets, where and when.

Number formats (:func:`format`), rounding onto them (:func:`quantize`) and keeping tensors in them (:func:`pack`); plans
(:class:`Plan`), the tensors of a model (:func:`sites`), what a plan does to them (:func:`explain`) and costs
(:func:`cost`), a plan at work on a model (:func:`attach`), and the memory of a training step, before it runs
(:func:`predict_memory`) and while it does (:func:`measure_memory`).
"""

import logging

from bitplan._version import __version__
from bitplan.analysis.cost import Cost, cost
from bitplan.analysis.explain import Explanation, explain
from bitplan.analysis.measure import Measurement, Watch, measure
from bitplan.analysis.memory import Memory, measure_memory, predict_memory
from bitplan.analysis.sites import Site, sites
from bitplan.analysis.targets import Target
from bitplan.errors import (
    AccountError,
    BitplanError,
    BitplanWarning,
    CostError,
    FormatError,
    PlanError,
    QuantizeError,
    ScheduleError,
    TargetError,
)
from bitplan.numerics.formats import BlockFormat, FloatFormat, Format, IntFormat, format
from bitplan.numerics.mutable_format import LiveFormat
from bitplan.numerics.packing import Packed, pack
from bitplan.numerics.quantizer import Quantizer, quantize
from bitplan.numerics.scaling import Scaling
from bitplan.planners import Advice, RangeTest, advise, assign, cpt_plan, range_test
from bitplan.plans import Plan
from bitplan.plans.schedules import Schedule, schedule
from bitplan.runtime.attach import Attachment, attach

logging.getLogger("bitplan").addHandler(logging.NullHandler())

__all__ = [
    "AccountError",
    "Advice",
    "Attachment",
    "BitplanError",
    "BitplanWarning",
    "BlockFormat",
    "Cost",
    "CostError",
    "Explanation",
    "FloatFormat",
    "Format",
    "FormatError",
    "IntFormat",
    "LiveFormat",
    "Measurement",
    "Memory",
    "Packed",
    "Plan",
    "PlanError",
    "QuantizeError",
    "Quantizer",
    "RangeTest",
    "Scaling",
    "Schedule",
    "ScheduleError",
    "Site",
    "Target",
    "TargetError",
    "Watch",
    "__version__",
    "advise",
    "assign",
    "attach",
    "cost",
    "cpt_plan",
    "explain",
    "format",
    "measure",
    "measure_memory",
    "pack",
    "predict_memory",
    "quantize",
    "range_test",
    "schedule",
    "sites",
]
