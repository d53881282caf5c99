"""A small model with adapters, plans for its frozen weights, and a training loop, for the tests of this folder."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NF4 = {"match": "*", "frozen": {"format": "nf4", "scale": "block", "block": 64}}


def plan(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "rules": list(rules)}


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank product beside it."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.second = LoraLinear(96, 128, True), LoraLinear(128, 96, False)
        self.checkpoints = checkpoints
        self.to(dtype)

    def block(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        return self.block(x)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(dtype, **options)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 96, generator=torch.Generator().manual_seed(1)).to(dtype)


def train(model: nn.Module, forward: Any = None, steps: int = 3, run: Any = None) -> list[Tensor]:
    """Losses and the adapters after some steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    results = []
    x = batch(trained[0].dtype)
    for _ in range(steps):
        loss = (model if forward is None else forward)(x).float().square().mean()
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in trained)]
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step()
    return results


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


PLANS = {
    "nf4": plan(NF4),
    "int4": plan({"match": "*", "frozen": "int4"}),
    "e4m3": plan({"match": "*", "frozen": "e4m3"}),
    "int8": plan({"match": "*", "frozen": "int8"}),
    "mxfp4": plan({"match": "*", "frozen": "mxfp4"}),
    "e2m1": plan({"match": "*", "frozen": {"format": "e2m1", "scale": "block", "block": 32, "power_of_two": True}}),
    "operands": plan(NF4, {"match": "*", "op": "linear", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}),
    "slots": plan(
        NF4, {"match": "*", "op": "linear", "fprop": "e4m3", "dgrad": {"format": "e5m2", "rounding": "stochastic"}}
    ),
    "output": plan(NF4, {"match": "*", "op": "linear", "activation": "bf16", "grad_activation": "e5m2"}),
    "weight": plan(NF4, {"match": "*", "op": "linear", "weight": "e4m3"}),
}
