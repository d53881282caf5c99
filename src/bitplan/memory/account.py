"""What a training step holds in memory, class by class."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

import torch

from bitplan.errors import AccountError
from bitplan.sizes import byte_text

#: What each figure means, in the order of the table.
MEANINGS = {
    "weights": "parameters and buffers",
    "optimizer": "the optimizer's state",
    "activations": "kept for the backward pass, when the forward pass has ended",
    "gradients": "of the parameters, when the backward pass has ended",
    "other": "what else lives at the peak: the batch, tensors on their way, workspaces",
    "peak": "the most that lives at any moment of a step",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step: forward, loss, backward, optimizer.

    Weights and optimizer state live all the time. Activations die while gradients are born, so the two do not add up:
    ``peak = weights + optimizer + max(activations, gradients) + other``.
    """

    weights: int
    gradients: int
    activations: int
    optimizer: int
    other: int
    peak: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 0:
                raise AccountError(f"{field.name} are bytes, a whole number from 0, not {value!r}.")
        if self.peak != self.weights + self.optimizer + max(self.activations, self.gradients) + self.other:
            raise AccountError("these classes do not make up the peak: use Memory.of, which takes other from it.")

    @classmethod
    def of(cls, weights: int, gradients: int, activations: int, optimizer: int, peak: int) -> Memory:
        """With what remains of the peak as ``other``. (Sizes of a graph that was made for any batch are symbols.)"""
        given: tuple[Any, ...] = (weights, gradients, activations, optimizer, peak)
        weights, gradients, activations, optimizer, peak = (
            int(size) if isinstance(size, torch.SymInt) else size for size in given
        )
        known = weights + optimizer + max(activations, gradients)
        # What is counted tensor by tensor is there at the peak; an allocator may say a few bytes less.
        peak = max(peak, known)
        return cls(weights, gradients, activations, optimizer, peak - known, peak)

    def to_dict(self) -> dict[str, int]:
        """Plain numbers of bytes by class, the peak among them."""
        return asdict(self)

    def rows(self) -> list[tuple[str, int, str]]:
        """(class, bytes, meaning), the peak last."""
        return [(name, getattr(self, name), meaning) for name, meaning in MEANINGS.items()]

    def __str__(self) -> str:
        return "\n".join(f"{name:<12}{byte_text(count):>12}  {meaning}" for name, count, meaning in self.rows())

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:right">{byte_text(count)}</td>'
            f'<td style="text-align:left">{escape(meaning)}</td></tr>'
            for name, count, meaning in self.rows()
        )
        return f"<table><tbody>{rows}</tbody></table>"
