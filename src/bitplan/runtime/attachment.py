"""A plan attached to a model: what :func:`bitplan.attach` returns.

The attachment is the run as its user holds it. :class:`~bitplan.runtime.installation.Installation` is the plan inside
the model, :class:`~bitplan.runtime.clock.ScheduleClock` says where the run stands,
:class:`~bitplan.runtime.coverage.RuleCoverage` whether every rule has had an effect, and
:class:`~bitplan.runtime.cost_tracker.CostTracker` adds up costs. :class:`~bitplan.compiler.compiling.Compiler`
compiles, and a :class:`~bitplan.runtime.checkpoint_state.RunState` is what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.analysis.cost import Cost
from bitplan.analysis.explain import Explanation, explanation_table, require_effect
from bitplan.capture.recording import FakeInputs, Operation, call_arguments, scripted_modules
from bitplan.capture.scopes import in_loss_scope, loss_holder, unwrapped
from bitplan.compiler.backends import register_backend
from bitplan.compiler.compiling import Compiler
from bitplan.errors import PlanError
from bitplan.executions.native.backends import backends_of
from bitplan.executions.native.fallbacks import FALLBACK_COLUMNS, Fallback, fallbacks_of
from bitplan.executions.native.paths import NativeTerms
from bitplan.executions.packed.saved_tensors import SavedTensorPacker
from bitplan.numerics.wire_format import LOSS_PATH
from bitplan.plans import Plan
from bitplan.plans.execution import Emulate, ExecutionOptions
from bitplan.runtime.checkpoint_state import RunState
from bitplan.runtime.clock import ScheduleClock, Total
from bitplan.runtime.cost_tracker import CostTracker
from bitplan.runtime.coverage import RuleCoverage
from bitplan.runtime.decisions import Decider
from bitplan.runtime.dispatch import Rounder
from bitplan.runtime.installation import Installation
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.optimizers import OptimizerPromise, OptimizerSteps, StepCounter, before_every_step
from bitplan.runtime.rounding_op import PROMOTION_COLUMNS, OpRounding, Promoted
from bitplan.runtime.statistics import Statistics
from bitplan.tables import Table

if TYPE_CHECKING:
    from bitplan.analysis.memory import RunMemory
    from bitplan.compiler.torch_private import CustomPartitionerFn


class Attachment:
    """A plan at work. Made by :func:`attach`; also a context manager that detaches at its end."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        steps: Total | None = None,
        seed: int = 0,
        mutable_formats: bool = False,
        stats: bool = False,
        execution: ExecutionOptions = Emulate(),  # noqa: B008 - frozen
        terms: NativeTerms | None = None,
    ) -> None:
        self.plan = plan
        #: How the plan is computed: the options that :func:`attach` was given, or the plan's own.
        self.execution = execution
        is_packed = execution.kind == "packed"
        self.model = unwrapped(model)
        self.steps = steps
        self.seed = seed
        self._step = 0
        self._watched = stats
        self._terms = terms
        self._rounder = Rounder()
        if is_packed:
            self._rounder.packer = SavedTensorPacker()
            register_backend()
        self._clock = ScheduleClock(plan, steps, fixed=is_packed)
        decider = Decider(plan, mutable_formats, stats, is_packed, terms=terms)
        self._installation = Installation(self.model, self._rounder, decider, self._clock)
        self._all_tables = self._installation.tables
        self._compiler = Compiler(execution, self._installation)
        self._coverage = RuleCoverage(plan, scripted_modules(self.model))
        self._checked = not plan.all_rules
        self._cost_tracker = CostTracker(
            self.model, plan, self._all_tables.per_module, self._clock, self._all_tables.promotions
        )
        self._promise = OptimizerPromise(plan, self.model)
        self._optimizer_steps = OptimizerSteps(self.model)
        self._remove_optimizer_hook: Callable[[], object] = lambda: None
        #: Counts the steps of the optimizers that :func:`attach` was given; None: the loop calls :meth:`step`.
        self._step_counter: StepCounter | None = None
        if plan.all_rules:
            self._install()
        if plan.all_rules or plan.optimizer_rule is not None:
            self._remove_optimizer_hook = before_every_step(self._before_optimizer_step)

    # --- life ---

    def _install(self) -> None:
        self._installation.put_in(self.seed, self._step)
        self._rounder.on_site = self._coverage.note
        self._rounder.on_first_call = self._note_call
        self._look_for_new_sites()

    def _look_for_new_sites(self) -> None:
        """Have operations told that are met for the first time, where the plan observes any."""
        if self._installation.observes:
            self._rounder.on_new_site = self._meet

    def detach(self) -> None:
        """Leave the model exactly as it was."""
        self._installation.take_out()
        self._remove_optimizer_hook()
        if self._step_counter is not None:
            self._step_counter.remove()

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
    ) -> Any:
        """Compile the model as its execution needs it: packed and native execution partition the graph themselves.

        ``Native(recompute=...)`` says what the backward pass recomputes. Before every call torch checks guards.
        Compiled here, one guard per module covers the plan; by ``torch.compile``, every attribute of every module's
        actions has its own.

        :param module: a module that contains the model, such as one that returns the loss; by default the model.
        :param options: of Inductor, as ``torch.compile`` takes them; those that `mode` stands for come first.
        """
        return self._compiler.compile(
            self.model if module is None else module,
            fullgraph=fullgraph,
            mode=mode,
            dynamic=dynamic,
            options=options,
        )

    def partitioner(self) -> CustomPartitionerFn | None:
        """What partitions the graph into forward and backward when :meth:`compile` compiles it; None: torch's own."""
        return self._compiler.partitioner()

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
        self._clock.tell(share)
        self._move()
        self._write_tables()

    def step(self) -> None:
        """Count an optimizer step: schedules move, random bits change, costs and statistics add up.

        For loops of their own; ``attach(..., optimizer=)`` counts by itself. A step that a ``GradScaler`` skipped
        counts as well: fused optimizers skip on the device, and a schedule has to end when the loop does.
        """
        if self._step_counter is not None:
            raise PlanError(
                "attach(optimizer=) counts the steps of this run: drop run.step(), or attach without optimizer=."
            )
        self._count_step()

    def count_steps_of(self, optimizers: Sequence[Optimizer]) -> None:
        """Count the steps of these optimizers from now on, so that the loop does not call :meth:`step`."""
        if optimizers:
            self._step_counter = StepCounter(optimizers, self._count_step)

    def _count_step(self) -> None:
        self._check_seen()
        self._promise.after_step()
        self._step += 1
        self._cost_tracker.count_step()
        self._optimizer_steps.tell()
        self._all_tables.fold(self._step)
        self._installation.show_promotions()
        self._clock.after(self._step)
        self._move()
        self._write_tables()

    def _move(self) -> None:
        """Bring what the plan does to where the run is; tables are not written."""
        if self._installation.move(self.seed, self._step):
            self._look_for_new_sites()
            self._formats_changed()

    def _formats_changed(self) -> None:
        self._cost_tracker.formats_changed()
        self._all_tables.formats_changed()

    def set_format(self, quantizer: str, format: str) -> None:
        """Give the plan's named quantizer another number format from now on, without a recompilation.

        The format must be mutable (its plan leaves ``bits`` open, or ``attach(..., mutable_formats=True)``) and stay
        of its kind: floats among themselves, integers among themselves.
        """
        self._installation.set_format(quantizer, format)
        self._formats_changed()
        self._write_tables()

    def _write_tables(self) -> None:
        if self._installation.modules:
            self._all_tables.write(self.seed, self._step)

    def _before_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self._optimizer_steps.is_of_model(optimizer):
            return
        self._promise.before_step(optimizer)
        self._check_seen()
        if not self._checked:
            raise PlanError(
                "compiled code cannot be watched for rules that match nothing: give attach() an example= batch."
            )
        if self._step_counter is None:
            self._optimizer_steps.begin(optimizer)

    # --- what happens ---

    def _note_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember the shapes of the first batch: tables and costs are asked for later."""
        if module is self.model:
            self._rounder.on_first_call = None
            self._cost_tracker.inputs = FakeInputs(args, kwargs)

    def expect(self, batch: Any) -> None:
        """Remember the shapes of a batch for tables and costs."""
        self._cost_tracker.inputs = batch if isinstance(batch, FakeInputs) else FakeInputs(*call_arguments(batch))

    def check(self, operations: list[Operation]) -> None:
        """Raise where a rule has no effect on these operations; rules for the loss wait for :meth:`loss`."""
        self._coverage.note_all(operations)
        waiting = [rule for rule in self.plan.all_rules if self._coverage.waits_for_loss(rule)]
        require_effect(
            self.plan, operations, lambda rule: rule in waiting or self._coverage.is_for_unseen_modules(rule)
        )
        self._cost_tracker.use(operations)
        self._installation.make_room_for(operations)
        self._installation.tell_compiled_code()
        self._checked = not waiting
        if self._checked:
            self._rounder.on_site = self._rounder.on_first_call = None

    def _meet(self, module: nn.Module, action: OpRounding, context: OpContext) -> None:
        self._installation.make_room(module, action, context)

    def _check_seen(self) -> None:
        """Raise where a rule matched nothing in what has run so far; does nothing before the first forward."""
        if not self._checked and self._coverage.roles:
            self._coverage.require_answers()
            self._checked = True
            self._rounder.on_site = None

    def loss(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` with its tensors brought in as sites of the module path ``loss``."""
        if not self.plan.all_rules:
            return function
        self._installation.require_place()
        holder = loss_holder(self._rounder)
        self._installation.add(LOSS_PATH, holder, self.seed, self._step)
        self._installation.tell_compiled_code()
        self._look_for_new_sites()
        return in_loss_scope(function, self._rounder, holder)

    # --- what is to be told ---

    def table(self) -> Table[Explanation]:
        """The quantizer of every tensor, and the rule that chose it."""
        return explanation_table(self._cost_tracker.table())

    def cost(self) -> Cost:
        """What the steps so far have cost (see :mod:`bitplan.analysis.cost`); of one step where none was made yet."""
        return self._cost_tracker.cost()

    def memory(self, batch: Any = None, loss: Callable[..., Tensor] | None = None, **options: Any) -> RunMemory:
        """Bytes of a training step by class, ``estimated`` and ``measured``, see :mod:`bitplan.analysis.memory`.

        Estimated from the shapes of the first batch that was seen; measured where a batch is given, on a copy.
        """
        from bitplan.analysis.memory import of_run

        return of_run(self, batch, loss, **options)

    def fallbacks(self) -> Table[Fallback]:
        """In native execution: the GEMMs that are emulated, and why. Empty where all run on low-precision units."""
        if self._terms is None:
            raise PlanError("only native execution has fallbacks: attach with execution='native'.")
        device = next(self.model.parameters(), torch.empty(0)).device
        plan = self._clock.plan_in(self._installation.phase)
        operations = self._cost_tracker.operations()
        rows = fallbacks_of(operations, plan.decide, backends_of(device), self._terms, device.type)
        return Table(rows, FALLBACK_COLUMNS, empty="no fallbacks: every GEMM of the plan runs natively")

    def stats(self) -> dict[str, Statistics]:
        """Per site and place, what rounding did to its values. Reading waits for the device."""
        if not self._watched:
            raise PlanError("statistics are off: attach with stats=True.")
        return self._all_tables.statistics()

    @property
    def promotes(self) -> bool:
        """Whether the plan may promote tensors."""
        return self._all_tables.promotes

    def promotions(self) -> Table[Promoted]:
        """The tensors that were promoted so far, and when. Reading waits for the device."""
        return Table(self._all_tables.promotions(), PROMOTION_COLUMNS, empty="no promotions")

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: plain numbers and tensors only."""
        return RunState(
            step=self._step,
            seed=self.seed,
            plan=self.plan.flattened().to_dict(),
            formats=self._installation.formats(),
            records={
                tables.path: (dict(tables.records), kept.cpu().clone()) for tables, kept in self._all_tables.records()
            },
            steps=self._cost_tracker.state(),
            total=self.steps,
            phase=self._installation.phase,
            position=[self._clock.position.step, self._clock.position.total],
        ).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; nothing is changed where the state does not fit."""
        saved = RunState.from_dict(state)
        saved.require_plan(self.plan, self._clock)
        self._installation.prepare_phases(saved.phases)
        saved.require_rows(self._installation.rows_in(saved.phase))
        self._step, self.seed = saved.step, saved.seed
        self._installation.restore_formats(saved.phase, saved.formats)
        self._clock.restore(saved.step, saved.position)
        self._move()
        for tables in self._all_tables.per_module:
            if tables.path in saved.records:
                self._all_tables.take(tables, *saved.records[tables.path])
        self._installation.show_promotions()
        self._installation.tell_compiled_code()
        self._cost_tracker.load(saved.steps)
        self._formats_changed()
        self._write_tables()
