"""Which tensor's rounding breaks a run, and a plan that mends it: :func:`diagnose`.

Steps are replayed from a state that was still good, each time with other tensors in high precision: without any
rounding, which is the reference, then with ever smaller groups of tensors left alone, until the fewest are found whose
rounding has to go (the QuickXplain bisection of Junker 2004). The forward and the backward pass are tried first. Wider
quantizers of these tensors are replayed, too, and the first that is as good as high precision makes the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np

from bitplan.capture.decompositions import decision_for, has_slots
from bitplan.capture.ops import PRODUCTS
from bitplan.capture.recording import Operation
from bitplan.errors import BitplanError, PlanError
from bitplan.gemm.macs import RECURRENT
from bitplan.numerics.formats import BlockFormat, CodebookFormat
from bitplan.numerics.scaling import Granularity
from bitplan.numerics.wire_format import FPROP, OPERAND_OF_SLOT, SLOTS, op_site
from bitplan.plans import KEEP, OPERANDS, Plan, QuantizerSpec, Rule
from bitplan.plans.match import GradAt, exact_pattern
from bitplan.plans.quantizer_use import Use
from bitplan.runtime.attach import Attachment
from bitplan.tables import Table

#: The share by which a loss may exceed that without rounding.
TOLERANCE = 0.02
#: Replays of a diagnosis, at most.
MOST_REPLAYS = 64
#: A replay is good if less than this share of the excess remains.
_REMAINING = 0.25
#: The excess is the mean of this share of the steps, where it is largest.
_WINDOW_SHARE = 0.25
#: A replay diverges if its mean loss rises by this factor from the first to the last quarter of the steps, or ends at
#: this many times the first loss: after a jump that does not make it infinite, the loss stays high.
_RISE, _RISE_OF_FIRST = 2.0, 3.0
#: An excess is chance unless it is more than this many times what the reference exceeds the plan's losses by elsewhere.
_CHANCE = 2.0
#: Learning rates that are tried where the plan is not the cause.
_RATES = (1 / 4, 1 / 16)
#: Tensors that a summary names.
_NAMED = 4

#: The plans of replays run with this rate, relative to the run's own.
FULL_RATE = 1.0


#: A remedy that every range fits into.
BF16 = QuantizerSpec("bf16")


class Replay(Protocol):
    """Repeats the steps of a run from its good state, under a plan."""

    def __call__(self, plan: Plan, rate: float = FULL_RATE) -> Sequence[float]:
        """The losses; the last is not finite if the run broke there."""


# --- Tensors that a plan rounds


@dataclass(frozen=True)
class RoundedTensor:
    """A tensor that the plan rounds, as a rule can name it."""

    module: str
    #: The operation with its number; of a decomposed one, perhaps the fused operation whose rules decide.
    op: str
    #: A class (``weight``) or an operand (``dgrad.dy``).
    place: str
    #: What the plan gives it.
    quantizer: str
    spec: QuantizerSpec
    grad_at: GradAt = "producer"
    #: Whether the quantizer stays the same during the run.
    is_fixed: bool = True
    #: Every name of the operation that rules may decide by.
    names: tuple[str, ...] = ()

    @property
    def is_forward(self) -> bool:
        slot = OPERAND_OF_SLOT.get(self.place)
        return self.place in ("weight", "activation") if slot is None else slot.pass_ == FPROP

    def __str__(self) -> str:
        return f"{self.module}/{self.op}:{self.place}"


def rounded_tensors(plan: Plan, operations: Iterable[Operation]) -> list[RoundedTensor]:
    """The tensors of recorded operations that a plan rounds: the forward pass first, then the backward pass."""
    tensors: dict[tuple[str, str, str], RoundedTensor] = {}
    for operation in operations:
        site = op_site(operation.op, operation.index)
        decision = decision_for(plan.decide, operation.module, site, operation.inside, operation.kind)
        names = _names_in_rules(plan, operation, site)
        for place in _places(operation):
            spec = decision[place].quantizer
            if spec is None:
                continue
            key = (operation.module, names[0], place)
            if key in tensors:
                tensors[key] = replace(tensors[key], names=tuple(dict.fromkeys((*tensors[key].names, *names))))
                continue
            is_fixed = decision[place].over_time is None and spec.moved_by is None and spec.promote is None
            text = decision[place].words or str(spec)
            tensors[key] = RoundedTensor(*key, text, spec, decision.grad_at, is_fixed, names)
    return sorted(tensors.values(), key=lambda tensor: not tensor.is_forward)


def _names_in_rules(plan: Plan, operation: Operation, site: str) -> tuple[str, ...]:
    """The names under which rules decide: of a product in a decomposed operation that of the whole comes first."""
    inside = operation.inside
    # A recurrent layer repeats an operation for every step of a sequence.
    name = operation.op if inside in RECURRENT else site
    if inside is not None and operation.op in PRODUCTS and has_slots(plan.decide(operation.module, inside)):
        return inside, name
    return (name,)


def _places(operation: Operation) -> list[str]:
    """The tensors that an operation has."""
    parameters = [tensor for _, tensor in operation.parameters if tensor.is_floating_point()]
    places = ["weight"] * bool(parameters) + ["activation"] * bool(operation.outputs)
    if operation.operands is not None:
        places += [slot for slot in SLOTS if operation.needs_grad or OPERAND_OF_SLOT[slot].pass_ == FPROP]
    if operation.needs_grad:
        places += ["grad_activation"] + ["grad_weight"] * any(tensor.requires_grad for tensor in parameters)
    return places


def keep_plan(plan: Plan, kept: Iterable[RoundedTensor]) -> Plan:
    """The plan with these tensors left alone. Rules may lose their effect: none of them is strict."""
    rules = (*plan.flattened().rules, *_rules_for(dict.fromkeys(kept, KEEP)))
    return replace(plan.flattened(), rules=tuple(replace(rule, strict=False) for rule in rules), made_by=None)


def _rules_for(uses: dict[RoundedTensor, Use]) -> list[Rule]:
    """One rule for all modules whose operation of a name gets the same."""
    by_operation: dict[tuple[str, tuple[str, ...], GradAt], dict[str, Use]] = {}
    for tensor, use in uses.items():
        operation = tensor.module, tensor.names or (tensor.op,), tensor.grad_at
        by_operation.setdefault(operation, {})[tensor.place] = use
    modules: dict[tuple[tuple[str, ...], GradAt, tuple[tuple[str, Use], ...]], list[str]] = {}
    for (module, names, grad_at), places in by_operation.items():
        modules.setdefault((names, grad_at, _share(places)), []).append(exact_pattern(module))
    return [
        Rule(tuple(paths), names, places, grad_at=grad_at if "grad_activation" in dict(places) else None)
        for (names, grad_at, places), paths in modules.items()
    ]


def _share(places: dict[str, Use]) -> tuple[tuple[str, Use], ...]:
    """Both slots of an operand as one key, unless each needs scales along its own axis."""
    shared = dict(places)
    for operand, pair in OPERANDS.items():
        uses = [places.get(slot) for slot in pair]
        use = uses[0]
        has_own_axis = isinstance(use, QuantizerSpec) and use.axis_meaning == "summed"
        if use is not None and uses[1] == use and not has_own_axis:
            shared = {key: value for key, value in shared.items() if key not in pair} | {operand: use}
    return tuple(shared.items())


# --- The excess of a loss over the reference's


def excess(losses: Sequence[float], reference: Sequence[float]) -> float:
    """How much higher the losses are, on average over the quarter of the steps where it is most; infinite if broken.

    >>> excess([3.0, 2.0, 1.0, 2.0], [3.0, 2.0, 1.0, 0.5]), excess([3.0, math.nan], [3.0, 2.0])
    (1.5, inf)
    """
    if len(losses) != len(reference) or not np.isfinite(losses).all():
        return math.inf
    differences = np.subtract(losses, reference)
    width = _width(len(differences))
    return float(np.convolve(differences, np.ones(width) / width, "valid").max())


def is_broken(losses: Sequence[float]) -> bool:
    """Whether a loss is not finite, or rises as it does in a divergence."""
    if not len(losses) or not np.isfinite(losses).all():
        return True
    width = _width(len(losses))
    means = np.convolve(losses, np.ones(width) / width, "valid")
    return bool(means[-1] > _RISE * abs(means[0]) or means[-1] > _RISE_OF_FIRST * abs(losses[0]))


def _width(steps: int) -> int:
    return max(1, round(steps * _WINDOW_SHARE))


# --- The diagnosis

#: ``plan``: rounding of some tensors; ``not the plan``: the run breaks without rounding, too; ``none``: nothing breaks.
Cause = Literal["plan", "not the plan", "none"]


@dataclass(frozen=True)
class ReplayRecord:
    """One replay."""

    #: What was in high precision, or got another quantizer.
    change: str
    #: See :func:`excess`.
    excess: float
    verdict: str


@dataclass(frozen=True)
class Diagnosis:
    """Why a run breaks, and what mends it."""

    cause: Cause
    #: One paragraph.
    summary: str
    #: The tensors whose rounding breaks the run: the fewest that have to be in high precision.
    culprits: tuple[RoundedTensor, ...] = ()
    #: A plan under which the replay is as good as in high precision; None where the plan is not the cause.
    plan: Plan | None = None
    #: A learning rate, relative to the run's own, with which the replay does not diverge.
    rate: float | None = None
    records: tuple[ReplayRecord, ...] = ()

    @property
    def replays(self) -> Table[ReplayRecord]:
        """Every replay, in order."""
        columns: dict[str, Callable[[ReplayRecord], Any]] = {
            "change": lambda record: record.change,
            "excess": lambda record: f"{record.excess:.3g}",
            "verdict": lambda record: record.verdict,
        }
        return Table(self.records, columns, empty="no replays")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "cause": self.cause,
            "summary": self.summary,
            "culprits": [
                {"site": str(tensor), "place": tensor.place, "quantizer": tensor.quantizer} for tensor in self.culprits
            ],
            "rate": self.rate,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "replays": [vars(record) for record in self.records],
        }

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True)
class Window:
    """The steps that are replayed, for messages."""

    #: Steps made before the first of them.
    start: int
    #: What is wrong with the run, as the beginning of the summary; a sentence.
    symptom: str = ""

    def describe(self, losses: Sequence[float]) -> str:
        return f"{len(losses)} {'step' if len(losses) == 1 else 'steps'} from step {self.start} on"


def diagnose(
    replay: Replay,
    plan: Plan,
    tensors: Sequence[RoundedTensor],
    window: Window,
    *,
    tolerance: float = TOLERANCE,
    most_replays: int = MOST_REPLAYS,
    reference: Sequence[float] | None = None,
    report: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Find the tensors whose rounding breaks a run.

    :param replay: repeats the steps from the good state; always the same steps with the same data.
    :param plan: the run's, without selectors.
    :param tensors: those that the plan rounds, see :func:`rounded_tensors`.
    :param tolerance: the share by which the loss may exceed that without rounding.
    :param reference: the losses of the replay without a plan, where they are known.
    :param report: called with a sentence after each replay.
    """
    if not 0 < tolerance < 1:
        raise PlanError(f"tolerance is {tolerance:g}; it must be a share between 0 and 1, such as {TOLERANCE}.")
    if most_replays < 4:
        raise PlanError(f"a diagnosis needs at least 4 replays, not {most_replays}.")
    return _Search(replay, plan.flattened(), tensors, window, tolerance, most_replays, report).run(reference)


class _OutOfReplays(Exception):
    """No more replays may be made."""


class _Search:
    """The state of a diagnosis: replays that were made, and the smallest set of tensors so far that mends the run."""

    def __init__(
        self,
        replay: Replay,
        plan: Plan,
        tensors: Sequence[RoundedTensor],
        window: Window,
        tolerance: float,
        most_replays: int,
        report: Callable[[str], None] | None,
    ) -> None:
        self.replay, self.plan, self.tensors, self.window = replay, plan, list(tensors), window
        self.tolerance, self.most_replays = tolerance, most_replays
        self.report = report or (lambda sentence: None)
        self.records: list[ReplayRecord] = []
        self.reference: Sequence[float] = ()
        #: The mean loss of the reference, which excesses are compared with.
        self.level = 0.0
        #: The excess up to which a replay is good.
        self.allowed = 0.0
        self._excess_of: dict[frozenset[RoundedTensor], float] = {}

    def run(self, reference: Sequence[float] | None) -> Diagnosis:
        self.reference = self.replay(Plan()) if reference is None else reference
        failing = self.replay(self.plan) if self.tensors else self.reference
        if not np.isfinite(self.reference).all() or (is_broken(self.reference) and is_broken(failing)):
            return self._not_the_plan(failing)
        self.level = float(np.abs(self.reference).mean())
        least = self.tolerance * self.level
        found = excess(failing, self.reference)
        # Losses under two roundings drift apart by chance, in both directions.
        is_chance = found <= _CHANCE * max(excess(self.reference, failing), 0.0) and math.isfinite(found)
        self._record("the plan as it is", found, "good" if found <= least or is_chance else "fails")
        if found <= least or is_chance:
            return self._nothing_found(found)
        self.allowed = max(least, _REMAINING * min(found, self.level))
        if not self._is_good(self.tensors):
            return self._outside()
        with suppress(_OutOfReplays):
            self._bisect([], False, self.tensors)
        good = [kept for kept, value in self._excess_of.items() if value <= self.allowed]
        smallest = min(good, key=len)
        return self._blame([tensor for tensor in self.tensors if tensor in smallest], found)

    # --- replays ---

    def _record(self, change: str, value: float, verdict: str) -> None:
        self.records.append(ReplayRecord(change, value, verdict))
        self.report(f"replay {len(self.records)}: {change}: loss {_signed(value)}, {verdict}")

    def _is_good(self, kept: Sequence[RoundedTensor]) -> bool:
        key = frozenset(kept)
        if key not in self._excess_of:
            if len(self.records) >= self.most_replays:
                raise _OutOfReplays
            value = excess(self.replay(keep_plan(self.plan, kept)), self.reference)
            self._excess_of[key] = value
            self._record(f"{self._name(kept)} in high precision", value, "good" if value <= self.allowed else "fails")
        return self._excess_of[key] <= self.allowed

    def _bisect(self, kept: list[RoundedTensor], is_new: bool, among: Sequence[RoundedTensor]) -> list[RoundedTensor]:
        """The fewest of some tensors that have to be in high precision, too, while others are.

        :param is_new: whether `kept` has grown since it was known not to be enough.
        """
        if is_new and self._is_good(kept):
            return []
        if len(among) == 1:
            self._is_good([*kept, *among])
            return list(among)
        first, second = halves(among)
        from_second = self._bisect([*kept, *first], True, second)
        from_first = self._bisect([*kept, *from_second], bool(from_second), first)
        return [*from_first, *from_second]

    # --- conclusions ---

    def _blame(self, culprits: list[RoundedTensor], found: float) -> Diagnosis:
        kept = self._excess_of[frozenset(culprits)]
        others = [tensor for tensor in self.tensors if tensor not in culprits]
        alone = excess(self.replay(keep_plan(self.plan, others)), self.reference) if others else found
        if others:
            verdict = "fails" if alone > self.allowed else "good"
            self._record(f"all but {self._name(culprits)} in high precision", alone, verdict)
        fixed, words, remaining = self._mend(culprits, kept)
        few = "The cause is" if len(culprits) <= _NAMED else "No few tensors are the cause; it is"
        it = "it" if len(culprits) == 1 else "them"
        if not others:
            only = ""
        elif alone > self.allowed:
            only = f", and with nothing else rounded it is {_signed(alone)}"
        else:
            only = ", and with nothing else rounded the run does not fail: it takes other rounded tensors, too"
        summary = (
            f"{self._beginning()} Without rounding the mean loss is {_mean(self.reference):.4g}; under the plan it is "
            f"{_signed(found)}. {few} {self._name(culprits)}, in {_passes(culprits)}: with {it} in high precision the "
            f"loss is {_signed(kept)}{only}. Verified by replay: with {it} {words} the loss is {_signed(remaining)}."
        )
        return self._result("plan", summary, tuple(culprits), fixed)

    def _mend(self, culprits: Sequence[RoundedTensor], kept: float) -> tuple[Plan, str, float]:
        """The first plan that is as good as high precision, its change in words, and what remains of the excess."""
        ladders = [remedies(tensor) for tensor in culprits]
        limit = max(kept, 0.0) + self.tolerance * self.level
        for rung in range(max(map(len, ladders)) if ladders else 0):
            uses = [ladder[min(rung, len(ladder) - 1)] for ladder in ladders]
            words = ", ".join(dict.fromkeys(_use_words(use) for use in uses))
            plan = self._fixed_plan(dict(zip(culprits, uses, strict=True)))
            value = excess(self.replay(plan), self.reference)
            is_last = rung == max(map(len, ladders)) - 1
            self._record(f"{self._name(culprits)} {words}", value, "mends it" if value <= limit or is_last else "fails")
            if value <= limit or is_last:
                break
        return plan, words, value

    def _fixed_plan(self, uses: dict[RoundedTensor, Use]) -> Plan:
        """The plan with other quantizers for some tensors, without the rules that decide nothing any more."""
        added = _rules_for(uses)
        whole = replace(self.plan, rules=(*self.plan.rules, *added))
        before, after = (_deciding_rules(plan, self.tensors) for plan in (self.plan, whole))
        rules = [rule for index, rule in enumerate(whole.rules) if index not in before - after]
        return replace(whole, rules=tuple(rules), name=f"{self.plan.name}-mended" if self.plan.name else None)

    def _not_the_plan(self, failing: Sequence[float]) -> Diagnosis:
        rate = next((rate for rate in _RATES if not is_broken(self.replay(self.plan, rate))), None)
        tried = ", ".join(f"{rate:g}" for rate in _RATES)
        remedy = (
            f"At {rate:g} of the learning rate the replay under the plan does not diverge: lower the learning rate, or "
            f"warm it up or clip gradients."
            if rate is not None
            else f"It does so at {tried} of the learning rate, too: look at the data and the loss of these steps, or "
            f"give an earlier start."
        )
        also = "diverges without rounding, too" if is_broken(failing) else "diverges without rounding"
        state = (
            ""
            if self.plan.optimizer_rule is None
            else (f" The optimizer's state was kept in {self.plan.optimizer_rule.state} in all replays.")
        )
        summary = f"{self._beginning()} It {also}, so no operand is to blame. {remedy}{state}"
        return self._result("not the plan", summary, rate=rate)

    def _nothing_found(self, found: float) -> Diagnosis:
        level = (
            f"at most {_signed(found)} than without rounding ({_mean(self.reference):.4g}), which is within "
            f"{self.tolerance:.0%} or chance"
        )
        what = f"Under the plan the loss is {level}." if self.tensors else "The run rounds nothing."
        return self._result("none", f"{self._beginning()} {what} Nothing breaks here: replay more steps, or others.")

    def _outside(self) -> Diagnosis:
        summary = (
            f"{self._beginning()} Under the plan it fails with all {len(self.tensors)} tensors in high precision, and "
            f"without a plan it does not: the cause is what the plan does besides rounding these tensors, such as its "
            f"execution or the loss."
        )
        return self._result("plan", summary)

    def _result(
        self,
        cause: Cause,
        summary: str,
        culprits: tuple[RoundedTensor, ...] = (),
        plan: Plan | None = None,
        rate: float | None = None,
    ) -> Diagnosis:
        if plan is not None:
            made_by = {"planner": "bitplan doctor", "culprits": [str(tensor) for tensor in culprits], "why": summary}
            plan = replace(plan, made_by=made_by)
        return Diagnosis(cause, summary.strip(), culprits, plan, rate, tuple(self.records))

    def _beginning(self) -> str:
        return f"{self.window.symptom} Replayed: {self.window.describe(self.reference)}.".strip()

    def _name(self, tensors: Sequence[RoundedTensor]) -> str:
        """A few tensors by name, more by what they have in common."""
        if len(tensors) == len(self.tensors):
            return f"all {len(tensors)} rounded tensors" if len(tensors) > 1 else str(tensors[0])
        for is_forward, name in ((True, "forward"), (False, "backward")):
            if len(tensors) > 1 and [t for t in self.tensors if t.is_forward == is_forward] == list(tensors):
                return f"the {name} pass"
        if len(tensors) <= _NAMED:
            return ", ".join(f"{tensor} ({tensor.quantizer})" for tensor in tensors)
        return f"{len(tensors)} tensors, {tensors[0]} to {tensors[-1]},"


def halves(tensors: Sequence[RoundedTensor]) -> tuple[list[RoundedTensor], list[RoundedTensor]]:
    """Two parts: forward and backward pass, or else modules, operations or tensors, cut near the middle."""
    keys = [(tensor.is_forward, *tensor.module.split("."), "", tensor.op, tensor.place) for tensor in tensors]
    depth = next(depth for depth in range(max(map(len, keys))) if len({key[: depth + 1] for key in keys}) > 1)
    sizes = [len(list(group)) for _, group in groupby(keys, key=lambda key: key[: depth + 1])]
    cuts = np.cumsum(sizes)[:-1]
    cut = int(cuts[np.abs(cuts - len(tensors) / 2).argmin()])
    return list(tensors[:cut]), list(tensors[cut:])


def remedies(tensor: RoundedTensor) -> list[Use]:
    """What to give a tensor whose rounding breaks the run, the cheapest first; the last leaves it alone."""
    spec = tensor.spec
    uses: list[Use] = []
    if tensor.is_fixed and not isinstance(spec.target, (BlockFormat, CodebookFormat)) and spec.axis is None:
        finer: dict[Granularity | None, tuple[Granularity, ...]] = {
            None: ("tensor", "channel"),
            "tensor": ("channel", "vector"),
            "channel": ("vector",),
        }
        plain = replace(spec, history=None, margin=0, eval="same" if spec.eval == "ema" else spec.eval, overflow=None)
        for scale in finer.get(spec.scale, ()):
            with suppress(PlanError):  # a scale that this quantizer cannot have
                uses.append(replace(plain, scale=scale))
    wider = QuantizerSpec("e4m3" if tensor.is_forward else "e5m2", scale="tensor")
    if spec.target.bits < 8 or (spec.target.bits == 8 and spec.target != wider.target):
        uses.append(wider)
    if spec.target.bits <= 16 and spec.target != BF16.target:
        uses.append(BF16)
    return [*uses, KEEP]


def _use_words(use: Use) -> str:
    return "in high precision" if use == KEEP else f"in {use}"


def _deciding_rules(plan: Plan, tensors: Iterable[RoundedTensor]) -> set[int | None]:
    return {plan.decide(tensor.module, tensor.op)[tensor.place].rule for tensor in tensors}


def _passes(tensors: Sequence[RoundedTensor]) -> str:
    directions = {tensor.is_forward for tensor in tensors}
    return "both passes" if len(directions) > 1 else "the forward pass" if True in directions else "the backward pass"


def _mean(losses: Sequence[float]) -> float:
    return float(np.mean(losses))


def _signed(value: float) -> str:
    """An excess in words."""
    if math.isinf(value):
        return "not finite"
    return f"{abs(value):.3g} {'higher' if value >= 0 else 'lower'}"


def continue_run(run: Attachment, state: dict[str, Any]) -> None:
    """Continue from the state of an attachment whose plan may differ in some tensors.

    Amax histories and promotions of tensors that both plans round are kept, where the state fits.
    """
    plan = run.plan.flattened().to_dict()
    own = state if state["plan"] == plan else {**state, "plan": plan, "steps": []}
    try:
        run.load_state_dict(own)
    except (BitplanError, ValueError):  # other mutable formats, or other phases
        run.start_at(int(state["step"]))
