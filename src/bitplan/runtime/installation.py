"""Installs a plan in the modules of a model, keeps it in step with the run, and uninstalls it.

Every module gets a class that intercepts its operations (:mod:`bitplan.capture.scopes`), the roundings of the plan's
present phase (:mod:`bitplan.runtime.decisions`), tables beside its weights (:mod:`bitplan.runtime.run_tables`), and one
version that compiled graphs are guarded by (:mod:`bitplan.compiler.tracing`). The clock has the position of the run;
the attachment calls :meth:`Installation.move` when it changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from bitplan.capture import scopes as checkpointing
from bitplan.capture.constants import CONSTANT, MASK
from bitplan.capture.planned_classes import install, uninstall
from bitplan.capture.recording import Operation
from bitplan.capture.scopes import is_planned, show_all_functions, state_of
from bitplan.compiler import torch_patches
from bitplan.compiler.torch_private import unset_fake_temporarily
from bitplan.compiler.tracing import (
    VERSION,
    RaisedSetting,
    allow_functions_in_graph,
    fall_back_to_eager,
    hide_custom_backward,
    show_view_attributes,
    version_of,
)
from bitplan.errors import PlanError
from bitplan.numerics.formats import Format, get_format
from bitplan.numerics.wire_format import op_site
from bitplan.plans.document import Phase
from bitplan.plans.schedules import Schedule
from bitplan.runtime.clock import ScheduleClock
from bitplan.runtime.coverage import require_interceptable
from bitplan.runtime.decisions import Decider
from bitplan.runtime.dispatch import Rounder
from bitplan.runtime.frozen import FrozenSite, find_frozen_weights, store_frozen_weights
from bitplan.runtime.module_state import (
    FormatRow,
    ModuleTables,
    keep_buffers_per_rank,
    remove_buffers,
    with_copies,
)
from bitplan.runtime.op_context import OpContext, not_compilable
from bitplan.runtime.rounding_op import OpRounding
from bitplan.runtime.run_tables import RunTables, restore_rows
from bitplan.runtime.sharding import is_sharded
from bitplan.runtime.statistics import Observed


class Installation:
    """A plan in the modules of one model."""

    def __init__(self, model: nn.Module, rounder: Rounder, decider: Decider, clock: ScheduleClock) -> None:
        """`decider` is that of the whole plan; the clock says which phase and bits apply."""
        self.model = model
        self.plan = decider.plan
        self.rounder = rounder
        self.decider = decider
        self.clock = clock
        self.tables = RunTables(model)
        #: The phase of the plan that the modules are in.
        self.phase = clock.phase
        #: Path and module of all modules that can be intercepted; empty while the plan is not installed.
        self.modules: list[tuple[str, nn.Module]] = []
        #: The roundings of a module in a phase of the plan: kept, so that compiled graphs stay valid.
        self._roundings: dict[tuple[ModuleTables, Phase], dict[str, Any]] = {}
        self._operations: list[Operation] = []
        self._widths: dict[Schedule, int] = {}
        #: Patches of torch belong to the rounder, which the model and its copies refer to: a model that outlives its
        #: attachment still rounds.
        self._release_patches: Callable[[], object] = lambda: None
        self._allowances: list[RaisedSetting] = []
        self._is_detached = False

    # --- Installing ---

    def install(self, seed: int, step: int) -> None:
        """Install the plan in all modules of the model, with the random keys of that seed and step."""
        require_interceptable(self.plan, self.model)
        self.modules = install(self.model, self.rounder)
        self.rounder.model, self.rounder.reported_gaps = weakref.ref(self.model), set()
        allow_functions_in_graph()
        self._release_patches = torch_patches.hold(self.rounder)
        torch_patches.apply(checkpointing.carry_scopes)
        torch_patches.apply(show_all_functions)
        torch_patches.apply(show_view_attributes)
        torch_patches.apply(hide_custom_backward)
        torch_patches.apply(fall_back_to_eager)
        torch_patches.apply(keep_buffers_per_rank)
        if is_sharded(self.model):
            self.rounder.follow_sharding()
        for path, module in self.modules:
            self.add(path, module, seed, step)
        self._allow_compiled_rnn()
        self._raise_recompile_limit()
        self.update_versions()

    def find_frozen_weights(self) -> list[FrozenSite]:
        """The weights that the plan stores in few bits; raise where a rule about them has no effect."""
        return find_frozen_weights(self.plan, self.modules, self.model)

    def store_frozen_weights(self, sites: list[FrozenSite]) -> None:
        """Store frozen weights in few bits, or round them where the execution does not."""
        if not sites:
            return
        in_few_bits = self.rounder.execution.stores_frozen_weights
        store_frozen_weights(sites, in_few_bits)
        self.rounder.has_frozen = in_few_bits
        self.update_versions()

    def uninstall(self) -> None:
        """Leave the model exactly as it was; weights that were stored in few bits keep their rounded values."""
        self._is_detached = True
        if self.modules:
            self.rounder.enabled = False  # for copies of the model, which stop rounding, too
            self.update_versions()
            added = [module for module in self.model.modules() if is_planned(module)]  # parametrizations, say
            for module in {*added, *(tables.module for tables in self.tables.per_module)}:
                remove_buffers(module)
                if is_planned(module):  # not the holder of a loss
                    uninstall([module])
            self._release_patches()
        self.modules = []
        for allowance in self._allowances:
            allowance.remove()
        self._allowances = []

    def require_attached(self) -> None:
        """Raise if the plan was detached from the model."""
        if self._is_detached:
            raise PlanError("the plan was detached from this model: attach it again first.")

    def add(self, path: str, module: nn.Module, seed: int, step: int) -> None:
        """Install the plan in one module."""
        tables = ModuleTables(path, module)
        self.tables.per_module.append(tables)
        self._enter_phase(tables, seed, step)

    def _enter_phase(self, tables: ModuleTables, seed: int, step: int) -> None:
        """Give the module the roundings of the plan's present phase."""
        state = state_of(tables.module)
        state.actions.clear()
        state.actions.update(self._planned(tables, self.phase))
        tables.enter(self.phase)
        self._follow(tables)
        actions = [action for action in state.actions.values() if isinstance(action, OpRounding)]
        self.rounder.tags_gradients |= any(a.at_consumer and "grad_activation" in a.places for a in actions)
        self.rounder.tags_weights |= any("weight" in a.places or "grad_weight" in a.places for a in actions)
        self.rounder.tags_constants |= any("activation" in a.places or a.has_slots for a in actions)
        self.tables.watched |= Observed(
            rounding=self.decider.watched,
            ranges=any(action.uses_means for action in actions),
            signals=any(action.promotes for action in actions),
            amax=any(action.delays for action in actions),
        )
        self.rounder.records_values = self.observes
        self.tables.install(tables, seed, step)

    def _planned(self, tables: ModuleTables, phase: Phase) -> dict[str, Any]:
        """The roundings of a module in a phase of the plan."""
        if (tables, phase) not in self._roundings:
            decider = self.decider
            if phase:
                decider = decider.in_phase(self.clock.plan_in(phase))
            tables.enter(phase)
            self._roundings[tables, phase] = decider.actions(tables)
        return self._roundings[tables, phase]

    def actions(self) -> Iterator[OpRounding]:
        """The roundings of all modules, in all phases so far."""
        for planned in self._roundings.values():
            for action in planned.values():
                if isinstance(action, OpRounding):
                    yield action

    # --- Compiled graphs ---

    def _allow_compiled_rnn(self) -> None:
        """torch.compile rejects nn.LSTM and similar layers by default; decomposed, they are plain operations."""
        recurrent = [m for _, m in self.modules if isinstance(m, nn.RNNBase)]
        if any(state_of(m).actions[f"open {m.mode.lower()}"] for m in recurrent):
            self._allowances.append(RaisedSetting("allow_rnn", True, owner=self.rounder))

    def allow_graphs_for(self, blocks: int) -> None:
        """Allow a graph for each of some blocks, which share their code and may all be treated differently."""
        limit = 2 * self.clock.count_phases() * blocks
        self._allowances.append(RaisedSetting("recompile_limit", limit, owner=self.rounder))

    def _raise_recompile_limit(self) -> None:
        """Every phase of the plan has a graph of its own, in training and in evaluation; torch's limit is eight."""
        self._allowances.append(RaisedSetting("recompile_limit", 2 * self.clock.count_phases(), owner=self.rounder))

    def require_compilable(self) -> None:
        """Raise where a class of the user's own rounds, whose parameters a compiled graph cannot hold."""
        for action in self.actions():
            for op in action.places.values():
                if op.learns:
                    raise not_compilable(op)

    def update_versions(self) -> None:
        """Invalidate compiled graphs that were traced with other roundings, formats or flags."""
        for tables in self.tables.per_module:
            self._set_version(tables)

    def _set_version(self, tables: ModuleTables) -> None:
        rounder, state = self.rounder, state_of(tables.module)
        state.has_buffers = tables.has_table or bool(tables.records)
        tags = (rounder.tags_gradients, rounder.tags_weights, rounder.tags_constants, rounder.has_frozen)
        flags = (rounder.enabled, rounder.execution.facts(), *tags)
        distinct = {id(action): action for action in state.actions.values()}
        facts_of = {key: _facts(action) for key, action in distinct.items()}
        facts = tuple((op, facts_of[id(action)]) for op, action in state.actions.items())
        version = version_of((flags, state.has_buffers, facts))
        state.set_version(version)
        for module in with_copies(tables.module):
            if module.__dict__.get(VERSION) != version:  # a write would make torch check the whole dictionary again
                module.__dict__[VERSION] = version

    # --- Statistics ---

    @property
    def observes(self) -> bool:
        """Whether statistics of any tensor are recorded."""
        return self.tables.watched != Observed()

    def add_rows(self, module: nn.Module, action: OpRounding, context: OpContext) -> None:
        """Add rows for an operation that runs for the first time, eagerly."""
        with unset_fake_temporarily():  # tables hold values, also while memory is estimated on fake tensors
            tables = self.tables.add_rows(module, action, context)
        if tables is not None:
            self._set_version(tables)

    def add_rows_for(self, operations: list[Operation]) -> None:
        """Add rows for all observed tensors of these operations, now and in later phases of the plan."""
        self._operations = operations
        by_path = dict(self.modules)
        for operation in operations:
            module = by_path.get(operation.module)
            if module is None:
                continue
            action = self.rounder.rounding_of(module, operation.op, operation.index, operation.inside)
            is_left_alone = operation.kind == CONSTANT and action is not None and not action.rounds_constants
            if action is None or is_left_alone:
                continue
            context = OpContext(op_site(operation.op, operation.index), module, action)
            if self.observes:
                self.tables.add_rows(module, action, context)
            _make_quantizer_modules(action, context, operation)

    def apply_promotions(self) -> None:
        """In packed execution, apply promotions: a packed tensor has one width, so the host must know of them."""
        if self.rounder.execution.packs_saved_tensors and self.tables.promotes and self.tables.apply_promotions():
            self.update_versions()

    # --- Formats and schedules ---

    def move(self, seed: int, step: int) -> bool:
        """Update formats, and in a new phase the roundings, to the position of the run; tables are not written.

        :return: whether formats may have changed.
        """
        if not self.clock.moves or not self.modules:
            return False
        has_moved = False
        phase = self.clock.phase
        if phase != self.phase:
            self.phase = phase
            for tables in self.tables.per_module:
                self._enter_phase(tables, seed, step)
                restore_rows(tables)
            self.add_rows_for(self._operations)
            self.apply_promotions()
            self.update_versions()
            has_moved = True
        widths = {schedule: self.clock.bits_of(schedule) for schedule in self.plan.followed.values()}
        if widths != self._widths:
            self._widths = widths
            for tables in self.tables.per_module:
                self._follow(tables)
            has_moved = True
        return has_moved

    def _follow(self, tables: ModuleTables) -> None:
        """Give a module's formats the present bits of their schedules."""
        for row in tables.formats:
            if row.spec.moved_by is not None:
                row.follow(self.clock.bits_of(row.spec.moved_by))

    def set_format(self, quantizer: str, format: str) -> None:
        """Change the format of a named quantizer; tables are not written."""
        mutable = [row for tables in self.tables.per_module for row in tables.formats]
        rows = [row for row in mutable if row.name == quantizer]
        if not rows:
            names = sorted({row.name for row in mutable if row.name})
            raise PlanError(
                f"{quantizer!r} names no format that can change in this run; "
                + (f"these can: {', '.join(names)}." if names else "attach with mutable_formats=True, and name it.")
            )
        moved = next((row.spec.moved_by for row in rows if row.spec.moved_by is not None), None)
        if moved is not None:
            raise PlanError(f"{quantizer!r} follows the schedule {moved}: give it bits of its own to change them.")
        target = get_format(format)
        for row in rows:
            row.change(target)
        self._update_stored_formats()

    def formats(self) -> dict[str, list[str]]:
        """The present names of mutable formats, by the path of their module."""
        return {path: [row.format.name for row in rows] for path, rows in self.rows_in(self.phase).items() if rows}

    def rows_in(self, phase: Phase) -> dict[str, list[FormatRow]]:
        """The mutable formats of a phase, by the path of their module."""
        return {tables.path: tables.rows_in(phase)[0] for tables in self.tables.per_module}

    def prepare_phases(self, phases: Iterable[Phase]) -> None:
        """Make the roundings and rows of phases that a saved run went through."""
        phases = list(phases)
        for tables in self.tables.per_module:
            for phase in phases:
                self._planned(tables, phase)
            tables.enter(self.phase)

    def restore_formats(self, phase: Phase, formats: Mapping[str, list[str]]) -> None:
        """Restore the formats of a saved run in a phase; schedules apply again afterwards."""
        rows = self.rows_in(phase)
        for path, names in formats.items():
            for row, name in zip(rows[path], names, strict=True):
                row.change(get_format(name))
        self._update_stored_formats()
        self._widths = {}

    def _update_stored_formats(self) -> None:
        """After a format was set by hand: packed graphs with codes of the old width must not be used any more."""
        if not self.rounder.execution.packs_saved_tensors:
            return
        for (tables, phase), planned in self._roundings.items():
            for action in planned.values():
                if isinstance(action, OpRounding):
                    action.set_stored_formats(partial(_stored_format, tables, phase))
        self.update_versions()


def _make_quantizer_modules(action: OpRounding, context: OpContext, operation: Operation) -> None:
    """Make the objects of the user's own classes that round tensors of an operation: an optimizer has to know them."""
    module = context.module
    assert module is not None
    like = next(module.parameters(), torch.empty(0))
    for place, op in action.places.items():
        if not op.learns or (place == "activation" and operation.kind == MASK):
            continue
        if place != "weight":
            context.quantizer_module(op, like)
            continue
        for full_name, _ in operation.parameters:
            name = full_name.removeprefix(f"{operation.module}.")
            context_of_weight = context.of_parameter(name) if name in module._parameters else context
            context_of_weight.quantizer_module(op, like)


def _stored_format(tables: ModuleTables, phase: Phase, row: int) -> Format:
    return tables.row_at(row, phase).stored()


def _facts(action: Any) -> Hashable:
    return action.facts() if isinstance(action, OpRounding) else action
