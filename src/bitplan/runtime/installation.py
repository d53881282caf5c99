"""A plan inside a model: what is put into its modules, brought to where the run is, and taken out again.

Every module gets a class that shows its operations (:mod:`bitplan.capture.scopes`), the actions that the plan's
present phase has for them (:mod:`bitplan.runtime.decisions`), tables beside its weights
(:mod:`bitplan.runtime.run_tables`), and one word for compiled code that stands for all of it
(:mod:`bitplan.compiler.tracing`). The clock says how far the run has come; the attachment says when to follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from bitplan.analysis.explain import require_seen
from bitplan.capture import scopes as checkpointing
from bitplan.capture.recording import Operation
from bitplan.capture.scopes import install, show_all_functions, state_of, uninstall
from bitplan.compiler import torch_patches
from bitplan.compiler.torch_private import unset_fake_temporarily
from bitplan.compiler.tracing import VERSION, RaisedSetting, allow_functions_in_graph, version_of
from bitplan.errors import PlanError
from bitplan.numerics.formats import Format, get_format
from bitplan.numerics.wire_format import op_site
from bitplan.plans.document import Phase
from bitplan.plans.schedules import Schedule
from bitplan.runtime.clock import ScheduleClock
from bitplan.runtime.decisions import Decider
from bitplan.runtime.dispatch import Rounder
from bitplan.runtime.module_state import LiveRow, ModuleTables, remove_buffers, with_twins
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounding_op import OpRounding
from bitplan.runtime.run_tables import RunTables, restore_rows
from bitplan.runtime.statistics import Watched


class Installation:
    """What a plan has put into the modules of one model."""

    def __init__(self, model: nn.Module, rounder: Rounder, decider: Decider, clock: ScheduleClock) -> None:
        """`decider` is that of the whole plan; the clock says which phase and which bits apply."""
        self.model = model
        self.plan = decider.plan
        self.rounder = rounder
        self.decider = decider
        self.clock = clock
        self.tables = RunTables(model)
        #: The phase of the plan that the modules are in.
        self.phase = clock.phase
        #: Path and module, of all that can be followed; empty while the plan is not in the model.
        self.modules: list[tuple[str, nn.Module]] = []
        #: What happens in a module, by the plan's phase: kept, so that compiled code knows it again.
        self._actions: dict[tuple[ModuleTables, Phase], dict[str, Any]] = {}
        self._operations: list[Operation] = []
        self._widths: dict[Schedule, int] = {}
        #: Changes to torch belong to the rounder, which the model and its copies refer to: a model that outlives its
        #: attachment still rounds.
        self._release_patches: Callable[[], object] = lambda: None
        self._allowances: list[RaisedSetting] = []
        self._is_out = False

    # --- in and out ---

    def put_in(self, seed: int, step: int) -> None:
        """Let the plan work in all modules of the model. Random bits are those of that seed and step."""
        require_seen(self.plan, self.model)
        self.modules = install(self.model, self.rounder)
        allow_functions_in_graph()
        self._release_patches = torch_patches.hold(self.rounder)
        torch_patches.apply(checkpointing.carry_scopes)
        torch_patches.apply(show_all_functions)
        for path, module in self.modules:
            self.add(path, module, seed, step)
        self._let_recurrent_layers_compile()
        self._let_phases_compile()
        self.tell_compiled_code()

    def take_out(self) -> None:
        """Leave the model exactly as it was."""
        self._is_out = True
        if self.modules:
            self.rounder.enabled = False  # copies that were made of the model become plain, too
            self.tell_compiled_code()
            for tables in self.tables.per_module:
                remove_buffers(tables.module)
            uninstall(self.modules)
            self._release_patches()
        self.modules = []
        for allowance in self._allowances:
            allowance.remove()
        self._allowances = []

    def require_place(self) -> None:
        """Raise where the plan has been taken out of the model."""
        if self._is_out:
            raise PlanError("the plan was detached from this model: attach it again first.")

    def add(self, path: str, module: nn.Module, seed: int, step: int) -> None:
        """Fill in what the plan says of every operation that may happen in this module."""
        tables = ModuleTables(path, module)
        self.tables.per_module.append(tables)
        self._put_to_work(tables, seed, step)

    def _put_to_work(self, tables: ModuleTables, seed: int, step: int) -> None:
        """Let the module do what the plan's present phase says of it."""
        state = state_of(tables.module)
        state.actions.clear()
        state.actions.update(self._planned(tables, self.phase))
        tables.enter(self.phase)
        self._follow(tables)
        actions = [action for action in state.actions.values() if isinstance(action, OpRounding)]
        self.rounder.tags_gradients |= any(a.at_consumer and "grad_activation" in a.places for a in actions)
        self.rounder.tags_weights |= any("weight" in a.places or "grad_weight" in a.places for a in actions)
        self.tables.watched |= Watched(
            rounding=self.decider.watched,
            ranges=any(action.uses_means for action in actions),
            signs=any(action.promotes for action in actions),
            amax=any(action.delays for action in actions),
        )
        self.tables.install(tables, seed, step)

    def _planned(self, tables: ModuleTables, phase: Phase) -> dict[str, Any]:
        """What happens in a module in a phase of the plan."""
        if (tables, phase) not in self._actions:
            decider = self.decider
            if phase:
                plan = self.clock.plan_in(phase)
                decider = Decider(plan, *decider.ways, whole=decider, terms=decider.terms)
            tables.enter(phase)
            self._actions[tables, phase] = decider.actions(tables)
        return self._actions[tables, phase]

    def actions(self) -> Iterator[OpRounding]:
        """Those of all modules, in all phases that were met."""
        for planned in self._actions.values():
            for action in planned.values():
                if isinstance(action, OpRounding):
                    yield action

    # --- what compiled code has to know ---

    def _let_recurrent_layers_compile(self) -> None:
        """torch.compile refuses nn.LSTM and its like unless told otherwise; written out they are plain operations."""
        recurrent = [m for _, m in self.modules if isinstance(m, nn.RNNBase)]
        if any(state_of(m).actions[f"open {m.mode.lower()}"] for m in recurrent):
            self._allowances.append(RaisedSetting("allow_rnn", True, owner=self.rounder))

    def _let_phases_compile(self) -> None:
        """Every phase of the plan has a graph of its own, in training and in evaluation; torch stops after eight."""
        self._allowances.append(RaisedSetting("recompile_limit", 2 * self.clock.count_phases(), owner=self.rounder))

    def tell_compiled_code(self) -> None:
        """Graphs hold for what tracing reads now, until this is called again."""
        for tables in self.tables.per_module:
            self._set_version(tables)

    def _set_version(self, tables: ModuleTables) -> None:
        rounder, state = self.rounder, state_of(tables.module)
        state.has_buffers = tables.has_table or bool(tables.records)
        tags = (rounder.tags_gradients, rounder.tags_weights)
        flags = (rounder.enabled, rounder.packer is not None, rounder.recast_in_backward, *tags)
        facts = tuple((op, _facts(action)) for op, action in state.actions.items())
        version = version_of((flags, state.has_buffers, facts))
        for module in with_twins(tables.module):
            if module.__dict__.get(VERSION) != version:  # or torch would check all of its dictionary again
                module.__dict__[VERSION] = version

    # --- what is observed ---

    @property
    def observes(self) -> bool:
        """Whether anything that happens in the modules is written into records."""
        return self.tables.watched != Watched()

    def make_room(self, module: nn.Module, action: OpRounding, context: OpContext) -> None:
        """An operation is met for the first time, eagerly: tables have to grow."""
        with unset_fake_temporarily():  # a forecast of memory meets operations without values; tables have some
            tables = self.tables.make_room(module, action, context)
        if tables is not None:
            self._set_version(tables)

    def make_room_for(self, operations: list[Operation]) -> None:
        """Rows of the record for all that is observed in these operations, now and in later phases of the plan."""
        self._operations = operations
        by_path = dict(self.modules)
        for operation in operations if self.observes else ():
            module = by_path.get(operation.module)
            if module is None:
                continue
            action = self.rounder.action_of(module, operation.op, operation.index, operation.inside)
            if action is not None:
                self.tables.make_room(module, action, OpContext(op_site(operation.op, operation.index), module, action))

    def show_promotions(self) -> None:
        """What is kept has one width, so that packed execution must know on the host what was promoted."""
        if self.decider.packed and self.tables.promotes and self.tables.show_promotions():
            self.tell_compiled_code()

    # --- formats, and where the run is ---

    def move(self, seed: int, step: int) -> bool:
        """Bring formats, and where whole quantizers change the actions, to where the run is; tables are not written.

        :return: whether formats may be other ones now.
        """
        if not self.clock.moves or not self.modules:
            return False
        has_moved = False
        phase = self.clock.phase
        if phase != self.phase:
            self.phase = phase
            for tables in self.tables.per_module:
                self._put_to_work(tables, seed, step)
                restore_rows(tables)
            self.make_room_for(self._operations)
            self.show_promotions()
            self.tell_compiled_code()
            has_moved = True
        widths = {schedule: self.clock.bits_of(schedule) for schedule in self.plan.followed.values()}
        if widths != self._widths:
            self._widths = widths
            for tables in self.tables.per_module:
                self._follow(tables)
            has_moved = True
        return has_moved

    def _follow(self, tables: ModuleTables) -> None:
        """Give a module's formats the bits that their schedules have come to."""
        for row in tables.formats:
            if row.spec.moved_by is not None:
                row.follow(self.clock.bits_of(row.spec.moved_by))

    def set_format(self, quantizer: str, format: str) -> None:
        """Give the rows of a named quantizer another format; tables are not written."""
        every = [row for tables in self.tables.per_module for row in tables.formats]
        rows = [row for row in every if row.name == quantizer]
        if not rows:
            known = sorted({row.name for row in every if row.name})
            raise PlanError(
                f"{quantizer!r} names no format that can change in this run; "
                + (f"these can: {', '.join(known)}." if known else "attach with mutable_formats=True, and name it.")
            )
        moved = next((row.spec.moved_by for row in rows if row.spec.moved_by is not None), None)
        if moved is not None:
            raise PlanError(f"{quantizer!r} follows the schedule {moved}: give it bits of its own to change them.")
        target = get_format(format)
        for row in rows:
            row.change(target)
        self._settle_again()

    def formats(self) -> dict[str, list[str]]:
        """The names of the formats that may change, as they are now, by the path of their module."""
        return {path: [row.format.name for row in rows] for path, rows in self.rows_in(self.phase).items() if rows}

    def rows_in(self, phase: Phase) -> dict[str, list[LiveRow]]:
        """The formats that may change in a phase, by the path of their module."""
        return {tables.path: tables.rows_in(phase)[0] for tables in self.tables.per_module}

    def prepare_phases(self, phases: Iterable[Phase]) -> None:
        """Make the actions and rows of phases that a saved run went through."""
        phases = list(phases)
        for tables in self.tables.per_module:
            for phase in phases:
                self._planned(tables, phase)
            tables.enter(self.phase)

    def restore_formats(self, phase: Phase, formats: Mapping[str, list[str]]) -> None:
        """Give the rows of a phase the formats that a saved run had there; schedules are followed anew."""
        rows = self.rows_in(phase)
        for path, names in formats.items():
            for row, name in zip(rows[path], names, strict=True):
                row.change(get_format(name))
        self._settle_again()
        self._widths = {}

    def _settle_again(self) -> None:
        """Formats were changed by hand: packed graphs, whose codes had the old width, are not used for the new one."""
        if not self.decider.packed:
            return
        for (tables, phase), planned in self._actions.items():
            for action in planned.values():
                if isinstance(action, OpRounding):
                    action.set_stored_formats(partial(_stored_format, tables, phase))
        self.tell_compiled_code()


def _stored_format(tables: ModuleTables, phase: Phase, row: int) -> Format:
    return tables.live_row(row, phase).stored()


def _facts(action: Any) -> Hashable:
    return action.facts() if isinstance(action, OpRounding) else action
