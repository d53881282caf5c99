"""Tensors that a plan leaves alone because they are no activations: constants, and attention scores under a mask."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan as bp
from bitplan.capture.decompositions import attention

ALL = ("fp8-all", "int8-all")
MASKED_VALUES = (-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4)


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


class SelfAttention(nn.Module):
    """Attention as nanoGPT, Transformers and torch write it, by `apply_mask`; keeps its weights for the test."""

    def __init__(self, apply_mask: Callable[[Tensor, float], Tensor], value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48)
        self.apply_mask = apply_mask
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = self.apply_mask(3 * q @ k.transpose(-2, -1), self.value)
        self.weights = torch.softmax(scores, -1)
        return self.weights @ v


def fill(scores: Tensor, value: float) -> Tensor:
    return scores.masked_fill(causal(scores.shape[-1]).logical_not(), value)


def fill_in_place(scores: Tensor, value: float) -> Tensor:
    return scores.clone().masked_fill_(causal(scores.shape[-1]).logical_not(), value)


def add_full(scores: Tensor, value: float) -> Tensor:
    size = scores.shape[-1]
    return scores + torch.full((size, size), value).triu(1)


def add_product(scores: Tensor, value: float) -> Tensor:
    return scores + (1.0 - causal(scores.shape[-1]).float()) * max(value, torch.finfo(torch.float32).min)


def select(scores: Tensor, value: float) -> Tensor:
    return torch.where(causal(scores.shape[-1]), scores, value)


def assign(scores: Tensor, value: float) -> Tensor:
    scores = scores.clone()
    scores[..., causal(scores.shape[-1]).logical_not()] = value
    return scores


def subtract(scores: Tensor, value: float) -> Tensor:
    allowed = causal(scores.shape[-1]).float()
    return scores * allowed - (1.0 - allowed) * -max(value, torch.finfo(torch.float32).min)


def add_logarithm(scores: Tensor, value: float) -> Tensor:
    return scores + causal(scores.shape[-1]).float().log()


WAYS = (fill, fill_in_place, add_full, add_product, select, assign, subtract, add_logarithm)


@pytest.mark.parametrize("value", MASKED_VALUES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", ALL)
def test_masked_entries_do_not_decide_scales(plan: str, way: Callable[[Tensor, float], Tensor], value: float) -> None:
    model, x = SelfAttention(way, value), torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))
    model(x)
    expected = model.weights
    with bp.attach(model, plan):
        model(x).sum().backward()
        weights = model.weights.detach()
    error = (weights - expected).abs().max()
    assert 1e-4 < error < 0.15  # rounded, and still the same attention
    assert weights[:, ~causal(12)].abs().max() == 0
    assert model.qkv.weight.grad is not None
    assert model.qkv.weight.grad.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_masks_are_known_in_compiled_code(way: Callable[[Tensor, float], Tensor]) -> None:
    model, x = SelfAttention(way, -math.inf), torch.randn(2, 12, 16)
    with bp.attach(model, "fp8-all", example=x):
        eager = model(x)
        eager.sum().backward()
        gradient = model.qkv.weight.grad
        model.zero_grad()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        compiled.sum().backward()
    assert torch.equal(eager, compiled)
    assert torch.equal(gradient, model.qkv.weight.grad)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("plan", [*ALL, {"version": 1, "rules": [{"match": "*", "x": "e4m3", "activation": "e4m3"}]}])
def test_a_mask_that_is_an_argument(plan: Any, need_weights: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    before = mask.clone()
    plain = model(x, x, x, attn_mask=mask, need_weights=need_weights)[0]
    with bp.attach(model, plan):
        rounded = model(x, x, x, attn_mask=mask, need_weights=need_weights)[0]
    assert 1e-4 < (rounded - plain).abs().max() < 0.2
    assert torch.equal(mask, before)
    assert not [name for name in vars(mask) if "bitplan" in name]


@pytest.mark.parametrize("is_set_on_the_instance", [False, True])
def test_a_mask_by_the_name_of_an_argument(is_set_on_the_instance: bool) -> None:
    class Masked(nn.Module):
        def forward(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
            return torch.softmax(scores + attention_mask, -1)

    model = Masked()
    if is_set_on_the_instance:
        model.forward = functools.wraps(model.forward)(lambda *args, **kwargs: Masked.forward(model, *args, **kwargs))  # type: ignore[method-assign]
    scores, mask = 3 * torch.randn(4, 6), torch.zeros(6).masked_fill(torch.arange(6) > 3, -1e9)
    plain = model(scores, mask)
    with bp.attach(model, "fp8-all"):
        rounded = model(scores, attention_mask=mask)
    assert 0 < (rounded - plain).abs().max() < 0.1


def test_a_bias_by_the_name_of_an_argument() -> None:
    class Masked(nn.Module):
        def forward(self, scores: Tensor, attn_bias: Tensor) -> Tensor:
            return torch.softmax(scores + attn_bias, -1)

    model, scores = Masked(), 3 * torch.randn(4, 6)
    bias = torch.zeros(6).masked_fill(torch.arange(6) > 3, -1e9)
    plain = model(scores, bias)
    with bp.attach(model, "fp8-all"):
        assert 0 < (model(scores, bias) - plain).abs().max() < 0.1


@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_mask_in_a_buffer_or_an_attribute(value: float, is_compiled: bool, is_buffer: bool) -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            hidden = torch.full((8, 8), value).triu(1)
            if is_buffer:
                self.register_buffer("hidden", hidden)
            else:
                self.hidden = hidden

        def forward(self, x: Tensor) -> Tensor:
            scores = x @ x.mT + self.hidden[: x.shape[1], : x.shape[1]]  # type: ignore[index]
            return torch.softmax(scores, -1)

    torch.compiler.reset()
    model, x = Causal(), torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)) / 3
    plain = model(x)
    rule = {"match": "*", "activation": {"format": "int8", "scale": "tensor"}}
    with bp.attach(model, {"version": 1, "rules": [rule]}, example=x):
        rounded = torch.compile(model, backend="aot_eager", fullgraph=True)(x) if is_compiled else model(x)
    assert 1e-4 < (rounded - plain).abs().max() < 0.2


def test_a_buffer_of_small_numbers_is_no_mask() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.full((8,), -9999.0))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.offset

    model, x = Offset(), torch.randn(4, 8)
    with bp.attach(model, {"version": 1, "rules": [{"match": "*", "activation": "bf16"}]}, example=x):
        assert torch.equal(model(x), (x - 9999.0).bfloat16().float())


def test_features_of_a_mask_are_activations() -> None:
    class Segmenter(nn.Module):
        def forward(self, queries: Tensor, mask_features: Tensor) -> Tensor:
            return queries + mask_features

    queries, features = torch.randn(2, 4, 6).unbind()
    with bp.attach(Segmenter(), {"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]}) as run:
        total = run.model(queries, features)
    assert torch.equal(total, (queries + features).to(torch.float8_e4m3fn).float())


class Positions(nn.Module):
    """Angles from a buffer and positions, as rotary embeddings compute them; offsets from counts, as experts do."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 10000.0 ** -torch.linspace(0, 1, 8))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.ones(x.shape[1]).cumsum(0) - 1
        angles = positions[:, None] @ self.frequencies[None]
        cosines = torch.cat((angles, angles), -1).cos()
        offsets = torch.histc(tokens.float(), bins=32, min=0, max=31).cumsum(0)
        return self.linear(x * cosines), cosines, offsets


@pytest.mark.parametrize(
    "plan", [*ALL, "bf16-all", {"version": 1, "rules": [{"match": "*", "x": "e4m3", "w": "e4m3"}]}]
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_constants_are_left_alone(plan: Any, is_compiled: bool) -> None:
    torch.manual_seed(0)
    model, x, tokens = Positions(), torch.randn(1, 1024, 16), torch.randint(32, (1024,))
    y, *expected = model(x, tokens)
    with bp.attach(model, plan, example=(x, tokens)):
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        rounded, *constants = called(x, tokens)
    assert not torch.equal(rounded, y)
    for constant, plain in zip(constants, expected, strict=True):
        assert torch.equal(constant, plain)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_indices_that_are_cast_to_the_dtype_of_an_activation_are_constants(is_compiled: bool) -> None:
    """As in DeBERTa's buckets of relative positions, which compiled code rounded."""

    class Buckets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            indices = torch.arange(12)
            self.buckets = torch.where(indices < 3, indices.type_as(x), indices.to(x) * 1.37)
            return x + self.buckets

    torch.compiler.reset()
    model, x = Buckets(), torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    model(x)
    expected = model.buckets
    with bp.attach(model, "fp8-all"):
        y = (torch.compile(model, backend="aot_eager") if is_compiled else model)(x)
        assert torch.equal(model.buckets, expected)
    assert not torch.equal(y, x + expected)


class ComplexRotary(nn.Module):
    """Scores with rotary embeddings by complex numbers, as Llama 4 and Meta's Llama write them."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.is_buffer = is_buffer
        self.register_buffer("rotations", self.make_rotations(12))

    @staticmethod
    def make_rotations(length: int) -> Tensor:
        angles = torch.outer(torch.arange(length).float(), 0.1 ** torch.arange(8).float())
        return torch.polar(torch.ones_like(angles), angles)

    def rotate(self, x: Tensor, rotations: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rotations = self.rotations if self.is_buffer else self.make_rotations(x.shape[-2])
        query, key = self.rotate(self.query(x), rotations), self.rotate(self.key(x), rotations)
        return query @ key.transpose(-2, -1), torch.view_as_real(rotations) * 3.0


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_complex_numbers_are_activations_where_they_depend_on_one(is_buffer: bool, is_compiled: bool) -> None:
    model, x = ComplexRotary(is_buffer), torch.randn(2, 12, 16)
    rounded = functools.partial(bp.quantize, format="e4m3", scale="tensor")
    query, key = (model.rotate(layer(x), model.rotations).detach() for layer in (model.query, model.key))
    plan = {"version": 1, "rules": [{"match": "*", "op": "matmul", "x": "q", "w": "q", "dy": "q"}]}
    plan["quantizers"] = {"q": {"format": "e4m3", "scale": "tensor"}}
    with bp.attach(model, bp.Plan.from_dict(plan), example=x):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        scores, _ = run(x)
        scores.square().sum().backward()
        gradient = model.query.weight.grad
    torch.testing.assert_close(scores, rounded(query) @ rounded(key).transpose(-2, -1), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scores, query @ key.transpose(-2, -1), rtol=1e-4)
    model.zero_grad()
    model(x)[0].square().sum().backward()
    assert gradient is not None
    assert model.query.weight.grad is not None
    error = (gradient - model.query.weight.grad).norm() / gradient.norm()
    assert 1e-3 < error < 0.1
    with bp.attach(model, "int8-all"):
        _, table = model(x)
    assert torch.equal(table, torch.view_as_real(model.make_rotations(12)) * 3.0)


def test_constants_are_rounded_where_a_rule_says_so() -> None:
    model, x, tokens = Positions(), torch.randn(1, 64, 16), torch.randint(32, (64,))
    _, cosines, _ = model(x, tokens)
    with bp.attach(model, {"version": 1, "rules": [{"match": "*", "activation": "e4m3", "constants": True}]}):
        assert not torch.equal(model(x, tokens)[1], cosines)
    plan = bp.Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e4m3", "constants": True}]})
    assert bp.Plan.from_yaml(plan.to_yaml()) == plan


def test_an_explanation_lists_constants_and_masks() -> None:
    model, x, tokens = Positions(), torch.randn(1, 64, 16), torch.randint(32, (64,))
    table = str(bp.explain(model, "fp8-all", (x, tokens)))
    assert "left alone (constant)" in table
    masked = bp.explain(SelfAttention(fill, -math.inf), "fp8-all", torch.randn(2, 12, 16))
    assert [row.site.op for row in masked if row.reason == "mask"] == ["masked_fill.0"]


def test_a_rule_for_nothing_but_constants_has_no_effect() -> None:
    plan = {"version": 1, "rules": [{"match": "*", "op": "cos", "activation": "e4m3"}]}
    with pytest.raises(bp.BitplanError, match="cos"):
        bp.explain(Positions(), bp.Plan.from_dict(plan), (torch.randn(1, 8, 16), torch.randint(32, (8,))))


def test_what_is_written_into_a_constant_is_an_activation() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sums = torch.zeros(x.shape)
            sums.index_add_(0, torch.arange(len(x)), x)
            copied = torch.zeros(x.shape)
            copied[:] = x
            return sums * 3 + copied * 3

    x = torch.randn(8, 4)
    with bp.attach(Filled(), {"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]}) as run:
        y = run.model(x)
    assert torch.equal(y, y.to(torch.float8_e4m3fn).float())
    assert not torch.equal(y, x * 6)


@pytest.mark.parametrize("is_float", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_decomposed_attention_of_rows_without_keys_is_zero_as_in_torch(is_float: bool, is_causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    allowed = torch.rand(2, 1, 5, 5) > 0.3
    if is_causal:
        allowed &= causal(5)
    allowed[0, 0, :2] = False
    mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, -math.inf) if is_float else allowed
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    actual = attention(q, k, v, mask)
    torch.testing.assert_close(actual, expected)
    for first, second in zip(
        torch.autograd.grad(actual.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(first, second)


# --- statistics of norms ---


def rms_norm(x: Tensor) -> Tensor:  # as Llama writes it
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred * centred).mean(-1, True).add(1e-6).sqrt()


def norm_by_variance(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) / (variance + 1e-12) ** 0.5


def norm_by_deviation(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def unit_length(x: Tensor) -> Tensor:
    return 4 * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def unit_length_by_squares(x: Tensor) -> Tensor:
    return 4 * x / torch.square(x).sum(dim=-1, keepdim=True).clamp_min(1e-12).pow(0.5)


NORMS = (rms_norm, layer_norm, unit_length, unit_length_by_squares)
#: Those that divide a difference by a statistic of another tensor. The grid of int8-all has no 0, and the difference of
#: a row of zeros from its mean is rounded to half a step of the grid, whatever the variance is.
NORMS_OF_DIFFERENCES = (norm_by_variance, norm_by_deviation)


class Norm(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(16, 16)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


def rows_of_different_size() -> Tensor:
    """Rows of ordinary values, of small ones and of zeros, as padding tokens have them."""
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    return x * torch.tensor([1.0, 1.0, 1e-2, 1e-3, 1e-3, 0.0])[:, None]


@pytest.mark.parametrize(
    ("plan", "norm"), [*itertools.product(ALL, NORMS), *itertools.product(["fp8-all"], NORMS_OF_DIFFERENCES)]
)
@pytest.mark.parametrize("way", ["emulate", "packed", "compiled"])
def test_statistics_of_a_norm_are_left_alone(way: str, plan: str, norm: Callable[[Tensor], Tensor]) -> None:
    model, x = Norm(norm), rows_of_different_size()
    with torch.no_grad():
        model.fc.bias.zero_()
    with bp.attach(model, plan, execution="packed" if way == "packed" else "emulate"):
        planned = torch.compile(model, backend="aot_eager") if way == "compiled" else model
        y = planned(x)
        y.square().mean().backward()
    assert model.fc.weight.grad is not None
    assert model.fc.weight.grad.isfinite().all()
    hidden = model.fc(x).detach()
    if plan == "fp8-all":  # an 8-bit integer of the whole tensor has no values for the small rows
        assert 1e-3 < (y[:5].detach() - norm(hidden)[:5]).abs().max() < 0.5
    assert (y[:2].detach() - norm(hidden)[:2]).abs().max() < 0.5
    assert y.abs().max() < 5


def test_a_norm_that_is_written_out_is_rounded_as_a_fused_one() -> None:
    class Fused(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(self.fc(x), (16,), eps=1e-6)

    x = rows_of_different_size()
    gradients = []
    for model in (Norm(rms_norm), Fused(rms_norm)):
        with bp.attach(model, {"version": 1, "rules": [{"match": "*", "weight": "e4m3", "activation": "e4m3"}]}):
            model(x).square().sum().backward()
        gradients.append(model.fc.weight.grad)
    torch.testing.assert_close(*gradients)


def test_squares_that_are_read_otherwise_are_activations() -> None:
    class SquaredRelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.squares = F.relu(self.up(x)).square()
            self.mean = self.squares.mean()
            return self.down(self.squares)

    torch.manual_seed(0)
    model = SquaredRelu()
    x = torch.randn(8, 4)
    with bp.attach(model, {"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]}):
        model(x)
    for tensor in (model.squares, model.mean):  # the mean over all values is no statistic of a norm
        assert torch.equal(tensor, tensor.to(torch.float8_e4m3fn).float())
    rows = {row.site.name: row.treatment for row in bp.explain(model, "fp8-all", x)}
    assert rows["/square.0:activation"].startswith("e4m3")


def test_an_explanation_lists_statistics() -> None:
    rows = {row.site.name: row.treatment for row in bp.explain(Norm(rms_norm), "fp8-all", torch.ones(2, 16))}
    for op in ("pow.0", "mean.0", "add.0", "rsqrt.0"):
        for role in ("activation", "grad_activation"):
            assert rows[f"/{op}:{role}"] == "left alone (statistic)"
    assert rows["/mul.0:activation"].startswith("e4m3")


@pytest.mark.parametrize("op", ["rsqrt", "pow"])
def test_a_rule_for_nothing_but_statistics_has_no_effect(op: str) -> None:
    plan = {"version": 1, "rules": [{"match": "*", "op": op, "activation": "e4m3"}]}
    with pytest.raises(bp.BitplanError, match="rules"):
        bp.attach(Norm(rms_norm), plan, example=torch.ones(2, 16))


def test_what_is_written_into_squares_or_statistics_is_an_activation() -> None:
    class Overwriting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            squares = x.square()
            squares.mul_(3)
            statistic = x.var(-1, keepdim=True)
            statistic += x[:, :1]
            return squares.mean(-1, keepdim=True) + statistic

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    model = Overwriting()
    with bp.attach(model, {"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]}):
        y = model(x)
    assert torch.equal(y, y.to(torch.float8_e4m3fn).float())
