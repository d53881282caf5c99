"""Noticing matrix products wherever they hide, so that a cost can refuse to overlook one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

#: torch's own products, as functions of any kind (custom, composite, from other libraries) end in them.
ATEN_PRODUCTS = frozenset(
    """
    mm bmm addmm baddbmm addbmm mv addmv dot vdot convolution _convolution convolution_overrideable _trilinear
    _sparse_mm _sparse_addmm _sparse_sparse_matmul sspaddmm hspmm sparse_sampled_addmm _int_mm _scaled_mm _grouped_mm
    _scaled_grouped_mm mkldnn_rnn_layer _thnn_fused_lstm_cell _cudnn_rnn miopen_rnn _mkldnn_linear mkldnn_linear
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _flash_attention_forward
    _efficient_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)


class ProductWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of aten's products among everything that runs inside it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in ATEN_PRODUCTS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
