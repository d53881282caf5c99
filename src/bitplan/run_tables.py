"""The tables of all modules of a model: written together after every step, their records folded together."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bitplan.actions import Action, Here
from bitplan.intercept import state_of, without_wrappers
from bitplan.noise import keys_of
from bitplan.observe import Statistics, fold, statistics
from bitplan.tables import RECORD, TABLE, ModuleTables, write


class RunTables:
    """What lies beside the weights of a whole model while a plan is at work, see :mod:`bitplan.tables`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.each: list[ModuleTables] = []
        self._parameter_names = {id(tensor): without_wrappers(name) for name, tensor in model.named_parameters()}

    def device(self) -> torch.device:
        return next(self.model.parameters(), torch.empty(0)).device

    # --- what a step reads ---

    def rows(self, tables: Sequence[ModuleTables], seed: int, step: int) -> list[list[list[int]]]:
        """The rows of several modules: all keys are mixed at once, since a step of a small model takes milliseconds."""
        names: list[str] = []
        for each in tables:
            own = each.module._parameters
            known = (self._parameter_names.get(id(own[name]), name) for name in each.parameters)
            names += [each.path, *(f"parameter {name}" for name in known)]
        keys = iter(keys_of(seed, step, [zlib.crc32(name.encode()) for name in names]))
        return [each.rows([next(keys) for _ in range(1 + len(each.parameters))]) for each in tables]

    def install(self, tables: ModuleTables, seed: int, step: int) -> None:
        """Give a module, and every copy that was made of it, its buffers."""
        (rows,) = self.rows([tables], seed, step)
        for module in (tables.module, *state_of(tables.module).twins):
            device = next(module.parameters(), torch.empty(0, device=self.device())).device
            tables.install(rows, device, module)

    def write(self, seed: int, step: int) -> None:
        """The tables of the model, and of every copy that was made of it."""
        buffers: list[Tensor] = []
        rows: list[list[list[int]]] = []
        written = [tables for tables in self.each if tables.has_table]
        for tables, new in zip(written, self.rows(written, seed, step), strict=True):
            for module in (tables.module, *state_of(tables.module).twins):
                buffer = module._buffers.get(TABLE)
                if buffer is not None:
                    buffers.append(buffer)
                    rows.append(new)
        for device in {buffer.device for buffer in buffers}:
            here = [number for number, buffer in enumerate(buffers) if buffer.device == device]
            write([buffers[number] for number in here], [rows[number] for number in here])

    # --- what a step leaves ---

    def records(self) -> list[tuple[ModuleTables, Tensor]]:
        found = ((tables, tables.module._buffers.get(RECORD)) for tables in self.each)
        return [(tables, record) for tables, record in found if record is not None]

    def fold(self) -> None:
        """A step is done: what it left in the records becomes part of the whole."""
        records = [record for _, record in self.records()]
        if records:
            folded = torch.split(fold(torch.cat(records)), [len(record) for record in records])
            torch._foreach_copy_(records, list(folded))

    def statistics(self) -> dict[str, Statistics]:
        """Per site and place, what rounding did to its values. Reading waits for the device."""
        found = {}
        for tables, kept in self.records():
            rows = kept.tolist()
            for name, row in tables.records.items():
                seen = statistics(rows[row])
                if seen.steps:  # an operation without a weight has no weight's statistics
                    found[f"{tables.path}/{name}"] = seen
        return found

    def make_room(self, module: nn.Module, action: Action, here: Here) -> None:
        """A row of the record for each place of an operation that is observed."""
        tables = next((tables for tables in self.each if tables.path == state_of(module).path), None)
        if tables is None or tables.module is not module:
            return  # a copy of the model leaves no traces
        action.met.add(here.site)
        for place, place_action in action.places.items():
            if place_action.watched or place_action.uses_mean_range:
                place_action.records[here.site] = tables.record_row(f"{here.site}:{place}", self.device())

    def take(self, tables: ModuleTables, names: dict[str, int], kept: Tensor) -> None:
        """A record that was saved goes on in this module."""
        tables.records = dict(names)
        tables.module.register_buffer(RECORD, kept.to(self.device()), persistent=False)
        restore_rows(tables)


def restore_rows(tables: ModuleTables) -> None:
    """Tell the module's actions which rows of its record are theirs."""
    for site_and_place, row in tables.records.items():
        site, _, place = site_and_place.partition(":")
        for action in state_of(tables.module).actions.values():
            if isinstance(action, Action) and place in action.places:
                action.places[place].records[site] = row
