"""The checks of the zoo: each is a function of a model and a plan, and raises :class:`Failure` with one sentence."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from zoo_models import Batch, ZooModel
from zoo_spy import ConstantSpy, IntegerProducts, ProductSpy, SoftmaxSpy, is_on_float_grid, is_on_integer_grid

import bitplan as bp

__all__ = ["CHECKS", "PLANS", "Check", "Failure", "NotChecked", "ZooPlan"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Failure(AssertionError):
    """A check that does not hold."""


class NotChecked(Exception):
    """A check that has nothing to compare with, and why."""


@dataclass(frozen=True, eq=False)
class ZooPlan:
    """A plan and how its grids are recognised."""

    name: str
    plan: str | Mapping[str, Any]
    #: Of an operand, and whether its product is one of the backward pass.
    is_on_grid: Callable[[Tensor, bool], bool]
    #: Rounds operands of products, which decomposes fused operations; otherwise classes of tensors.
    rounds_operands: bool
    rounds_gradients: bool = True
    #: Rows of a batch share no scale.
    has_independent_rows: bool = False


def _scaled_fp8(x: Tensor, backward: bool) -> bool:
    return _fp8(x, backward, power_of_two=True)


def _preset_fp8(x: Tensor, backward: bool) -> bool:
    return _fp8(x, backward, power_of_two=False)


def _unscaled_fp8(x: Tensor, backward: bool) -> bool:
    values = x.detach().double()
    return any(bool((values.float().to(dtype).double() == values).all()) for dtype in _dtypes(backward))


def _fp8(x: Tensor, backward: bool, *, power_of_two: bool) -> bool:
    return any(is_on_float_grid(x, dtype, power_of_two=power_of_two) for dtype in _dtypes(backward))


def _dtypes(backward: bool) -> tuple[torch.dtype, ...]:
    return (E4M3, E5M2) if backward else (E4M3,)


def _int8(x: Tensor, backward: bool) -> bool:
    return is_on_integer_grid(x)


def _rules(**rule: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": "*", **rule}]}


_X = {"format": "e4m3", "scale": "tensor", "power_of_two": True}
_DY = {"format": "e5m2", "scale": "tensor", "power_of_two": True}

PLANS: dict[str, ZooPlan] = {
    plan.name: plan
    for plan in [
        ZooPlan("operands", _rules(x=_X, w=_X, dy=_DY), _scaled_fp8, rounds_operands=True),
        ZooPlan("fp8-all", "fp8-all", _preset_fp8, rounds_operands=False),
        ZooPlan("int8-all", "int8-all", _int8, rounds_operands=False),
        ZooPlan(
            "weight+activation",
            _rules(weight=_X, activation=_X),
            _scaled_fp8,
            rounds_operands=False,
            rounds_gradients=False,
        ),
    ]
}
#: No scales: the rows of a batch are rounded independently of each other.
UNSCALED = ZooPlan(
    "unscaled", _rules(x="e4m3", w="e4m3", dy="e5m2"), _unscaled_fp8, rounds_operands=True, has_independent_rows=True
)
_Q8 = {"format": "int8", "scale": "tensor"}
NATIVE = ZooPlan(
    "int8 products", _rules(op=["linear", "addmm", "conv*"], x=_Q8, w=_Q8, dy=_Q8), _int8, rounds_operands=True
)


@dataclass(frozen=True)
class Step:
    """Loss and gradients of a training step."""

    loss: Tensor
    gradients: dict[str, Tensor]
    output: Tensor


@contextmanager
def attached(model: nn.Module, plan: ZooPlan, **options: Any) -> Iterator[Any]:
    """The model with a plan, which is detached whatever happens."""
    run = bp.attach(model, plan.plan, **options)
    try:
        yield run
    finally:
        run.detach()


def train_step(zoo: ZooModel, model: nn.Module, batch: Batch | None = None) -> Step:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    returned = zoo.run(model, batch)
    loss = zoo.loss(returned)
    loss.backward()
    return _step(zoo, model, returned, loss)


def _step(zoo: ZooModel, model: nn.Module, returned: Any, loss: Tensor) -> Step:
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach().clone(), gradients, zoo.output(returned).detach().clone())


def train(
    zoo: ZooModel, model: nn.Module, run: Any, steps: int = 2, forward: Any = None, batch: Batch | None = None
) -> list[Step]:
    """Training steps with SGD; `forward` is a compiled model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = []
    for _ in range(steps):
        optimizer.zero_grad()
        returned = zoo.run(forward or model, batch)
        loss = zoo.loss(returned)
        loss.backward()
        done.append(_step(zoo, model, returned, loss))
        optimizer.step()
        if run is not None:
            run.step()
    return done


def _emulated(zoo: ZooModel, plan: ZooPlan, steps: int = 2, **options: Any) -> list[Step]:
    model = zoo.make()
    with attached(model, plan, **options) as run:
        return train(zoo, model, run, steps)


def distance(a: Tensor, b: Tensor) -> float:
    """The relative distance of `a` from `b`."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def gradient_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The same for all gradients together; a missing gradient is zero."""
    zeros = {name: torch.zeros_like(gradient) for name, gradient in {**a, **b}.items()}
    ours, theirs = (torch.cat([{**zeros, **side}[name].flatten() for name in zeros]) for side in (a, b))
    return distance(ours, theirs)


def _require_finite(step: Step, where: str = "") -> None:
    if not step.loss.isfinite():
        raise Failure(f"the loss is {step.loss.item()}{where}")
    names = [name for name, gradient in step.gradients.items() if not gradient.isfinite().all()]
    if names:
        raise Failure(f"the gradient of {names[0]} is not finite{where}")


# --- the checks ---


def check_example(zoo: ZooModel, plan: ZooPlan) -> None:
    """attach(example=) takes the batch, and every rule has an effect."""
    with attached(zoo.make(), plan, example=zoo.make_batch()):
        pass


def check_products(zoo: ZooModel, plan: ZooPlan) -> None:
    """Every operand of every product, forward and backward, is on the grid."""
    if zoo.is_recurrent and not plan.rounds_operands:
        return
    model = zoo.make()
    batch = zoo.make_batch()
    with attached(model, plan):
        # The first call lists operations; the second is looked at.
        zoo.loss(zoo.run(model, batch)).backward()
        spy = ProductSpy(
            model,
            batch,
            plan.is_on_grid,
            inputs_are_rounded=plan.rounds_operands,
            reports_fused=plan.rounds_operands,
            checks_backward=plan.rounds_gradients,
        )
        model.zero_grad()
        with spy:
            loss = zoo.loss(zoo.run(model, batch))
            spy.backward = True
            loss.backward()
    if spy.products == 0:
        raise Failure("no product was seen")
    if spy.off_grid:
        raise Failure(f"{len(spy.off_grid)} operands of {spy.products} products; {spy.off_grid[0]}")


def check_values(zoo: ZooModel, plan: ZooPlan) -> None:
    """Loss and gradients are finite, the output is near the one without a plan, indices and angles are the same."""
    plain_constants, plain = _with_constants(zoo, zoo.make())
    model = zoo.make()
    with attached(model, plan):
        constants, planned = _with_constants(zoo, model)
    _require_finite(planned)
    if len(constants) != len(plain_constants):
        raise Failure(f"{len(constants)} embeddings and angles instead of {len(plain_constants)}")
    for number, ((op, ours), (_, theirs)) in enumerate(zip(constants, plain_constants, strict=True)):
        if not torch.equal(ours, theirs):
            raise Failure(f"the plan changes the {'indices' if op == 'embedding' else 'angles'} of {op}.{number}")
    _require_near(zoo, planned, plain)


def _with_constants(zoo: ZooModel, model: nn.Module) -> tuple[list[tuple[str, Tensor]], Step]:
    with ConstantSpy() as spy:
        returned = zoo.run(model)
    loss = zoo.loss(returned)
    loss.backward()
    return spy.constants, _step(zoo, model, returned, loss)


def _require_near(zoo: ZooModel, planned: Step, plain: Step, where: str = "") -> None:
    """Rounding noise of eight bits changes a random network's output by up to half; one that is wrong, altogether."""
    error = distance(planned.output, plain.output)
    if error > zoo.output_tolerance:
        raise Failure(f"the output is off by {error:.0%}{where}")


def _require_close(zoo: ZooModel, plan: ZooPlan, ours: Step, theirs: Step, number: int, where: str = "") -> None:
    """Gradients of a step are as close as those of weights that differ in the last bit of float32.

    A value near the midpoint of two neighbours then rounds to the other one, which deep networks amplify.
    """
    error = gradient_distance(ours.gradients, theirs.gradients)
    if error > 0.02 and error > 2 * (noise := _noise(zoo, plan)[number]):
        raise Failure(f"gradients{where} differ by {error:.1%} (rounding noise {noise:.1%})")


@cache
def _noise(zoo: ZooModel, plan: ZooPlan) -> list[float]:
    """What a relative change of the weights by 1e-7 does to the gradients of each of three steps, at most."""
    distances = [0.0] * 3
    for layout in (torch.contiguous_format, torch.channels_last):
        runs = []
        for seed in (None, 3, 4):
            model = zoo.make().to(memory_format=layout)
            if seed is not None:
                _perturb(model, seed)
            with attached(model, plan) as run:
                batch = tree_map_only(Tensor, partial(_in_layout, layout), zoo.make_batch())
                runs.append(train(zoo, model, run, 3, batch=batch))
        for perturbed in runs[1:]:
            for number, (ours, theirs) in enumerate(zip(perturbed, runs[0], strict=True)):
                distances[number] = max(distances[number], gradient_distance(ours.gradients, theirs.gradients))
    return distances


def _perturb(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))


def _in_layout(layout: torch.memory_format, tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=layout) if tensor.dim() == 4 else tensor


def check_packed(zoo: ZooModel, plan: ZooPlan) -> None:
    """Packed execution has the losses and gradients of emulation, bit for bit."""
    expected = _emulated(zoo, plan)
    for number, (ours, theirs) in enumerate(zip(_emulated(zoo, plan, execution="packed"), expected, strict=True)):
        _require_finite(theirs, f" in step {number}")
        if not torch.equal(ours.loss, theirs.loss):
            raise Failure(f"the loss of step {number} is {ours.loss.item()!r} instead of {theirs.loss.item()!r}")
        names = [name for name, g in theirs.gradients.items() if not torch.equal(ours.gradients[name], g)]
        if names:
            error = gradient_distance(ours.gradients, theirs.gradients)
            raise Failure(f"{len(names)} gradients of step {number} differ ({names[0]}; {error:.1%} in all)")


def check_compiled(zoo: ZooModel, plan: ZooPlan) -> None:
    """Compiled (aot_eager) and eager are close, and no graph is compiled after the first step."""
    expected = _emulated(zoo, plan, steps=3)
    _require_finite(expected[0], " in eager")
    try:
        step, graphs = _compiled(zoo, plan)
    except Exception:
        if not _compiles(zoo):
            raise NotChecked("torch.compile fails without a plan, too") from None
        raise
    for number, (ours, theirs) in enumerate(zip(step, expected, strict=True)):
        _require_finite(ours, f" in step {number}")
        _require_close(zoo, plan, ours, theirs, number, f" of compiled step {number}")
    if graphs[1:] != [graphs[0]] * 2:
        _, plain_graphs = _compiled(zoo, None)
        if plain_graphs[1:] == [plain_graphs[0]] * 2:
            raise Failure(f"graphs after each step: {graphs} (without a plan {plain_graphs})")


def _compiles(zoo: ZooModel) -> bool:
    """Whether the model compiles without a plan."""
    try:
        _compiled(zoo, None)
    except Exception:
        return False
    return True


def _compiled(zoo: ZooModel, plan: ZooPlan | None) -> tuple[list[Step], list[int]]:
    """Three steps, and the number of graphs after each."""
    from torch._dynamo.backends.registry import lookup_backend

    torch._dynamo.reset()
    compiled_graphs = 0
    aot_eager = lookup_backend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled_graphs
        compiled_graphs += 1
        return aot_eager(graph, inputs)

    model = zoo.make()
    counts: list[int] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        returned = compiled(*args, **kwargs)
        counts.append(compiled_graphs)
        return returned

    if plan is None:
        compiled = torch.compile(model, backend=backend)
        return train(zoo, model, None, 3, forward), counts
    try:
        run = bp.attach(model, plan.plan, example=zoo.make_batch())
    except bp.BitplanError:
        run = bp.attach(model, plan.plan)
        zoo.run(model)
    try:
        compiled = torch.compile(model, backend=backend)
        return train(zoo, model, run, 3, forward), counts
    finally:
        run.detach()
        torch._dynamo.reset()


def check_detach(zoo: ZooModel, plan: ZooPlan) -> None:
    """After detach: classes, attributes, hooks, state_dict and output as before."""
    model = zoo.make()
    before = _description(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = zoo.output(zoo.run(model)).detach()
    model.load_state_dict(state)
    with attached(model, plan):
        if list(model.state_dict()) != list(state):
            raise Failure("state_dict has other keys while the plan is attached")
        train_step(zoo, model)
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    after = _description(model)
    for name, description in before.items():
        if after.get(name) != description:
            raise Failure(f"{name or 'the model'} is not as before: {_first_difference(description, after.get(name))}")
    if list(model.state_dict()) != list(state):
        raise Failure("state_dict has other keys after detach")
    if not torch.equal(zoo.output(zoo.run(model)).detach(), expected):
        raise Failure("the output differs after detach")


def _description(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "class": type(module),
            "attributes": sorted(key for key in vars(module) if not key.startswith("_") or "bitplan" in key),
            "buffers": sorted(module._buffers),
            "forward": "forward" in vars(module),
            "hooks": [len(vars(module)[key]) for key in sorted(vars(module)) if key.endswith("_hooks")],
        }
        for name, module in model.named_modules()
    }


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any] | None) -> str:
    return next((f"{key} {a[key]} became {b[key]}" for key in a if a[key] != b[key]), "") if b else "it is gone"


def check_copy(zoo: ZooModel, plan: ZooPlan) -> None:
    """A deep copy of the attached model computes what the model computes."""
    model = zoo.make()
    with attached(model, plan):
        expected = train_step(zoo, model)
        model.zero_grad(set_to_none=True)
        twin = copy.deepcopy(model)
        _require_equal(train_step(zoo, model), expected, "the model after the copy")
        _require_equal(train_step(zoo, twin), expected, "the copy")


def _require_equal(ours: Step, theirs: Step, what: str) -> None:
    if not torch.equal(ours.loss, theirs.loss):
        raise Failure(f"{what} has the loss {ours.loss.item()!r} instead of {theirs.loss.item()!r}")
    names = [name for name, g in theirs.gradients.items() if not torch.equal(ours.gradients[name], g)]
    if names:
        raise Failure(f"{what} has another gradient of {names[0]}")


def check_save(zoo: ZooModel, plan: ZooPlan) -> None:
    """The state_dict of an attached model loads into a plain one, which then computes the same without a plan."""
    model = zoo.make()
    plain = zoo.make()
    with attached(model, plan) as run:
        train(zoo, model, run, 1)
        stored = io.BytesIO()
        torch.save(model.state_dict(), stored)
    stored.seek(0)
    plain.load_state_dict(torch.load(stored, weights_only=True))
    if not torch.equal(zoo.output(zoo.run(plain)), zoo.output(zoo.run(model))):
        raise Failure("the loaded model has another output")


def check_padding(zoo: ZooModel, plan: ZooPlan) -> None:
    """With left and right padding: finite values; a row without padding does not depend on another row's."""
    if not zoo.takes_padding:
        return
    model = zoo.make()
    cases = [(side, width) for side in ("left", "right") for width in (3, 5)]
    plain = {case: train_step(zoo, model, _padded_batch(zoo, *case)) for case in cases}
    with attached(model, plan):
        planned = {case: train_step(zoo, model, _padded_batch(zoo, *case)) for case in cases}
    for side, width in cases:
        _require_finite(planned[side, width], f" with {side} padding")
        error = distance(planned[side, width].output[0], plain[side, width].output[0])
        if error > zoo.output_tolerance:
            raise Failure(f"with {side} padding the row without padding is off by {error:.0%}")
        # Not where rows of the model depend on each other without a plan too.
        if plan.has_independent_rows and distance(plain[side, 3].output[0], plain[side, 5].output[0]) < 1e-5:
            error = distance(planned[side, 5].output[0], planned[side, 3].output[0])
            if error > 1e-5:
                raise Failure(f"with {side} padding of another row this row changes by {error:.2%}")


def _padded_batch(zoo: ZooModel, side: str, width: int) -> Batch:
    """The batch with `width` places of padding in its last row."""
    batch = dict(zoo.make_batch())
    places = slice(None, width) if side == "left" else slice(-width, None)
    for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        if name != "labels" or batch[name].dim() == 2:
            batch[name] = batch[name].clone()
            batch[name][1, places] = value
    return batch


def check_attention(zoo: ZooModel, plan: ZooPlan) -> None:
    """With each attention implementation: finite, near the output without a plan, weights as uneven as there."""
    for implementation in zoo.attentions or (None,):
        options = {} if implementation is None else {"attn_implementation": implementation}
        where = f" with {implementation} attention" if implementation else ""
        plain_model, model = zoo.make(**options), zoo.make(**options)
        plain, plain_weights = _with_weights(zoo, plain_model)
        with attached(model, plan):
            train_step(zoo, model)
            planned, weights = _with_weights(zoo, model)
        _require_finite(planned, where)
        _require_near(zoo, planned, plain, where)
        if len(plain_weights) != len(weights):
            continue  # The plan decomposes fused attention; its output was compared.
        for ours, theirs in zip(weights, plain_weights, strict=True):
            spread, plain_spread = (float(w[..., -1, :].std(-1).mean()) for w in (ours, theirs))
            if plain_spread > 0.01 and spread < 0.5 * plain_spread:
                raise Failure(
                    f"attention is uniform{where}: standard deviation {spread:.4f} instead of {plain_spread:.4f}"
                )


def _with_weights(zoo: ZooModel, model: nn.Module) -> tuple[Step, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    with SoftmaxSpy() as spy:
        returned = zoo.run(model)
    loss = zoo.loss(returned)
    loss.backward()
    return _step(zoo, model, returned, loss), spy.weights


def check_native(zoo: ZooModel, plan: ZooPlan) -> None:
    """Native INT8 products run; each of them, by itself, gives what emulation gives, to 1e-5; the model does, too."""
    steps = []
    calls: dict[str, _Call] = {}
    for execution in ("emulate", _NATIVE):
        # Convolutions run natively with channels last.
        model = zoo.make().to(memory_format=torch.channels_last)
        batch = tree_map_only(Tensor, partial(_in_layout, torch.channels_last), zoo.make_batch())
        layers = {} if execution == "emulate" else _layers(model)
        with attached(model, plan, execution=execution), IntegerProducts() as products:
            for name in layers:
                calls[name] = _Call(model.get_submodule(name))
            steps.append(train_step(zoo, model, batch))
    expected, native = steps
    if products.count == 0:
        raise Failure("no product runs natively")
    _require_finite(expected, " in emulation")
    _require_finite(native)
    for name, call in calls.items():
        call.require_same_by_itself(plan, name, layers[name], native.gradients.get(f"{name}.weight"))
    _require_close(zoo, plan, native, expected, 0)


_NATIVE = bp.Native(min_macs=0)


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """Copies of the layers that are one product, by their names, before a plan is attached."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d)
    return {
        name: copy.deepcopy(layer)
        for name, layer in model.named_modules()
        if type(layer) in kinds and not layer._forward_hooks
    }


class _Call:
    """The input, the output and the output's gradient of a layer in a training step."""

    def __init__(self, layer: nn.Module) -> None:
        self.count = 0
        self.x = self.y = self.dy = torch.empty(0)
        layer.register_forward_hook(self._record)

    def _record(self, layer: nn.Module, args: Any, y: Tensor) -> None:
        self.count += 1
        self.x, self.y = args[0].detach().clone(), y.detach().clone()
        if y.requires_grad:
            y.register_hook(self._record_gradient)

    def _record_gradient(self, dy: Tensor) -> None:
        self.dy = dy.detach().clone()

    def require_same_by_itself(self, plan: ZooPlan, name: str, layer: nn.Module, weight_grad: Tensor | None) -> None:
        """Repeat the call natively, which must give the same bits, and in emulation, which must be close.

        In the whole model a sum that differs in its last bit makes a later value round to its other neighbour, and
        batch norm over a few images amplifies that: no bound on the model's gradients would show a wrong product.
        """
        if self.count != 1 or self.dy.numel() == 0:
            return
        results = []
        for execution in (_NATIVE, "emulate"):
            alone = copy.deepcopy(layer)
            x = self.x.clone().requires_grad_()
            with attached(alone, plan, execution=execution):
                y = alone(x)
                y.backward(self.dy)
            results.append({"output": y.detach(), "dx": x.grad, "dw": alone.weight.grad})
        native, emulated = results
        in_model = {"output": self.y, "dw": weight_grad}
        for what, tensor in in_model.items():
            if tensor is not None and not torch.equal(tensor, native[what]):
                raise Failure(f"{what} of {name} is another one in the model than by itself")
        for what, tensor in native.items():
            error = distance(tensor, emulated[what])
            if error > 1e-5:
                raise Failure(f"{what} of {name} by itself differs from emulation by {error:.1e}")


@dataclass(frozen=True)
class Check:
    """A column of the table."""

    name: str
    function: Callable[[ZooModel, ZooPlan], None]
    plans: tuple[ZooPlan, ...]

    def applies(self, zoo: ZooModel) -> bool:
        if self.name == "padding":
            return zoo.takes_padding
        if self.name == "attention":
            return bool(zoo.attentions)
        return True


_ALL = tuple(PLANS.values())
_OPERANDS, _FP8, _INT8_ALL, _CLASSES = _ALL
CHECKS: dict[str, Check] = {
    check.name: check
    for check in [
        Check("example", check_example, (_OPERANDS, _FP8)),
        Check("products", check_products, _ALL),
        Check("values", check_values, _ALL),
        Check("packed", check_packed, _ALL),
        Check("compiled", check_compiled, (_OPERANDS, _FP8, _INT8_ALL)),
        Check("detach", check_detach, (_OPERANDS, _INT8_ALL)),
        Check("copy", check_copy, (_FP8, _INT8_ALL)),
        Check("save", check_save, (_INT8_ALL,)),
        Check("padding", check_padding, (UNSCALED, _FP8, _INT8_ALL, _CLASSES)),
        Check("attention", check_attention, _ALL),
        Check("native", check_native, (NATIVE,)),
    ]
}
logging.getLogger("bitplan").setLevel(logging.ERROR)
