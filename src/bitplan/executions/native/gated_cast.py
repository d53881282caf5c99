"""silu(gate) * up and its two gradients, fused with their casts to float8.

The last layer of a gated MLP casts the product, and the two layers before it cast its gradients: the widest tensors of
a block. Inductor would write each in bfloat16 in one kernel and read it for the cast in another. With delayed scaling
the scale does not depend on their values, so one kernel can read gate and up and write codes:

* ``bitplan::gated_cast`` casts the product, and gate and up themselves where the plan rounds these to E4M3;
* ``bitplan::gated_grads_cast`` casts the gradients of gate and up, both in one pass;
* ``bitplan::gated_amax`` and ``bitplan::gated_grads_amax`` compute the amax, in partial results, in the first step.
  Later steps have a `history_amax`, and they do nothing.

`sources` pads the columns of groups of rows, as in :func:`bitplan.executions.native.float8_cast.cast_float8`.

Scales are powers of two. :mod:`bitplan.compiler.gated_fusion` puts these operations into graphs. On a GPU they are
Triton kernels (:mod:`bitplan.executions.native.gated_cast_kernel`), elsewhere the reference implementations in this
file. Both compute in float32, round once to bfloat16, as Inductor does, and cast as
:mod:`bitplan.executions.native.float8_cast` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import register
from bitplan.executions.native.float8_cast import (
    FORMATS,
    amax_reference,
    cast_reference,
    fake_amax,
    fake_cast,
    tile_count,
)
from bitplan.numerics.rounding import round_float

#: Dtypes of gate and up: values, or codes without a scale.
INPUT_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
#: Side of the tiles of the gradients' kernel, and how many of them, one below the other, a program casts.
SIDE, STEPS = 64, 4

Results = tuple[Tensor, ...]

_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "gated_amax(Tensor gate, Tensor up, Tensor history_amax, bool codes) -> Tensor",
    "gated_cast(Tensor gate, Tensor up, ScalarType dtype, Tensor partial_amax, Tensor history_amax, bool as_rows, "
    "bool as_columns, bool returns_amax, bool codes, Tensor? after=None, Tensor? sources=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "gated_grads_amax(Tensor grad, Tensor gate, Tensor up, Tensor gate_history_amax, Tensor up_history_amax) "
    "-> (Tensor, Tensor)",
    "gated_grads_cast(Tensor grad, Tensor gate, Tensor up, ScalarType dtype, Tensor gate_partial_amax, "
    "Tensor up_partial_amax, Tensor gate_history_amax, Tensor up_history_amax, bool as_rows, bool as_columns, "
    "bool returns_amax, Tensor? after=None, Tensor? sources=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def gated_product_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in bfloat16."""
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide)) * up.float()).bfloat16()


def gated_grads_reference(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up in bfloat16; `grad` is the product's gradient."""
    wide, incoming = gate.float(), grad.float()
    sigmoid = 1 / (1 + torch.exp(-wide))
    gate_grad = incoming * up.float() * sigmoid * (wide * (1 - sigmoid) + 1)
    return gate_grad.bfloat16(), (incoming * (wide / (1 + torch.exp(-wide)))).bfloat16()


def e4m3_reference(x: Tensor) -> Tensor:
    """`x` rounded to E4M3, saturating."""
    return round_float(x.float(), FORMATS[torch.float8_e4m3fn], "nearest", "saturate").to(torch.float8_e4m3fn)


def gated_amax_reference(gate: Tensor, up: Tensor, history_amax: Tensor, codes: bool) -> Tensor:
    if codes:
        gate, up = e4m3_reference(gate), e4m3_reference(up)
    return amax_reference(gated_product_reference(gate, up), history_amax)


def gated_cast_reference(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    partial_amax: Tensor,
    history_amax: Tensor,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    codes: bool,
    after: Tensor | None = None,
    sources: Tensor | None = None,
) -> Results:
    """The cast of the product, and the codes of gate and up, which are empty unless `codes`."""
    if codes:
        gate, up = e4m3_reference(gate), e4m3_reference(up)
    product = gated_product_reference(gate, up)
    layouts = (True, as_rows, as_columns, returns_amax)
    cast = cast_reference(product, dtype, partial_amax, history_amax, *layouts, sources=sources)
    empty = (torch.empty(0, 0, dtype=torch.float8_e4m3fn, device=gate.device) for _ in range(2))
    return (*cast, *((gate, up) if codes else empty))


def gated_grads_amax_reference(
    grad: Tensor, gate: Tensor, up: Tensor, gate_history_amax: Tensor, up_history_amax: Tensor
) -> tuple[Tensor, Tensor]:
    gate_grad, up_grad = gated_grads_reference(grad, gate, up)
    return amax_reference(gate_grad, gate_history_amax), amax_reference(up_grad, up_history_amax)


def gated_grads_cast_reference(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    gate_partial_amax: Tensor,
    up_partial_amax: Tensor,
    gate_history_amax: Tensor,
    up_history_amax: Tensor,
    as_rows: bool,
    as_columns: bool,
    returns_amax: bool,
    after: Tensor | None = None,
    sources: Tensor | None = None,
) -> Results:
    """The casts of both gradients: four results for gate, then four for up."""
    gate_grad, up_grad = gated_grads_reference(grad, gate, up)
    layouts = (True, as_rows, as_columns, returns_amax)
    return (
        *cast_reference(gate_grad, dtype, gate_partial_amax, gate_history_amax, *layouts, sources=sources),
        *cast_reference(up_grad, dtype, up_partial_amax, up_history_amax, *layouts, sources=sources),
    )


def grads_tile_count(rows: int, features: int) -> int:
    """The number of tiles that the gradients' kernel covers a matrix with."""
    return -(-rows // (SIDE * STEPS)) * STEPS * -(-features // SIDE)


def _sources(optional: list[Any]) -> Tensor | None:
    """The last argument of a cast, of the two that may be left out."""
    return optional[1] if len(optional) > 1 else None


def _fake_gated_cast(gate: Tensor, up: Tensor, dtype: torch.dtype, *args: Any) -> Results:
    _, _, as_rows, as_columns, returns_amax, codes, *optional = args
    cast = fake_cast(gate, dtype, as_rows, as_columns, returns_amax, tile_count, _sources(optional))
    input_codes = (gate.new_empty(gate.shape if codes else (0, 0), dtype=torch.float8_e4m3fn) for _ in range(2))
    return (*cast, *input_codes)


def _fake_grads_amax(grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return fake_amax(grad), fake_amax(grad)


def _fake_grads_cast(grad: Tensor, gate: Tensor, up: Tensor, dtype: torch.dtype, *args: Any) -> Results:
    _, _, _, _, as_rows, as_columns, returns_amax, *optional = args
    layouts = (as_rows, as_columns, returns_amax)
    casts = (fake_cast(grad, dtype, *layouts, grads_tile_count, _sources(optional)) for _ in range(2))
    return tuple(result for cast in casts for result in cast)


register(_LIBRARY, "gated_amax", gated_amax_reference, fake_amax, __name__)
register(_LIBRARY, "gated_cast", gated_cast_reference, _fake_gated_cast, __name__)
register(_LIBRARY, "gated_grads_amax", gated_grads_amax_reference, _fake_grads_amax, __name__)
register(_LIBRARY, "gated_grads_cast", gated_grads_cast_reference, _fake_grads_cast, __name__)
