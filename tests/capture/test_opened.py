"""Fused operations written out: the same results and gradients as torch's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitplan
from bitplan.capture.decompositions import DECOMPOSITIONS, attention
from bitplan.plans import Plan
from bitplan.runtime.attach import attach


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def gradients(y: Tensor, *of: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), of)]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    for ours, theirs in zip(first, second, strict=True):
        tight = 1e-9 if ours.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=tight, atol=tight)


# --- attention ---

LENGTH, KEYS = 5, 7
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "of booleans": {"attn_mask": torch.rand(LENGTH, KEYS, generator=torch.Generator().manual_seed(1)) > 0.3},
    "added": {"attn_mask": torch.randn(2, 1, LENGTH, KEYS, dtype=torch.float64)},
}


@pytest.mark.parametrize("call", CALLS)
def test_attention_equals_torchs(call: str) -> None:
    query = torch.randn(2, 4, LENGTH, 6, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 4, KEYS, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours = gradients(attention(query, key, value, **CALLS[call]), query, key, value)
    assert_same(ours, gradients(F.scaled_dot_product_attention(query, key, value, **CALLS[call]), query, key, value))


def test_attention_with_fewer_heads_of_keys_equals_torchs() -> None:
    query = torch.randn(2, 4, LENGTH, 6, dtype=torch.float64)
    key, value = (torch.randn(2, 2, KEYS, 6, dtype=torch.float64) for _ in range(2))
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(attention(query, key, value, enable_gqa=True), expected)


def test_attention_drops_out_as_often_as_it_is_told() -> None:
    query = key = torch.zeros(1, 1, 100, 4)
    value = torch.ones(1, 1, 100, 1)
    mixed = attention(query, key, value, dropout_p=0.25)
    assert abs(float(mixed.mean()) - 1) < 0.02  # kept ones are scaled up
    assert float(mixed.std()) > 0.01


# --- recurrent layers ---

LAYERS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
SHAPES = list(itertools.product([1, 2], [False, True], [True, False]))


def opened(model: nn.RNNBase, op: str) -> Any:
    """A plan that opens the layer and rounds to float32, that is, not at all."""
    return attach(
        model,
        Plan.from_dict(
            {"version": 1, "rules": [{"match": "*", "op": op, "x": {"format": "fp32", "overflow": "saturate"}}]}
        ),
    )


@pytest.mark.parametrize("op", LAYERS)
@pytest.mark.parametrize(("layers", "both_ways", "batch_first"), SHAPES)
def test_a_recurrent_layer_equals_torchs(op: str, layers: int, both_ways: bool, batch_first: bool) -> None:
    more = {"nonlinearity": op.removeprefix("rnn_")} if op.startswith("rnn") else {}
    model = LAYERS[op](5, 4, layers, bias=batch_first, batch_first=batch_first, bidirectional=both_ways, **more)
    x = torch.randn(3, 2, 5, requires_grad=True)

    def step() -> list[Tensor]:
        y, last = model(x)
        states = last if isinstance(last, tuple) else (last,)
        return gradients(torch.cat([y.flatten(), *(state.flatten() for state in states)]), x, *model.parameters())

    expected = step()
    calls = []
    original = DECOMPOSITIONS[op]

    def counted(*args: Any) -> Any:
        calls.append(op)
        return original(*args)

    DECOMPOSITIONS[op] = counted
    try:
        with opened(model, op):
            ours = step()
    finally:
        DECOMPOSITIONS[op] = original
    assert calls == [op]
    assert_same(ours, expected)


def test_a_given_state_and_a_single_sequence_serve_as_well() -> None:
    model = nn.LSTM(5, 4)
    x, h, c = (torch.randn(3, 5), torch.randn(1, 4), torch.randn(1, 4))
    arguments = x, (h, c)
    expected = model(*arguments)
    with opened(model, "lstm"):
        y, (last, cell) = model(*arguments)
    assert_same([y, last, cell], [expected[0], *expected[1]])


def test_what_cannot_be_opened_says_so() -> None:
    projected = nn.LSTM(5, 4, proj_size=2)
    with opened(projected, "lstm"), pytest.raises(bitplan.errors.QuantizeError, match="projections cannot be opened"):
        projected(torch.randn(3, 2, 5))
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 5), [3, 2])
    for op, model in (("lstm", nn.LSTM(5, 4)), ("gru", nn.GRU(5, 4))):
        with opened(model, op), pytest.raises(bitplan.errors.QuantizeError, match="packed sequences cannot be opened"):
            model(packed)


def test_packed_sequences_are_fine_where_nothing_is_opened() -> None:
    model = nn.GRU(5, 4)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 5), [3, 2])
    plain = model(packed)[0].data
    with attach(model, Plan.from_dict({"version": 1, "rules": [{"match": "*", "activation": "e3m2"}]})):
        assert torch.equal(model(packed)[0].data, bitplan.quantize(plain, "e3m2"))


# --- multi-head attention ---


def test_multi_head_attention_is_looked_into_and_equals_torchs() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected = gradients(model(x, x, x, attn_mask=mask, need_weights=False)[0], x, *model.parameters())
    plan = Plan.from_dict(
        {
            "version": 1,
            "rules": [{"match": "*", "op": ["linear", "matmul"], "x": {"format": "fp32", "overflow": "saturate"}}],
        }
    )
    with attach(model, plan) as run:
        ours = gradients(model(x, x, x, attn_mask=mask, need_weights=False)[0], x, *model.parameters())
        run.step()  # which would raise if there were nothing inside
    assert_same(ours, expected)


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_layer_rounds_the_products_of_its_attention(training: bool) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(2, 5, 8)
    plain = model(x)
    with attach(model, Plan.from_dict({"version": 1, "rules": [{"match": "self_attn", "op": "matmul", "w": "e2m1"}]})):
        assert not torch.allclose(model(x), plain, atol=1e-3)
    assert torch.equal(model(x), plain)
