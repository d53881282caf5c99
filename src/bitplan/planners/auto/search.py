"""One budget in, one verified plan out: :func:`auto`.

1. The model is recorded, and its saved activations and linear layers are put into groups.
2. Linear layers are timed on the low-precision units of the machine, for their own shapes.
3. The damage of rounding each activation is scored in one backward pass.
4. Candidates combine executions, products and activations; a knapsack chooses activations for a memory budget.
5. Candidates are measured: peak memory and time of real training steps. The model as it is and, compiled, the model
   with recomputation are always among them.
6. The best within the limits is trained beside the model without a plan, and dropped if its loss is worse.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from bitplan._version import __version__
from bitplan.analysis.memory import estimate_memory
from bitplan.analysis.memory.step import OptimizerChoice, make_optimizer
from bitplan.analysis.targets import Target
from bitplan.capture.recording import record
from bitplan.capture.selectors import OperationGraph
from bitplan.errors import BitplanError, PlanError
from bitplan.executions.native.crossover import machine_name
from bitplan.files import byte_text
from bitplan.machine import describe_machine
from bitplan.numerics.quantizer import make_quantizer
from bitplan.numerics.wire_format import op_site
from bitplan.planners.assign.budget import Budget
from bitplan.planners.auto.cache import TrialCache, fingerprint_of
from bitplan.planners.auto.candidates import (
    ACTIVATION_QUANTIZERS,
    LOWER,
    Candidate,
    Item,
    cheapest,
    levels,
    lowered,
    make_candidate,
    make_items,
)
from bitplan.planners.auto.damage import measure_damage
from bitplan.planners.auto.groups import ProductGroup, SiteKey, activation_groups, product_groups, second_halves
from bitplan.planners.auto.products import TimedProducts, time_products
from bitplan.planners.auto.result import AutoResult, TriedPlan, no_plan
from bitplan.planners.auto.trials import (
    OUT_OF_MEMORY,
    Batches,
    Failure,
    LocalTrials,
    Outcome,
    Problem,
    Trial,
    Trials,
    device_alone,
)
from bitplan.planners.auto.verify import measure_loss_gap
from bitplan.planners.registry import Planner, planned_by
from bitplan.plans import Plan
from bitplan.plans.spec import OptimizerRule

log = logging.getLogger("bitplan")

#: The model without a plan, and with recomputation.
PLAIN, RECOMPUTE = "no plan", "no plan, recompute"
#: The model in its own precision with its loss in chunks, compiled as plans are.
CHUNKED = "no plan, loss in chunks"
#: The model in its own precision, compiled as plans are: attention with a constant mask runs without it.
WITHOUT_MASKS = "no plan, constant masks dropped"
#: The end of the name of a candidate that recomputes gate halves.
_RECOMPUTED = ", half of each gate recomputed"
#: Logits of at least this share of the largest activation are worth computing in chunks.
_LEAST_LOGITS = 0.5
#: Packed candidates are tried unless a native one takes less than this share of the plain time.
_FASTER = 0.97
#: Rounds of candidates that a knapsack chooses for a memory budget.
_MOST_ROUNDS = 3
#: The share of the budget that such a candidate aims at, compiled and eager: predictions are not exact.
_AIM = {True: 0.985, False: 0.998}
#: Candidates whose time differs by less than this share are equally fast: the one with less damage is chosen.
_SAME_TIME = 0.01
#: The most candidates that are trained, one after the other, until one keeps the loss.
_MOST_VERIFIED = 3


@dataclass(frozen=True)
class Limits:
    """What the plan must meet."""

    #: Peak memory of a training step.
    memory: Budget | None = None
    #: Time of a step, in multiples of the model's without a plan.
    slowdown: float | None = None
    #: Final loss, above that without a plan.
    loss_gap: float | None = None

    def __post_init__(self) -> None:
        for name in ("slowdown", "loss_gap"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and (not is_number or not 0 <= value < float("inf")):
                raise PlanError(f"{name} is a number of at least 0, not {value!r}.")
        if self.slowdown == 0:
            raise PlanError("no plan takes no time: a slowdown of 1 is the time without a plan.")


def auto(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    optimizer: OptimizerChoice = None,
    memory: str | int | None = None,
    slowdown: float | None = None,
    loss_gap: float | None = None,
    data: Batches | None = None,
    *,
    compile: bool | None = None,
    autocast: torch.dtype | None = None,
    steps: int | None = None,
    seeds: int = 3,
    planners: Sequence[str | Planner] = (),
    report: Callable[[str], None] | None = None,
) -> AutoResult:
    """Find a plan for `model`: formats, execution and recomputation, measured and verified.

    :param batch: as in :func:`bitplan.list_sites`, with the target if `loss` takes one; its size is that of training.
    :param optimizer: a name (``"sgd"``, ``"adamw"``) or a function that makes an optimizer for a model. None: memory
        and time are those of the forward and backward pass.
    :param memory: what the peak of a step may be: ``"8GiB"``, bytes, or ``"50%"`` of the peak without a plan.
    :param slowdown: what a step may take, in multiples of the time without a plan.
    :param loss_gap: how much larger the final loss may be than without a plan; by default, as much as seeds change it,
        or 1 %.
    :param data: batches to verify the plan on: a function of the step, or an iterable. None: `batch`, again and again.
    :param compile: plans are for the compiled model; by default on a GPU.
    :param steps: training steps of the verification; 0: none. By default 200, and fewer where a step takes long.
    :param seeds: trainings of the verification, on other batches each.
    :param planners: planners of your own (:func:`bitplan.planners.register_planner`), or their names: their plans are
        measured and verified like all others.
    :param report: called with a sentence before each part of the search.

    Ctrl-C ends the search and returns the best so far. The model is not changed.
    """
    is_compiled = next(model.parameters(), torch.empty(0)).is_cuda if compile is None else compile
    problem = Problem(Target(model, batch, loss), optimizer, data, is_compiled, autocast)
    limits = Limits(None if memory is None else Budget.parse(memory), slowdown, loss_gap)
    return search(problem, limits, LocalTrials(problem), steps=steps, seeds=seeds, planners=planners, report=report)


def search(
    problem: Problem,
    limits: Limits,
    trials: Trials,
    *,
    steps: int | None = None,
    seeds: int = 3,
    planners: Sequence[str | Planner] = (),
    report: Callable[[str], None] | None = None,
) -> AutoResult:
    """:func:`auto` for a problem, with trials in this process or in others."""
    if seeds < 1 or (steps is not None and steps < 0):
        raise PlanError("a verification has at least one seed, and steps of at least 0.")
    if any(parameter.is_meta for parameter in problem.target.model.parameters()):
        raise PlanError("a search runs the model: give one with real weights.")
    work = _Search(problem, limits, trials, report or (lambda sentence: log.info("%s", sentence)))
    is_interrupted = False
    try:
        work.run(steps, seeds, planners)
    except KeyboardInterrupt:
        is_interrupted = True
        if not work.rows or work.rows[0].name != PLAIN or not any(row.trial for row in work.rows):
            raise
    finally:
        trials.close()
    return work.result(is_interrupted)


class _Search:
    """The state of a search: rows that are measured one after the other."""

    def __init__(self, problem: Problem, limits: Limits, trials: Trials, report: Callable[[str], None]) -> None:
        self.problem, self.limits, self.trials, self.report = problem, limits, trials, report
        self.began = time.perf_counter()
        self.rows: list[TriedPlan] = []
        self.candidates: dict[str, Candidate] = {}
        self.products: list[TimedProducts] = []
        #: None: trials are made on other machines.
        self.cache = TrialCache() if trials.are_here else None

    def run(self, steps: int | None, seeds: int, planners: Sequence[str | Planner] = ()) -> None:
        problem = self.problem
        own = self._planned_candidates(planners)
        self.report("recording the model")
        self.operations = record(problem.target.model, problem.target.batch, problem.target.loss)
        self.fingerprint = fingerprint_of(problem, self.operations)
        self.sites = [SiteKey(op.module, op_site(op.op, op.index)) for op in self.operations]
        groups = activation_groups(self.operations, problem.compile)
        self.second_halves = second_halves(self.operations)
        self.chunks_loss = self._can_chunk_loss()
        self.products = self._time_products()
        self.report(f"scoring the damage of rounding {sum(len(g.bytes_by_site) for g in groups)} activations")
        damage = self._damage([site for g in groups for site, _ in g.bytes_by_site])
        self.items = make_items(groups, damage)
        self.lower_items = [] if problem.compile else lowered(self.items, damage)
        native = self._native_candidates()
        self._measure([Candidate(PLAIN, None), *self._own_precision(), *(native or self._packed_candidates())])
        plain = self.rows[0].outcome
        if isinstance(plain, Failure) and plain != OUT_OF_MEMORY:
            raise BitplanError(f"the model does not train without a plan ({plain.reason}): fix that first.")
        if native and not self._is_native_faster():
            self._measure(self._packed_candidates())
        if own:
            self._measure(own)
        if self._has_small_state():
            self._measure([self._with_small_state()])
        if self.limits.memory is not None:
            self._fit_budget()
        if steps != 0:
            self._verify(steps, seeds)

    # --- candidates ---

    def _can_chunk_loss(self) -> bool:
        """Whether the model is a language model whose loss can be computed in chunks, with logits that matter."""
        from bitplan.integrations.causal_lm import compute_loss_in_chunks  # built on top of planners

        batch, model = self.problem.target.batch, self.problem.target.model
        last = OperationGraph(self.operations).numbers("last-product")
        sizes = {number: sum(t.nbytes for t in op.outputs) for number, op in enumerate(self.operations)}
        is_large = sum(sizes[number] for number in last) >= _LEAST_LOGITS * max(sizes.values(), default=0)
        if not isinstance(batch, Mapping) or "labels" not in batch or not is_large:
            return False
        try:
            compute_loss_in_chunks(model, batch)()
        except BitplanError as error:
            log.info("the loss is not computed in chunks: %s", error)
            return False
        return True

    def _time_products(self) -> list[TimedProducts]:
        groups = product_groups(self.operations)
        if not self.problem.compile or not groups:
            return []
        parameter = next(self.problem.target.model.parameters())
        dtype = self.problem.autocast or parameter.dtype
        self.report(f"timing {len({group.shape for group in groups})} shapes of linear layers")
        with device_alone(self.problem.device):
            return time_products(groups, self.problem.device, dtype, self.report)

    def _damage(self, sites: Sequence[SiteKey]) -> dict[SiteKey, dict[str, float]]:
        quantizers = {name: make_quantizer(**options) for name, options in ACTIVATION_QUANTIZERS.items()}
        try:
            return measure_damage(self.problem.target, frozenset(sites), quantizers, self.problem.autocast)
        except torch.OutOfMemoryError:
            self.report("there is no memory to score damage: all activations count alike")
            return {}

    def _planned_candidates(self, planners: Sequence[str | Planner]) -> list[Candidate]:
        """The plans of the user's own planners."""
        target = self.problem.target
        made: dict[str, Plan] = {}
        for planner in planners:
            made |= planned_by(planner, target.model, target.batch, target.loss)
        return [Candidate(name, plan, family="planner") for name, plan in made.items()]

    def _own_precision(self) -> list[Candidate]:
        """The model without rounding: with recomputation, and with its loss in chunks or without constant masks."""
        candidates = [make_candidate(RECOMPUTE, "packed", (), recompute="aggressive")] if self.problem.compile else []
        execution = "native" if self.problem.compile else "emulate"
        if self.chunks_loss:
            candidates.append(make_candidate(CHUNKED, execution, (), chunks_loss=True))
        elif self.problem.compile and any(op.op == "scaled_dot_product_attention" for op in self.operations):
            candidates.append(make_candidate(WITHOUT_MASKS, execution, ()))
        return candidates

    def _native_candidates(self) -> list[Candidate]:
        """Products on low-precision units, and growing sets of rounded activations."""
        backend, products = self._native_products()
        if not products:
            return []
        sets = levels(self.items) or [("", [])]
        candidates = [self._native(f"{backend} + {name}".rstrip(" +"), items, products) for name, items in sets]
        last = [timed.group for timed in self.products if timed.group.is_last and timed.is_worth_a_trial]
        if last:
            name = f"{backend} with last product + {sets[0][0]}".rstrip(" +")
            candidates.append(self._native(name, sets[0][1], [*products, *last]))
        return candidates

    def _packed_candidates(self) -> list[Candidate]:
        """Growing sets of rounded activations; in eager code also all of them in fewer bits."""
        sets = levels(self.items)
        candidates = [self._packed(f"packed {name}", items) for name, items in sets]
        if self.lower_items and sets:
            candidates.append(self._packed(f"packed {sets[-1][0]}, {LOWER}", self.lower_items))
        return candidates

    def _is_native_faster(self) -> bool:
        """Whether a native candidate is faster than the model as it is, so that packed ones are no better."""
        plain = self.rows[0].trial
        native = [row.trial.milliseconds for row in self.rows if row.family == "native" and row.trial]
        return plain is None or min(native, default=float("inf")) < _FASTER * plain.milliseconds

    def _with_small_state(self) -> Candidate:
        """The smallest candidate so far, with the optimizer's state in 8 bits."""
        planned = [row for row in self.rows if row.trial and row.family in ("packed", "native")]
        smallest = min(planned, key=_peak, default=None)
        name = "8-bit optimizer" if smallest is None else f"{smallest.name}, 8-bit optimizer"
        base = no_plan() if smallest is None or smallest.plan is None else smallest.plan
        before = self.candidates.get(smallest.name) if smallest else None
        plan = replace(base, optimizer=OptimizerRule("int8"))
        kind = "packed" if smallest is None else smallest.family
        return Candidate(name, plan, before.saved_bytes if before else 0, before.damage if before else 0.0, kind)

    def _native_products(self) -> tuple[str, list[ProductGroup]]:
        """The backend and the products that run on it: all but the last, if they are worth a trial."""
        timed = [timed for timed in self.products if timed.is_worth_a_trial and not timed.group.is_last]
        if not timed:
            return "", []
        backend = timed[0].backend or ""
        return backend, [product.group for product in timed if product.backend == backend]

    def _native(
        self, name: str, items: Sequence[Item], products: Sequence[ProductGroup], recompute: str = "inputs"
    ) -> Candidate:
        backend = next(timed.backend for timed in self.products if timed.is_worth_a_trial)
        return make_candidate(
            *(name, "native", items, products, backend or "fp8"),
            recompute=recompute,
            chunks_loss=self.chunks_loss,
            all_sites=self.sites,
        )

    def _recomputing(self, name: str, items: Sequence[Item], products: Sequence[ProductGroup]) -> Candidate:
        """A native candidate that recomputes the second half of each gate instead of saving its codes."""
        saved = [item for item in items if item.site not in self.second_halves]
        whole = sum(item.saving + item.remaining for item in items if item.site in self.second_halves)
        candidate = self._native(f"{name}{_RECOMPUTED}", saved, products, "products")
        return replace(candidate, saved_bytes=candidate.saved_bytes + whole)

    def _packed(self, name: str, items: Sequence[Item], products: Sequence[ProductGroup] = ()) -> Candidate:
        return make_candidate(name, "packed", items, chunks_loss=self.chunks_loss, all_sites=self.sites)

    def _has_small_state(self) -> bool:
        """Whether the optimizer's state can be kept in 8 bits."""
        choice = self.problem.optimizer
        if choice is None or importlib.util.find_spec("torchao") is None:
            return False
        return choice == "adamw" or (
            callable(choice) and type(make_optimizer(choice, self.problem.target.model)) is AdamW
        )

    # --- measurements ---

    def _measure(self, candidates: Sequence[Candidate]) -> None:
        """Measure candidates, or read what was measured before; a row for each."""
        new = [c for c in candidates if not any(row.plan == c.plan and row.outcome for row in self.rows)]
        known = [self._remembered(candidate) for candidate in new]
        missing = [candidate for candidate, trial in zip(new, known, strict=True) if trial is None]
        if missing:
            names = ", ".join(candidate.name for candidate in missing)
            self.report(f"measuring {len(missing)} candidate{'s' * (len(missing) > 1)}: {names}")
        outcomes: dict[int, Outcome] = {place: trial for place, trial in enumerate(known) if trial is not None}
        places = [place for place, trial in enumerate(known) if trial is None]
        try:
            for number, outcome in self.trials.measure_each([candidate.plan for candidate in missing]):
                outcomes[places[number]] = outcome
                self._note(missing[number], outcome)
        finally:  # an interruption keeps what was measured before it, if the first row is there to compare it with
            if self.rows or 0 in outcomes:
                for place, outcome in sorted(outcomes.items()):
                    self._add_row(new[place], outcome)

    def _note(self, candidate: Candidate, outcome: Outcome) -> None:
        """Report a new measurement, and remember it."""
        self.report(f"{candidate.name}: {outcome}")
        if not isinstance(outcome, Trial):
            return
        if self.cache is not None:
            self.cache.add(self.cache.key(self.fingerprint, candidate.plan), outcome)
        if not outcome.is_quiet:
            self.report(f"{candidate.name}: times spread by {outcome.spread:.0%}, the machine is busy; not remembered")

    def _add_row(self, candidate: Candidate, outcome: Outcome) -> None:
        self.candidates[candidate.name] = candidate
        predicted = self._predicted_peak(candidate)
        row = TriedPlan(candidate.name, candidate.plan, candidate.family, predicted, candidate.damage, outcome)
        self.rows.append(row)

    def _remembered(self, candidate: Candidate) -> Trial | None:
        if self.cache is None:
            return None
        return self.cache.trials.get(self.cache.key(self.fingerprint, candidate.plan))

    def _predicted_peak(self, candidate: Candidate) -> int | None:
        """The peak before anything is measured: from shapes where the step is compiled, else on fake tensors."""
        if candidate.plan is None or candidate.family == "recompute":
            return None
        if self.problem.compile:
            plain = self.rows[0].trial
            return None if plain is None else max(0, plain.peak - candidate.saved_bytes)
        target = self.problem.target
        try:
            return estimate_memory(target.model, target.batch, target.loss, self.problem.optimizer, candidate.plan).peak
        except BitplanError:
            return None  # a model whose shapes depend on values

    @property
    def _limit(self) -> int | None:
        """The memory budget in bytes."""
        plain = self.rows[0].trial
        if self.limits.memory is None or (plain is None and self.limits.memory.bytes is None):
            return None
        return self.limits.memory.limit(plain.peak if plain else 0)

    def _fit_budget(self) -> None:
        """Between two measured sets of a family, one too large for the budget, let the knapsack choose a third."""
        limit = self._limit
        if limit is None:
            raise BitplanError(
                "the model does not train without a plan, so a share of its peak says nothing: give bytes."
            )
        backend, products = self._native_products()
        self._fit_family(limit, self._native, products, self._names("native"))
        is_met = any(row.trial and row.trial.peak <= limit for row in self.rows if row.family == "native")
        if products and self.second_halves and not is_met:
            sets = levels(self.items)
            self._measure([self._recomputing(f"{backend} + {name}", items, products) for name, items in sets[-2:]])
        self._fit_family(limit, self._packed, (), self._names("packed"))

    def _names(self, family: str) -> list[str]:
        """The candidates of a family that keep all gate halves and leave the optimizer's state alone."""
        return [
            row.name
            for row in self.rows
            if row.family == family
            and row.plan is not None
            and row.plan.optimizer_rule is None
            and not row.name.endswith(_RECOMPUTED)
        ]

    def _fit_family(
        self,
        limit: int,
        make: Callable[[str, Sequence[Item], Sequence[ProductGroup]], Candidate],
        products: Sequence[ProductGroup],
        names: Sequence[str],
    ) -> None:
        """Measure candidates that `make` makes, with as many activations as the budget needs by those of `names`."""
        plain, family = self.rows[0].trial, set(names)
        for _ in range(_MOST_ROUNDS):
            measured = sorted(
                (self.candidates[row.name].saved_bytes, row.trial.peak)
                for row in self.rows
                if row.name in family and row.trial
            )
            if not products and plain is not None:
                measured = [(0, plain.peak), *measured]
            needed = _interpolate(measured, int(limit * _AIM[self.problem.compile]))
            items = None if needed is None else cheapest(self.items, self.lower_items, needed)
            if not items:
                return
            kind = "native" if products else "packed"
            candidate = make(f"{kind} {len(items)} of {len(self.items)}", items, products)
            if any(row.plan == candidate.plan for row in self.rows):
                return
            self._measure([candidate])
            family.add(candidate.name)
            trial = self.rows[-1].trial
            if trial is None or trial.peak <= limit:
                return

    # --- the answer ---

    def _verify(self, steps: int | None, seeds: int) -> None:
        """Train the best candidates until one keeps the loss."""
        plain = self.rows[0].trial
        count = steps if steps is not None else _verification_steps(plain, seeds)
        plain_losses: list[float] = []
        for _ in range(_MOST_VERIFIED):
            row = self._best()
            if row is None or row.plan is None or row.family == "recompute" or row.loss_gap is not None:
                return
            self.report(f"verifying {row.name}")
            try:
                gap = measure_loss_gap(
                    *(self.trials, row.plan),
                    steps=count,
                    seeds=seeds,
                    plain_losses=plain_losses,
                    on_one_batch=self.problem.data is None,
                    report=self.report,
                )
            except (BitplanError, RuntimeError) as error:
                self.report(f"{row.name} was not verified: {(str(error).splitlines() or [''])[0]}")
                return
            self.rows[self.rows.index(row)] = replace(row, loss_gap=gap)

    def _why_not(self, row: TriedPlan) -> str | None:
        """Why a row is not the answer; None where it may be."""
        trial, plain = row.trial, self.rows[0].trial
        if isinstance(row.outcome, Failure):
            return f"failed: {row.outcome.reason}"
        if trial is None:
            return "not measured"
        if row.loss_gap is not None and not row.loss_gap.is_within(self.limits.loss_gap):
            return "its loss is worse"
        for other in self.rows:
            if other.family in ("none", "recompute") and other is not row and other.trial is not None:
                is_larger, is_slower = trial.peak >= other.trial.peak, trial.milliseconds >= other.trial.milliseconds
                if is_larger and is_slower and row.family not in ("none",):
                    return f"slower and larger than {other.name}"
        if self._limit is not None and trial.peak > self._limit:
            return "over the memory budget"
        slowdown = self.limits.slowdown
        if slowdown is not None and plain is not None and trial.milliseconds > slowdown * plain.milliseconds:
            return "too slow"
        return None

    def _best(self) -> TriedPlan | None:
        """The row to choose: the fastest within a memory budget, the smallest within a slowdown, else balanced."""
        possible = [row for row in self.rows if self._why_not(row) is None]
        if not possible:
            return None
        if self.limits.memory is not None:
            fastest = min(_milliseconds(row) for row in possible)
            close = [row for row in possible if _milliseconds(row) <= (1 + _SAME_TIME) * fastest]
            return min(close, key=lambda row: (row.damage, _milliseconds(row)))
        if self.limits.slowdown is not None:
            return min(possible, key=_peak)
        return min(possible, key=lambda row: _peak(row) * _milliseconds(row))

    def result(self, is_interrupted: bool) -> AutoResult:
        best, plain = self._best(), self.rows[0]
        meets = best is not None
        if best is None:
            usable = [row for row in self.rows if row.trial and self._why_not(row) != "its loss is worse"]
            best = min(usable, key=_peak, default=plain)
        rows = tuple(
            replace(row, verdict="chosen" if row is best else (self._why_not(row) or "possible")) for row in self.rows
        )
        seconds = time.perf_counter() - self.began
        plan = self._with_provenance(best, seconds) if best.plan is not None else no_plan()
        return AutoResult(
            plan=plan,
            chosen=best.name,
            meets_limits=meets,
            summary=self._summary(best, meets, seconds),
            rows=rows,
            picks=self._picks(),
            seconds=seconds,
            is_interrupted=is_interrupted,
            facts={
                "machine": describe_machine(self.problem.device),
                "compile": self.problem.compile,
                "memory_limit": self._limit,
                "slowdown": self.limits.slowdown,
                "loss_gap": self.limits.loss_gap,
                "products": [
                    {
                        "name": timed.group.name,
                        "count": len(timed.group.sites),
                        "shape": list(timed.group.shape),
                        "backend": timed.backend,
                        "plain_ms": timed.time and timed.time.plain,
                        "native_ms": timed.time and timed.time.native,
                    }
                    for timed in self.products
                ],
            },
        )

    def _picks(self) -> dict[str, str]:
        """The fastest, the smallest and the balanced candidate, whatever the limits."""
        usable = [row for row in self.rows if row.trial and (self._why_not(row) or "").split(":")[0] not in _UNUSABLE]
        if not usable:
            return {}
        return {
            "fastest": min(usable, key=_milliseconds).name,
            "smallest": min(usable, key=_peak).name,
            "balanced": min(usable, key=lambda row: _peak(row) * _milliseconds(row)).name,
        }

    def _with_provenance(self, row: TriedPlan, seconds: float) -> Plan:
        assert row.plan is not None
        trial, plain = row.trial, self.rows[0].trial
        made_by: dict[str, Any] = {
            "planner": "bitplan auto",
            "version": __version__,
            "machine": machine_name(self.problem.device),
            "torch": torch.__version__,
            "search_seconds": round(seconds, 1),
        }
        if trial is not None:
            made_by |= {"peak_bytes": trial.peak, "milliseconds": round(trial.milliseconds, 3)}
        if plain is not None:
            made_by |= {"plain_peak_bytes": plain.peak, "plain_milliseconds": round(plain.milliseconds, 3)}
        if row.loss_gap is not None:
            made_by["loss_gap"] = round(row.loss_gap.gap, 6)
        return replace(row.plan, name=row.name, made_by=made_by)

    def _summary(self, best: TriedPlan, meets: bool, seconds: float) -> str:
        plain, trial = self.rows[0].trial, best.trial
        parts = []
        if not meets and self._limit is not None:
            parts.append(
                f"No plan keeps the peak within {byte_text(self._limit)} and meets every other limit; the nearest is "
                f"{best.name}, {byte_text(trial.peak) if trial else 'not measured'}."
            )
        elif not meets:
            parts.append(f"No plan meets the limits; the nearest is {best.name}.")
        elif best.plan is None:
            parts.append(
                "Nothing helps: every candidate is slower and larger than the model as it is, or its loss is worse."
            )
        else:
            parts.append(f"Chosen: {best.name}.")
        if trial is not None and plain is not None and best.plan is not None:
            parts.append(
                f"Peak {byte_text(trial.peak)} instead of {byte_text(plain.peak)} ({trial.peak / plain.peak:.0%}), "
                f"{trial.milliseconds:.2f} ms a step instead of {plain.milliseconds:.2f} "
                f"({trial.milliseconds / plain.milliseconds:.2f} x)."
            )
        if best.loss_gap is not None:
            gap = best.loss_gap
            where = " on one batch" if gap.on_one_batch else ""
            parts.append(
                f"Loss after {gap.steps} steps{where}, {gap.seeds} seeds: {gap} of {gap.baseline_loss:.4f}; seeds "
                f"alone change it by {gap.baseline_spread:.4f}."
            )
        elif best.plan is not None and best.family != "recompute":
            parts.append("Its loss was not verified.")
        parts.append(f"The search took {seconds / 60:.1f} minutes.")
        return " ".join(parts)


#: Reasons that exclude a candidate whatever the limits are.
_UNUSABLE = ("failed", "not measured", "its loss is worse")


def _milliseconds(row: TriedPlan) -> float:
    return row.trial.milliseconds if row.trial else float("inf")


def _peak(row: TriedPlan) -> float:
    return row.trial.peak if row.trial else float("inf")


def _verification_steps(plain: Trial | None, seeds: int) -> int:
    """200 steps, or as many as two minutes allow."""
    seconds = 2 * seeds * (plain.milliseconds if plain else 100.0) / 1e3
    return max(30, min(200, int(120 / seconds)))


def _interpolate(measured: Sequence[tuple[int, int]], goal: int) -> int | None:
    """The saving at which the peak is `goal`, by the two measurements around it; None where all are on one side.

    >>> _interpolate([(0, 100), (50, 60)], 80)
    25
    """
    above = max((point for point in measured if point[1] > goal), default=None)
    below = min((point for point in measured if point[1] <= goal and (above is None or point > above)), default=None)
    if above is None or below is None:
        return None
    (less, high), (more, low) = above, below
    return round(less + (more - less) * (high - goal) / (high - low))
