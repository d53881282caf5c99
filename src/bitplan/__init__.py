"""bitplan decides how many bits every tensor of a PyTorch training run gets, where and when.

A :class:`Plan` says which tensors get which number format; :func:`attach` runs a model under it, emulated,
:class:`Packed` or :class:`Native`. :func:`list_sites`, :func:`explain`, :func:`estimate_cost`, :func:`estimate_memory`
and :func:`measure` say what a plan does before it is trained with; :func:`auto` finds one, measured and verified, and
:func:`assign`, :func:`advise` and :func:`range_test` choose one by a single criterion. :func:`record` keeps what a
training loop did in a run folder, and :func:`compare` trains a function under several plans. :func:`get_format`,
:func:`quantize` and :func:`pack` work on single tensors. Everything else is imported from its submodule: errors from
:mod:`bitplan.errors`, for example.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bitplan._version import __version__
from bitplan.errors import BitplanError

if TYPE_CHECKING:
    from bitplan.analysis.cost import estimate_cost
    from bitplan.analysis.explain import explain
    from bitplan.analysis.measure import measure
    from bitplan.analysis.memory import estimate_memory
    from bitplan.analysis.sites import list_sites
    from bitplan.lab.compare.functions import compare
    from bitplan.lab.train.record import record
    from bitplan.numerics.formats import Format, get_format, register_format
    from bitplan.numerics.packing import PackedTensor, pack
    from bitplan.numerics.quantizer import Quantizer, quantize
    from bitplan.planners import Watch, advise, assign, auto, range_test
    from bitplan.plans import Plan
    from bitplan.plans.execution import Native, Packed
    from bitplan.plans.schedules import Schedule, schedule
    from bitplan.runtime.attach import Attachment, attach

logging.getLogger("bitplan").addHandler(logging.NullHandler())

__all__ = [
    "Attachment",
    "BitplanError",
    "Format",
    "Native",
    "Packed",
    "PackedTensor",
    "Plan",
    "Quantizer",
    "Schedule",
    "Watch",
    "__version__",
    "advise",
    "assign",
    "attach",
    "auto",
    "compare",
    "estimate_cost",
    "estimate_memory",
    "explain",
    "get_format",
    "list_sites",
    "measure",
    "pack",
    "quantize",
    "range_test",
    "record",
    "register_format",
    "schedule",
]

#: Where the public names are defined. They are imported together, at the first use of one of them: the command line
#: prints its help without waiting for torch.
_EXPORTS = {
    "bitplan.analysis.cost": ("estimate_cost",),
    "bitplan.analysis.explain": ("explain",),
    "bitplan.analysis.measure": ("measure",),
    "bitplan.analysis.memory": ("estimate_memory",),
    "bitplan.analysis.sites": ("list_sites",),
    "bitplan.numerics.formats": ("Format", "get_format", "register_format"),
    "bitplan.numerics.packing": ("PackedTensor", "pack"),
    "bitplan.numerics.quantizer": ("Quantizer", "quantize"),
    "bitplan.planners": ("Watch", "advise", "assign", "auto", "range_test"),
    "bitplan.plans": ("Plan",),
    "bitplan.plans.execution": ("Native", "Packed"),
    "bitplan.plans.schedules": ("Schedule", "schedule"),
    "bitplan.runtime.attach": ("Attachment", "attach"),
}
#: Public names of the lab, each imported at its own first use: the library itself never needs the lab.
_LAB_EXPORTS = {
    "compare": "bitplan.lab.compare.functions",
    "record": "bitplan.lab.train.record",
}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'bitplan' has no attribute {name!r}")
    if name in _LAB_EXPORTS:
        globals()[name] = getattr(import_module(_LAB_EXPORTS[name]), name)
        return globals()[name]
    for module, names in _EXPORTS.items():
        defining = import_module(module)
        globals().update({public: getattr(defining, public) for public in names})
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"module 'bitplan' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
