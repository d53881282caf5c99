"""Buffers beside a module's weights while a plan is attached: random keys, format parameters, statistics.

Up to three per module. They are non-persistent, so that the model's ``state_dict`` is untouched, and buffers, so that
equal blocks share one compiled graph and CUDA graphs see static inputs:

* ``TABLE`` (int32): row 0 is the module's random key, then one row for the key of each of its parameters and one row
  for each mutable format. Graphs only read it; :meth:`Attachment.step` writes it.
* ``RECORD`` (float32): a row of statistics for each site, see :mod:`bitplan.runtime.statistics`.
* ``AMAX_HISTORY_MAX`` (float32): for each row of the record the maximum of the amax history, for delayed scaling.
  Graphs only read it, so that equal casts stay equal; :meth:`RunTables.fold` writes it.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.capture.scopes import state_of
from bitplan.compiler import torch_private
from bitplan.compiler.torch_patches import Undo, replace_attribute
from bitplan.compiler.torch_private import DDP_ASSIGN_BUFFERS, foreach_copy_
from bitplan.numerics.formats import Format
from bitplan.numerics.mutable_format import MutableFormat
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


class QuantizerModules(dict[str, nn.Module]):
    """The objects of the user's own classes that round, by site; those of a whole run."""

    def __init__(self) -> None:
        super().__init__()
        #: Site -> state of a resumed run, for objects that are made when their tensor is first met.
        self.saved: dict[str, dict[str, Any]] = {}

    def restore(self, site: str, module: nn.Module) -> None:
        """Give an object its saved parameters."""
        state = self.saved.pop(site, None)
        if state is not None:
            module.load_state_dict(state)


class FormatRow:
    """A mutable format in the table of one module."""

    def __init__(self, mutable: MutableFormat, spec: QuantizerSpec, name: str | None) -> None:
        self.mutable = mutable
        self.spec = spec
        #: The quantizer's name in the plan; None where the rule spells it out.
        self.name = name
        #: What the row holds now.
        self.format = spec.target
        #: The format and its row when last computed: read at every step, changed rarely.
        self._written: tuple[Format, list[int]] | None = None

    def change(self, target: Format) -> None:
        """Change to another format of the same kind."""
        self.mutable.require_same_kind(self.spec.stored(target))
        self.format = target

    def follow(self, bits: int) -> None:
        """Change to the bits of its schedule."""
        self.format = self.spec.with_bits(bits).target if bits != self.spec.bits else self.spec.target

    def stored(self) -> Format:
        """The format as tensors are stored in it."""
        return self.spec.stored(self.format)

    @property
    def values(self) -> list[int]:
        """The row, all whole numbers: floats as their bit patterns."""
        if self._written is None or self._written[0] is not self.format:
            row = self.mutable.row_of(self.stored())
            whole = [_pattern(value) for value in row] if self.mutable.kind == "int" else [int(value) for value in row]
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
        self.parameters = tuple(parameter_names(module))
        #: Their names in the whole model, which random keys are made of; set when the tables are first installed.
        self.full_names: tuple[str, ...] = ()
        self.formats: list[FormatRow] = []
        #: Index of a rule and place -> the row of its format.
        self.rows_by_rule: dict[tuple[int | None, str], int] = {}
        #: Phase of the plan -> formats and rows.
        self._phases: dict[Phase, tuple[list[FormatRow], dict[tuple[int | None, str], int]]] = {}
        self.needs_keys = False
        #: Site and place -> its row of the record.
        self.records: dict[str, int] = {}

    def enter(self, phase: Phase) -> None:
        """Switch to the rows of a phase."""
        self.formats, self.rows_by_rule = self._phases.setdefault(phase, ([], {}))

    def rows_in(self, phase: Phase) -> tuple[list[FormatRow], dict[tuple[int | None, str], int]]:
        """The rows of a phase, and their numbers by rule and place."""
        return self._phases.get(phase, ([], {}))

    def format_row(
        self, rule: int | None, place: str, mutable: MutableFormat, spec: QuantizerSpec, name: str | None
    ) -> int:
        """The number of the row, which all operations under the same rule share."""
        if (rule, place) not in self.rows_by_rule:
            self.formats.append(FormatRow(mutable, spec, name))
            self.rows_by_rule[rule, place] = len(self.parameters) + len(self.formats)
        return self.rows_by_rule[rule, place]

    def row_at(self, row: int, phase: Phase | None = None) -> FormatRow:
        """The format in that row of the table, in the present phase of the plan or in another."""
        formats = self.formats if phase is None else self.rows_in(phase)[0]
        return formats[row - len(self.parameters) - 1]

    @property
    def has_table(self) -> bool:
        return self.needs_keys or bool(self.formats)

    def install(self, rows: Tensor, device: torch.device, module: nn.Module | None = None) -> None:
        """Register the table with the module or a copy of it, unless it has one of the same size."""
        module = self.module if module is None else module
        table = module._buffers.get(TABLE)
        if self.has_table and (table is None or len(table) != len(rows)):
            module.register_buffer(TABLE, rows.clone().to(device), persistent=False)

    def record_row(
        self, site: str, device: torch.device, limit: float = math.inf, history: int = 0, margin: int = 0
    ) -> int:
        """The row of a site, which is added if there is none yet.

        :param limit: of the signal of a promotion.
        :param history: length of the amax history.
        :param margin: exponent of the factor by which scales leave room beyond the history's maximum.
        """
        if site not in self.records:
            self.records[site] = len(self.records)
            present = self.module._buffers.get(RECORD)
            added = blank_record(1, device)
            grown = added if present is None else torch.cat((present, added))
            self.module.register_buffer(RECORD, grown, persistent=False)
        record, row = self.module._buffers[RECORD], self.records[site]
        assert record is not None
        for column, value in ((LIMIT, limit), (LENGTH, history), (MARGIN, 2.0**margin)):
            record[row, column] = value
        if history or self.module._buffers.get(AMAX_HISTORY_MAX) is not None:
            write_amax_history_max(self.module, record)
        return row


#: Attribute of a module: what is known of weights that are stored in few bits, by name.
FROZEN = "_bitplan_frozen"


def parameter_names(module: nn.Module) -> list[str]:
    """The names of a module's parameters, with those that are stored in few bits."""
    stored: dict[str, Any] = module.__dict__.get(FROZEN, {})
    return [name for name, tensor in module._parameters.items() if tensor is not None or name in stored]


def remove_buffers(module: nn.Module) -> None:
    """Remove every buffer that a plan has given the module."""
    for name in (TABLE, RECORD, AMAX_HISTORY_MAX):
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)


def keep_buffers_per_rank() -> Undo:
    """A patch of torch: DistributedDataParallel broadcasts no buffers of a plan.

    Every rank records its own tensors; :meth:`RunTables.fold` combines the records of all ranks.
    """
    assign_buffers = torch_private.ddp_assign_buffers

    def assign_own_buffers(self: Any) -> None:
        assign_buffers(self)  # type: ignore[no-untyped-call]
        own = {name: buffer for name, buffer in self.named_module_buffers.items() if not _is_ours(name)}
        self.named_module_buffers, self.modules_buffers = own, list(own.values())

    return replace_attribute(nn.parallel.DistributedDataParallel, DDP_ASSIGN_BUFFERS, assign_own_buffers)


def _is_ours(name: str) -> bool:
    return name.rpartition(".")[2] in (TABLE, RECORD, AMAX_HISTORY_MAX)


def write_amax_history_max(module: nn.Module, record: Tensor) -> None:
    """Update the module's AMAX_HISTORY_MAX buffer from its record."""
    values, buffer = amax_history_max(record), module._buffers.get(AMAX_HISTORY_MAX)
    if buffer is not None and buffer.shape == values.shape:
        buffer.copy_(values)
    else:
        module.register_buffer(AMAX_HISTORY_MAX, values, persistent=False)


# --- The tables of all modules as one tensor, written after every step


class DeviceTables:
    """The tables of several modules in one tensor, which is copied to their buffers. Remade when formats are added."""

    def __init__(self, per_module: Sequence[ModuleTables]) -> None:
        self.per_module = per_module
        self.sizes = [1 + len(tables.parameters) + len(tables.formats) for tables in per_module]
        self.numbers = np.zeros((sum(self.sizes), ROW_FIELDS), np.int32)
        keys: list[int] = []
        sites: list[str] = []
        self._formats: list[tuple[int, FormatRow]] = []
        first = 0
        for tables, size in zip(per_module, self.sizes, strict=True):
            sites += [tables.path, *map(parameter_key, tables.full_names)]
            after_keys = first + 1 + len(tables.parameters)
            keys += range(first, after_keys)
            self._formats += list(enumerate(tables.formats, after_keys))
            first += size
        self._keys = np.array(keys, np.int64)
        self._sites = np.array([text_hash(site) for site in sites], np.uint32)
        #: The values last written for each format: a row returns the same list as long as its format is unchanged.
        self._written: list[list[int] | None] = [None] * len(self._formats)
        self._draws = any(tables.needs_keys for tables in per_module)
        self._changed = True
        self._host_tables = torch.from_numpy(self.numbers)
        self._modules = [tables.module for tables in per_module]
        self._states = [state_of(module) for module in self._modules]
        #: One for each device.
        self._device_copies: list[_DeviceCopy] = []
        self._buffers: list[Tensor | None] = []
        #: Whether the buffers hold the present numbers.
        self._is_up_to_date = False

    def formats_changed(self) -> None:
        """Read all formats before the next write. A small model has hundreds, and they rarely change."""
        self._changed = True

    def at(self, seed: int, step: int) -> Tensor:
        """The tables at that step, in memory that the next call overwrites."""
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
        return self._host_tables

    def write(self, seed: int, step: int) -> None:
        """Write the tables at that step into the buffers of the modules and of their copies."""
        self.at(seed, step)
        self._find_buffers()
        if self._is_up_to_date and not self._draws:
            return
        for device_copy in self._device_copies:
            device_copy.write()
        self._is_up_to_date = True

    def _find_buffers(self) -> None:
        """Find the buffers again: a model may have been moved or copied."""
        buffers = [module._buffers.get(TABLE) for module in self._modules]
        numbers = list(range(len(buffers)))
        for number, state in enumerate(self._states):
            for twin in state.copies():
                buffers.append(twin._buffers.get(TABLE))
                numbers.append(number)
        if len(buffers) == len(self._buffers) and all(map(operator.is_, buffers, self._buffers)):
            return
        self._buffers, self._is_up_to_date = buffers, False
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for number, buffer in zip(numbers, buffers, strict=True):
            if buffer is not None:
                by_device.setdefault(buffer.device, []).append((number, buffer))
        parts = torch.split(self._host_tables, self.sizes)
        self._device_copies = [_DeviceCopy(self._host_tables, parts, device, own) for device, own in by_device.items()]


class _DeviceCopy:
    """Copies the tables to the buffers of one device: all at once to the device, and there to each buffer."""

    def __init__(
        self, host: Tensor, parts: Sequence[Tensor], device: torch.device, numbered: Sequence[tuple[int, Tensor]]
    ) -> None:
        """`numbered`: buffers of the device with the numbers of their parts."""
        self.host = host
        self.buffers = [buffer for _, buffer in numbered]
        self.on_device = host if device.type == "cpu" else torch.empty_like(host, device=device)
        if device.type != "cpu":
            parts = torch.split(self.on_device, [len(part) for part in parts])
        self.rows = [parts[number] for number, _ in numbered]

    def write(self) -> None:
        if self.on_device is not self.host:
            # A copy from memory that is not pinned waits for all GPU work before it.
            source = self.host.pin_memory() if self.on_device.is_cuda else self.host
            self.on_device.copy_(source, non_blocking=self.on_device.is_cuda)
        foreach_copy_(self.buffers, self.rows)


def with_copies(module: nn.Module) -> list[nn.Module]:
    """A module and the copies that were made of it."""
    return [module, *state_of(module).copies()]
