"""Attention in native execution, with the plain twin in place of the kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bitplan as bp
from bitplan.errors import PlanError
from bitplan.executions.native import attention_path, backends, execution
from bitplan.executions.native.attention import restore_values, transpose_values

BATCH, TOKENS, SIZE = 2, 140, 64
NATIVE = bp.Native(min_macs=0)
PRESET = "fp8-attention"
HEAD = {"format": "e4m3", "scale": "channel", "axis": -3}
pytestmark = pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")


class Attention(nn.Module):
    """Attention between other products, whose numbers must not depend on how it is computed."""

    def __init__(self, heads: int = 4, key_heads: int = 2, size: int = SIZE, **settings: Any) -> None:
        super().__init__()
        self.heads, self.size = (heads, key_heads, key_heads), size
        self.settings = settings
        torch.manual_seed(0)
        self.projection = nn.Parameter(torch.randn(SIZE * 4, size * (heads + 2 * key_heads)) / 16)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.matmul(x * 1.5, self.projection.to(x.dtype))
        parts = mixed.split([self.size * heads for heads in self.heads], -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        out = self.attend(q, k * 2, v).transpose(1, 2).flatten(2)
        return torch.matmul(out, out.transpose(-2, -1)) * 0.01

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = self.heads[0] != self.heads[1]
        return F.scaled_dot_product_attention(q, k, v, **{"enable_gqa": grouped, **self.settings})


class Calls:
    """Counts the calls of the function that it stands for."""

    def __init__(self, function: Any) -> None:
        self.function, self.count = function, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.function(*args)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(attention_path._attend)
    monkeypatch.setattr(attention_path, "_attend", calls)
    monkeypatch.setattr(execution, "multiplies_attention", lambda device: True)
    return calls


def batch(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, TOKENS, SIZE * 4, dtype=dtype)


def gradients(called: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and of the weight."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = called(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    assert x.grad is not None
    return [
        y.detach(),
        x.grad,
        *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
    ]


def step(
    model: nn.Module, plan: Any, how: Any, is_compiled: bool = False, steps: int = 1, **attached: Any
) -> list[Tensor]:
    torch.compiler.reset()
    with bp.attach(model, plan, execution=how, **attached) as run:
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        for _ in range(steps):
            values = gradients(called, model, batch())
            run.step()
    return values


def apart(first: Tensor, second: Tensor) -> float:
    return float((first.double() - second.double()).norm() / second.double().norm())


def plan_of(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": "*", **rule} for rule in rules]}


def of_attention(**operands: Any) -> dict[str, Any]:
    return {"op": "scaled_dot_product_attention", "x": HEAD, "w": HEAD, **operands}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("settings", [{"is_causal": True}, {}, {"scale": 0.3, "is_causal": True}], ids=str)
@pytest.mark.parametrize("key_heads", [2, 4])
def test_native_is_as_far_from_exact_as_emulate(
    key_heads: int, settings: dict[str, Any], is_compiled: bool, calls: Calls
) -> None:
    native, emulated = (
        step(Attention(key_heads=key_heads, **settings), PRESET, how, is_compiled, example=batch())
        for how in (NATIVE, "emulate")
    )
    assert calls.count > 0
    model = Attention(key_heads=key_heads, **settings)
    plain = gradients(model, model, batch())
    exact = gradients(model.double(), model, batch().double())
    for name, *values in zip(("y", "dx", "dw"), native, emulated, plain, exact, strict=True):
        ours, theirs, bfloat16 = (apart(value, values[3]) for value in values[:3])
        assert 2 * bfloat16 < ours, name  # E4M3 applied
        assert 0.7 * theirs < ours < 1.3 * theirs, name
        assert 0 < apart(values[0], values[1]) < 0.8 * theirs, name  # the probabilities alone are rounded otherwise


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_fixed_scale_of_the_probabilities_costs_half_an_ulp_at_most(is_causal: bool) -> None:
    """E4M3 has 3 bits behind the leading one: rounding moves a probability by a 16th of it at most."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 64) * factor for factor in (2, 2, 1))
    scales = [x.abs().amax((0, 2, 3)) / 448 for x in (q, k, v)]
    codes = [
        torch.ops.bitplan.attention_cast(x, scale, number == 2)
        for number, (x, scale) in enumerate(zip((q, k, v), scales, strict=True))
    ]
    out, logsumexp = torch.ops.bitplan.attention_forward(*codes, *scales, 0.125, is_causal)
    restored = [*codes[:2], restore_values(codes[2], 300)]
    q, k, v = ((x.double() * scale.view(-1, 1)).transpose(1, 2) for x, scale in zip(restored, scales, strict=True))
    scores = q @ k.transpose(-2, -1) * 0.125
    if is_causal:
        scores = scores.masked_fill(torch.ones(300, 300).tril() == 0, -math.inf)
    assert torch.allclose(logsumexp.double(), scores.logsumexp(-1), atol=1e-5)
    weights, exact = scores.softmax(-1), scores.softmax(-1) @ v
    bfloat16, smallest = 2.0**-9, 2.0**-10 / 448
    row_sum = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    bound = weights @ v.abs() / 16 + (v.abs().sum(-2, keepdim=True) * smallest / row_sum)
    error = (out.transpose(1, 2).double() - exact).abs()
    assert bool((error <= bound + (exact.abs() + bound) * bfloat16 + 1e-6).all())
    assert float(error.norm() / exact.norm()) > 4 * bfloat16 / math.sqrt(3)  # far more than the result's own rounding


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("later", ["matmul.3", "mul.3"])
def test_operations_behind_attention_keep_their_numbers(
    later: str, with_example: bool, is_compiled: bool, calls: Calls
) -> None:
    """matmul.0 comes before attention, 1 and 2 are inside, 3 follows; likewise mul."""
    if is_compiled and not with_example:
        pytest.skip("rules are checked while the model runs uncompiled")
    plan = plan_of(of_attention(), {"op": later, "activation": "e2m1"})
    attached = {"example": batch()} if with_example else {}
    y, *_ = step(Attention(is_causal=True), plan, NATIVE, is_compiled, **attached)
    assert calls.count > 0
    assert 3 < len(y.unique()) <= 15  # the values of e2m1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_delayed_scales_come_from_past_steps(is_compiled: bool, calls: Calls) -> None:
    delayed = {"format": "e4m3", "scale": "tensor", "history": 4}
    plan = plan_of({"op": "matmul.1", "x": delayed, "w": delayed}, {"op": "matmul.2", "x": HEAD, "w": delayed})
    native = [step(Attention(), plan, NATIVE, is_compiled, steps, example=batch()) for steps in (1, 3)]
    emulated = step(Attention(), plan, "emulate", steps=3, example=batch())
    assert calls.count > 0
    assert apart(native[1][0], emulated[0]) < 0.05
    model, grown = Attention(), batch() * 8
    with bp.attach(model, plan, execution=NATIVE, example=batch()) as run:
        model(batch()).sum().backward()
        run.step()
        outgrown = model(grown)
    assert apart(outgrown, Attention()(grown)) > 3 * apart(native[0][0], Attention()(batch()))  # it saturates


MASK = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
E5M2 = {**HEAD, "format": "e5m2"}
REASONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mask": ({"attn_mask": MASK}, plan_of(of_attention()), "mask"),
    "dropout": ({"dropout_p": 0.5}, plan_of(of_attention()), "dropout"),
    "head size": ({"size": 32}, plan_of(of_attention()), "64 or 128 features"),
    "negative scale": ({"scale": -1.0}, plan_of(of_attention()), "positive scales"),
    "format": ({}, plan_of(of_attention(w=E5M2)), "fprop.w is e5m2"),
    "scale by row": ({}, plan_of(of_attention(x={"format": "e4m3", "scale": "vector"})), "within a head"),
    "no scale": ({}, plan_of({"op": "matmul.[12]", "x": HEAD, "w": HEAD}, {"op": "matmul.2", "x": "e4m3"}), "no scale"),
    "stochastic": ({}, plan_of(of_attention(x={**HEAD, "rounding": "stochastic"})), "nearest"),
    "gradient": ({}, plan_of(of_attention(dy=HEAD)), "no gradients"),
    "passes apart": (
        {},
        plan_of({"op": "matmul.[12]", "x": HEAD, "fprop.w": HEAD, "dgrad.w": E5M2}),
        "once for all passes",
    ),
    "softmax": ({}, plan_of(of_attention(), {"op": "softmax", "activation": "e5m2"}), "softmax"),
    "one product": ({}, plan_of({"op": "matmul.2", "x": HEAD, "w": HEAD}), "no format"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_has_no_native_path_is_emulated_with_a_reason(case: str, calls: Calls) -> None:
    settings, plan, reason = REASONS[case]
    torch.manual_seed(3)
    with bp.attach(Attention(**settings), plan, example=batch(), execution=NATIVE) as run:
        rows = {row.site: row for row in run.fallbacks()}
    inside = {"/matmul.2"} if case == "one product" else {"/matmul.1", "/matmul.2"}
    assert set(rows) == inside
    assert all(row.gemm_pass == "all passes" for row in rows.values())
    assert all(reason in row.reason for row in rows.values()), rows
    results = []
    for how in (NATIVE, "emulate"):
        torch.manual_seed(4)
        results.append(step(Attention(**settings), plan, how, example=batch(), seed=0))
    assert calls.count == 0
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_other_dtypes_statistics_and_devices_are_emulated_with_a_reason(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons(x: Tensor, **attached: Any) -> set[str]:
        model = Attention()
        with bp.attach(model, PRESET, example=x, execution=NATIVE, **attached) as run:
            model(x)
            return {row.reason for row in run.fallbacks()}

    (dtype,), (stats,) = reasons(batch(torch.float32)), reasons(batch(), stats=True)
    assert "bfloat16" in dtype
    assert "statistics" in stats
    assert calls.count == 0
    assert not reasons(batch())
    assert calls.count == 1
    (small,) = {row.reason for row in _rows(bp.Native(min_macs=1 << 40))}
    assert "too small" in small
    monkeypatch.setattr(execution, "multiplies_attention", lambda device: False)
    (device,) = reasons(batch())
    assert "Hopper" in device


def test_whether_a_device_has_the_kernel_is_asked_while_a_graph_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo does not trace a search for packages."""
    monkeypatch.setattr(backends, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    expected = backends.multiplies_attention(torch.device("cuda"))

    @torch.compile(backend="eager", fullgraph=True)
    def asked(x: Tensor) -> Tensor:
        return x + backends.multiplies_attention(torch.device("cuda"))

    assert asked(torch.zeros(1)).item() == expected


def _rows(options: bp.Native) -> list[Any]:
    with bp.attach(Attention(), PRESET, example=batch(), execution=options) as run:
        return list(run.fallbacks())


def test_causal_attention_of_unequal_lengths_is_emulated(calls: Calls) -> None:
    class Crossed(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q[:, :, :100], k, v, is_causal=self.is_causal, enable_gqa=True)

    for is_causal in (False, True):
        model = Crossed()
        model.is_causal = is_causal
        calls.count = 0
        with bp.attach(model, PRESET, example=batch(), execution=NATIVE) as run:
            model(batch())
            assert len(list(run.fallbacks())) == 2 * is_causal
        assert calls.count == (not is_causal)


def test_evaluation_without_rounding_is_that_of_the_model(calls: Calls) -> None:
    plan = plan_of(of_attention(x={**HEAD, "eval": "off"}, w={**HEAD, "eval": "off"}))
    model = Attention(is_causal=True)
    with bp.attach(model, plan, example=batch(), execution=NATIVE):
        model(batch())
        assert calls.count == 1
        model.eval()(batch())
    assert calls.count == 1


def test_saved_operands_take_a_byte_per_element(calls: Calls) -> None:
    model, saved = Attention(is_causal=True), {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    heads, key_heads = 4, 2
    q, k, v = (
        torch.randn(BATCH, count, TOKENS, SIZE).bfloat16().requires_grad_() for count in (heads, key_heads, key_heads)
    )
    model.forward = lambda *tensors: F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    with (
        bp.attach(model, PRESET, example=(q, k, v), execution=NATIVE),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        model(q, k, v)
    assert calls.count == 1
    codes = BATCH * SIZE * (TOKENS * (heads + key_heads) + 256 * key_heads)  # tokens of values in blocks of 128
    out_and_sums = BATCH * TOKENS * heads * (2 * SIZE + 4)
    scales = 4 * (heads + 2 * key_heads)
    assert sum(tensor.nbytes for tensor in saved.values()) == codes + out_and_sums + scales


def test_checkpointing_computes_it_again_alike(calls: Calls) -> None:
    class Checkpointed(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return checkpoint(super().attend, q, k, v, use_reentrant=False)  # type: ignore[no-any-return]

    plain, checkpointed = (
        step(made(is_causal=True), PRESET, NATIVE, example=batch()) for made in (Attention, Checkpointed)
    )
    assert calls.count == 3
    assert all(torch.equal(*pair) for pair in zip(plain, checkpointed, strict=True))


def test_a_second_derivative_is_refused(calls: Calls) -> None:
    model, x = Attention(), batch().requires_grad_()
    with (
        bp.attach(model, PRESET, example=x, execution=NATIVE),
        pytest.raises(PlanError, match="second derivative"),
    ):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_tokens_are_interleaved_as_tensor_cores_hold_them() -> None:
    """Of 16 columns of a result a thread holds 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; of an operand 4 t to 4 t + 3."""
    tokens = torch.arange(48).to(torch.uint8).view(torch.float8_e4m3fn).view(1, 48, 1, 1)
    places = transpose_values(tokens).view(torch.uint8).flatten()
    assert places[:8].tolist() == [0, 1, 8, 9, 2, 3, 10, 11]
    assert places[16:20].tolist() == [16, 17, 24, 25]
    assert len(places) == 128
    for interleaved in (True, False):
        there_and_back = restore_values(transpose_values(tokens, interleaved), 48, interleaved)
        assert torch.equal(there_and_back.view(torch.uint8), tokens.view(torch.uint8))


def test_results_on_fake_tensors_are_like_those_on_real_ones() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 70, 64).bfloat16(), torch.randn(2, 2, 70, 64).bfloat16()
    checks = ("test_faketensor",)  # torch compares no float8 tensors, which test_schema would do
    scale = torch.full((4,), 0.01)
    casts = [(q, scale, False), (k, scale[:2], False), (k, scale[:2], True)]
    for args in casts:
        torch.library.opcheck(torch.ops.bitplan.attention_cast.default, args, test_utils=checks)
    codes = [torch.ops.bitplan.attention_cast(*args) for args in casts]
    args = (*codes, scale, scale[:2], scale[:2], 0.1, True)
    torch.library.opcheck(torch.ops.bitplan.attention_forward.default, args, test_utils=checks)
    out, logsumexp = torch.ops.bitplan.attention_forward(*args)
    operands = [x.transpose(1, 2).contiguous() for x in (q, q, k, k)]
    args = (*operands, out, logsumexp, 0.1, True)
    torch.library.opcheck(torch.ops.bitplan.attention_backward.default, args, test_utils=checks)
