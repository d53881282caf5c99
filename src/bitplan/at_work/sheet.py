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

from bitplan.at_work.tables import TABLE, LiveRow, ModuleTables
from bitplan.numbers.noise import keys_of
from bitplan.numbers.rounding import ROW_FIELDS
from bitplan.seeing.intercept import state_of


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
        self._sites = np.array([zlib.crc32(site.encode()) for site in sites], np.uint32)
        #: The values that each format's row was last written with: a row keeps its list as long as it stays the same.
        self._written: list[list[int] | None] = [None] * len(self._formats)
        self._draws = any(tables.needs_keys for tables in each)
        self._changed = True
        self._sheet = torch.from_numpy(self.numbers)
        self._modules = [tables.module for tables in each]
        self._states = [state_of(module) for module in self._modules]
        #: Where the numbers go, each device's tables together.
        self._ways: list[_Way] = []
        self._buffers: list[Tensor | None] = []
        #: Whether these hold the numbers as they are now.
        self._is_up_to_date = False

    def formats_changed(self) -> None:
        """Look at the formats before the next writing: there are hundreds in a small model, and they seldom change."""
        self._changed = True

    def at(self, seed: int, step: int) -> Tensor:
        """The numbers at that step, in memory that the next call writes over."""
        if self._draws:
            self.numbers[self._keys, :2] = keys_of(seed, step, self._sites)
        if self._changed:
            self._changed = False
            for number, (place, row) in enumerate(self._formats):
                values = row.values
                if values is not self._written[number]:
                    self._written[number] = values
                    self.numbers[place] = values
                    self._is_up_to_date = False
        return self._sheet

    def write(self, seed: int, step: int) -> None:
        """The numbers at that step into the modules' buffers, and into those of every copy."""
        self.at(seed, step)
        self._find_buffers()
        if self._is_up_to_date and not self._draws:
            return
        for way in self._ways:
            _copy(way)
        self._is_up_to_date = True

    def _find_buffers(self) -> None:
        """Look where the tables are: a model may have been moved, or copied, since."""
        found = [module._buffers.get(TABLE) for module in self._modules]
        places = list(range(len(found)))
        for number, state in enumerate(self._states):
            for twin in state.copies():
                found.append(twin._buffers.get(TABLE))
                places.append(number)
        if len(found) == len(self._buffers) and all(map(operator.is_, found, self._buffers)):
            return
        self._buffers, self._is_up_to_date = found, False
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, buffer in zip(places, found, strict=True):
            if buffer is not None:
                by_device.setdefault(buffer.device, []).append((number, buffer))
        parts = torch.split(self._sheet, self.sizes)
        self._ways = [_Way(self._sheet, parts, device, here) for device, here in by_device.items()]


class _Way:
    """The numbers' way into the tables of one device: as a whole, and from there into each."""

    def __init__(
        self, sheet: Tensor, parts: Sequence[Tensor], device: torch.device, here: Sequence[tuple[int, Tensor]]
    ) -> None:
        self.sheet = sheet
        self.buffers = [buffer for _, buffer in here]
        #: The sheet itself, or its copy on the device.
        self.there = sheet if device.type == "cpu" else torch.empty_like(sheet, device=device)
        there = parts if device.type == "cpu" else torch.split(self.there, [len(part) for part in parts])
        self.rows = [there[number] for number, _ in here]


def _copy(way: _Way) -> None:
    if way.there is not way.sheet:
        # From memory that is not pinned, a copy waits until the GPU has done all before it.
        sent = way.sheet.pin_memory() if way.there.is_cuda else way.sheet
        way.there.copy_(sent, non_blocking=way.there.is_cuda)
    torch._foreach_copy_(way.buffers, way.rows)


def with_twins(module: nn.Module) -> list[nn.Module]:
    """A module and the copies that were made of it."""
    return [module, *state_of(module).copies()]
