"""What torch finds out about our kernels before it compiles them into a graph: which of their arguments they write.

Where one tensor is given for several arguments, as for those that a variant does not use, an argument that is wrongly
taken for written replaces results by copies that nobody has written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bitplan.compiler.launching import written_tensors
from bitplan.compiler.torch_private import triton_access_analyses

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Recorded:
    """A kernel that notes its arguments instead of being launched."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int) -> None:
            self.launches.append((self.kernel, dict(zip(self.kernel.arg_names, arguments, strict=False))))

        return launch


def written_by(launch: Callable[..., Any], *arguments: Any, **options: Any) -> list[set[str]]:
    """Of each kernel that is launched, the arguments that torch takes for written."""
    launches: list[tuple[Any, dict[str, Any]]] = []
    launch(lambda kernel: Recorded(kernel, launches), *arguments, **options)
    (analyse,) = triton_access_analyses().values()
    return [written_tensors(analyse(kernel, arguments, {})) for kernel, arguments in launches]


def test_kernels_write_their_results_and_nothing_else() -> None:
    from bitplan.executions.native.float8_block_cast_kernel import launch_float8_block_cast
    from bitplan.executions.native.float8_cast_kernel import launch_float8_cast, launch_float8_padded_cast
    from bitplan.executions.native.gated_cast_kernel import launch_gated_cast, launch_gated_grads_cast

    codes, blocks = {"as_rows", "as_columns"}, {"as_rows", "as_columns", "row_scales", "column_scales"}
    grads = {f"{half}_{name}" for half in ("gate", "up") for name in ("rows", "columns", "scale")}
    with FakeTensorMode():
        x, y = (torch.empty(512, 256, dtype=torch.bfloat16) for _ in range(2))
        partial_amax, record, history = torch.empty(512), torch.empty(4), torch.empty(())
        sources = torch.empty(640, dtype=torch.int32)
        scaling: tuple[Tensor, Tensor] = partial_amax, history
        for dtype in (E4M3, E5M2):
            layouts = (x, dtype, *scaling, True, True, True, False)
            assert written_by(launch_float8_cast, *layouts) == [codes | {"scale_out"}]
            recording = {"records": (record,), "cells": (1,)}
            assert written_by(launch_float8_cast, *layouts, **recording) == [codes | {"scale_out", "record_0"}]
            padded = (x, sources, dtype, *scaling, True, True, False)
            assert written_by(launch_float8_padded_cast, *padded) == [codes | {"scale_out"}]
        for matrix in (x, x.float()):
            for tiles in (False, True):
                assert written_by(launch_float8_block_cast, matrix, tiles, False, True, True) == [blocks]
                one = {"as_columns", "column_scales"}
                assert written_by(launch_float8_block_cast, matrix, tiles, False, False, True) == [one]
        for rows in (None, sources):
            gated = (x, y, E4M3, *scaling, True, True, False)
            assert written_by(launch_gated_cast, *gated, False, None, rows) == [codes | {"scale_out"}]
            coded = codes | {"scale_out", "gate_codes", "up_codes"}
            assert written_by(launch_gated_cast, *gated, True, None, rows) == [coded]
            amaxes = (partial_amax, partial_amax, history, history)
            assert written_by(launch_gated_grads_cast, x, x, y, E5M2, *amaxes, True, True, False, None, rows) == [grads]
