"""Mixtures of experts of Transformers: their products have six operands, however they are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_backend import compile_without_inductor
from operand_spy import OperandSpy
from torch import Tensor, nn

import bitplan as bp
from bitplan.errors import BitplanWarning

transformers = pytest.importorskip("transformers")

EXPERTS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}
SMALL_EXPERTS: dict[str, Any] = {"num_experts": EXPERTS, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen2Moe": {**SMALL_EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {**SMALL_EXPERTS, "head_dim": 16},
}
#: How Transformers multiplies with the experts' weights -> the operation that rules see.
WAYS = {"grouped_mm": "grouped_mm", "batched_mm": "bmm", "eager": "linear"}
PLAN = {"version": 1, "rules": [{"match": "*", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}]}
#: A scale for each row of each pass, and for each column of each expert's matrix.
_ROWS = {"format": "e4m3", "scale": "vector"}
SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
ROWWISE = {"version": 1, "rules": [{"match": "*.experts", **dict.fromkeys(SLOTS, _ROWS)}]}


def make(name: str, way: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    model.set_experts_implementation(way)
    return model


def batch(tokens: int = 6) -> dict[str, Tensor]:
    ids = torch.randint(0, SIZES["vocab_size"], (2, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, called: Any = None) -> list[Tensor]:
    """The loss and all gradients of a step."""
    loss: Tensor = (model if called is None else called)(**batch()).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_operand_is_rounded(name: str, way: str) -> None:
    """Forward and backward, without the attention scores, whose operands lie on a grid times a power of two."""
    model = make(name, way)
    plan = {"version": 1, "rules": [{"match": "*.experts", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}]}
    experts = next(module for path, module in model.named_modules() if path.endswith("experts"))
    spy = OperandSpy()
    unplanned = OperandSpy()
    inputs = torch.randn(12, SIZES["hidden_size"], requires_grad=True)
    chosen = torch.tensor([[0, 1], [2, 3], [0, 3]] * 4)
    weights = torch.full((12, 2), 0.5)
    with unplanned:
        plain = experts(inputs, chosen, weights)
        plain.sum().backward()
    with bp.attach(model, plan) as run, spy:
        rounded = experts(inputs, chosen, weights)
        rounded.sum().backward()
        assert run is not None
    assert unplanned.unrounded
    assert spy.count == unplanned.count
    assert spy.unrounded == []
    assert 0 < (rounded - plain).norm() < 0.5 * plain.norm()


@pytest.mark.parametrize("plan", [PLAN, "deepseek-v3"], ids=["once", "deepseek-v3"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_emulate(name: str, way: str, plan: Any) -> None:
    plain = step(make(name, way))
    results = {}
    for how in ("emulate", "packed"):
        model = make(name, way)
        with bp.attach(model, plan, example=batch(), execution=how):
            results[how] = step(model)
    assert len(results["emulate"]) == len(plain) > 1
    assert all(torch.equal(*pair) for pair in zip(results["emulate"], results["packed"], strict=True))
    assert not torch.equal(results["emulate"][0], plain[0])
    torch.testing.assert_close(results["emulate"][0], plain[0], rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [(PLAN, torch.float32), (ROWWISE, torch.float32), ("deepseek-v3", torch.bfloat16)],
    ids=["once", "for each pass", "deepseek-v3, bfloat16"],
)
def test_a_compiled_mixtral_has_the_numbers_of_eager_code(plan: Any, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    model = make("Mixtral", "grouped_mm", dtype)
    with bp.attach(model, plan, example=batch()):
        eager = step(model)
        model.zero_grad()
        compiled = step(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    model.zero_grad()
    plain = step(model)
    bound = 1e-5 if dtype == torch.float32 else 0.05
    for ours, expected, unrounded in zip(compiled, eager, plain, strict=True):
        size = float(expected.float().norm())
        assert float((ours - expected).float().norm()) <= bound * size
        if plan is PLAN:
            assert float((ours - unrounded).float().norm()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_packed_equals_emulate(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where nothing is equal bit for bit, packed is held against eager code, which takes no compiling."""
    results = []
    for how in ("emulate", "packed"):
        torch.compiler.reset()
        model = make("Mixtral", "grouped_mm", dtype)
        with bp.attach(model, PLAN, example=batch(), execution=how) as run:
            is_eager = how == "emulate" and dtype == torch.bfloat16
            results.append(step(model, model if is_eager else compile_without_inductor(run, model, monkeypatch)))
    for ours, expected in zip(results[1], results[0], strict=True):
        if dtype == torch.float32:
            assert torch.equal(ours, expected)
        gap = float((ours - expected).float().norm())
        assert gap <= 0.02 * float(expected.float().norm())


def test_ways_agree() -> None:
    """Operands are rounded alike without scales, so the ways differ by the order of sums only."""
    results = []
    for way in WAYS:
        model = make("Mixtral", way)
        with bp.attach(model, PLAN, example=batch()):
            results.append(step(model))
    for other in results[1:]:
        torch.testing.assert_close(other[0], results[0][0], rtol=1e-3, atol=0)


def test_scales_of_an_expert_do_not_depend_on_the_others() -> None:
    """``scale: vector`` of a stack of matrices has a scale for each column of each expert."""
    rules = [{"match": "*.experts", "fprop.w": {"format": "e4m3", "scale": "vector"}}]
    model = make("Mixtral", "grouped_mm")
    experts = next(module for path, module in model.named_modules() if path.endswith("experts"))
    inputs = torch.randn(4, SIZES["hidden_size"])
    chosen, weights = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    with bp.attach(model, {"version": 1, "rules": rules}):
        before = experts(inputs, chosen, weights)
        with torch.no_grad():
            experts.gate_up_proj[2:] *= 1000
        after = experts(inputs, chosen, weights)
    assert torch.equal(before, after)


@pytest.mark.parametrize("way", WAYS)
def test_experts_without_a_token_have_no_gradient(way: str) -> None:
    model = make("Mixtral", way)
    experts = next(module for path, module in model.named_modules() if path.endswith("experts"))
    inputs = torch.randn(4, SIZES["hidden_size"], requires_grad=True)
    for how in ("emulate", "packed"):
        model.zero_grad()
        with bp.attach(model, PLAN, execution=how):
            y = experts(inputs, torch.tensor([[0, 3]] * 4), torch.full((4, 2), 0.5))
            y.sum().backward()
        assert y.isfinite().all()
        norms = experts.gate_up_proj.grad.flatten(1).norm(dim=1)
        assert norms[[1, 2]].tolist() == [0, 0]
        assert norms[[0, 3]].min() > 0


@pytest.mark.parametrize("way", WAYS)
def test_native_lists_products_that_it_emulates(way: str) -> None:
    model = make("Mixtral", way)
    with pytest.warns(BitplanWarning, match="emulated"):
        run = bp.attach(model, PLAN, example=batch(), execution=bp.Native(min_macs=0))
    native = step(model)
    reasons = [row.reason for row in run.fallbacks() if f"experts/{WAYS[way]}" in row.site]
    run.detach()
    assert reasons
    model.zero_grad()
    with bp.attach(model, PLAN, example=batch()):
        emulated = step(model)
    for ours, expected in zip(native, emulated, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_tables_and_costs_count_the_experts(way: str) -> None:
    model = make("Mixtral", way)
    with bp.attach(model, PLAN, example=batch()) as run:
        rows = [str(row) for row in run.table() if f"experts/{WAYS[way]}.0" in str(row)]
        everything = run.cost()
    without = {"version": 1, "rules": [*PLAN["rules"], {"match": "*.experts", "keep": True}]}  # type: ignore[misc]
    with bp.attach(model, without, example=batch()) as run:
        others = run.cost()
    for place in ("fprop.x", "fprop.w", "dgrad.dy"):
        assert any(place in row for row in rows)
    # 12 tokens with two experts each, three matrices of 32 x 48, three passes: in e4m3 by e4m3 or e5m2, and in float32.
    macs = 12 * 2 * 3 * 32 * 48 * 3
    assert others.gbitops - everything.gbitops == pytest.approx(macs * (32 * 32 - 8 * 8) / 1e9, rel=0.02)
