"""Which cases the golden tests have: models x plans x executions x compilers, and what is left out with its reason.

Ids such as ``resnet/fp8-all/packed/eager`` are stored beside the numbers and never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

STEPS = 20
#: Where the resumed runs are saved.
MIDDLE = 10

MODELS = ("resnet", "gpt", "lstm", "graph")
EXECUTIONS = ("emulate", "packed", "native")

#: None is no plan, a name a preset, and the rest are documents of version 1.
PLANS: dict[str, str | None] = {
    "none": None,
    "fp8-all": "fp8-all",
    "int8-minmax": "int8-minmax",
    "fp8-linear-delayed": """
        version: 1
        quantizers:
          f8: {format: e4m3, scale: tensor, history: 4}
          g8: {format: e5m2, scale: tensor, history: 4, margin: 1, power_of_two: true}
        rules:
        - {match: "*", op: [linear, "conv*"], x: f8, w: f8, dy: g8}
    """,
    "stochastic": """
        version: 1
        quantizers:
          i8: {format: int8, scale: tensor, rounding: stochastic}
          f8: {format: e4m3, scale: tensor, rounding: stochastic}
          g16: {format: bf16, rounding: stochastic}
        rules:
        - {match: "*", op: [linear, "conv*"], x: i8, w: i8, dy: i8, grad_weight: g16}
        - {match: "*", op: [relu, gelu, layer_norm, batch_norm, embedding], activation: f8, grad_activation: g16}
    """,
    "cpt-cr": """
        version: 1
        schedules: {cpt: {name: CR, low: 3, high: 8, cycles: 2}}
        quantizers:
          weights: {format: int, bits: cpt, scale: channel, range: minmax}
          activations: {format: int, bits: cpt, scale: tensor, range: minmax, eval: ema}
          gradients: {format: int8, scale: tensor, range: minmax, rounding: stochastic}
        rules:
        - {match: "*", op: [linear, "conv*"], x: activations, w: weights, dy: gradients}
    """,
    "switch-50": """
        version: 1
        quantizers:
          low: {until: 50%, use: {format: int8, scale: tensor}, then: bf16}
        rules:
        - {match: "*", op: [linear, "conv*"], x: low, w: low, dy: low}
    """,
    "promotion": """
        version: 1
        quantizers:
          i4: {format: int4, scale: tensor, promote: {to: bf16, underflow: 0.25}}
          f8: {format: e4m3, scale: tensor, promote: {to: keep, error: 0.026}}
        rules:
        - {match: "*", weight: i4, activation: f8}
    """,
    # Beside the eight: symmetric integers at bits that move, which native execution multiplies as INT8.
    "cr-symmetric": """
        version: 1
        schedules: {cr: {name: CR, low: 4, high: 8, cycles: 2}}
        quantizers:
          low: {format: int, bits: cr, scale: tensor}
          high: {format: int8, scale: tensor}
        rules:
        - {match: "*", op: [linear, "conv*"], x: low, w: low, dy: high}
    """,
    # Beside the eight: blocks and vectors, whose axes follow from the operand.
    "vector-mxfp8": """
        version: 1
        quantizers:
          v8: {format: e4m3, scale: vector}
          g8: {format: e5m2, scale: vector}
        rules:
        - {match: "*", op: [linear, "conv*"], fprop: v8, dgrad.dy: g8, dgrad.w: v8, wgrad: mxfp8}
    """,
    "fp8-linear": "fp8-linear",
    # Scales that are powers of two, and the halves of a gate rounded: what fused casts of gates and norms need.
    "fp8-gated": """
        version: 1
        quantizers:
          f8: {format: e4m3, scale: tensor, history: 16, power_of_two: true}
          g8: {format: e5m2, scale: tensor, history: 16, power_of_two: true}
        rules:
        - {match: "*", op: linear, x: f8, w: f8, dy: g8}
        - {match: ["*.gate", "*.up"], op: linear, activation: e4m3}
    """,
}

#: Plans of the full matrix; the others are for accelerators.
CPU_PLANS = tuple(plan for plan in PLANS if plan not in ("fp8-linear", "fp8-gated"))
#: The plans that compiled cases have.
COMPILED_PLANS = CPU_PLANS[:8]


#: What the compiled backward pass casts or computes again; the ids have these words.
RECOMPUTED = ("no", "weights", "inputs", "products")


@dataclass(frozen=True)
class Case:
    """One training run of :data:`STEPS` steps."""

    model: str
    plan: str
    execution: str
    compiler: str
    #: What the compiled backward pass casts again instead of saving it (native execution).
    recompute: str = "no"

    @property
    def id(self) -> str:
        recompute = "" if self.recompute == "no" else f"/recompute-{self.recompute}"
        return f"{self.model}/{self.plan}/{self.execution}/{self.compiler}{recompute}"


def plan_document(plan: str) -> str | dict[str, Any] | None:
    """A preset's name, a document, or None."""
    text = PLANS[plan]
    if text is None or "version" not in text:
        return text
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def skip_reason(case: Case) -> str | None:
    """Why a combination makes no sense."""
    if case.plan == "none" and case.execution != "emulate":
        return "without a plan every execution is the model as it is"
    if case.execution == "native" and case.plan in ("fp8-all", "promotion"):
        return "the plan gives no product's operand a format, so no product could run natively"
    return None


def eager_matrix() -> list[Case]:
    """Every combination without a compiler, those that are skipped among them."""
    return [Case(m, p, e, "eager") for m in MODELS for p in CPU_PLANS for e in EXECUTIONS]


def aot_eager_cases() -> list[Case]:
    return [Case(model, plan, "emulate", "aot_eager") for model in ("resnet", "gpt") for plan in COMPILED_PLANS]


def inductor_cases() -> list[Case]:
    chosen = (
        ("fp8-all", "packed"),
        ("fp8-linear-delayed", "native"),
        ("stochastic", "emulate"),
        ("cpt-cr", "emulate"),
        ("int8-minmax", "emulate"),
    )
    return [
        Case(model, plan, execution, "inductor") for model in ("resnet-tiny", "gpt-tiny") for plan, execution in chosen
    ]


def cpu_cases() -> list[Case]:
    """All that are stored for CPUs."""
    return [case for case in (*eager_matrix(), *aot_eager_cases(), *inductor_cases()) if skip_reason(case) is None]


def skipped() -> dict[str, str]:
    """Id -> reason."""
    reasons = {case.id: skip_reason(case) for case in eager_matrix()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def cuda_cases() -> list[Case]:
    """Cases of FP8 units and packed graphs on an accelerator."""
    cases = []
    for model in ("resnet-wide", "gpt-wide", "llama-bf16"):
        cases += [
            Case(model, "fp8-linear", "native", "inductor"),
            Case(model, "fp8-linear-delayed", "native", "inductor"),
            Case(model, "fp8-all", "packed", "inductor"),
        ]
    cases += [Case("llama-bf16", "fp8-gated", "native", "inductor", recompute) for recompute in RECOMPUTED]
    cases += [Case("gpt-wide", "fp8-linear-delayed", "native", "inductor", "inputs")]
    cases += [Case(model, "fp8-linear-delayed", "native", "eager") for model in ("gpt-wide", "llama-bf16")]
    return cases
