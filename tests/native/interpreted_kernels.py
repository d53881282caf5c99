"""Holds the Triton kernels, interpreted on a CPU, against the plain torch beside them; prints how many cases agreed.

Triton's interpreter lacks four things that are put in here: a float8 conversion that rounds to nearest and saturates,
also where it is written as PTX, multiplication and addition with one rounding, and loops whose bounds are numbers of
the kernel.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bitplan.kernel_operations import itself
from bitplan.native.float8_cast import FORMATS, amax_in_torch, cast_in_torch

KINDS = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def complete(interpreter: Any) -> None:
    """Put in what is missing."""
    convert, patch = interpreter._convert_float, interpreter._patch_lang_tensor

    def converted(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        kind = KINDS.get(str(target))
        if kind is None:
            return convert(given, source, target, rounding)
        most = FORMATS[kind].max
        return torch.from_numpy(np.ascontiguousarray(given)).clamp(-most, most).to(kind).view(torch.uint8).numpy()

    def assembled(self: Any, asm: str, constraints: str, given: Any, types: Any, *more: Any) -> Any:
        """The one piece of PTX there is; what it is combined with counts."""
        kind = "fp8e4nv" if "e4m3x2" in asm else "fp8e5"
        codes = converted(given[0].data, None, kind, None) ^ given[1].data.astype(np.uint8)
        return SimpleNamespace(get_result=lambda number: interpreter.TensorHandle(codes, types[0].scalar))

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(np.float32), z.dtype)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float, interpreter._patch_lang_tensor = converted, patched
    interpreter.InterpreterBuilder.create_fma = fused
    interpreter.InterpreterBuilder.create_inline_asm = assembled


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, NaN being NaN."""
    one, other = one.float(), other.float()
    signs = torch.equal(one.signbit() | one.isnan(), other.signbit() | other.isnan())
    return signs and torch.equal(one.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0))


def samples() -> list[torch.Tensor]:
    torch.manual_seed(0)
    ragged = torch.randn(130, 150) * 7
    small = [
        [-3.0, 0.0, -0.0],
        [1e-40, -1e-39, 1e-45],
        [3e38, -1e38, 1.0],
        [torch.inf, 1.0, 2.0],
        [torch.nan, 1.0, 2.0],
    ]
    return [ragged, ragged.bfloat16(), *(torch.tensor([row]) for row in small)]


def main() -> int:
    """How many cases agreed."""
    import triton.runtime.interpreter as interpreter

    complete(interpreter)
    from bitplan.native.float8_cast_kernel import amax_by_kernel, cast_by_kernel

    agreed = 0
    np.seterr(all="ignore")
    for x in samples():
        for reach in (None, torch.tensor(0.0), torch.tensor(1.5)):
            ours, plain = amax_by_kernel(itself, x, reach), amax_in_torch(x, reach)
            assert reach == 1.5 or same(ours.amax(), plain.amax())
            for kind, power_of_two in itertools.product(FORMATS, (False, True)):
                for scaled in (True, False) if reach is None and not power_of_two else (True,):
                    rest = (reach, power_of_two, True, True, True)
                    parts = plain if power_of_two else ours  # one part, or many
                    one = cast_by_kernel(itself, x, kind, parts if scaled else None, *rest)
                    other = cast_in_torch(x, kind, plain if scaled else None, *rest)
                    assert all(same(*pair) for pair in zip(one[:3], other[:3], strict=True)), (x, rest, kind)
                    assert same(one[3].amax(), other[3].amax())
                    agreed += 1
    return agreed


if __name__ == "__main__":
    print(main())
