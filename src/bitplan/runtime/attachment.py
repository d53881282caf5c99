"""A plan attached to a model: what :func:`bitplan.attach` returns.

The attachment is the run as its user holds it. :class:`~bitplan.runtime.installation.Installation` is the plan inside
the model, :class:`~bitplan.runtime.clock.ScheduleClock` says where the run stands,
:class:`~bitplan.runtime.coverage.RuleCoverage` whether every rule has had an effect, and
:class:`~bitplan.runtime.cost_tracker.CostTracker` adds up costs. An :class:`~bitplan.runtime.execution.Execution` says
what packed and native execution do differently, and a :class:`~bitplan.runtime.checkpoint_state.RunState` is what is
saved.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.capture.planned_classes import unwrapped, without_wrappers
from bitplan.capture.recording import FakeInputs, Operation, call_arguments, scripted_modules
from bitplan.capture.scopes import in_loss_scope, loss_holder
from bitplan.compiler import torch_private
from bitplan.compiler.tracing import keep_guards
from bitplan.errors import BitplanError, BitplanWarning, PlanError
from bitplan.numerics.wire_format import LOSS_PATH
from bitplan.plans import Decision, Plan
from bitplan.plans.execution import Native
from bitplan.plans.frozen import FrozenSpec
from bitplan.progress import LEAST_SECONDS, duration_text, say
from bitplan.runtime.checkpoint_state import RunState
from bitplan.runtime.clock import ScheduleClock, Total
from bitplan.runtime.communication import PlannedCommunication
from bitplan.runtime.cost_tracker import CostTracker
from bitplan.runtime.coverage import ProductCoverage, RuleCoverage, product_coverage
from bitplan.runtime.decisions import Decider
from bitplan.runtime.dispatch import Rounder
from bitplan.runtime.execution import CompilerSettings, Execution
from bitplan.runtime.frozen import FrozenSite, with_stored_weight
from bitplan.runtime.installation import Installation
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.optimizers import OptimizerStateCheck, OptimizerSteps, StepCounter, before_every_step
from bitplan.runtime.regions import equal_blocks
from bitplan.runtime.rounding_op import PROMOTION_COLUMNS, OpRounding, Promoted
from bitplan.runtime.scalars import PREFIX, ScalarSink, StepTimer, run_scalars, scalar_writer
from bitplan.runtime.sharding import split_modules
from bitplan.runtime.statistics import Statistics
from bitplan.tables import Table, html_table

if TYPE_CHECKING:
    from bitplan.analysis.cost import Cost
    from bitplan.analysis.explain import Explanation
    from bitplan.analysis.memory import RunMemory
    from bitplan.compiler.torch_private import CustomPartitionerFn

log = logging.getLogger("bitplan")

#: What an operation of a planned model takes to compile, to announce how long the first call takes: 116 s, natively
#: on an H200, for a Llama of 1B, which has some 600 operations.
_SECONDS_PER_OPERATION = 0.2


class PickledAttachment:
    """An attachment as a pickle holds it: the state of the run, without the model and the patches of torch."""

    def __init__(self, state: dict[str, Any]) -> None:
        #: What :meth:`Attachment.load_state_dict` takes.
        self.state = state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PlanError(
            f"a pickle holds no attached plan, so it has no {name}: attach the plan to the model that was loaded, and "
            f"give the new attachment's load_state_dict() the `state` of this one."
        )


class Attachment:
    """A plan that is attached to a model. Made by :func:`attach`; as a context manager it detaches at the end."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        execution: Execution,
        steps: Total | None = None,
        seed: int = 0,
        mutable_formats: bool = False,
        stats: bool = False,
    ) -> None:
        self.plan = plan
        #: How the plan is computed: the options that :func:`attach` was given, or the plan's own.
        self.execution = execution.options
        self.model = unwrapped(model)
        self.steps = steps
        self.seed = seed
        self._step = 0
        self._watched = stats
        self._mutable_formats = mutable_formats
        self._execution = execution
        self._rounder = Rounder(execution)
        self._clock = ScheduleClock(plan, steps, fixed=execution.packs_saved_tensors)
        execution.is_watched = stats or mutable_formats
        decider = Decider(plan, mutable_formats, stats, execution)
        #: Objects of the user's own classes that round, by site.
        self._quantizer_modules = decider.quantizer_modules
        self._installation = Installation(self.model, self._rounder, decider, self._clock)
        self._all_tables = self._installation.tables
        self._coverage = RuleCoverage(plan, scripted_modules(self.model), not (mutable_formats or stats))
        paths = [without_wrappers(path) for path, _ in self.model.named_modules(remove_duplicate=False)]
        self._coverage.require_modules(paths)
        self._checked = not plan.all_rules
        #: What the example ran, where rules are checked again.
        self._expected: RuleCoverage | None = None
        #: Whether the first optimizer step may have a closure that runs the model for the first time.
        self._waits_for_closure = True
        self._cost_tracker = CostTracker(
            self.model, plan, self._all_tables.per_module, self._clock, self._all_tables.promotions
        )
        self._optimizer_state = OptimizerStateCheck(plan, self.model)
        self._optimizer_steps = OptimizerSteps(self.model)
        self._remove_optimizer_hook: Callable[[], object] = lambda: None
        #: Counts the steps of the optimizers that :func:`attach` was given; None: the loop calls :meth:`step`.
        self._step_counter: StepCounter | None = None
        #: Those optimizers.
        self.optimizers: tuple[Optimizer, ...] = ()
        self._counts_first_optimizer = False
        #: Loggers that :meth:`log_to` was given.
        self._sinks: list[ScalarSink] = []
        self._step_callbacks: list[Callable[[int], None]] = []
        self._detach_callbacks: list[Callable[[], None]] = []
        self._timer = StepTimer()
        #: Modules that :meth:`compile` has compiled in place.
        self._compiled_in_place: list[nn.Module] = []
        #: Diagnoses the run, where a :class:`bitplan.Watch` makes its steps.
        self.diagnosed_by: Callable[..., Any] | None = None
        #: Undoes a change of the model that is no rounding, such as a loss in chunks.
        self.after_detach: Callable[[], None] | None = None
        self._frozen_weights: list[FrozenSite] = []
        spec = plan.declared_communication
        #: Exchanges weights and gradients in the plan's formats.
        self._communication: PlannedCommunication | None = None
        if spec is not None:
            self._communication = PlannedCommunication(spec, lambda: (self.seed, self._step))
            self._communication.install(model)
            self._rounder.on_sharding = partial(self._communication.install, self.model)
        if plan.all_rules:
            self._install()
        if plan.all_rules or plan.optimizer_rule is not None:
            self._remove_optimizer_hook = before_every_step(self._before_optimizer_step)

    # --- life ---

    def _install(self) -> None:
        self._installation.install(self.seed, self._step)
        try:
            self._frozen_weights = self._installation.find_frozen_weights()
        except BaseException:
            self._installation.uninstall()
            raise
        self._rounder.on_site = self._coverage.note_call
        self._rounder.on_product = self._coverage.note_products
        self._rounder.on_first_call = self._note_first_call
        self._notify_new_sites()

    def store_frozen_weights(self) -> None:
        """Store weights that are not trained as the plan's ``frozen:`` says. Their original values are gone."""
        self._installation.store_frozen_weights(self._frozen_weights)

    def _notify_new_sites(self) -> None:
        """Have operations told that are met for the first time, where the plan observes any."""
        if self._installation.observes:
            self._rounder.on_new_site = self._add_rows

    def detach(self) -> None:
        """Leave the model exactly as it was. Weights that the plan stored in few bits keep their rounded values."""
        for callback in self._detach_callbacks:
            callback()
        self._detach_callbacks = []
        self._installation.uninstall()
        self._remove_optimizer_hook()
        if self._communication is not None:
            self._communication.remove()
        if self._step_counter is not None:
            self._step_counter.remove()
        for module in self._compiled_in_place:
            module.__dict__.pop(torch_private.COMPILED_CALL, None)
        self._compiled_in_place = []
        if self.after_detach is not None:
            self.after_detach()
            self.after_detach = None

    def attach_again(self, plan: Plan | None = None, *, stats: bool | None = None) -> Attachment:
        """Detach, and attach another plan to the same model in the same way, from its first step on.

        As without an example, rules are checked in the first step, and the rows of :meth:`load_state_dict` are not
        hidden by those of an example. A loss in chunks stays as it is. Functions that :meth:`loss` or :meth:`compile`
        returned belong to this attachment.

        :param plan: without selectors; None: this attachment's.
        :param stats: whether to gather statistics; None: as this attachment.
        """
        from bitplan.executions import make_execution  # built on top of the runtime

        undo, self.after_detach = self.after_detach, None
        self.detach()
        execution = make_execution(self.execution, self.model)
        watched = self._watched if stats is None else stats
        chosen = self.plan if plan is None else plan
        run = Attachment(self.model, chosen, execution, self.steps, self.seed, self._mutable_formats, watched)
        run.after_detach = undo
        run._cost_tracker.inputs = self._cost_tracker.inputs
        run.count_steps_of(self.optimizers)
        run.store_frozen_weights()
        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return self  # a copy of the model follows the same plan, in the same run

    def __reduce__(self) -> tuple[Any, ...]:
        return PickledAttachment, (self.state_dict(),)  # as the pickle of a model with a plan is the plain model

    def __repr__(self) -> str:
        of = f" of {self.steps:,}" if isinstance(self.steps, int) else ""
        plan = repr(self.plan).strip("<>")
        return f"<Attachment to {type(self.model).__name__}, {self.execution.kind}, step {self._step:,}{of}: {plan}>"

    def _repr_html_(self) -> str:
        """The run so far as a table of its scalars."""
        scalars = run_scalars(self._step, self._all_tables, self._cost_tracker, self._clock, None)
        names = [name.removeprefix(PREFIX).replace("_", " ") for name in scalars]
        return f"<p>{escape(repr(self))}</p>{html_table({'now': names, 'value': list(scalars.values())})}"

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
        in_place: bool = False,
        regional: bool = False,
    ) -> Any:
        """Compile the model as its execution needs it: packed and native execution partition the graph themselves.

        ``Native(recompute=...)`` says what the backward pass recomputes. Before every call torch checks guards.
        Compiled here, one guard per module covers the plan; by ``torch.compile``, every attribute of every module's
        actions has its own.

        :param module: a module that contains the model, such as one that returns the loss; by default the model.
        :param options: of Inductor, as ``torch.compile`` takes them; those that `mode` stands for come first.
        :param in_place: the module itself runs compiled from now on, as by ``nn.Module.compile()``, and stays the same
            object: for trainers, which hold the model. :meth:`detach` undoes it.
        :param regional: compile the model's equal blocks only, in place: one graph serves all blocks that the plan
            treats alike, whatever their number. What is around the blocks (embedding, last norm, head, loss) runs
            eagerly. Returns the model itself.
        """
        self._installation.require_attached()
        own_options = {**({} if mode is None else torch_private.list_mode_options(mode, dynamic)), **(options or {})}
        settings = self._compiler_settings(own_options)
        self._installation.update_versions()
        self._installation.require_compilable()
        target = self.model if module is None else module
        arguments: dict[str, Any] = {
            "fullgraph": fullgraph,
            "dynamic": dynamic,
            "backend": settings.backend,
            "options": {"guard_filter_fn": keep_guards, **settings.options},
        }
        if regional:
            blocks = equal_blocks(target)
            if not blocks:
                raise PlanError(
                    f"{type(target).__name__} has no equal blocks: no nn.ModuleList or nn.Sequential of it holds two "
                    f"modules of one class with parameters of equal shapes; compile it with regional=False."
                )
            self._installation.allow_graphs_for(len(blocks))
            for block in blocks:
                block.compile(**arguments)
            self._compiled_in_place += blocks
            return target
        self._announce_compilation()
        if not in_place:
            return torch.compile(target, **arguments)
        target.compile(**arguments)
        self._compiled_in_place.append(target)
        return target

    def _announce_compilation(self) -> None:
        """Say how long the first call takes, where that is long; torch reports no progress."""
        try:
            count = len(self._cost_tracker.operations())
        except (BitplanError, RuntimeError):
            return  # no batch was seen
        seconds = count * _SECONDS_PER_OPERATION
        if seconds >= LEAST_SECONDS:
            say(f"the first call compiles {count} operations, {duration_text(seconds)}; later ones do not.")

    def partitioner(self) -> CustomPartitionerFn | None:
        """What partitions the graph into forward and backward when :meth:`compile` compiles it; None: torch's own."""
        return self._compiler_settings({}).partitioner

    def _compiler_settings(self, options: dict[str, Any]) -> CompilerSettings:
        ops = (op for rounding in self._installation.actions() for op in rounding.places.values())
        return self._execution.compiler_settings(ops, options)

    # --- the loop ---

    def optimizer(self, kind: Any, params: Iterable[Any] | None = None, **settings: Any) -> Optimizer:
        """An optimizer for the model's parameters, its state kept as the plan's ``optimizer:`` says.

        ``run.optimizer(torch.optim.AdamW, lr=3e-4)`` is torch's own where the plan says nothing of it, else torchao's
        twin of it. There, a learning rate is a tensor: change it by torch's schedulers, or by ``fill_()``.

        :param kind: the class; or an optimizer that has made no step yet, whose groups and settings are taken over.
        :param params: parameters or groups of them, as torch takes them; by default all that are trained.
        """
        return self._optimizer_state.make(kind, params, settings)

    def set_total_steps(self, steps: int) -> None:
        """Give the number of optimizer steps of the whole run. For ``steps="later"``, before the first step.

        For trainers, which attach before they know how many steps there are. Only plans that change over time need it.
        """
        self._clock.set_total(steps)
        self.steps = steps
        self._clock.advance(self._step)
        self._move()
        self._write_tables()

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps that were counted, those of a resumed run included."""
        return self._step

    def start_at(self, step: int) -> None:
        """Begin at that step of the run instead of its first, with empty histories and statistics.

        For a run whose first steps were made without this plan. Schedules and random bits are those of `step`.
        """
        if step < 0:
            raise PlanError(f"a run has no step {step}: steps are counted from 0.")
        self._step = step
        self._clock.advance(step)
        self._move()
        self._write_tables()

    def progress(self, share: float) -> None:
        """Tell that this share of the run (0 to 1) is done: schedules move there. For ``steps="progress"``.

        Called before a training step, it decides the bits of that step.
        """
        self._clock.set_progress(share)
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
            self.optimizers = tuple(optimizers)

    def count_steps_of_first_optimizer(self) -> None:
        """Count the steps of the first optimizer that steps with parameters of the model, whichever that is."""
        self._counts_first_optimizer = self._step_counter is None

    def _count_step(self) -> None:
        self._clock.require_total()
        self._check_coverage()
        if self._communication is not None:
            self._communication.require_installed()
        self._optimizer_state.after_step()
        self._step += 1
        self._cost_tracker.count_step()
        self._optimizer_steps.mark_counted()
        self._all_tables.fold(self._step)
        self._installation.apply_promotions()
        self._clock.advance(self._step)
        self._move()
        self._write_tables()
        self._timer.count_step()
        for sink in self._sinks:
            if self._step % sink.every == 0:
                sink.write(self.scalars(), self._step)
        for callback in self._step_callbacks:
            callback(self._step)

    def _move(self) -> None:
        """Bring what the plan does to where the run is; tables are not written."""
        if self._installation.move(self.seed, self._step):
            self._notify_new_sites()
            self._formats_changed()

    def _formats_changed(self) -> None:
        self._cost_tracker.formats_changed()
        self._all_tables.formats_changed()

    def quantizer_modules(self) -> dict[str, nn.Module]:
        """The objects of the user's own classes that round tensors (``function: module:Class``), by site.

        Those of the operations that the example or a forward pass has run. Their parameters are no parameters of the
        model: give them to the optimizer by :meth:`quantizer_parameters`.
        """
        return dict(self._quantizer_modules)

    def quantizer_parameters(self) -> list[nn.Parameter]:
        """The parameters of :meth:`quantizer_modules`: ``optimizer.add_param_group({"params": ...})``."""
        return [parameter for module in self._quantizer_modules.values() for parameter in module.parameters()]

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

    def _before_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        if not self._optimizer_steps.is_of_model(optimizer):
            return
        self._clock.require_total()
        self._optimizer_state.before_step(optimizer)
        self._check_coverage()
        if not self._checked and has_closure and self._waits_for_closure:
            self._waits_for_closure = False  # the first forward pass is inside this step
        elif not self._checked:
            raise PlanError(
                "no forward pass ran uncompiled before this optimizer step, and compiled code cannot be watched for "
                "rules that match nothing: give attach() an example= batch."
            )
        if self._counts_first_optimizer:
            self._counts_first_optimizer = False
            self.count_steps_of([optimizer])
        elif self._step_counter is None:
            self._optimizer_steps.before_step(optimizer)

    # --- what happens ---

    def _note_first_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember the shapes of the first batch: tables and costs are asked for later."""
        if module is self.model and not torch_private.are_transforms_active():
            self._rounder.on_first_call = None
            self._cost_tracker.inputs = FakeInputs(args, kwargs)

    def expect(self, batch: Any) -> None:
        """Remember the shapes of a batch for tables and costs."""
        self._cost_tracker.inputs = batch if isinstance(batch, FakeInputs) else FakeInputs(*call_arguments(batch))

    def check(self, operations: list[Operation]) -> None:
        """Raise where a rule has no effect on these operations; rules for the loss wait for :meth:`loss`."""
        self._coverage.note_recorded(operations)
        waiting = [rule for rule in self.plan.all_rules if self._coverage.waits_for_loss(rule)]
        self._coverage.require_known_operations(waiting)
        self._coverage.require_effect(lambda rule: rule in waiting or self._coverage.covers_scripted_module(rule))
        self._cost_tracker.use(operations)
        self._installation.add_rows_for(operations)
        self._installation.update_versions()
        self._checked = not waiting
        if self._checked:
            self._rounder.on_site = self._rounder.on_product = self._rounder.on_first_call = None
        log.info("%s", self.coverage())
        self._execution.check(operations, self._decide_product, self._device, split_modules(self.model))

    def check_again(self) -> None:
        """Check rules once more, on the operations of the next forward pass, which may differ from the example's.

        For trainers that exchange a model's ``forward`` after the plan was attached. The pass must run uncompiled.
        """
        if not self.plan.all_rules:
            return
        self._expected = self._coverage if self._coverage.places else None
        self._coverage = RuleCoverage(self.plan, self._coverage.scripted, self._coverage.formats_are_fixed)
        self._checked = False
        self._waits_for_closure = True
        self._rounder.on_site = self._coverage.note_call
        self._rounder.on_product = self._coverage.note_products

    def check_rules(self) -> None:
        """Raise now if a rule matched nothing in the forward passes so far.

        For trainers whose optimizer runs the model inside its step, by a closure: before that step nothing has run.
        """
        self._check_coverage()

    def _add_rows(self, module: nn.Module, action: OpRounding, context: OpContext) -> None:
        self._installation.add_rows(module, action, context)

    def _check_coverage(self) -> None:
        """Raise where a rule matched nothing in what has run so far; does nothing before the first forward."""
        if not self._checked and self._coverage.places:
            self._coverage.require_effect()
            self._warn_of_products_not_run()
            self._checked = True
            self._rounder.on_site = self._rounder.on_product = None
            self._check_fallbacks()

    def _warn_of_products_not_run(self) -> None:
        """After :meth:`check_again`: warn of products that the example has and the training does not run."""
        names = [] if self._expected is None else self._coverage.products_not_run(self._expected)
        self._expected = None
        if names:
            warnings.warn(
                f"the plan rounds {', '.join(names[:3])}{' and others' if names[3:] else ''} of the example, which "
                f"training does not run: the trainer computes it in another way, without rounding.",
                BitplanWarning,
                stacklevel=6,
            )

    def _check_fallbacks(self) -> None:
        """Attached without an example: warn of products that native execution emulates, once operations are known."""
        if not isinstance(self.execution, Native):
            return
        try:
            operations = self._cost_tracker.operations()
        except (BitplanError, RuntimeError):
            return  # the model cannot be recorded; run.fallbacks() says why
        self._execution.check(operations, self._decide_product, self._device, split_modules(self.model))

    def loss(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` with its tensors brought in as sites of the module path ``loss``."""
        if not self.plan.all_rules:
            return function
        self._installation.require_attached()
        holder = loss_holder(self._rounder)
        self._installation.add(LOSS_PATH, holder, self.seed, self._step)
        self._installation.update_versions()
        self._notify_new_sites()
        return in_loss_scope(function, self._rounder, holder)

    # --- what is to be told ---

    def table(self, step: int | None = None) -> Table[Explanation]:
        """The quantizer of every tensor, and the rule that chose it.

        :param step: a training step, from 0: what the tensors got there, or will get if the run goes on as planned.
        """
        from bitplan.analysis.explain import explanation_table

        return explanation_table(self._cost_tracker.table(step))

    def cost(self) -> Cost:
        """What the steps so far have cost (see :mod:`bitplan.analysis.cost`); of one step where none was made yet."""
        return self._cost_tracker.cost()

    def memory(self, batch: Any = None, loss: Callable[..., Tensor] | None = None, **options: Any) -> RunMemory:
        """Bytes of a training step by class, ``estimated`` and ``measured``, see :mod:`bitplan.analysis.memory`.

        Estimated from the shapes of the first batch that was seen; measured where a batch is given, on a copy.
        """
        from bitplan.analysis.memory import estimate_run_memory

        return estimate_run_memory(self, batch, loss, **options)

    def scalars(self) -> dict[str, float]:
        """The run in numbers, for a logger: one flat dictionary of names that begin with ``bitplan/``.

        ``bits`` and ``mean_bits`` (of an operand, of a stored value) are those of the last step; ``gbitops`` and
        ``cost`` (relative to FP32) of all steps so far; ``bits/NAME`` the present bits of a schedule. With
        ``stats=True``, ``overflow``, ``underflow`` and ``error`` are means over all tensors and steps, with ``_max``
        the largest of a tensor. ``amax_min`` and ``amax_max`` are the extremes over tensors: of all steps with
        ``stats=True``, of the last step with delayed scales. ``promotions`` counts promoted tensors.
        ``seconds_per_step`` is the time between counted steps since the last call. A scalar that is not known is left
        out. Reading waits for the device.
        """
        return run_scalars(
            self._step, self._all_tables, self._cost_tracker, self._clock, self._timer.seconds_per_step()
        )

    def log_to(self, logger: Any, every: int = 1) -> None:
        """Write :meth:`scalars` to `logger` after every `every` steps.

        :param logger: an object with ``log(dict, step=)`` (Weights & Biases, Accelerate), ``log_metrics(dict, step=)``
            (MLflow, Lightning's loggers) or ``add_scalar(name, value, step)`` (TensorBoard), or a function of a
            dictionary and a step. With several processes, call it in one of them.
        """
        self._sinks.append(ScalarSink(scalar_writer(logger), every))

    def operations(self) -> list[Operation]:
        """The operations of one forward pass, recorded on fake tensors; those of a loss outside are not among them."""
        return self._cost_tracker.operations()

    def after_each_step(self, callback: Callable[[int], None]) -> None:
        """Call `callback` with the number of steps made, after each optimizer step that is counted."""
        self._step_callbacks.append(callback)

    def before_detach(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the plan is about to be detached: statistics and promotions are gone after that."""
        self._detach_callbacks.append(callback)

    def coverage(self) -> ProductCoverage:
        """How many of the model's products have operands that the plan rounds, and what share of multiplications."""
        return product_coverage(self._cost_tracker.operations(), self.plan.decide)

    def diagnose(self, **options: Any) -> Any:
        """The tensors whose rounding breaks the run, and a plan that mends it; see :meth:`bitplan.Watch.diagnose`.

        An attachment keeps nothing to replay by itself, so that its steps have to be made by a ``Watch``.
        """
        if self.diagnosed_by is None:
            raise PlanError(
                "nothing is kept to replay: make the steps by bp.Watch(run, train_step), or name the folder of a "
                "run to bitplan doctor."
            )
        return self.diagnosed_by(**options)

    def fallbacks(self) -> Table[Any]:
        """In native execution: the products that the plan rounds and that are emulated, and why.

        Empty where all of them run on low-precision units.
        """
        if not isinstance(self.execution, Native):
            raise PlanError("only native execution has fallbacks: attach with execution='native'.")
        operations, split = self._cost_tracker.operations(), split_modules(self.model)
        return self._execution.fallbacks(operations, self._decide_product, self._device, split)

    def _decide_product(self, path: str, op: str) -> Decision:
        """What the plan decides for a product, with the format of a weight that is stored in few bits."""
        decision = self._present_plan.decide(path, op)
        spec = self._frozen_specs.get(path) if op.split(".")[0] == "linear" else None
        return decision if spec is None else with_stored_weight(decision, spec)

    @property
    def _frozen_specs(self) -> dict[str, FrozenSpec]:
        return {site.path: site.spec for site in self._frozen_weights}

    @property
    def _present_plan(self) -> Plan:
        """The plan in its present phase."""
        return self._clock.plan_in(self._installation.phase)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters(), torch.empty(0)).device

    def stats(self) -> dict[str, Statistics]:
        """Per site and place, what rounding did to its values. Reading waits for the device."""
        if not self._watched:
            raise PlanError("statistics are off: attach with stats=True.")
        return self._all_tables.statistics()

    @property
    def has_stats(self) -> bool:
        """Whether :meth:`stats` are gathered."""
        return self._watched

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
            quantizers={
                site: {name: value.cpu().clone() for name, value in module.state_dict().items()}
                for site, module in self._quantizer_modules.items()
            },
        ).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; nothing is changed where the state does not fit."""
        saved = RunState.from_dict(state)
        saved.require_plan(self.plan, self._clock)
        if saved.steps and not saved.records and self._installation.tables.watched.decides:
            raise PlanError(
                "this state has lost its records: torch.distributed.checkpoint loads what the attachment has room for "
                "already, so give attach() an example= batch."
            )
        self._installation.prepare_phases(saved.phases)
        saved.require_rows(self._installation.rows_in(saved.phase))
        saved.load_quantizers(self._quantizer_modules)
        self._step, self.seed = saved.step, saved.seed
        self._installation.restore_formats(saved.phase, saved.formats)
        self._clock.restore(saved.step, saved.position)
        self._move()
        for tables in self._all_tables.per_module:
            if tables.path in saved.records:
                self._all_tables.take(tables, *saved.records[tables.path])
        self._installation.apply_promotions()
        self._installation.update_versions()
        self._cost_tracker.load(saved.steps)
        self._formats_changed()
        self._write_tables()
