"""Attention in FP8 on a model of transformers: the operands of its six products, as torch multiplies them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import bitplan
from bitplan.plans import Plan

transformers = pytest.importorskip("transformers")

BATCH, HEADS, KEY_HEADS, TOKENS, FEATURES = 2, 4, 2, 12, 16
_VALUES = {step * 2.0 ** (exponent - 3) for exponent in range(-6, 9) for step in range(16)}
E4M3 = torch.tensor(sorted(_VALUES - {480.0}), dtype=torch.float64)
#: The batched products of a step in the order in which they run, with the names of their operands.
FORWARD, DV, DP = [("q", "k"), ("p", "v")], ("p in dv", "do in dv"), ("do", "v in dp")
DK_DQ = [("q in dk", "ds in dk"), ("ds", "k in dq")]


class Products(TorchDispatchMode):
    """Records the operands of batched products, by name, as (batch, heads, ..., ...)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.seen.append(tuple(one.detach().double().unflatten(0, (BATCH, HEADS)) for one in args[:2]))
        return func(*args, **(kwargs or {}))

    def by_name(self, dp_first: bool) -> dict[str, Tensor]:
        order = [*FORWARD, *((DP, DV) if dp_first else (DV, DP)), *DK_DQ]
        assert len(self.seen) == len(order)
        return {
            name: tensor for at, names in enumerate(order) for name, tensor in zip(names, self.seen[at], strict=True)
        }


def llama() -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=HEADS * FEATURES,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            vocab_size=50,
            attn_implementation="sdpa",
        )
    )
    attention = model.model.layers[0].self_attn
    with torch.no_grad():  # heads of very different size
        for layer, heads in ((attention.q_proj, HEADS), (attention.k_proj, KEY_HEADS), (attention.v_proj, KEY_HEADS)):
            layer.weight *= torch.logspace(0, 2.3, heads).repeat_interleave(FEATURES).unsqueeze(1)
    return model


def step(plan: Any, execution: str = "emulate", dp_first: bool = False) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The operands of attention's products; then the loss and the gradients of the projections.

    :param dp_first: whether the product of dP runs before that of dV, as where operands are rounded apart.
    """
    model = llama()
    ids = torch.randint(0, 50, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    with bitplan.attach(model, plan, example=batch, execution=execution), Products() as products:
        loss = model(**batch).loss
        loss.backward()
    attention = model.model.layers[0].self_attn
    return products.by_name(dp_first), [loss.detach(), *(p.grad for p in attention.parameters())]


def is_on_grid(operand: Tensor, by_head: bool = True) -> bool:
    """Whether all values are E4M3 times a scale that maps the largest of each head to 448."""
    groups = operand.movedim(1, 0).reshape(HEADS, -1) if by_head else operand.reshape(1, -1)
    steps = (groups / groups.abs().amax(1, keepdim=True) * 448).abs()
    return bool((steps.unsqueeze(-1) - E4M3).abs().amin(-1).max() < 1e-3)


PLAIN = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "scaled_dot_product_attention", "x": "fp16"}]})


def test_operands_of_both_products_are_in_e4m3_with_a_scale_for_each_head() -> None:
    operands, values = step("fp8-attention")
    exact, exact_values = step(PLAIN)
    for name in ("q", "k", "p", "v"):
        assert is_on_grid(operands[name]), name
        assert not is_on_grid(exact[name]), name
        error = float((operands[name] - exact[name]).norm() / exact[name].norm())
        assert 1e-3 < error < 0.1, name  # of E4M3, a 16th at most
    for name, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
        amax = operands[name].abs().amax((0, 2, 3))
        assert len(amax.unique()) == heads
        assert float(amax.max() / amax.min()) > 50  # one scale would have lost the small ones
        assert not is_on_grid(operands[name], by_head=False), name
    assert 0 < float((values[0] - exact_values[0]).abs()) < 0.05 * float(exact_values[0])


def test_the_backward_pass_multiplies_dequantised_operands_and_dp_in_full() -> None:
    operands, _ = step("fp8-attention")
    assert torch.equal(operands["v in dp"], operands["v"].transpose(-2, -1))
    assert torch.equal(operands["p in dv"], operands["p"].transpose(-2, -1))
    assert torch.equal(operands["k in dq"], operands["k"].transpose(-2, -1))
    assert torch.equal(operands["q in dk"], operands["q"].transpose(-2, -1))
    for name in ("do", "do in dv", "ds", "ds in dk"):
        assert not is_on_grid(operands[name]), name


def test_a_plan_may_round_the_gradient_of_scores_and_keep_dp() -> None:
    """Six of the seven products in FP8: dP = dO V^T has an operand in full."""
    head = {"format": "e4m3", "scale": "channel", "axis": -3}
    rules = [
        {"match": "*.self_attn", "op": "matmul.0", "x": head, "w": head, "dy": head},
        {"match": "*.self_attn", "op": "matmul.1", "x": head, "w": head, "wgrad.dy": head},
    ]
    operands, _ = step({"version": 1, "rules": rules}, dp_first=True)
    for name in ("q", "k", "p", "v", "ds", "ds in dk", "do in dv"):
        assert is_on_grid(operands[name]), name
    assert not is_on_grid(operands["do"])


def test_packed_execution_has_the_same_numbers() -> None:
    emulated, packed = (step("fp8-attention", execution)[1] for execution in ("emulate", "packed"))
    assert all(torch.equal(one, two) for one, two in zip(emulated, packed, strict=True))


def test_native_execution_lists_attention_as_a_fallback() -> None:
    model = llama()
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    options = bitplan.Native(min_macs=0)
    with (
        pytest.warns(bitplan.errors.BitplanWarning, match="emulated"),
        bitplan.attach(model, "fp8-attention", example={"input_ids": ids}, execution=options) as run,
    ):
        rows = {row.site: row.reason for row in run.fallbacks()}
    assert set(rows) == {f"model.layers.0.self_attn/matmul.{number}" for number in (0, 1)}
    assert all("Hopper" in reason for reason in rows.values())
