"""What lies beside a module's weights while a plan is at work: keys of random bits, rows of formats, records.

Up to three buffers a module, all non-persistent, so that the model's ``state_dict`` is untouched, and all *buffers*, so
that equal blocks share one compiled graph and CUDA graphs see static inputs:

* ``TABLE`` (int32): row 0 the module's key, one row for the key of each of its parameters, then a row for each
  format that may change while the run goes on. The graph only reads it; :meth:`Attachment.step` writes it.
* ``RECORD`` (float32): what was observed at each site, see :mod:`bitplan.runtime.statistics`.
* ``AMAX_HISTORY_MAX`` (float32): for each row of the record the largest magnitude of past steps, for delayed scales.
  The graph only reads it, so that equal casts stay equal; :meth:`RunTables.fold` writes it.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.capture.scopes import state_of
from bitplan.compiler.torch_private import foreach_copy_
from bitplan.numerics.formats import Format
from bitplan.numerics.mutable_format import LiveFormat
from bitplan.numerics.noise import keys_of
from bitplan.numerics.rounding import ROW_FIELDS
from bitplan.numerics.wire_format import parameter_key, text_hash
from bitplan.plans.document import Phase
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.statistics import LENGTH, LIMIT, MARGIN, amax_history_max, blank_record

TABLE = "_bitplan_table"

RECORD = "_bitplan_record"

AMAX_HISTORY_MAX = "_bitplan_reach"


class OperandState:
    """The state of a run for one tensor of an operation, in all places of the module where the operation runs."""

    def __init__(self) -> None:
        #: Site -> row of the module's record, for what is observed.
        self.records: dict[str, int] = {}
        #: In packed execution, the tensors that are promoted: site and part.
        self.promoted: dict[str, bool] = {}

    def facts(self) -> Hashable:
        """All that tracing reads of it."""
        return tuple(self.records.items()), tuple(self.promoted)


class LiveRow:
    """A format that may change during the run, in one place of one module."""

    def __init__(self, live: LiveFormat, spec: QuantizerSpec, name: str | None) -> None:
        self.live = live
        self.spec = spec
        #: The quantizer's name in the plan; None where the rule spells it out.
        self.name = name
        #: What the row holds now.
        self.format = spec.target
        #: The format whose row was last asked for, and that row: asked for every step, changed now and then.
        self._written: tuple[Format, list[int]] | None = None

    def change(self, target: Format) -> None:
        """Another format of the same kind."""
        self.live.require_same_kind(self.spec.stored(target))
        self.format = target

    def follow(self, bits: int) -> None:
        """The width that its schedule has come to."""
        self.format = self.spec.with_bits(bits).target if bits != self.spec.bits else self.spec.target

    def stored(self) -> Format:
        """The format as tensors are stored in it."""
        return self.spec.stored(self.format)

    @property
    def values(self) -> list[int]:
        """The row, all whole numbers: floats as their bit patterns."""
        if self._written is None or self._written[0] is not self.format:
            row = self.live.row_of(self.stored())
            whole = [_pattern(value) for value in row] if self.live.kind == "int" else [int(value) for value in row]
            self._written = self.format, whole + [0] * (ROW_FIELDS - len(whole))
        return self._written[1]


def _pattern(value: float) -> int:
    """The bits of a float32 as a signed number."""
    pattern: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return pattern


class ModuleTables:
    """The rows of one module, on the host; :meth:`install` makes its buffers."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.parameters = tuple(name for name, tensor in module._parameters.items() if tensor is not None)
        self.formats: list[LiveRow] = []
        #: Index of a rule and a place -> the row that holds what it says there.
        self.spoken: dict[tuple[int | None, str], int] = {}
        #: Formats and what speaks of them, by the phase of a plan that changes over time.
        self._phases: dict[Phase, tuple[list[LiveRow], dict[tuple[int | None, str], int]]] = {}
        self.needs_keys = False
        #: Site and place -> its row of the record.
        self.records: dict[str, int] = {}

    def enter(self, phase: Phase) -> None:
        """From now on the rows are those of that phase."""
        self.formats, self.spoken = self._phases.setdefault(phase, ([], {}))

    def rows_in(self, phase: Phase) -> tuple[list[LiveRow], dict[tuple[int | None, str], int]]:
        """The rows of a phase, and what speaks of them."""
        return self._phases.get(phase, ([], {}))

    def format_row(self, rule: int | None, place: str, live: LiveFormat, spec: QuantizerSpec, name: str | None) -> int:
        """The number of the row: one for all operations that a rule speaks of in one breath."""
        if (rule, place) not in self.spoken:
            self.formats.append(LiveRow(live, spec, name))
            self.spoken[rule, place] = len(self.parameters) + len(self.formats)
        return self.spoken[rule, place]

    def live_row(self, row: int, phase: Phase | None = None) -> LiveRow:
        """The format in that row of the table: in the present phase of the plan, or in another."""
        formats = self.formats if phase is None else self.rows_in(phase)[0]
        return formats[row - len(self.parameters) - 1]

    @property
    def has_table(self) -> bool:
        return self.needs_keys or bool(self.formats)

    def install(self, rows: Tensor, device: torch.device, module: nn.Module | None = None) -> None:
        """Give the module, or a copy of it, its table; one of the same size is left where it lies, to be written."""
        module = self.module if module is None else module
        known = module._buffers.get(TABLE)
        if self.has_table and (known is None or len(known) != len(rows)):
            module.register_buffer(TABLE, rows.clone().to(device), persistent=False)

    def record_row(
        self, site: str, device: torch.device, limit: float = math.inf, history: int = 0, margin: int = 0
    ) -> int:
        """The row of a site, a new one if it was not met before.

        :param limit: of the sign that a promotion watches there.
        :param history: of how many past steps the largest magnitude is remembered, for the next one's scale.
        :param margin: by which power of two the scale makes room for more than that.
        """
        if site not in self.records:
            self.records[site] = len(self.records)
            known = self.module._buffers.get(RECORD)
            fresh = blank_record(1, device)
            grown = fresh if known is None else torch.cat((known, fresh))
            self.module.register_buffer(RECORD, grown, persistent=False)
        record, row = self.module._buffers[RECORD], self.records[site]
        assert record is not None
        for column, value in ((LIMIT, limit), (LENGTH, history), (MARGIN, 2.0**margin)):
            record[row, column] = value
        known = self.module._buffers.get(AMAX_HISTORY_MAX)
        if history or known is not None:
            write_amax_history_max(self.module, record)
        return row


def remove_buffers(module: nn.Module) -> None:
    """Remove every buffer that a plan has given the module."""
    for name in (TABLE, RECORD, AMAX_HISTORY_MAX):
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)


def write_amax_history_max(module: nn.Module, record: Tensor) -> None:
    """Write what the module's record says of this step's scales where its graphs read it."""
    now, known = amax_history_max(record), module._buffers.get(AMAX_HISTORY_MAX)
    if known is not None and known.shape == now.shape:
        known.copy_(now)
    else:
        module.register_buffer(AMAX_HISTORY_MAX, now, persistent=False)


# --- All tables of a run as one sheet of numbers, written after every step


class DeviceTables:
    """The rows of several modules, one below the other. Made anew when the modules' formats are other ones."""

    def __init__(self, each: Sequence[ModuleTables], parameter_names: Mapping[int, str]) -> None:
        """`parameter_names`: by a parameter's identity, its name in the whole model."""
        self.per_module = each
        self.sizes = [1 + len(tables.parameters) + len(tables.formats) for tables in each]
        self.numbers = np.zeros((sum(self.sizes), ROW_FIELDS), np.int32)
        keys: list[int] = []
        sites: list[str] = []
        self._formats: list[tuple[int, LiveRow]] = []
        first = 0
        for tables, size in zip(each, self.sizes, strict=True):
            own = tables.module._parameters
            known = (parameter_names.get(id(own[name]), name) for name in tables.parameters)
            sites += [tables.path, *(parameter_key(name) for name in known)]
            after_keys = first + 1 + len(tables.parameters)
            keys += range(first, after_keys)
            self._formats += list(enumerate(tables.formats, after_keys))
            first += size
        self._keys = np.array(keys, np.int64)
        self._sites = np.array([text_hash(site) for site in sites], np.uint32)
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
    foreach_copy_(way.buffers, way.rows)


def with_twins(module: nn.Module) -> list[nn.Module]:
    """A module and the copies that were made of it."""
    return [module, *state_of(module).copies()]
