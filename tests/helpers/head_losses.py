"""Models whose head computes its loss in chunks of tokens, and what is measured of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bitplan
from bitplan.runtime import head_loss_ops
from bitplan.runtime.head_loss import linear_cross_entropy


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        loop = getattr(head_loss_ops, f"_{func._opname}", None) if func.namespace == "bitplan" else None
        if loop is None:
            result = func(*args, **(kwargs or {}))
        else:
            with self:  # inside of our operations, too
                result = loop(*args)
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


CHUNK = 16
TENSOR = {"format": "int8", "scale": "tensor"}
VECTOR = {"format": "int8", "scale": "vector"}
RULES: dict[str, dict[str, Any]] = {
    "fp8": {"x": "e4m3", "w": "e4m3", "dy": "e5m2"},
    "fp8 scaled": {
        "x": {"format": "e4m3", "scale": "tensor"},
        "w": {"format": "e4m3", "scale": "tensor"},
        "dy": {"format": "e5m2", "scale": "tensor"},
    },
    "delayed": {
        "x": {"format": "e4m3", "scale": "tensor", "history": 4},
        "w": {"format": "e4m3", "scale": "tensor"},
        "dy": {"format": "e5m2", "scale": "tensor", "history": 4},
    },
    "int8": {"x": TENSOR, "w": TENSOR, "dy": TENSOR},
    "slots apart": {
        "fprop.x": "e4m3",
        "fprop.w": {"format": "e4m3", "scale": "tensor"},
        "dgrad.dy": VECTOR,
        "dgrad.w": "e5m2",
        "wgrad.x": TENSOR,
        "wgrad.dy": TENSOR,
    },
    "vectors": {"fprop.x": VECTOR, "fprop.w": VECTOR, "dgrad.dy": VECTOR, "dgrad.w": VECTOR, "wgrad.x": VECTOR},
    "minmax": {"x": TENSOR, "w": TENSOR, "dy": {**TENSOR, "range": "minmax"}},
    "blocks": {"fprop.x": "mxfp8", "fprop.w": "mxfp8", "dgrad.dy": "mxfp8", "dgrad.w": "mxfp8"},
    "weight": {"weight": {"format": "e4m3", "scale": "tensor"}, "grad_weight": {"format": "e5m2", "scale": "tensor"}},
    "stochastic x": {"x": {**TENSOR, "rounding": "stochastic"}, "w": {**TENSOR, "rounding": "stochastic"}},
    "gradient only": {"dgrad.dy": "e4m3"},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


class WholeLoss(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).float().flatten(0, 1), classes.flatten())


class ChunkedLoss(WholeLoss):
    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        hidden = torch.relu(self.model.body(x))
        return linear_cross_entropy(hidden, self.model.head, classes, chunk=CHUNK)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, classes = torch.randn(4, 9, 16), torch.randint(0, 64, (4, 9))
    classes[1, 3] = -100
    return x, classes


def trained(
    kind: type[WholeLoss],
    rule: dict[str, Any] | None,
    execution: Any = "emulate",
    compiled: bool = False,
    steps: int = 3,
) -> tuple[list[float], list[Tensor]]:
    """Losses of some steps, and the last gradients."""
    torch.manual_seed(0)
    model = Model()
    x, classes = batch()
    plan = {"version": 1, "rules": [{"match": "head", **(rule or {"activation": "bf16"})}]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    with bitplan.attach(model, plan, example=x, execution=execution, optimizer=optimizer) as run:
        if rule is None:
            run.detach()
        step: Any = run.compile(kind(model)) if compiled else kind(model)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = step(x, classes) * 0.7
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def assert_same(
    actual: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]], tolerance: float = 2e-6
) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=tolerance)
    for ours, theirs in zip(actual[1], expected[1], strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < tolerance
