"""Which layout the operands of a product have, by how it was called."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bitplan.errors import MetricError, QuantizeError
from bitplan.gemm.convolutions import Convolution
from bitplan.gemm.matrices import Layout, einsum_layout, linear_layout, matmul_layout
from bitplan.gemm.products import product_of


def layout_of(op: str, args: Any, kwargs: dict[str, Any], x: Tensor, w: Tensor) -> Layout:
    """How the product that was called so lays its operands out; :class:`MetricError` where that is not known."""
    if op == "linear":
        return linear_layout()
    if op == "einsum":
        return einsum_layout(args[0], x, w)
    if not op.startswith("conv"):
        return matmul_layout(x, w)
    try:
        product, _ = product_of(op, args, kwargs)
    except QuantizeError as error:
        raise MetricError(str(error)) from error
    return Convolution(*product.settings)
