"""Which linear layers pay on the low-precision units of this machine, measured for the model's own shapes.

All three GEMMs of a layer with their casts take turns with the same GEMMs in the model's precision. Times that agree
with each other are cached; a busy machine's are used once and not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bitplan.executions.native.backends import GemmBackend, backends_of
from bitplan.executions.native.crossover import ProductTime, cache_file, machine_name, time_product
from bitplan.planners.auto.cache import add_to_cache, read_cache
from bitplan.planners.auto.groups import ProductGroup
from bitplan.planners.auto.trials import WIDEST_SPREAD

#: In a compiled model casts are fused with the operations before them, which a product alone does not show: a product
#: that takes up to this many times as long as in the model's precision is still worth a trial in the model.
_WORTH_A_TRIAL = 1.15


@dataclass(frozen=True)
class TimedProducts:
    """A group of linear layers and its times."""

    group: ProductGroup
    #: The fastest backend, and its times; None where none supports the shape.
    backend: str | None
    time: ProductTime | None

    @property
    def is_worth_a_trial(self) -> bool:
        return self.time is not None and self.time.native <= _WORTH_A_TRIAL * self.time.plain


def time_products(
    groups: Sequence[ProductGroup], device: torch.device, dtype: torch.dtype, report: Callable[[str], None]
) -> list[TimedProducts]:
    """Time each group, each shape once."""
    cached = _read_cache()
    stored = dict(cached)
    timed: list[TimedProducts] = []
    noisy = 0
    for group in groups:
        best: tuple[str, ProductTime] | None = None
        for backend in _backends(device):
            key = f"{machine_name(device)}, {dtype}, torch {torch.__version__}, {backend.name}, {group.shape}"
            time = cached[key] if key in cached else time_product(backend, group.shape, device, dtype)
            cached[key] = time
            if time is None or time.spread <= WIDEST_SPREAD:
                stored[key] = time
            else:
                noisy += key not in stored
            if time is not None and (best is None or time.native < best[1].native):
                best = backend.name, time
        timed.append(TimedProducts(group, *(best or (None, None))))
    if noisy:
        report(
            f"{noisy} of {len(groups)} products were timed on a busy machine (their times spread by more than "
            f"{WIDEST_SPREAD:.0%}) and are not remembered: search again while the machine is idle."
        )
    add_to_cache(_file(), {key: None if time is None else asdict(time) for key, time in stored.items()})
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return timed


def _backends(device: torch.device) -> tuple[GemmBackend, ...]:
    """The backends worth timing: where there are FP8 units, INT8 has the same rate and no casts in one kernel."""
    backends = backends_of(device)
    return tuple(backend for backend in backends if backend.name == "fp8") or backends


def _read_cache() -> dict[str, ProductTime | None]:
    try:
        return {key: None if row is None else ProductTime(**row) for key, row in read_cache(_file()).items()}
    except TypeError:
        return {}  # a damaged file: measured again


def _file() -> Path:
    return cache_file().with_name("products.json")
