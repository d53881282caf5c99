"""All tables of a run as one sheet of numbers, written after every step.

A step of a small model takes milliseconds, so a step of the plan must take a fraction of one. What stays the same is
looked up once: where each module's rows lie, and what its keys are made of. Then a step mixes all keys at once, writes
the formats that changed, and sends the sheet to the device as a whole, which nothing waits for. Where no rounding draws
random bits and no format has changed, nothing is sent.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.intercept import state_of
from bitplan.noise import keys_of
from bitplan.rounding import ROW_FIELDS
from bitplan.tables import TABLE, LiveRow, ModuleTables


class Sheet:
    """The rows of several modules, one below the other. Made anew when the modules' formats are other ones."""

    def __init__(self, each: Sequence[ModuleTables], parameter_names: Mapping[int, str]) -> None:
        """`parameter_names`: by a parameter's identity, its name in the whole model."""
        self.each = each
        self.sizes = [1 + len(tables.parameters) + len(tables.formats) for tables in each]
        self.numbers = np.zeros((sum(self.sizes), ROW_FIELDS), np.int32)
        keys: list[int] = []
        sites: list[str] = []
        self._formats: list[tuple[int, LiveRow]] = []
        first = 0
        for tables, size in zip(each, self.sizes, strict=True):
            own = tables.module._parameters
            known = (parameter_names.get(id(own[name]), name) for name in tables.parameters)
            sites += [tables.path, *(f"parameter {name}" for name in known)]
            after_keys = first + 1 + len(tables.parameters)
            keys += range(first, after_keys)
            self._formats += list(enumerate(tables.formats, after_keys))
            first += size
        self._keys = np.array(keys, np.int64)
        self._sites = torch.tensor([zlib.crc32(site.encode()) for site in sites], dtype=torch.int64)
        #: The values that each format's row was last written with: a row keeps its list as long as it stays the same.
        self._written: list[list[int] | None] = [None] * len(self._formats)
        self._draws = any(tables.needs_keys for tables in each)
        #: The buffers that hold the numbers as they are now.
        self._up_to_date: list[Tensor] = []

    def at(self, seed: int, step: int) -> Tensor:
        """The numbers at that step, in memory that the next call writes over."""
        self.numbers[self._keys, :2] = keys_of(seed, step, self._sites).numpy()
        for number, (place, row) in enumerate(self._formats):
            values = row.values
            if values is not self._written[number]:
                self._written[number] = values
                self.numbers[place] = values
                self._up_to_date = []
        return torch.from_numpy(self.numbers)

    def write(self, seed: int, step: int) -> None:
        """The numbers at that step into the modules' buffers, and into those of every copy."""
        parts = torch.split(self.at(seed, step), self.sizes)
        buffers: dict[torch.device, list[Tensor]] = {}
        rows: dict[torch.device, list[Tensor]] = {}
        for tables, part in zip(self.each, parts, strict=True):
            for module in with_twins(tables.module):
                buffer = module._buffers.get(TABLE)
                if buffer is not None:
                    buffers.setdefault(buffer.device, []).append(buffer)
                    rows.setdefault(buffer.device, []).append(part)
        wanted = [buffer for here in buffers.values() for buffer in here]
        known = self._up_to_date
        if not self._draws and len(wanted) == len(known) and all(map(operator.is_, wanted, known)):
            return
        for device, here in buffers.items():
            _copy(here, rows[device], device)
        self._up_to_date = wanted


def _copy(buffers: list[Tensor], rows: list[Tensor], device: torch.device) -> None:
    if device.type != "cpu":
        flat = torch.cat(rows)
        if device.type == "cuda":  # from memory that is not pinned, a copy waits until the GPU has done all before it
            flat = flat.pin_memory()
        flat = flat.to(device, non_blocking=True)
        rows = list(torch.split(flat, [len(part) for part in rows]))
    torch._foreach_copy_(buffers, rows)


def with_twins(module: nn.Module) -> list[nn.Module]:
    """A module and the copies that were made of it."""
    twins = state_of(module).twins
    return [module, *twins] if len(twins) else [module]
