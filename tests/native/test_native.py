"""Native execution: the operands of emulation on low-precision units, held against float64."""

from __future__ import annotations

import json
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import bitplan
from bitplan import Plan
from bitplan.errors import BitplanWarning, PlanError
from bitplan.executions.native import backends as units
from bitplan.executions.native import crossover, paths
from bitplan.executions.native.backends import Float8Backend, Int8Backend

INT8_VECTOR = {"format": "int8", "scale": "vector"}
INT8 = {"format": "int8", "scale": "tensor"}
NOISY = {"format": "int8", "scale": "tensor", "rounding": "stochastic"}
APART: dict[str, Any] = dict.fromkeys(("fprop", "dgrad", "wgrad"), INT8_VECTOR)


pytestmark = pytest.mark.filterwarnings("ignore:.*are emulated:bitplan.errors.BitplanWarning")


def plan_of(**rule: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **rule}]})


class Calls:
    """Counts what the units are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []
        for kind in (Int8Backend, Float8Backend):
            monkeypatch.setattr(kind, "multiply", self._counted(kind.multiply))

    def _counted(self, multiply: Any) -> Any:
        def counted(unit: Any, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
            self.dtypes.append((a.dtype, b.dtype))
            return multiply(unit, a, b, *rest)  # type: ignore[no-any-return]

        return counted


def step(model: nn.Module, called: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    arguments = x.clone().requires_grad_()
    y = called(arguments)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y.detach(), arguments.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item,union-attr]


def results(plan: Plan, execution: str, compiled: bool = False, shape: tuple[int, ...] = (6, 32)) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = nn.Linear(32, 16), torch.randn(shape)
    options = bitplan.Native(min_macs=0) if execution == "native" else execution
    with bitplan.attach(model, plan, example=x, execution=options):
        return step(model, torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model, x)


E4M3 = {"format": "e4m3", "scale": "tensor"}
E5M2 = {"format": "e5m2", "scale": "tensor"}
PLANS = {
    "int8 tensor": (plan_of(x=INT8, w=INT8, dy=INT8), 3),
    "int8 vector": (plan_of(**APART), 3),
    "stochastic": (plan_of(x=NOISY, w=NOISY, dy=NOISY), 3),
    "six bits": (plan_of(x={"format": "int6", "scale": "tensor"}, w=INT8, dy=INT8), 3),
    "bits that move": (plan_of(x={"format": "int", "bits": 5, "scale": "tensor"}, w=INT8, dy=INT8), 3),
    "fp8": (plan_of(x=E4M3, w=E4M3, dy=E5M2), 3),
    "weight gradient in full": (plan_of(fprop=INT8_VECTOR, dgrad=INT8_VECTOR), 2),
    "forward only": (plan_of(fprop=INT8), 1),
}


@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 32)])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("compiled", [False, True])
def test_native_differs_from_emulate_by_the_order_of_accumulation_only(
    name: str, compiled: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    plan, passes = PLANS[name]
    native = results(plan, "native", compiled, shape)
    assert len(calls.dtypes) >= passes  # tracing may look twice
    expected = {torch.float8_e4m3fn, torch.float8_e5m2} if name == "fp8" else {torch.int8}
    assert {dtype for pair in calls.dtypes for dtype in pair} == expected
    emulated = results(plan, "emulate", shape=shape)
    for ours, theirs in zip(native, emulated, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    plain = results(Plan.from_dict({"version": 1}), "emulate", shape=shape)
    assert not torch.allclose(native[0], plain[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs", "tokens"), [(32, 1, 196), (1, 32, 196), (32, 16, 1)])
def test_one_input_one_output_and_one_token(inputs: int, outputs: int, tokens: int) -> None:
    """torch's integer product on a CPU is wrong where a single row is a transposed column."""
    result = []
    for execution in ("emulate", bitplan.Native(min_macs=0)):
        torch.manual_seed(0)
        model, x = nn.Linear(inputs, outputs), torch.randn(tokens, inputs)
        with bitplan.attach(model, PLANS["int8 tensor"][0], example=x, execution=execution):
            result.append(step(model, model, x))
    for emulated, native in zip(*result, strict=True):
        torch.testing.assert_close(native, emulated, rtol=2e-5, atol=2e-5)


def test_the_products_are_those_of_the_rounded_operands_in_float64() -> None:
    """Scales along the right axes, by hand: (token | output), (token | input), (output | input)."""
    torch.manual_seed(0)
    x, w = torch.randn(6, 32).double(), torch.randn(16, 32).double()

    def rounded(t: Tensor, axis: int) -> Tensor:
        scale = t.float().abs().amax(axis, keepdim=True) / 127
        return (torch.round(t.float() / scale) * scale.double()).double()

    model = nn.Linear(32, 16, bias=False)
    with torch.no_grad():
        model.weight.copy_(w)
    with bitplan.attach(model, plan_of(**APART), execution=bitplan.Native(min_macs=0)):
        y, dx, dw = step(model, model, x.float())
    dy = torch.linspace(-1, 1, y.numel()).view_as(y).double()
    for ours, exact in (
        (y, rounded(x, 1) @ rounded(w, 1).t()),
        (dx, rounded(dy, 1) @ rounded(w, 0)),
        (dw, rounded(dy, 0).t() @ rounded(x, 0)),
    ):
        assert (ours.double() - exact).abs().max() <= 32 * 2**-23 * exact.abs().max()


@pytest.mark.parametrize("name", ["int8 tensor", "int8 vector", "forward only"])
def test_under_autocast_results_have_its_type(name: str) -> None:
    result = []
    for execution in (bitplan.Native(min_macs=0), "emulate"):
        torch.manual_seed(0)
        model, x = nn.Linear(32, 16), torch.randn(6, 32)
        with (
            bitplan.attach(model, PLANS[name][0], example=x, execution=execution),
            torch.autocast("cpu", torch.bfloat16),
        ):
            result.append(step(model, model, x))
    assert result[0][0].dtype == torch.bfloat16
    for native, emulated in zip(*result, strict=True):
        assert native.dtype == emulated.dtype
        # Emulation's operands are rounded once more, to bfloat16, before they are multiplied.
        assert (native - emulated).float().norm() <= 2e-2 * emulated.float().norm()


@pytest.mark.parametrize("form", ["autocast", "bfloat16"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_operands_of_16_bits_are_those_of_native_execution_with_powers_of_two(power_of_two: bool, form: str) -> None:
    """Emulation casts element times scale to bfloat16, which rounds it once more unless the scale is a power of two."""
    int8 = {**INT8, "power_of_two": power_of_two}
    plan, results = plan_of(x=int8, w=int8, dy=int8), []
    for execution in (bitplan.Native(min_macs=0), "emulate"):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
        model, x = nn.Linear(64, 48, bias=False).to(dtype), torch.randn(80, 64).to(dtype).requires_grad_()
        with bitplan.attach(model, plan, example=x, execution=execution):
            with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
                y = model(x)
            y.backward(torch.randn(80, 48).to(y.dtype))
        results.append([tensor.detach().double() for tensor in (y, x.grad, model.weight.grad)])
    differences = [float((native - ours).norm() / native.norm()) for native, ours in zip(*results, strict=True)]
    if not power_of_two:
        assert all(2e-3 < difference < 5e-3 for difference in differences), differences
    else:
        # Few sums lie so near a midpoint that their order decides. Gradients under autocast: native execution returns
        # them in float32, emulation rounds them to bfloat16 first.
        assert differences[0] < 2e-4
        bounds = (1e-3, 2.5e-3) if form == "autocast" else (0.0, 2e-4)
        assert all(bounds[0] <= difference < bounds[1] for difference in differences[1:]), differences


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["int8 tensor", "int8 vector", "fp8"])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    model, x = nn.Linear(32, 16), torch.randn(6, 32)
    x[2, 3] = bad
    with bitplan.attach(model, PLANS[name][0], execution=bitplan.Native(min_macs=0)):
        assert not model(x)[2].isfinite().any()


def test_an_empty_batch_is_one() -> None:
    model = nn.Linear(32, 16)
    with bitplan.attach(model, PLANS["int8 tensor"][0], execution=bitplan.Native(min_macs=0)):
        y = model(torch.empty(0, 32))
        y.sum().backward()
    assert y.shape == (0, 16)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_evaluation_that_is_not_rounded_is_plain() -> None:
    off = {**INT8, "eval": "off"}
    model, x = nn.Linear(32, 16).eval(), torch.randn(6, 32)
    plain = model(x)
    with bitplan.attach(model, plan_of(x=off, w=off, dy=off), example=x, execution=bitplan.Native(min_macs=0)):
        assert torch.equal(model(x), plain)
        assert not torch.equal(model.train()(x), plain)


def test_a_second_derivative_is_refused() -> None:
    model, x = nn.Linear(32, 16), torch.randn(6, 32, requires_grad=True)
    with bitplan.attach(model, PLANS["int8 tensor"][0], execution=bitplan.Native(min_macs=0)):
        y = model(x).sum()
        with pytest.raises(PlanError, match="second derivative"):
            torch.autograd.grad(y, x, create_graph=True)


def test_what_is_kept_for_the_backward_pass_is_codes() -> None:
    model, x = nn.Linear(64, 8), torch.randn(128, 64, requires_grad=True)
    kept: list[Tensor] = []
    with (
        bitplan.attach(model, plan_of(x=INT8, w=INT8, dy=INT8), execution=bitplan.Native(min_macs=0)),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        model(x).sum().backward()
    activations = [t for t in kept if t.numel() == x.numel()]
    assert [t.dtype for t in activations] == [torch.int8]


@pytest.mark.parametrize(
    ("rule", "one", "reason"),
    [
        ({"x": INT8, "w": INT8}, "dgrad", "dgrad.dy has no format"),
        ({"x": INT8_VECTOR, "w": INT8, "dy": INT8}, "wgrad", "the scale of wgrad.x changes along the sum"),
        ({"fprop": {"format": "int8", "scale": "tensor", "range": "minmax"}}, "fprop", "zero point"),
        ({"fprop": {"format": "int8", "scale": "block", "block": 8}}, "fprop", "fprop.x has blocks of 8, and only"),
        ({"fprop": "int8"}, "fprop", "has no scale"),
        ({"fprop": "mxfp8"}, "fprop", "changes along the sum"),
        ({"fprop": {"format": "int12", "scale": "tensor"}}, "fprop", "no backend here multiplies int12 by int12"),
        ({"fprop": "e5m2"}, "fprop", "no backend here multiplies e5m2 by e5m2"),
        ({"fprop": {**INT8, "promote": {"to": "bf16", "error": 0.5}}}, "fprop", "may be promoted"),
    ],
)
def test_a_fallback_says_which_pass_and_why(rule: dict[str, Any], one: str, reason: str) -> None:
    model, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(6, 32)
    plan = plan_of(**rule)
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0)) as run:
        result = [fallback for fallback in run.fallbacks() if fallback.gemm_pass == one]
        assert len(result) == 1
        assert result[0].site == "0/linear.0"
        assert reason in result[0].reason
    with pytest.raises(PlanError, match="strict=True"):
        bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, strict=True))
    emulated, native = (results(plan, execution) for execution in ("emulate", "native"))
    for ours, theirs in zip(native, emulated, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_sizes_that_do_not_suit_a_unit_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (
        "bitplan.executions.native.fallbacks.supports_shape",
        "bitplan.executions.native.product.supports_shape",
    ):
        monkeypatch.setattr(place, lambda name, kind, sizes: units.supports_shape(name, "cuda", sizes))
    calls = Calls(monkeypatch)
    plan = PLANS["fp8"][0]
    native = results(plan, "native")
    assert len(calls.dtypes) == 2
    for ours, theirs in zip(native, results(plan, "emulate"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    with bitplan.attach(
        nn.Linear(32, 16), plan, example=torch.randn(6, 32), execution=bitplan.Native(min_macs=0)
    ) as run:
        assert [str(fallback) for fallback in run.fallbacks()] == [
            "/linear.0, wgrad: the fp8 backend does not support the shape 16 x 6 x 32"
        ]


def test_convolutions_and_small_products_are_emulated_and_told_of_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    x = torch.randn(2, 3, 8, 8)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "x": INT8, "w": INT8, "dy": INT8}]})
    with pytest.warns(BitplanWarning, match="2 products are emulated") as reported:
        run = bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=10**6))
    assert [fallback.site for fallback in run.fallbacks()] == ["0/conv2d.0", "2/linear.0"]
    assert "2 x 144 x 5 is too small" in str(run.fallbacks()[1])
    assert len(reported) == 1
    run.detach()


def test_on_a_machine_without_units_the_same_plan_is_emulated_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Int8Backend, Float8Backend):
        monkeypatch.setattr(kind, "is_available", lambda self, device: False)
    plan = PLANS["int8 tensor"][0]
    for ours, theirs in zip(results(plan, "native"), results(plan, "emulate"), strict=True):
        assert torch.equal(ours, theirs)


def test_fallbacks_and_strictness_need_native_execution_and_an_example() -> None:
    with pytest.raises(PlanError, match="example="):
        bitplan.attach(nn.Linear(4, 4), plan_of(x=INT8), execution=bitplan.Native(min_macs=0, strict=True))
    with bitplan.attach(nn.Linear(4, 4), plan_of(x=INT8)) as run, pytest.raises(PlanError, match="native execution"):
        run.fallbacks()


@pytest.mark.parametrize(("layers", "others"), [(1, ""), (2, "nor does 1 more of the plan"), (3, "nor do 2 more")])
def test_strict_execution_counts_what_would_be_emulated(layers: int, others: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    strict = bitplan.Native(strict=True)
    with pytest.raises(PlanError, match=r"0/linear\.0 does not run natively") as raised:
        bitplan.attach(model, "int8-all", example=torch.randn(2, 4), execution=strict)
    assert others in str(raised.value)
    assert ("nor do" in str(raised.value)) is (layers > 1)


def test_a_late_switch_runs_native_and_then_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    model, x = nn.Linear(32, 16), torch.randn(6, 32)
    late = {"until": "50%", "use": INT8, "then": "keep"}
    with bitplan.attach(
        model, plan_of(x=late, w=late, dy=late), steps=4, example=x, execution=bitplan.Native(min_macs=0)
    ) as run:
        counts = []
        for _ in range(4):
            before = len(calls.dtypes)
            step(model, model, x)
            run.step()
            counts.append(len(calls.dtypes) - before)
    assert counts == [3, 3, 0, 0]


def test_fast_sums_are_asked_for_in_the_passes_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, names = nn.Linear(32, 16), torch.randn(16, 32), []
    multiply = torch._scaled_mm

    def noted(a: Tensor, b: Tensor, use_fast_accum: bool, **arguments: Any) -> Tensor:
        names.append((a.dtype, b.dtype, use_fast_accum))
        return multiply(a, b, use_fast_accum=use_fast_accum, **arguments)

    monkeypatch.setattr(units, "scaled_mm", noted)
    kinds = torch.float8_e4m3fn, torch.float8_e5m2
    for passes, fast in (
        ((), (False, False, False)),
        ("fprop", (True, False, False)),
        (["wgrad"], (False, False, True)),
    ):
        names.clear()
        plan = PLANS["fp8"][0]
        with bitplan.attach(
            model, plan, example=x, execution=bitplan.Native(min_macs=0, fast_accumulation=passes)
        ) as run:
            assert run.fallbacks() == []
            step(model, model, x)
        assert names == [(kinds[0], kinds[0], fast[0]), (kinds[1], kinds[0], fast[1]), (kinds[1], kinds[0], fast[2])]


def test_every_unit_has_a_crossover_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(32, 16), torch.randn(16, 32)
    terms = paths.NativeTerms(min_macs_by_backend=(("int8", 0), ("fp8", 16 * 32 * 16 + 1)))
    monkeypatch.setattr(
        import_module("bitplan.executions.native.execution"), "load_crossover", lambda device, dtype: terms
    )
    with bitplan.attach(model, PLANS["int8 tensor"][0], example=x, execution="native") as run:
        assert run.fallbacks() == []
    with bitplan.attach(model, PLANS["fp8"][0], example=x, execution="native") as run:
        (result,) = run.fallbacks()
    assert str(result) == "/linear.0, all passes: 16 x 32 x 16 is too small to gain by it"


def test_the_crossover_is_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(crossover, "SIZES", {"cpu": (8, 16)})
    monkeypatch.setattr(crossover, "CHANNELS", (16, 32))
    monkeypatch.setattr(crossover, "IMAGES", {"cpu": (2, 4)})
    monkeypatch.setattr(crossover, "_WIDEST_RATIOS", float("inf"))  # whatever else this machine does
    first = crossover.load_crossover(torch.device("cpu"), torch.float32)
    linear, unfolded = json.loads((tmp_path / "crossover.json").read_text()).values()
    assert {(row["unit"], row["size"]) for row in linear} == {(u.name, s) for u in units.BACKENDS for s in (8, 16)}
    assert {(row["unit"], row["size"]) for row in unfolded} == {(u.name, s) for u in units.BACKENDS for s in (16, 32)}
    for table in ("measure_crossover", "measure_im2col_crossover"):
        monkeypatch.setattr(crossover, table, lambda *arguments: pytest.fail("measured again"))
    assert crossover.load_crossover(torch.device("cpu"), torch.float32) == first
    assert crossover.load_crossover(torch.device("meta"), torch.float32).min_macs == crossover.NEVER
    assert len(json.loads((tmp_path / "crossover.json").read_text())) == 2
    key = next(iter(json.loads((tmp_path / "crossover.json").read_text())))
    row = {"unit": "int8", "size": 8, "plain": 1.0, "native": 2.0}
    for damage in (
        *("damaged", "[]", "3", "[" * 100_000, json.dumps({key: 3}), json.dumps({key: [3]}), json.dumps({key: [{}]})),
        *(json.dumps({key: [{**row, "size": size}]}) for size in ("8", 0, -5, 8.5, True, [], 10**400)),
        *(json.dumps({key: [{**row, "plain": time}]}) for time in ("1", 0, -1.0, True, None)),
    ):
        (tmp_path / "crossover.json").write_text(damage)
        with pytest.warns(BitplanWarning, match="is damaged: the crossover is measured again"):
            assert not crossover._read(crossover.cache_file())
    won = [crossover.Crossing("int8", 8, 2.0, 1.0), crossover.Crossing("fp8", 8, 1.0, 2.0)]
    for table in ("measure_crossover", "measure_im2col_crossover"):
        monkeypatch.setattr(crossover, table, lambda *arguments: crossover.Rounds([won]))
    with pytest.warns(BitplanWarning, match="is damaged"):
        result = crossover.load_crossover(torch.device("cpu"), torch.float32)
    assert result.min_macs_by_backend == (("int8", 512), ("fp8", crossover.NEVER))
    assert result.min_channels_by_backend == (("int8", 8), ("fp8", crossover.NEVER))


def test_a_table_without_rows_is_measured_again_and_sends_nothing_to_the_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path))
    measured: list[str] = []
    for table in ("measure_crossover", "measure_im2col_crossover"):
        monkeypatch.setattr(
            crossover, table, lambda *arguments, table=table: measured.append(table) or crossover.Rounds([])
        )
    for _ in range(2):
        terms = crossover.load_crossover(torch.device("cpu"), torch.float32)
    assert measured == 2 * ["measure_crossover", "measure_im2col_crossover"]
    assert set(dict(terms.min_macs_by_backend).values()) == {crossover.NEVER}
    assert set(dict(terms.min_channels_by_backend).values()) == {crossover.NEVER}


def test_a_burst_of_other_work_does_not_decide_the_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native times of the first round are ten times too long."""
    monkeypatch.setattr(crossover, "SIZES", {"cpu": (8, 16)})
    monkeypatch.setattr(crossover, "backends_of", lambda device: [units.BACKENDS[0]])
    times = iter([*((2.0, 10.0), (2.0, 10.0)), *((2.0, 1.0), (2.0, 1.0)), *((2.5, 1.5), (2.5, 1.5))])
    monkeypatch.setattr(crossover, "_in_turns", lambda *arguments: next(times))
    rounds = crossover.measure_crossover(torch.device("cpu"))
    assert [(row.size, row.plain, row.native) for row in rounds.fastest] == [(8, 2.0, 1.0), (16, 2.0, 1.0)]
    assert rounds.is_quiet


def test_work_that_comes_and_goes_slows_both_ways_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timed call takes longer than the one before it: measured one after the other, the second would lose."""
    slowness = iter(range(1, 100))
    monkeypatch.setattr(crossover, "_timer", lambda call, device: lambda: call() * next(slowness))
    for first, second in ((1.0, 1.5), (1.5, 1.0)):
        plain, native = crossover._in_turns(
            lambda first=first: first, lambda second=second: second, torch.device("cpu")
        )
        assert (plain < native) == (first < second)
        next(slowness)  # the next pair begins with an even number


def test_processes_measure_the_crossover_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that waited reads the table of the one that measured."""
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path))
    table = [crossover.Crossing("int8", 8, 2.0, 1.0)]
    measuring, answers = threading.Event(), []

    def measure(*_: Any) -> crossover.Rounds:
        assert not measuring.is_set(), "two measure at the same time, or again"
        measuring.set()
        other.start()
        other.join(0.2)
        assert other.is_alive()
        return crossover.Rounds([table])

    def load() -> None:
        answers.append(crossover.crossover_tables(torch.device("cpu"), torch.float32).linear)

    other = threading.Thread(target=load)
    monkeypatch.setattr(crossover, "measure_crossover", measure)
    monkeypatch.setattr(crossover, "measure_im2col_crossover", lambda *_: crossover.Rounds([table]))
    load()
    other.join()
    assert answers == [table, table]


def test_the_crossover_of_a_busy_machine_is_used_but_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path))

    def tables(*native: float) -> crossover.Rounds:
        return crossover.Rounds([[crossover.Crossing("int8", 8, 1.0, time)] for time in native])

    quiet, busy = tables(0.5, 0.6, 0.5), tables(0.5, 1.5, 1.6)
    measured: list[str] = []
    monkeypatch.setattr(crossover, "measure_crossover", lambda *_: measured.append("linear") or busy)
    monkeypatch.setattr(crossover, "measure_im2col_crossover", lambda *_: measured.append("im2col") or quiet)
    device = torch.device("cpu")
    with pytest.warns(BitplanWarning, match="busy machine"):
        first = crossover.crossover_tables(device, torch.float32)
    assert not first.is_stored
    assert first.linear == busy.fastest
    assert [name.endswith("3x3") for name in json.loads((tmp_path / "crossover.json").read_text())] == [True]
    assert crossover.crossover_tables(device, torch.float32) == first
    assert measured == ["linear", "im2col"]  # this process measures once
    monkeypatch.setattr(crossover, "measure_crossover", lambda *_: quiet)
    again = crossover.crossover_tables(device, torch.float32, measure_again=True)
    assert again.is_stored
    assert len(json.loads((tmp_path / "crossover.json").read_text())) == 2


def test_without_a_compiler_the_crossover_is_measured_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def compiler(function: Any, **options: Any) -> Any:
        def failing(tensor: Tensor) -> Any:
            requests.append(tensor.shape)
            raise BackendCompilerFailed(function, RuntimeError("no compiler"), None)

        return failing

    monkeypatch.setattr(crossover, "SIZES", {"cpu": (8, 16)})
    monkeypatch.setattr(torch, "compile", compiler)
    crossover._encoder.cache_clear()
    try:
        assert [row.size for row in crossover.measure_crossover(torch.device("cpu")).fastest if row.unit == "int8"] == [
            8,
            16,
        ]
    finally:
        crossover._encoder.cache_clear()
    assert requests == [(8, 8)]  # once, and no more


def test_measuring_the_crossover_draws_no_numbers_of_others_and_stops_where_memory_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crossover, "SIZES", {"cpu": (8, 16, 32)})
    multiply = Int8Backend.multiply

    def small(unit: Int8Backend, a: Tensor, *rest: Any) -> Tensor:
        if a.shape[0] > 16:
            raise torch.OutOfMemoryError
        return multiply(unit, a, *rest)

    monkeypatch.setattr(Int8Backend, "multiply", small)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    table = crossover.measure_crossover(torch.device("cpu")).fastest
    assert torch.equal(torch.rand(3), expected)
    sizes = [(row.unit, row.size) for row in table]
    assert sizes == [("fp8", 8), ("fp8", 16), ("fp8", 32), ("int8", 8), ("int8", 16)]


def test_the_crossover_is_measured_on_real_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(crossover, "SIZES", {"cpu": (8,)})
    monkeypatch.setattr(crossover, "CHANNELS", (16,))
    monkeypatch.setattr(crossover, "IMAGES", {"cpu": (2, 4)})
    kinds: list[bool] = []
    multiply = Int8Backend.multiply
    monkeypatch.setattr(
        Int8Backend,
        "multiply",
        lambda unit, a, *rest: kinds.append(isinstance(a, FakeTensor)) or multiply(unit, a, *rest),
    )
    with FakeTensorMode():
        crossover.load_crossover(torch.device("cpu"), torch.float32)
    assert kinds
    assert not any(kinds)


def test_a_single_row_has_the_step_of_its_length() -> None:
    """What is told to a product on a GPU; torch itself calls a row with a step of one contiguous."""
    row = torch.zeros(16, 1).t()
    assert row.is_contiguous()
    assert row.stride() == (1, 1)
    assert units._row_major(row).stride() == (16, 1)
    assert units._column_major(row.t()).stride() == (1, 16)
    assert units._column_major(torch.zeros(3, 4)).stride() == (1, 3)


class Conv1D(nn.Module):
    """A linear layer as GPT-2 writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view_as(x)


class EveryProduct(nn.Module):
    """A linear layer, GPT-2's Conv1D, fused attention, a product of two activations and one by a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.conv = nn.Linear(16, 16), Conv1D(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.enter(x))
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.linalg.multi_dot([x[0], x[0].t(), x[0] @ x[0].t()])


FUSED_SITES = ["enter/linear.0", "conv/addmm.0", "/scaled_dot_product_attention.0", "/matmul.0", "/linalg_multi_dot.0"]
ROLE_RULE = {"match": "*", "weight": E4M3, "activation": E4M3}


@pytest.mark.parametrize(
    ("plan", "sites"),
    [
        ("int8-all", FUSED_SITES),
        ("fp8-all", FUSED_SITES),
        ({"version": 1, "rules": [ROLE_RULE, {"match": "", "op": "matmul", "x": E4M3}]}, None),
        ("fp8-linear", ["conv/addmm.0"]),
        ({"version": 1, "rules": [{"match": "enter", "activation": E4M3}]}, ["conv/addmm.0"]),
        ({"version": 1, "rules": [{"match": "conv", "grad_activation": E4M3}]}, ["conv/addmm.0"]),
    ],
)
def test_every_product_that_the_plan_rounds_is_native_or_a_fallback(plan: Any, sites: list[str] | None) -> None:
    model, x = EveryProduct(), torch.randn(2, 4, 16)
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0)) as run:
        listed = list(dict.fromkeys(fallback.site for fallback in run.fallbacks()))
    if sites is None:  # attention is decomposed: its two products are listed, and the one of the model
        sites = ["enter/linear.0", "conv/addmm.0", "/matmul.0", "/matmul.1", "/matmul.2", "/linalg_multi_dot.0"]
    assert listed == sites
    with pytest.raises(PlanError, match=sites[0]):
        bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, strict=True))


def test_without_an_example_fallbacks_are_warned_of_at_the_first_step() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    with bitplan.attach(model, "int8-all", execution="native") as run:
        model(x).sum().backward()
        with pytest.warns(BitplanWarning, match="1 product is emulated"):
            run.step()
