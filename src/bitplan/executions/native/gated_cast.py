"""silu(gate) * up and its two gradients, computed where they are cast to float8.

A gate's product is what the last layer of a perceptron casts, and its gradients are what the two layers before it cast:
the widest tensors of a block. Left to Inductor each is written in bfloat16 by one kernel and read again by the cast.
Where the scale is known from past steps, nothing else has to look at them first, and a kernel that reads gate and up
can write codes at once:

* ``bitplan::gated_cast`` for the product, and for the codes of gate and up, where these are rounded to E4M3 themselves;
* ``bitplan::gated_grads_cast`` for the gradients of gate and up, both from one reading;
* ``bitplan::gated_amax`` and ``bitplan::gated_grads_amax`` look for the largest magnitudes, in parts, while there is no
  past: else they do nothing.

Scales are powers of two. Graphs get these operations by :mod:`bitplan.compiler.gated_fusion`. On a GPU they are Triton
kernels (:mod:`bitplan.executions.native.gated_cast_kernel`), elsewhere the plain torch below, which says what they
compute: in
float32, rounded once to bfloat16, as Inductor does, and then cast as :mod:`bitplan.executions.native.float8_cast` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitplan.compiler.kernel_ops import itself, register
from bitplan.executions.native.float8_cast import (
    FORMATS,
    amax_reference,
    cast_reference,
    fake_amax,
    fake_cast,
    tiles_of,
)
from bitplan.numerics.rounding import round_float

#: What gate and up may be: numbers, or codes without a scale.
READ = (torch.bfloat16, torch.float8_e4m3fn)
#: A program of the gradients' kernel takes so many squares of this side, one below the other.
SIDE, STEPS = 64, 4

Results = tuple[Tensor, ...]

_LIBRARY: Any = torch.library.Library("bitplan", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "gated_amax(Tensor gate, Tensor up, Tensor reach, bool codes) -> Tensor",
    "gated_cast(Tensor gate, Tensor up, ScalarType dtype, Tensor parts, Tensor reach, bool as_rows, bool as_columns, "
    "bool gathers, bool codes, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "gated_grads_amax(Tensor grad, Tensor gate, Tensor up, Tensor gate_reach, Tensor up_reach) -> (Tensor, Tensor)",
    "gated_grads_cast(Tensor grad, Tensor gate, Tensor up, ScalarType dtype, Tensor gate_parts, Tensor up_parts, "
    "Tensor gate_reach, Tensor up_reach, bool as_rows, bool as_columns, bool gathers, Tensor? after=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def gated_product_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in bfloat16."""
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide)) * up.float()).bfloat16()


def gated_grads_reference(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The product's gradients by gate and by up in bfloat16, given that by the product."""
    wide, incoming = gate.float(), grad.float()
    sigmoid = 1 / (1 + torch.exp(-wide))
    to_gate = incoming * up.float() * sigmoid * (wide * (1 - sigmoid) + 1)
    return to_gate.bfloat16(), (incoming * (wide / (1 + torch.exp(-wide)))).bfloat16()


def e4m3_reference(x: Tensor) -> Tensor:
    """Rounded to E4M3, saturating."""
    return round_float(x.float(), FORMATS[torch.float8_e4m3fn], "nearest", "saturate").to(torch.float8_e4m3fn)


def gated_amax_reference(gate: Tensor, up: Tensor, reach: Tensor, codes: bool) -> Tensor:
    if codes:
        gate, up = e4m3_reference(gate), e4m3_reference(up)
    return amax_reference(gated_product_reference(gate, up), reach)


def gated_cast_reference(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    parts: Tensor,
    reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    codes: bool,
    after: Tensor | None = None,
) -> Results:
    """The product as a cast gives it, and the codes of gate and up, empty where they were not asked for."""
    if codes:
        gate, up = e4m3_reference(gate), e4m3_reference(up)
    cast = cast_reference(gated_product_reference(gate, up), dtype, parts, reach, True, as_rows, as_columns, gathers)
    nothing = (torch.empty(0, 0, dtype=torch.float8_e4m3fn, device=gate.device) for _ in range(2))
    return (*cast, *((gate, up) if codes else nothing))


def gated_grads_amax_reference(
    grad: Tensor, gate: Tensor, up: Tensor, gate_reach: Tensor, up_reach: Tensor
) -> tuple[Tensor, Tensor]:
    to_gate, to_up = gated_grads_reference(grad, gate, up)
    return amax_reference(to_gate, gate_reach), amax_reference(to_up, up_reach)


def gated_grads_cast_reference(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    gate_parts: Tensor,
    up_parts: Tensor,
    gate_reach: Tensor,
    up_reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
) -> Results:
    """Both gradients as casts give them: four results of the gate's, then four of the other."""
    to_gate, to_up = gated_grads_reference(grad, gate, up)
    return (
        *cast_reference(to_gate, dtype, gate_parts, gate_reach, True, as_rows, as_columns, gathers),
        *cast_reference(to_up, dtype, up_parts, up_reach, True, as_rows, as_columns, gathers),
    )


def squares_of(rows: int, features: int) -> int:
    """How many squares the gradients' kernel covers a matrix with."""
    return -(-rows // (SIDE * STEPS)) * STEPS * -(-features // SIDE)


def _gated_amax_launched(*given: Any, wrap: Any = itself) -> Tensor:
    from bitplan.executions.native.gated_cast_kernel import gated_amax_by_kernel

    return gated_amax_by_kernel(wrap, *given)


def _gated_cast_launched(*given: Any, wrap: Any = itself, **noted: Any) -> Results:
    from bitplan.executions.native.gated_cast_kernel import gated_cast_by_kernel

    return gated_cast_by_kernel(wrap, *given, **noted)


def _grads_amax_launched(*given: Any, wrap: Any = itself) -> tuple[Tensor, Tensor]:
    from bitplan.executions.native.gated_cast_kernel import grads_amax_by_kernel

    return grads_amax_by_kernel(wrap, *given)


def _grads_cast_launched(*given: Any, wrap: Any = itself, **noted: Any) -> Results:
    from bitplan.executions.native.gated_cast_kernel import grads_cast_by_kernel

    return grads_cast_by_kernel(wrap, *given, **noted)


def _gated_amax_of_shape(gate: Tensor, up: Tensor, reach: Tensor, codes: bool) -> Tensor:
    return fake_amax(gate)


def _gated_cast_of_shape(
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    parts: Tensor,
    reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    codes: bool,
    after: Tensor | None = None,
) -> Results:
    cast = fake_cast(gate, dtype, as_rows, as_columns, gathers, tiles_of(*gate.shape))
    small = (gate.new_empty(gate.shape if codes else (0, 0), dtype=torch.float8_e4m3fn) for _ in range(2))
    return (*cast, *small)


def _grads_amax_of_shape(grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return fake_amax(grad), fake_amax(grad)


def _grads_cast_of_shape(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    gate_parts: Tensor,
    up_parts: Tensor,
    gate_reach: Tensor,
    up_reach: Tensor,
    as_rows: bool,
    as_columns: bool,
    gathers: bool,
    after: Tensor | None = None,
) -> Results:
    tiles = squares_of(*grad.shape)
    both = (fake_cast(grad, dtype, as_rows, as_columns, gathers, tiles) for _ in range(2))
    return tuple(part for cast in both for part in cast)


for _name, _launched, _in_torch, _of_shape in (
    ("gated_amax", _gated_amax_launched, gated_amax_reference, _gated_amax_of_shape),
    ("gated_cast", _gated_cast_launched, gated_cast_reference, _gated_cast_of_shape),
    ("gated_grads_amax", _grads_amax_launched, gated_grads_amax_reference, _grads_amax_of_shape),
    ("gated_grads_cast", _grads_cast_launched, gated_grads_cast_reference, _grads_cast_of_shape),
):
    register(_LIBRARY, _name, _launched, _in_torch, _of_shape, (__name__, f"{__name__}_kernel"))
