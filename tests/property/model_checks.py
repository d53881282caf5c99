"""What must hold for every random model and plan; each function raises :class:`Failure`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from random_models import Case, build, inputs_of
from rounded_by_hand import Hand, Run
from torch import Tensor, nn
from torch._dynamo.utils import counters

import bitplan
from bitplan.errors import BitplanWarning, PlanError

__all__ = ["Discarded", "Failure", "check"]


class Failure(AssertionError):
    """A property that does not hold."""


class Discarded(Exception):
    """A case that shows nothing: torch itself refuses the model, or its numbers are not finite."""


Step = dict[str, Tensor]

#: Of torch's message about a tensor that the backward pass needs.
OVERWRITTEN = "modified by an inplace operation"


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _loss(outputs: tuple[Tensor, ...]) -> Tensor:
    weights = [torch.linspace(-1, 1, output.numel()).cos().view(output.shape) for output in outputs]
    return sum((output.float() * weight).sum() for output, weight in zip(outputs, weights, strict=True))


def step_of(case: Case, model: nn.Module, function: Callable[..., Any], step: int) -> Step:
    """All numbers of a training step, copied: results, gradients, buffers."""
    x, y = inputs_of(case, step)
    model.zero_grad()
    torch.manual_seed(step)  # for dropout
    outputs = _as_tuple(function(x, y))
    _loss(outputs).backward()
    numbers = {f"output {at}": output for at, output in enumerate(outputs)}
    numbers |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    if x.grad is not None:
        numbers["gradient of x"] = x.grad
    numbers |= {f"buffer {name}": buffer for name, buffer in model.named_buffers() if "running" in name}
    return {name: tensor.detach().clone() for name, tensor in numbers.items()}


def compare(what: str, actual: list[Step], expected: list[Step], tolerance: float = 0.0) -> None:
    """Raise unless both have the same bits (NaN equals NaN), or differ by that much of the largest value."""
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if a.keys() != b.keys():
            raise Failure(f"{what}, step {step}: {sorted(a.keys() ^ b.keys())} in one of them only")
        for name in a:
            largest = b[name].double().nan_to_num(0, 0, 0).abs().max().item()
            if not torch.allclose(a[name].double(), b[name].double(), 0, tolerance * largest, equal_nan=True):
                difference = (a[name].double() - b[name].double()).abs().max().item()
                raise Failure(f"{what}, step {step}: {name} differs by {difference:.3g} of {largest:.3g}")


def distance(actual: list[Step], expected: list[Step]) -> float:
    """The largest relative difference of a tensor, by norm."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        for name in a.keys() & b.keys():
            difference = (a[name].double() - b[name].double()).norm()
            worst = max(worst, float(difference / b[name].double().norm().clamp_min(1e-3)))
    return worst


@contextmanager
def _attached(case: Case, model: nn.Module, rules: Any, execution: str = "emulate", **options: Any) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitplanWarning)
        plan = {"version": 1, "rules": list(rules)}
        example = inputs_of(case, 0)
        run = bitplan.attach(model, plan, example=example, execution=execution, seed=case.seed, **options)
        with run:
            yield run


def _steps(case: Case, model: nn.Module, rules: Any, execution: str = "emulate", **options: Any) -> list[Step]:
    """Training steps, and an evaluation."""
    with _attached(case, model, rules, execution, **options) as run:
        steps = []
        for step in range(case.steps):
            steps.append(step_of(case, model, model, step))
            run.step()
        with torch.no_grad():
            outputs = model.eval()(*inputs_of(case, 0))
        steps.append({f"output {at}": output for at, output in enumerate(_as_tuple(outputs))})
        model.train()
    return steps


def _plain(case: Case, model: nn.Module) -> list[Step]:
    return [step_of(case, model, model, step) for step in range(case.steps)]


def _by_hand(case: Case, rules: Any) -> tuple[list[Step], Run]:
    model, function = build(case)
    run, steps = Run(rules), []
    for step in range(case.steps):
        numbers = step_of(case, model, lambda x, y: function(Hand(run), model, x, y), step)
        steps.append({name: tensor for name, tensor in numbers.items() if "buffer" not in name})
        run.step()
    return steps, run


def _quantizers(case: Case) -> list[dict[str, Any]]:
    return [value for rule in case.rules for value in rule.values() if isinstance(value, dict)]


def _rounds_operands(case: Case) -> bool:
    return any(key in ("x", "w", "dy") or "." in key for rule in case.rules for key in rule)


def _has_by_hand(case: Case) -> bool:
    if not case.has_by_hand or any("grad_at" in rule for rule in case.rules):
        return False
    # The first pass of a reentrant checkpoint records no amax, and a region that nothing reads has no second one.
    return not (case.is_reentrant and any("history" in quantizer for quantizer in _quantizers(case)))


def _check_by_hand(case: Case, emulated: list[Step], expected: list[Step], plain: list[Step]) -> None:
    """Emulated numbers are those by hand; stochastic ones, which by hand are to nearest, differ from the plain ones."""
    unrounded = _by_hand(case, ())[0]
    if distance(expected, unrounded) > 0 and distance(emulated, plain) == 0:
        raise Failure("the plan rounds values, but all numbers are those without a plan")
    if any("rounding" in quantizer for quantizer in _quantizers(case)):
        return
    difference = distance(unrounded, plain)
    if difference == 0:
        # Buffers of a checkpointed batch norm are updated once more when it is recomputed.
        numbers = [{name: step[name] for name in step if "buffer" not in name} for step in emulated]
        # Gradients of what is written into lie elsewhere in memory; linear layers without gradients sum otherwise.
        is_reordered = case.is_reentrant or any(statement.spelling.in_place for statement in case.statements)
        tolerance = 4 * torch.finfo(case.dtype).eps if is_reordered else 0.0
        compare("emulate and by hand", numbers, expected, tolerance)
    elif difference > 1e-2:
        # Inside a checkpoint torch does not notice that a tensor was overwritten that its backward pass needs.
        raise Discarded("torch itself has other gradients")
    elif distance(emulated, expected) > 0.3:  # a slice that is written lies elsewhere in memory: other sums
        raise Failure(f"emulate and by hand differ by {distance(emulated, expected):.3g}")


def _check_packed(case: Case, rules: Any, emulated: list[Step]) -> None:
    """Packed numbers are the emulated ones, bit for bit."""
    try:
        packed = _steps(case, build(case)[0], rules, "packed")
    except RuntimeError as error:
        # It saves inputs of some operations of which torch saves the result, see docs/how-to/packed.md.
        if OVERWRITTEN in str(error) and any(s.spelling.in_place for s in case.statements):
            raise Discarded("packed execution needs a tensor that is overwritten") from error
        raise
    compare("packed and emulate", packed, emulated)


def check(case: Case, compiled: str | None = None) -> str:
    """Check one case; returns what came of it.

    :param compiled: also compile it, by this backend.
    """
    torch.manual_seed(0)
    try:
        plain = _plain(case, build(case)[0])
    except RuntimeError as error:
        raise Discarded(str(error)) from error
    if not all(tensor.isfinite().all() for step in plain for tensor in step.values()):
        raise Discarded("not finite")
    expected, by_hand = _by_hand(case, case.rules) if _has_by_hand(case) else (None, None)
    rules = case.rules
    try:
        model = build(case)[0]
        before = _snapshot(model)
        emulated = _steps(case, model, rules)
    except PlanError as error:
        if by_hand is not None and _all_have_effect(by_hand):
            raise Failure(f"every rule has an effect, but: {error}") from error
        rules = tuple({**rule, "strict": False} for rule in rules)
        _require_unchanged(model, before)
        model = build(case)[0]
        before = _snapshot(model)
        try:
            emulated = _steps(case, model, rules)
        except PlanError as again:
            raise Failure(f"rules with strict: false raise: {again}") from again
        outcome = "a rule without effect"
    except RuntimeError as error:
        # Products save other tensors where operands are rounded, see docs/how-to/attach.md.
        if OVERWRITTEN in str(error) and any(s.spelling.in_place for s in case.statements) and _rounds_operands(case):
            raise Discarded("a rounded product needs a tensor that is overwritten") from error
        raise
    else:
        if by_hand is not None and not _all_have_effect(by_hand):
            raise Failure(f"a rule without effect was accepted: {by_hand.used}, {by_hand.present}")
        outcome = "checked"
    _require_unchanged(model, before)
    training = emulated[: case.steps]
    if expected is not None:
        _check_by_hand(case, training, expected, plain)
    _check_packed(case, rules, emulated)
    compare("with and without statistics", _steps(case, build(case)[0], rules, stats=True), emulated)
    _check_detached(case, rules, plain)
    if compiled is not None:
        _check_compiled(case, rules, training, compiled)
    return outcome


def _all_have_effect(run: Run) -> bool:
    for number, rule in enumerate(run.rules):
        keys = [key for key in rule if key not in ("match", "op", "keep", "grad_at", "strict")]
        is_used = number in run.used or number in run.without_tensors - run.with_tensors
        if not is_used or any((number, key) not in run.present for key in keys):
            return False
    return True


def _snapshot(model: nn.Module) -> Any:
    classes = {name: (type(module), sorted(module.__dict__)) for name, module in model.named_modules()}
    return classes, list(model.state_dict()), [name for name, _ in model.named_buffers()]


def _require_unchanged(model: nn.Module, before: Any) -> None:
    if _snapshot(model) != before:
        raise Failure("detaching left other classes, attributes, buffers or keys of state_dict")


def _check_detached(case: Case, rules: Any, plain: list[Step]) -> None:
    """Attached, run and detached, a model has the numbers that it had before; its buffers are put back for that."""
    model = build(case)[0]
    state = copy.deepcopy(model.state_dict())
    with _attached(case, model, rules):
        if list(model.state_dict()) != list(state):
            raise Failure("attaching changes the keys of state_dict")
        step_of(case, model, model, 0)
    model.load_state_dict(state)
    compare("detached and plain", _plain(case, model), plain)


def _check_compiled(case: Case, rules: Any, emulated: list[Step], backend: str) -> None:
    """Compiled in one graph, and none more from the second step on; its numbers are the eager ones."""
    if case.is_reentrant:
        return  # torch.compile does not support it
    is_same_order = _compiles_bit_for_bit(case, backend)
    model = build(case)[0]
    torch._dynamo.reset()
    counters.clear()
    steps: list[Step] = []
    with _attached(case, model, rules) as run:
        function = torch.compile(model, backend=backend, fullgraph=True)
        graphs = []
        for step in range(case.steps):
            steps.append(step_of(case, model, function, step))
            run.step()
            graphs.append(counters["stats"]["unique_graphs"])
    if graphs[0] < 1 or len(set(graphs)) > 1:
        raise Failure(f"numbers of graphs after each step: {graphs}")
    if is_same_order:
        # The gradient of a convolution's bias is summed in the order of memory, which graphs choose themselves.
        has_convolution = any("conv" in statement.kind for statement in case.statements)
        tolerance = 4 * torch.finfo(case.dtype).eps if has_convolution else 0.0
        compare(f"compiled by {backend} and eager", steps, emulated, tolerance)
    elif distance(steps, emulated) > 0.3:
        raise Failure(f"compiled by {backend} and eager differ by {distance(steps, emulated):.3g}")


def _compiles_bit_for_bit(case: Case, backend: str) -> bool:
    """Whether the model without a plan has the same bits, compiled and eager."""
    torch._dynamo.reset()
    model = build(case)[0]
    try:
        function = torch.compile(model, backend=backend, fullgraph=True)
        actual = [step_of(case, model, function, step) for step in range(case.steps)]
    except Exception as error:
        raise Discarded(f"torch does not compile it: {error}") from error
    difference = distance(actual, _plain(case, build(case)[0]))
    if difference > 0.05:
        raise Discarded("compiled without a plan it differs: a dropout that nothing reads draws no random numbers")
    return difference == 0
