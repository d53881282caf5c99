"""A look at the operands of torch's own products, below autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OperandSpy(TorchDispatchMode):
    """The operands of torch's own products, forward and backward, that lie on no FP8 grid."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.unrounded: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in (
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "addbmm",
            "mv",
            "addmv",
            "dot",
            "vdot",
            "convolution",
            "_grouped_mm",
        ):
            self.count += 1
            skipped = 1 if name.startswith(("add", "baddbmm")) else 0
            for operand in [value for value in args[skipped:] if isinstance(value, Tensor)][:2]:
                is_rounded = any(
                    torch.equal(operand, operand.to(dtype).to(operand.dtype))
                    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
                )
                if operand.is_floating_point() and not is_rounded:
                    self.unrounded.append(name)
        return func(*args, **(kwargs or {}))
