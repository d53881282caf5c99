"""Random small models, as the source code of their classes, each with the same computation rounded by hand.

A model is a list of statements (:mod:`statements`) over tensors of one shape. A case is drawn from a seed and nothing
else; :func:`source` writes its classes, and the functions that compute the same by hand.
"""

from __future__ import annotations

import linecache
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from rounded_by_hand import View
from statements import CALLS, KINDS, B, D, Kind, Masked, Swish, SwishByHand, T
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Statement:
    kind: str
    a: str
    b: str
    out: str
    number: int
    block: int = 0
    reentrant: bool = False

    @property
    def spelling(self) -> Kind:
        return KINDS.get(self.kind) or CALLS[self.kind]

    def text(self, template: str, indent: int) -> list[str]:
        filled = template.format(
            a=self.a, b=self.b, out=self.out, n=self.number, block=self.block, reentrant=self.reentrant
        )
        return [" " * indent + line for line in filled.splitlines()]


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and a plan."""

    body: tuple[Statement, ...]
    #: Statements of each block, which reads ``x`` only.
    blocks: tuple[tuple[Statement, ...], ...]
    block_outputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rules: tuple[dict[str, Any], ...]
    dtype: torch.dtype = torch.float32
    steps: int = 2
    seed: int = 0
    input_needs_grad: bool = True

    @property
    def statements(self) -> list[Statement]:
        return [*self.body, *(statement for block in self.blocks for statement in block)]

    @property
    def has_by_hand(self) -> bool:
        return all(statement.spelling.by_hand for statement in self.statements)

    @property
    def is_reentrant(self) -> bool:
        return any("checkpointed" in statement.kind and statement.reentrant for statement in self.statements)


def source(case: Case) -> str:
    """The classes of the model and of its blocks, and the functions that compute the same by hand."""
    lines: list[str] = []
    bodies = [
        (f"Block{at}", f"by_hand{at}", block, "x", case.block_outputs[at : at + 1])
        for at, block in enumerate(case.blocks)
    ]
    for name, function, body, arguments, outputs in [*bodies, ("Model", "by_hand", case.body, "x, y", case.outputs)]:
        lines += [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        if name == "Model":
            lines += [f"        self.block{at} = Block{at}()" for at in range(len(case.blocks))]
        for statement in body:
            lines += statement.text(statement.spelling.init, 8)
        lines += ["", f"    def forward(self, {arguments}):"]
        for statement in body:
            lines += statement.text(statement.spelling.code, 8)
        lines += [f"        return {', '.join(outputs)}", "", f"def {function}(h, m, {arguments}):"]
        for statement in body:
            lines += statement.text(statement.spelling.by_hand, 4)
        lines += [f"    return {', '.join(outputs)}", ""]
    return "\n".join(lines)


@lru_cache(maxsize=4)
def _module_of(text: str) -> ModuleType:
    """The source as a module, which torch.compile imports by its name."""
    name = "random_model"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(torch=torch, nn=nn, F=F, math=math, checkpoint=checkpoint, B=B, T=T, D=D)
    module.__dict__.update(View=View, Swish=Swish, SwishByHand=SwishByHand, Masked=Masked)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def build(case: Case) -> tuple[nn.Module, Callable[..., Any]]:
    """A new model, and the function that computes the same by hand."""
    module = _module_of(source(case))
    torch.manual_seed(case.seed)
    return module.Model().to(case.dtype), module.by_hand


def inputs_of(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Inputs that grow from step to step, so that delayed scales saturate."""
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    x, y = (torch.randn(B, T, D, generator=generator) * (1 + 0.5 * step) for _ in range(2))
    # A reentrant checkpoint has no gradients where none of its inputs has one.
    needs_grad = (case.input_needs_grad or case.is_reentrant, case.is_reentrant)
    return x.to(case.dtype).requires_grad_(needs_grad[0]), y.to(case.dtype).requires_grad_(needs_grad[1])


# --- Drawing


class Names:
    """The tensors of a body that may be read, and those that share memory."""

    def __init__(self, inputs: str) -> None:
        self.readable = inputs.split()
        #: May be written into: results of operations.
        self.writable: set[str] = set()
        self.aliases: dict[str, set[str]] = {name: {name} for name in self.readable}

    def add(self, name: str, view_of: str | None) -> None:
        self.readable.append(name)
        self.aliases[name] = {name}
        if view_of is None:
            self.writable.add(name)
            return
        self.aliases[name] |= self.aliases[view_of]
        if view_of in self.writable:
            self.writable.add(name)
        for other in self.aliases[name]:
            self.aliases[other] = self.aliases[name]

    def overwrite(self, name: str) -> None:
        """Others that share its memory are no longer what their statements made."""
        for other in self.aliases[name] - {name}:
            self.readable.remove(other)
            self.writable.discard(other)
        self.aliases[name] = {name}


def _draw_body(
    rng: random.Random, length: int, inputs: str, blocks: int, numbers: list[int]
) -> tuple[tuple[Statement, ...], list[str]]:
    """Statements, and the tensors that may be returned, the last one last."""
    names, body = Names(inputs), []
    for at in range(length):
        is_call = blocks and rng.random() < 0.3
        kind = rng.choice(list(CALLS if is_call else KINDS))
        if at == 0 and not is_call:
            kind = rng.choice(["linear", "linear", "x @ w.T", "conv1d", "RMS norm", "positions in a buffer", kind])
        spelling = KINDS.get(kind) or CALLS[kind]
        readable = names.readable[-4:]
        if spelling.in_place:
            targets = [name for name in readable if name in names.writable]
            if not targets:
                continue
            a = rng.choice(targets)
            names.overwrite(a)
        else:
            a = readable[-1] if rng.random() < 0.8 else rng.choice(readable)
        b = rng.choice(names.readable[-4:])
        numbers[0] += 1
        out = f"v{numbers[0]}"
        body.append(Statement(kind, a, b, out, numbers[0], rng.randrange(blocks) if is_call else 0, rng.random() < 0.3))
        if not spelling.in_place:
            names.add(out, a if spelling.is_view else None)
        if names.readable[-1] != a and spelling.in_place:
            names.readable.remove(a)  # read next
            names.readable.append(a)
    last = names.readable[-1]
    if not body or last in inputs.split():
        numbers[0] += 1
        body.append(Statement("linear", last, last, f"v{numbers[0]}", numbers[0]))
        names.add(body[-1].out, None)
    return tuple(body), [name for name in names.readable if name not in inputs.split()]


FORMATS: list[Any] = [
    *("e4m3", "e5m2", "e4m3", "e3m2"),
    *({"format": name, "scale": "tensor"} for name in ("e4m3", "e5m2", "int8", "int8")),
    {"format": "e4m3", "scale": "tensor", "power_of_two": True},
]
HISTORY: list[Any] = [
    {"format": "e4m3", "scale": "tensor", "history": 2},
    {"format": "int8", "scale": "tensor", "history": 1, "margin": 1},
]
VECTOR: list[Any] = [{"format": name, "scale": "vector"} for name in ("e4m3", "int8", "e5m2")]
NOISY: list[Any] = [
    {"format": "e4m3", "rounding": "stochastic"},
    {"format": "int8", "scale": "tensor", "rounding": "stochastic"},
]

ROLES = ("activation", "grad_activation", "weight", "grad_weight")
#: Operations that no kind of statement gives a weight.
WITHOUT_WEIGHT = frozenset(
    "sigmoid tanh relu gelu silu hardswish softmax masked_fill add sub div cat stack pow mean rsqrt".split()  # noqa: SIM905
)
PRODUCTS = ("linear", "matmul", "bmm", "addmm", "einsum", "conv1d", "conv2d", "conv_transpose1d")
SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")


def _draw_rule(rng: random.Random, place: tuple[str, str], formats: list[Any]) -> dict[str, Any]:
    """A rule for an operation that exists, or for more than it: a path, `place`, and an operation."""
    path, op = place
    rule: dict[str, Any] = {"match": "*" if rng.random() < 0.7 else path or "*"}
    if rng.random() < 0.35:
        rule["op"] = op
    is_product = op in PRODUCTS or (rule["match"] == "*" and "op" not in rule)
    style = rng.choice(["operands", "slots", "roles", "roles", "both"]) if is_product else "roles"
    if style in ("operands", "both"):
        pool = formats + (VECTOR * 2 if rng.random() < 0.3 else [])
        rule |= {key: rng.choice(pool) for key in rng.sample(["x", "w", "dy"], rng.choice([1, 2, 3, 3]))}
    if style == "slots":
        pool = formats + (VECTOR * 4 if rng.random() < 0.5 else [])
        rule |= {key: rng.choice(pool) for key in rng.sample(SLOTS, rng.choice([1, 2, 4, 6]))}
    if style in ("roles", "both"):
        has_weight = op not in WITHOUT_WEIGHT or ("op" not in rule and rule["match"] == "*")
        roles = ROLES if has_weight else ROLES[:2]
        rule |= {key: rng.choice(formats) for key in rng.sample(roles, rng.choice([1, 2, len(roles)]))}
        if "grad_activation" in rule and rng.random() < 0.15:
            rule["grad_at"] = "consumer"
    return rule


def _draw_rules(rng: random.Random, places: list[tuple[str, str]]) -> tuple[dict[str, Any], ...]:
    formats = list(FORMATS)
    if rng.random() < 0.25:
        formats += HISTORY * 3
    if rng.random() < 0.2:
        formats += NOISY * 4
    rules = [_draw_rule(rng, rng.choice(places), formats)]
    for _ in range(rng.choice([0, 0, 1, 2])):
        path, op = rng.choice(places)
        if rng.random() < 0.3:
            rules.append({"match": path or "*", "op": op, "keep": True})
        else:
            rules.append(_draw_rule(rng, (path, op), formats))
    return tuple(rules)


def draw(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    numbers = [0]
    blocks, block_outputs = [], []
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        block, names = _draw_body(rng, rng.choice([1, 2, 3, 4]), "x", 0, numbers)
        blocks.append(block)
        block_outputs.append(names[-1])
    body, names = _draw_body(rng, rng.choice([2, 3, 4, 5, 6, 8, 10]), "x y", len(blocks), numbers)
    outputs = [names[-1]]
    if rng.random() < 0.3:
        outputs.append(rng.choice(names))
    case = Case(
        body,
        tuple(blocks),
        tuple(block_outputs),
        tuple(dict.fromkeys(outputs)),
        (),
        dtype=rng.choice([torch.float32, torch.float32, torch.bfloat16]),
        steps=rng.choice([1, 2, 3]),
        seed=seed,
        input_needs_grad=rng.random() < 0.7,
    )
    places = [("", op) for statement in case.body for op in statement.spelling.ops.split()]
    for at, block in enumerate(case.blocks):
        places += [(f"block{at}", op) for statement in block for op in statement.spelling.ops.split()]
    for path, module in build(case)[0].named_modules():
        ops = {nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.LayerNorm: "layer_norm"}
        if type(module) in ops:
            places.append((path, ops[type(module)]))
    return replace(case, rules=_draw_rules(rng, places or [("", "*")]))
