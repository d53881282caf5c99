"""A plan at work on a model: what :func:`bitplan.attach` returns."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bitplan import checkpointing
from bitplan.actions import Action, Here
from bitplan.allowances import Allowance
from bitplan.cost import Cost
from bitplan.decisions import Decider
from bitplan.errors import BitplanWarning, PlanError, nearest_names
from bitplan.explain import Explanation, require_effect, require_seen
from bitplan.guarding import VERSION, depend_on, guarded_by_version, version_of
from bitplan.intercept import (
    ModuleState,
    Scope,
    innermost_scope,
    install,
    state_of,
    uninstall,
    unwrapped,
)
from bitplan.keeping import Keeper
from bitplan.ledger import Ledger
from bitplan.names import format as format_of
from bitplan.native.fallbacks import Fallback, fallbacks_of
from bitplan.native.paths import Terms
from bitplan.native.units import units_of
from bitplan.observe import Statistics, Watched
from bitplan.optimizers import OptimizerPromise
from bitplan.packed_backend import BACKEND, register_backend
from bitplan.plan import Plan
from bitplan.plan.document import Phase
from bitplan.promoting import Promoted
from bitplan.roll_call import RollCall
from bitplan.rounder import Rounder
from bitplan.run_tables import RunTables, restore_rows
from bitplan.schedules import Schedule
from bitplan.sheet import with_twins
from bitplan.sites import LOSS_PATH, FakeInputs, Operation, call_arguments
from bitplan.tables import ModuleTables
from bitplan.timeline import Timeline, Total
from bitplan.unseen import unseen_modules

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    from bitplan.native.sparing_backend import Sparing

#: What compiled native execution casts again in its backward pass, by how much memory it is to spare.
SPARING: dict[str, tuple[str, ...]] = {
    "no": (),
    "weights": ("w",),
    "activations": ("x",),
    "inputs": ("x", "w"),
    "products": ("x", "w"),
}


class Attachment:
    """A plan at work. Made by :func:`attach`; also a context manager that detaches at its end."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        steps: Total | None = None,
        seed: int = 0,
        live: bool = False,
        stats: bool = False,
        execution: str = "emulate",
        terms: Terms | None = None,
    ) -> None:
        self.plan = plan
        self.execution = execution
        self.model = unwrapped(model)
        self.steps = steps
        self.seed = seed
        self._step = 0
        self._watched = stats
        self._rounder = Rounder()
        if execution == "packed":
            self._rounder.keeper = Keeper()
            register_backend()
        self._timeline = Timeline(plan, steps, fixed=execution == "packed")
        self._phase = self._timeline.phase
        self._terms = terms
        self._decider = Decider(plan, live, stats, execution == "packed", terms=terms)
        #: What happens in a module, by the plan's phase: kept, so that compiled code knows it again.
        self._actions: dict[tuple[ModuleTables, Phase], dict[str, Any]] = {}
        self._operations: list[Operation] = []
        self._widths: dict[Schedule, int] = {}
        self._modules: list[tuple[str, nn.Module]] = []
        self._all_tables = RunTables(self.model)
        self._tables = self._all_tables.each
        self._hooks: list[Any] = []
        self._roll_call = RollCall(plan, unseen_modules(self.model))
        self._checked = not plan.all_rules
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        #: Optimizers of the model's parameters: going through all of these takes a while, and nothing is taken out.
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warned = False
        self._ledger = Ledger(self.model, plan, self._tables, self._timeline, self._all_tables.promotions)
        self._promise = OptimizerPromise(plan, self.model)
        if plan.all_rules:
            self._install()
        if plan.all_rules or plan.optimizer_rule is not None:
            self._watch_optimizers()

    # --- life ---

    def _install(self) -> None:
        require_seen(self.plan, self.model)
        self._modules = install(self.model, self._rounder)
        checkpointing.exchange()
        for path, module in self._modules:
            self._prepare(path, module)
        self._rounder.on_site = self._roll_call.note
        self._rounder.on_first_call = self._note_call
        self._let_recurrent_layers_compile()
        self._let_phases_compile()
        self._tell_compiled_code()

    def _tell_compiled_code(self) -> None:
        """Graphs hold for what tracing reads now, until this is called again."""
        for tables in self._tables:
            self._set_version(tables)

    def _set_version(self, tables: ModuleTables) -> None:
        rounder, state = self._rounder, state_of(tables.module)
        state.has_buffers = tables.has_table or bool(tables.records)
        tags = (rounder.tags_gradients, rounder.tags_weights)
        flags = (rounder.enabled, rounder.keeper is not None, rounder.casts_again, *tags)
        facts = tuple((op, _facts(action)) for op, action in state.actions.items())
        version = version_of((flags, state.has_buffers, facts))
        for module in with_twins(tables.module):
            if module.__dict__.get(VERSION) != version:  # or torch would check all of its dictionary again
                module.__dict__[VERSION] = version

    def _watch_optimizers(self) -> None:
        watcher = weakref.WeakMethod(self._before_optimizer_step)
        self._hooks.append(register_optimizer_step_pre_hook(lambda optimizer, *_: (watcher() or _nothing)(optimizer)))

    def _prepare(self, path: str, module: nn.Module) -> None:
        """Fill in what the plan says of every operation that may happen in this module."""
        tables = ModuleTables(path, module)
        self._tables.append(tables)
        self._put_to_work(tables)

    def _planned(self, tables: ModuleTables, phase: Phase) -> dict[str, Any]:
        """What happens in a module in a phase of the plan."""
        if (tables, phase) not in self._actions:
            decider = self._decider
            if phase:
                plan = self._timeline.plan_in(phase)
                decider = Decider(plan, *decider.ways, whole=decider, terms=decider.terms)
            tables.enter(phase)
            self._actions[tables, phase] = decider.actions(tables)
        return self._actions[tables, phase]

    def _put_to_work(self, tables: ModuleTables) -> None:
        """Let the module do what the plan's present phase says of it."""
        state = state_of(tables.module)
        state.actions.clear()
        state.actions.update(self._planned(tables, self._phase))
        tables.enter(self._phase)
        self._follow(tables)
        actions = [action for action in state.actions.values() if isinstance(action, Action)]
        self._rounder.tags_gradients |= any(a.at_consumer and "grad_activation" in a.places for a in actions)
        self._rounder.tags_weights |= any("weight" in a.places or "grad_weight" in a.places for a in actions)
        if self._watched or any(action.observes for action in actions):
            self._rounder.on_new_site = self._meet
        self._all_tables.watched |= Watched(
            rounding=self._watched,
            ranges=any(action.uses_means for action in actions),
            signs=any(action.promotes for action in actions),
            amax=any(action.delays for action in actions),
        )
        self._all_tables.install(tables, self.seed, self._step)

    def _let_recurrent_layers_compile(self) -> None:
        """torch.compile refuses nn.LSTM and its like unless told otherwise; written out they are plain operations."""
        recurrent = [m for _, m in self._modules if isinstance(m, nn.RNNBase)]
        if any(state_of(m).actions[f"open {m.mode.lower()}"] for m in recurrent):
            self._hooks.append(Allowance("allow_rnn", True, owner=self))

    def _let_phases_compile(self) -> None:
        """Every phase of the plan has a graph of its own, in training and in evaluation; torch stops after eight."""
        self._hooks.append(Allowance("recompile_limit", 2 * self._timeline.count_phases(), owner=self))

    def detach(self) -> None:
        """Leave the model exactly as it was."""
        if self._modules:
            self._rounder.enabled = False  # copies that were made of the model become plain, too
            self._tell_compiled_code()
            for tables in self._tables:
                tables.remove()
            uninstall(self._modules)
            checkpointing.restore()
        self._modules = []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def compile(
        self,
        module: nn.Module | None = None,
        *,
        fullgraph: bool = True,
        mode: str | None = None,
        dynamic: bool | None = None,
        options: dict[str, Any] | None = None,
        spare_memory: str = "no",
    ) -> Any:
        """The model compiled as its execution wants it; packed, what the graph keeps is chosen by the plan's codes.

        Before every call torch checks whether its graph still holds. Compiled here, it checks one word for all that the
        plan says; by ``torch.compile``, every attribute of every module's actions.

        :param module: a module that has the model in it, such as one that returns the loss; by default the model.
        :param options: of Inductor, as ``torch.compile`` takes them; those that `mode` stands for come first.
        :param spare_memory: of native execution: ``weights`` keeps no codes of a linear layer's weight, which is there
            anyway and is cast again in the backward pass; ``activations`` keeps none of its input, and computes that
            again where it can be had from what is kept; ``inputs`` keeps neither; ``products`` also makes a product
            again whose result only pointwise operations read, where another one has the same input (half of a gate).
            Each takes more time. Activations that the plan rounds are kept as codes in any case.
        """
        from torch._inductor import list_mode_options

        if spare_memory not in SPARING:
            raise PlanError(f"there is no spare_memory={spare_memory!r}; {nearest_names(str(spare_memory), SPARING)}")
        if spare_memory != "no" and self.execution != "native":
            raise PlanError("spare_memory goes with execution='native': give attach() that, too, or drop it.")
        self._rounder.casts_again = SPARING[spare_memory]
        self._tell_compiled_code()
        settings = {**({} if mode is None else list_mode_options(mode, dynamic)), **(options or {})}
        backend = self._backend(spare_memory)
        if self.execution == "native" and backend == "inductor":
            from bitplan.launching import with_opening

            settings = with_opening(settings)
        return torch.compile(
            self.model if module is None else module,
            fullgraph=fullgraph,
            dynamic=dynamic,
            backend=backend,
            options={"guard_filter_fn": guarded_by_version, **settings},
        )

    def _backend(self, spare_memory: str) -> Any:
        if self.execution == "packed":
            return BACKEND
        if self.execution != "native":
            return "inductor"
        from bitplan.native.sparing_backend import native_backend

        sparing = self._sparing(spare_memory)
        return "inductor" if sparing.is_plain else native_backend(sparing)

    def _sparing(self, spare_memory: str) -> Sparing:
        from bitplan.native.sparing_backend import Sparing

        actions = (action for planned in self._actions.values() for action in planned.values())
        places = (place for action in actions if isinstance(action, Action) for place in action.places.values())
        codes = any(place.keeps_codes for place in places)
        return Sparing("x" in SPARING[spare_memory], spare_memory == "products", codes)

    def partitioner(self, spare_memory: str = "no") -> CustomPartitionerFn | None:
        """What cuts the model's graph into forward and backward when :meth:`compile` compiles it; None: torch's own."""
        if self.execution == "packed":
            from bitplan.partitioning import PackedPartitioner

            return PackedPartitioner()
        from bitplan.native.sparing_backend import SparingPartitioner

        sparing = self._sparing(spare_memory)
        return None if sparing.is_plain else SparingPartitioner(sparing)

    # --- the loop ---

    def optimizer(self, kind: Any, params: Iterable[Any] | None = None, **settings: Any) -> Optimizer:
        """An optimizer for the model's parameters, its state kept as the plan's ``optimizer:`` says.

        ``run.optimizer(torch.optim.AdamW, lr=3e-4)`` is torch's own where the plan says nothing of it, else torchao's
        twin of it. There, a learning rate is a tensor: change it by torch's schedulers, or by ``fill_()``.

        :param kind: the class; or an optimizer that has made no step yet, whose groups and settings are taken over.
        :param params: parameters or groups of them, as torch takes them; by default all that are trained.
        """
        return self._promise.make(kind, params, settings)

    def progress(self, share: float) -> None:
        """Tell that this share of the run (0 to 1) is done: schedules move there. For ``steps="progress"``.

        Called before a training step, it decides the bits of that step.
        """
        self._timeline.tell(share)
        self._move()
        self._write_tables()

    def step(self) -> None:
        """Tell that an optimizer step is done: schedules move, random bits change, costs and statistics add up.

        A step that a ``GradScaler`` skipped counts as well: fused optimizers skip on the device, where nobody looks,
        and a schedule has to end when the loop does.
        """
        self._check_seen()
        self._promise.after_step()
        self._step += 1
        self._ledger.count_step()
        self._stepped.clear()
        self._all_tables.fold(self._step)
        self._promote()
        self._timeline.after(self._step)
        self._move()
        self._write_tables()

    def _promote(self) -> None:
        """What is kept has one width, so that packed execution must know on the host what was promoted."""
        if self.execution == "packed" and self._all_tables.promotes and self._all_tables.show_promotions():
            self._tell_compiled_code()

    def _move(self) -> None:
        """Bring formats, and where whole quantizers change the actions, to where the run is; tables are not written."""
        if not self._timeline.moves or not self._modules:
            return
        phase = self._timeline.phase
        if phase != self._phase:
            self._phase = phase
            for tables in self._tables:
                self._put_to_work(tables)
                restore_rows(tables)
            self._make_room_for(self._operations)
            self._promote()
            self._tell_compiled_code()
            self._formats_changed()
        widths = {schedule: self._timeline.bits_of(schedule) for schedule in self.plan.followed.values()}
        if widths != self._widths:
            self._widths = widths
            for tables in self._tables:
                self._follow(tables)
            self._formats_changed()

    def _formats_changed(self) -> None:
        self._ledger.formats_changed()
        self._all_tables.formats_changed()

    def _follow(self, tables: ModuleTables) -> None:
        """Give a module's formats the bits that their schedules have come to."""
        for row in tables.formats:
            if row.spec.moved_by is not None:
                row.follow(self._timeline.bits_of(row.spec.moved_by))

    def set_format(self, quantizer: str, format: str) -> None:
        """Give the plan's named quantizer another number format from now on, without a recompilation.

        The format must be live (its plan leaves ``bits`` open, or ``attach(..., live=True)``) and stay of its kind:
        floats among themselves, integers among themselves.
        """
        rows = [row for tables in self._tables for row in tables.formats if row.name == quantizer]
        if not rows:
            known = sorted({row.name for tables in self._tables for row in tables.formats if row.name})
            raise PlanError(
                f"{quantizer!r} names no format that can change in this run; "
                f"{'these can: ' + ', '.join(known) if known else 'attach with live=True, and name the quantizer'}."
            )
        moved = next((row.spec.moved_by for row in rows if row.spec.moved_by is not None), None)
        if moved is not None:
            raise PlanError(f"{quantizer!r} follows the schedule {moved}: give it bits of its own to change them.")
        target = format_of(format)
        for row in rows:
            row.change(target)
        self._settle_again()
        self._formats_changed()
        self._write_tables()

    def _write_tables(self) -> None:
        if self._modules:
            self._all_tables.write(self.seed, self._step)

    def _settle_again(self) -> None:
        """Formats were changed by hand: packed graphs, whose codes had the old width, are not used for the new one."""
        if self.execution != "packed":
            return
        for planned in self._actions.values():
            for action in planned.values():
                if isinstance(action, Action):
                    for place in action.places.values():
                        place.settle()
        self._tell_compiled_code()

    def _before_optimizer_step(self, optimizer: Optimizer) -> None:
        if optimizer not in self._optimizers:
            mine = {id(parameter) for parameter in self.model.parameters()}
            if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                return
            self._optimizers.add(optimizer)
        self._promise.before_step(optimizer)
        self._check_seen()
        if not self._checked:
            raise PlanError(
                "compiled code cannot be watched for rules that match nothing: give attach() an example= batch."
            )
        if optimizer in self._stepped and not self._warned:
            self._warned = True
            warnings.warn(
                "two optimizer steps passed without run.step(): call it after optimizer.step(), or the plan's "
                "schedules and random bits stand still.",
                BitplanWarning,
                stacklevel=4,
            )
        self._stepped.add(optimizer)

    # --- what happens ---

    def _note_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember the shapes of the first batch: tables and costs are asked for later."""
        if module is self.model:
            self._rounder.on_first_call = None
            self._ledger.inputs = FakeInputs(args, kwargs)

    def expect(self, batch: Any) -> None:
        """Remember the shapes of a batch for tables and costs."""
        self._ledger.inputs = batch if isinstance(batch, FakeInputs) else FakeInputs(*call_arguments(batch))

    def check(self, operations: list[Operation]) -> None:
        """Raise where a rule has no effect on these operations; rules for the loss wait for :meth:`loss`."""
        self._roll_call.note_all(operations)
        waiting = [rule for rule in self.plan.all_rules if self._roll_call.waits_for_loss(rule)]
        require_effect(
            self.plan, operations, lambda rule: rule in waiting or self._roll_call.is_for_unseen_modules(rule)
        )
        self._ledger.use(operations)
        self._operations = operations
        self._make_room_for(operations)
        self._tell_compiled_code()
        self._checked = not waiting
        if self._checked:
            self._rounder.on_site = self._rounder.on_first_call = None

    def _meet(self, module: nn.Module, action: Action, here: Here) -> None:
        """An operation is met for the first time, eagerly: tables have to grow."""
        tables = self._all_tables.make_room(module, action, here)
        if tables is not None:
            self._set_version(tables)

    def _make_room_for(self, operations: list[Operation]) -> None:
        """Rows of the record for all that is observed in these operations."""
        by_path = dict(self._modules)
        for operation in operations:
            module = by_path.get(operation.module)
            if module is None or self._rounder.on_new_site is None:
                continue
            action = self._rounder.action_of(module, operation.op, operation.index, operation.inside)
            if action is not None:
                self._all_tables.make_room(module, action, Here(f"{operation.op}.{operation.index}", module))

    def _check_seen(self) -> None:
        """Raise where a rule matched nothing in what has run so far; does nothing before the first forward."""
        if not self._checked and self._roll_call.roles:
            self._roll_call.require_answers()
            self._checked = True
            self._rounder.on_site = None

    def loss(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` with its tensors brought in as sites of the module path ``loss``."""
        if not self.plan.all_rules:
            return function
        holder = nn.Module()
        holder.__dict__["_bitplan"] = ModuleState(self._rounder, LOSS_PATH)
        self._prepare(LOSS_PATH, holder)
        self._tell_compiled_code()
        rounder = self._rounder

        def planned_loss(*args: Any, **kwargs: Any) -> Tensor:
            if torch.compiler.is_compiling():
                depend_on(holder.__dict__[VERSION])
            if rounder.keeper is not None and not torch.compiler.is_compiling() and innermost_scope() is None:
                with rounder.keeper.hooks(), Scope(rounder, holder):
                    return function(*args, **kwargs)
            with Scope(rounder, holder):
                return function(*args, **kwargs)

        return planned_loss

    # --- what is to be told ---

    def table(self) -> list[Explanation]:
        """What every tensor gets, and which rule said so; print the rows for a table."""
        return self._ledger.table()

    def cost(self) -> Cost:
        """What the steps so far have cost (see :mod:`bitplan.cost`); of one step where none was made yet."""
        return self._ledger.cost()

    def memory(self, batch: Any = None, loss: Callable[..., Tensor] | None = None, **options: Any) -> dict[str, Any]:
        """``{"predicted": ..., "measured": ...}``: bytes of a training step by class, see :mod:`bitplan.memory`.

        Predicted from the shapes of the first batch that was seen; measured where a batch is given, on a copy.
        """
        from bitplan.memory import of_run

        return dict(of_run(self, batch, loss, **options))

    def fallbacks(self) -> list[Fallback]:
        """In native execution: the products that are emulated, and why. Empty where all run on the device's units."""
        if self._terms is None:
            raise PlanError("only native execution has fallbacks: attach with execution='native'.")
        device = next(self.model.parameters(), torch.empty(0)).device
        plan = self._timeline.plan_in(self._phase)
        return fallbacks_of(self._ledger.operations(), plan.decide, units_of(device), self._terms, device.type)

    def stats(self) -> dict[str, Statistics]:
        """Per site and place, what rounding did to its values. Reading waits for the device."""
        if not self._watched:
            raise PlanError("statistics are off: attach with stats=True.")
        return self._all_tables.statistics()

    @property
    def promotes(self) -> bool:
        """Whether the plan may promote tensors."""
        return self._all_tables.promotes

    def promotions(self) -> list[Promoted]:
        """The tensors that were promoted so far, and when. Reading waits for the device."""
        return self._all_tables.promotions()

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: plain numbers and tensors only."""
        records = {
            tables.path: (dict(tables.records), kept.cpu().clone()) for tables, kept in self._all_tables.records()
        }
        formats = {tables.path: [row.format.name for row in tables.formats] for tables in self._tables}
        return {
            "step": self._step,
            "seed": self.seed,
            "plan": self.plan.flattened().to_dict(),
            "formats": {path: names for path, names in formats.items() if names},
            "records": records,
            "steps": self._ledger.state(),
            "total": self.steps,
            "phase": list(self._phase),
            "position": [self._timeline.position.step, self._timeline.position.total],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; nothing is changed where the state does not fit."""
        if not isinstance(state, dict) or not {"plan", "step", "seed", "formats", "records", "steps"} <= set(state):
            raise PlanError("this is not the state of an attached plan: give what run.state_dict() returned.")
        if state["plan"] != self.plan.flattened().to_dict():
            raise PlanError("this state belongs to another plan: attach the plan it was saved with.")
        if self._timeline.moves and state.get("total") != self.steps:
            raise PlanError(
                f"this state was saved in a run with steps={state.get('total')}, where the plan's schedules stand "
                f"elsewhere: attach with the same steps=."
            )
        phase = tuple(state.get("phase", ()))
        for tables in self._tables:
            for known in (phase, *(tuple(period[2]) for period in state["steps"])):
                self._planned(tables, known)
            tables.enter(self._phase)
        held = {tables.path: tables.rows_in(phase)[0] for tables in self._tables}
        if {path: len(rows) for path, rows in held.items() if rows} != {
            path: len(names) for path, names in state["formats"].items()
        }:
            raise PlanError("this state was saved with other formats that may change: attach with live= as then.")
        self._step, self.seed = int(state["step"]), int(state["seed"])
        for path, names in state["formats"].items():
            for row, name in zip(held[path], names, strict=True):
                row.change(format_of(name))
        self._settle_again()
        self._timeline.restore(self._step, state.get("position"))
        self._widths = {}
        self._move()
        for tables in self._tables:
            if tables.path in state["records"]:
                self._all_tables.take(tables, *state["records"][tables.path])
        self._promote()
        self._tell_compiled_code()
        self._ledger.load(state["steps"])
        self._formats_changed()
        self._write_tables()


def _nothing(*given: object) -> None:
    return None


def _facts(action: Any) -> Hashable:
    return action.facts() if isinstance(action, Action) else action
