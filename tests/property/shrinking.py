"""Failing cases made smaller: one statement, rule, key or step less at a time, as long as the same property fails."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from model_checks import Discarded, check
from random_models import Case, Statement, source


def outcome_of(case: Case, compiled: str | None) -> tuple[str, str]:
    """The outcome of a case, and for a failure its message."""
    try:
        return check(case, compiled), ""
    except Discarded as error:
        return "discarded", str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error).partition("\n")[0]
        return "FAILED", f"{type(error).__name__}: {message} ({Path(where.filename).name}:{where.lineno})"


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less."""
    if case.steps > 1:
        yield replace(case, steps=case.steps - 1)
    for at, rule in enumerate(case.rules):
        for fewer in _smaller_rules(rule):
            yield replace(case, rules=(*case.rules[:at], fewer, *case.rules[at + 1 :]))
        if len(case.rules) > 1:
            yield replace(case, rules=(*case.rules[:at], *case.rules[at + 1 :]))
    for at in range(len(case.body)):
        body, outputs = _without(case.body, at, case.outputs)
        yield replace(case, body=body, outputs=outputs)
    for number, block in enumerate(case.blocks):
        for at in range(len(block)):
            shorter, outputs = _without(block, at, case.block_outputs)
            blocks = (*case.blocks[:number], shorter, *case.blocks[number + 1 :])
            yield replace(case, blocks=blocks, block_outputs=outputs)
    if len(case.outputs) > 1:
        yield replace(case, outputs=case.outputs[:1])
        yield replace(case, outputs=case.outputs[1:])
    if case.dtype != torch.float32:
        yield replace(case, dtype=torch.float32)
    if not case.input_needs_grad:
        yield replace(case, input_needs_grad=True)


def _smaller_rules(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rules without one key, or with a plain format in the place of a quantizer."""
    for key, value in rule.items():
        rest = {name: rule[name] for name in rule if name != key}
        if key != "match" and set(rest) - {"match", "op", "grad_at"}:
            yield rest
        if isinstance(value, dict):
            yield {**rule, key: value["format"]}


def _without(
    body: tuple[Statement, ...], at: int, outputs: tuple[str, ...]
) -> tuple[tuple[Statement, ...], tuple[str, ...]]:
    """The body without one statement, whose readers read its input instead."""
    removed = body[at]

    def renamed(name: str) -> str:
        return removed.a if name == removed.out else name

    rest = (replace(other, a=renamed(other.a), b=renamed(other.b)) for other in (*body[:at], *body[at + 1 :]))
    return tuple(rest), tuple(map(renamed, outputs))


def shrink(case: Case, compiled: str | None, message: str, seconds: float = 60) -> Case:
    """The smallest case with the same kind of failure that removing one thing at a time leads to."""
    kind, start = message.split(",")[0][:40], time.monotonic()
    while True:
        for smaller in _smaller(case):
            if time.monotonic() - start > seconds:
                return case
            outcome, text = outcome_of(smaller, compiled)
            if outcome == "FAILED" and text.split(",")[0][:40] == kind:
                case = smaller
                break
        else:
            return case


def report(case: Case, message: str) -> str:
    facts = f"rules: {list(case.rules)}\n{case.dtype}, {case.steps} steps, input needs grad: {case.input_needs_grad}"
    return f"seed {case.seed}: {message}\n{source(case)}\n{facts}\n"
