"""The tables of all modules of a model: written together after every step, their records folded together."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, nn

from bitplan.capture.planned_classes import without_wrappers
from bitplan.capture.scopes import state_of
from bitplan.compiler.torch_private import foreach_copy_
from bitplan.errors import PlanError
from bitplan.numerics.wire_format import parameter_suffix, place_key
from bitplan.runtime.decisions import ANY
from bitplan.runtime.module_state import (
    AMAX_HISTORY_MAX,
    RECORD,
    DeviceTables,
    ModuleTables,
    with_copies,
    write_amax_history_max,
)
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding, Promoted, RoundingOp, promotion_limit
from bitplan.runtime.sharding import Ranks
from bitplan.runtime.statistics import (
    COLUMNS,
    PROMOTED,
    Observed,
    Statistics,
    amax_history_max,
    combine_ranks,
    fold,
    promotion_in,
    statistics,
)


class RunTables:
    """What lies beside the weights of a whole model while a plan is at work, see
    :mod:`bitplan.runtime.module_state`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.per_module: list[ModuleTables] = []
        #: What the plan writes into records.
        self.watched = Observed()
        #: Whether anything was ever observed: a step must not ask every module where nothing is.
        self._observes = False
        #: The processes that train the model; looked for until there are several.
        self._ranks: Ranks | None = None
        #: The records that were last folded, and memory for all of them, in parts as large as they are.
        self._folded: list[Tensor] = []
        self._whole = torch.empty(0)
        self._parts: tuple[Tensor, ...] = ()
        self._device_tables: DeviceTables | None = None
        self._parameter_names = {id(tensor): without_wrappers(name) for name, tensor in model.named_parameters()}

    def device(self) -> torch.device:
        return _with_values(next(self.model.parameters(), torch.empty(0)).device)

    @property
    def promotes(self) -> bool:
        """Whether anything may be promoted."""
        return self.watched.signals

    @property
    def delays(self) -> bool:
        """Whether any scale comes from past steps."""
        return self.watched.amax

    # --- what a step reads ---

    def install(self, tables: ModuleTables, seed: int, step: int) -> None:
        """Give a module, and every copy that was made of it, its buffers."""
        self._device_tables = None
        if not tables.full_names:  # later, parameters may be other objects: those of to_empty() are
            own = tables.module._parameters
            tables.full_names = tuple(self._parameter_names.get(id(own[name]), name) for name in tables.parameters)
        rows = DeviceTables([tables]).at(seed, step)
        for module in with_copies(tables.module):
            device = next(module.parameters(), torch.empty(0, device=self.device())).device
            with torch.inference_mode(False):  # or later steps could not write into them
                tables.install(rows, _with_values(device), module)

    def write(self, seed: int, step: int) -> None:
        """The tables of the model, and of every copy that was made of it."""
        if self._device_tables is None:
            self._device_tables = DeviceTables([tables for tables in self.per_module if tables.has_table])
        if self._device_tables.per_module:
            self._device_tables.write(seed, step)

    def formats_changed(self) -> None:
        """Formats are other ones than when the tables were last written."""
        if self._device_tables is not None:
            self._device_tables.formats_changed()

    # --- what a step leaves ---

    def records(self) -> list[tuple[ModuleTables, Tensor]]:
        if not self._observes:
            return []
        found = [(tables, tables.module._buffers.get(RECORD)) for tables in self.per_module]
        return [(tables, record) for tables, record in found if record is not None]

    def fold(self, step: int) -> None:
        """A step is done: what it left in the records becomes part of the whole. `step` is the one that comes next."""
        found = self.records()
        if not found:
            return
        records = [record for _, record in found]
        if len(records) != len(self._folded) or not all(map(operator.is_, records, self._folded)):
            self._folded, self._whole = records, torch.cat(records)
            self._parts = torch.split(self._whole, [len(record) for record in records])
        else:
            torch.cat(records, out=self._whole)
        whole, parts = self._whole, self._parts
        if self._ranks is None:
            self._ranks = Ranks.of(self.model)
        if self._ranks is not None:
            combine_ranks(whole, self.watched, self._ranks.largest, self._ranks.total)
        fold(whole, step, self.watched)
        foreach_copy_(records, parts)
        if self.delays:
            buffers = [tables.module._buffers.get(AMAX_HISTORY_MAX) for tables, _ in found]
            pairs = zip(buffers, torch.split(amax_history_max(whole), list(map(len, parts))), strict=True)
            read = [(buffer, now) for buffer, now in pairs if buffer is not None]
            if read:  # torch takes no empty lists
                foreach_copy_([buffer for buffer, _ in read], [now for _, now in read])
        for (tables, _), record in zip(found, parts, strict=True):
            _write_copies(tables, record)

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

    def add_rows(self, module: nn.Module, action: OpRounding, context: OpContext) -> ModuleTables | None:
        """A row of the record for each place of an operation that is observed; the tables that have grown."""
        tables = next((tables for tables in self.per_module if tables.path == state_of(module).path), None)
        if tables is None or tables.module is not module:
            return None  # a copy of the model leaves no traces
        action.met.add(context.site)
        with torch.inference_mode(False):  # the first call may be an evaluation
            self._add_rows(tables, action, context)
        return tables

    def _add_rows(self, tables: ModuleTables, action: OpRounding, context: OpContext) -> None:
        module = tables.module
        for place, place_action in action.places.items():
            limit = math.inf if place_action.promotion is None else promotion_limit(place_action.promotion)
            for part in _parts(place_action, module) if place_action.observes else ():
                self._observes = True
                row = tables.record_row(
                    *(place_key(context.site, place) + part, self.device(), limit),
                    *(place_action.spec.history or 0, place_action.spec.margin),
                )
                action.state_of(place).records[context.site + part] = row
        record = module._buffers.get(RECORD)
        if record is not None:
            _write_copies(tables, record)

    def promotions(self) -> list[Promoted]:
        """The tensors that were promoted, in the order of time. Reading waits for the device."""
        found = []
        for tables, kept in self.records() if self.promotes else ():
            for name, row in zip(tables.records, kept.tolist(), strict=True):
                known = promotion_in(row)
                action = _op_of_record(tables, name)
                if known is not None and action is not None and action.promotion is not None:
                    promotion = action.promotion
                    share = known[1] ** 0.5 if promotion.measure == "error" else known[1]
                    site = f"{tables.path}/{name}"
                    found.append(Promoted(site, known[0], promotion.measure, share, promotion.target))
        return sorted(found, key=lambda each: each.step)

    def apply_promotions(self) -> bool:
        """Let the actions of packed execution know what is promoted; whether that is news. Waits for the device."""
        found = self.records() if self.promotes else []
        if not found:
            return False
        is_news = False
        steps = iter(torch.cat([record[:, PROMOTED] for _, record in found]).tolist())
        for tables, _ in found:
            for name in tables.records:
                if not next(steps):
                    continue
                tensor, place = _tensor_and_place(name)
                for action in _actions(tables):
                    if place in action.places and tensor not in action.state_of(place).promoted:
                        action.state_of(place).promoted[tensor] = True
                        is_news = True
        return is_news

    def take(self, tables: ModuleTables, names: dict[str, int], kept: Tensor) -> None:
        """A record that was saved goes on in this module."""
        if kept.shape[1] != COLUMNS:
            raise PlanError("this state was saved by another version of bitplan: go on with that version.")
        self._observes = True
        tables.records = dict(names)
        tables.module.register_buffer(RECORD, kept.to(self.device()), persistent=False)
        if self.delays:
            write_amax_history_max(tables.module, tables.module._buffers[RECORD])  # type: ignore[arg-type]
        restore_rows(tables)


def _write_copies(tables: ModuleTables, record: Tensor) -> None:
    """Give copies of a module the same record: they evaluate with the same ranges and promotions, and code that
    averages or swaps weights expects the same buffers in both."""
    for twin in state_of(tables.module).copies():
        present = twin._buffers.get(RECORD)
        if present is not None and present.shape == record.shape:
            present.copy_(record)
        else:
            twin.register_buffer(RECORD, record.clone(), persistent=False)
        if AMAX_HISTORY_MAX in tables.module._buffers:
            write_amax_history_max(twin, record)


def _with_values(device: torch.device) -> torch.device:
    """Where tables of a module on that device are: the meta device keeps no values, and ``to_empty()`` moves them."""
    return torch.device("cpu") if device.type == "meta" else device


def restore_rows(tables: ModuleTables) -> None:
    """Tell the module's actions which rows of its record are theirs."""
    for name, row in tables.records.items():
        tensor, place = _tensor_and_place(name)
        for action in _actions(tables):
            if place in action.places:
                action.state_of(place).records[tensor] = row


def _parts(action: RoundingOp, module: nn.Module) -> list[str]:
    """What tells the tensors of a place apart: each weight is promoted by itself."""
    if action.promotion is None or action.place not in ("weight", "grad_weight"):
        return [""]
    others = (name for name, tensor in module._parameters.items() if tensor is not None and name != "weight")
    return ["", *map(parameter_suffix, others)]


def _tensor_and_place(name: str) -> tuple[str, str]:
    """The parts of a record's name.

    >>> _tensor_and_place("conv2d.0:weight(bias)")
    ('conv2d.0(bias)', 'weight')
    """
    site, _, rest = name.partition(":")
    place, bracket, part = rest.partition("(")
    return site + bracket + part, place


def _actions(tables: ModuleTables) -> list[OpRounding]:
    return [action for action in state_of(tables.module).actions.values() if isinstance(action, OpRounding)]


def _op_of_record(tables: ModuleTables, name: str) -> RoundingOp | None:
    """What rounds the tensor of that record in the plan's present phase."""
    tensor, place = _tensor_and_place(name)
    site = tensor.partition("(")[0]
    actions = state_of(tables.module).actions
    likely = [actions.get(key) for key in (site, site.partition(".")[0], ANY)]
    found = [*(action for action in _actions(tables) if site in action.met), *likely]
    return next((a.places[place] for a in found if isinstance(a, OpRounding) and place in a.places), None)
