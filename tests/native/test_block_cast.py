"""Casting to E4M3 with scales for blocks in both layouts: the codes of the quantizers, from one reading."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import bitplan
from bitplan import Plan
from bitplan.compiler.partitioning import RecomputePartitioner, RecomputePolicy
from bitplan.executions.native.backends import Float8BlockBackend
from bitplan.executions.native.float8_block_cast import block_codes, cast_float8_blocks
from bitplan.executions.native.product import NativeSlots
from bitplan.lab.models.language_models import LlamaBlocks
from bitplan.numerics.quantizer import make_quantizer

LINE: dict[str, Any] = {"format": "e4m3", "scale": "block", "block": [1, 128]}
TILE: dict[str, Any] = {"format": "e4m3", "scale": "block", "block": [128, 128]}
RECIPE: dict[str, Any] = {"fprop.x": LINE, "wgrad.x": LINE, "dgrad.dy": LINE, "wgrad.dy": LINE, "w": TILE}
pytestmark = pytest.mark.filterwarnings("ignore:.*(is|are) emulated:bitplan.errors.BitplanWarning")


def same(first: Tensor, second: Tensor) -> bool:
    """Equal to the bit, NaN being NaN."""
    first, second = first.float(), second.float()
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num().view(torch.int32), second.nan_to_num().view(torch.int32)
    )


def mixed(rows: int, features: int) -> Tensor:
    """Lines and tiles of all magnitudes, some of zeros, one with infinity, one with NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=generator) * torch.logspace(-44, 37, rows)[:, None]
    x[rows // 5], x[:, features // 3] = 0.0, -0.0
    x[rows // 2, features // 2], x[rows - 1, features - 1] = torch.inf, torch.nan
    return x


@pytest.mark.parametrize("shape", [(256, 384), (150, 260), (1, 1), (40, 128), (128, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_codes_and_scales_are_those_of_the_quantizer(
    shape: tuple[int, int], dtype: torch.dtype, power_of_two: bool
) -> None:
    x = mixed(*shape).to(dtype)
    for tiles, by_row in ((False, True), (False, False), (True, True), (True, False)):
        block, axis = ((128, 128), (0, 1)) if tiles else ((1, 128), (0, 1) if by_row else (1, 0))
        quantizer = make_quantizer("e4m3", scale="block", block=block, axis=axis, power_of_two=power_of_two)
        expected, blocks = quantizer.encode(x), quantizer.blocks(x)
        assert blocks is not None
        cast = cast_float8_blocks(x, tiles=tiles, power_of_two=power_of_two, as_rows=by_row, as_columns=not by_row)
        codes = block_codes(cast, tiles, by_row)
        assert codes.values.dtype == torch.float8_e4m3fn
        assert (codes.values if by_row else codes.values.t()).is_contiguous()
        assert same(codes.values, blocks.join(expected.elements, x.shape))
        grid = expected.scales[0].squeeze(-1)
        assert same(codes.scale, grid if tiles or by_row else grid.t())


def test_a_layout_that_is_not_requested_and_an_empty_matrix() -> None:
    assert cast_float8_blocks(torch.ones(2, 3), tiles=False, as_rows=False).rows.numel() == 0
    assert cast_float8_blocks(torch.ones(2, 3), tiles=True, as_columns=False).column_scales.numel() == 0
    cast = cast_float8_blocks(torch.empty(0, 5), tiles=False)
    assert cast.rows.shape == (0, 5)
    assert cast.columns.shape == (5, 0)


@pytest.mark.parametrize("tiles", [False, True])
def test_torch_finds_the_operation_well_defined(tiles: bool) -> None:
    torch.library.opcheck(torch.ops.bitplan.float8_block_cast, (torch.randn(150, 40), tiles, False, True, True))


# --- In products


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """In place of ``scaled_mm`` a product of the codes; records whether operands came in the GEMM's memory layout."""
    fits: list[bool] = []

    def scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, _a: Any, scale_b: Tensor, _b: Any, output_dtype: Any
    ) -> Tensor:
        fits.append(a.is_contiguous() and b.t().is_contiguous())
        weight = scale_a.double().sum() * scale_b.double().sum()
        return (a.double() @ b.double() * weight).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm, raising=False)
    monkeypatch.setattr(Float8BlockBackend, "is_available", lambda self, device: device.type == "cpu")
    return fits


def plan_of(**rule: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **rule}]})


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def step(rule: dict[str, Any], *shape: int) -> tuple[list[Tensor], int]:
    """Results of a layer's step, and how often an operand was cast."""
    torch.manual_seed(0)
    model, x = nn.Linear(256, 384), torch.randn(*shape, 256).exp().requires_grad_()
    with (
        bitplan.attach(model, plan_of(**rule), example=x, execution=bitplan.Native(min_macs=0)) as run,
        Counted() as counted,
    ):
        assert run.fallbacks() == []
        y = model(x)
        y.backward(torch.randn(y.shape).exp())
    assert x.grad is not None
    results = [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
    return results, counted.seen["bitplan::float8_block_cast"]


LINES = dict.fromkeys(("fprop", "dgrad", "wgrad"), LINE)


@pytest.mark.parametrize("shape", [(256,), (2, 128)])
@pytest.mark.parametrize(
    ("rule", "casts"),
    [
        (RECIPE, 3),
        (LINES, 3),
        ({**LINES, "dgrad": {**LINE, "power_of_two": True}}, 5),
        ({**RECIPE, "w": {**TILE, "power_of_two": True}}, 3),
    ],
)
def test_a_step_casts_every_operand_once_and_products_do_not_change(
    rule: dict[str, Any], casts: int, shape: tuple[int, ...], unit: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, count = step(rule, *shape)
    assert count == casts
    assert unit == [True] * 3
    monkeypatch.setattr(NativeSlots, "_block_layout", lambda *_: None)
    others, count = step(rule, *shape)
    assert count == 0
    assert all(map(torch.equal, ours, others))


@pytest.mark.parametrize("quantizer", [{**LINE, "rounding": "stochastic"}, {**LINE, "rounding": "nearest-away"}])
def test_what_is_more_than_a_cast_is_left_to_the_quantizer(quantizer: dict[str, Any], unit: list[bool]) -> None:
    assert step({**RECIPE, "fprop.x": quantizer, "wgrad.x": quantizer}, 256)[1] == 2


def products_by_hand(graph: fx.Graph, device: str) -> None:
    """Replace the products of blocks in a graph, which no CPU has."""

    def product(a: Tensor, b: Tensor, scale_a: Any, _a: Any, _: Any, scale_b: Any, *rest: Any) -> Tensor:
        weight = scale_a[0].double().sum() * scale_b[0].double().sum()
        return (a.double() @ b.double() * weight).to(rest[3])

    for node in graph.nodes:
        if node.target is torch.ops.aten._scaled_mm_v2.default:
            node.target = product


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this torch has no torch.nn.functional.scaled_mm")
def test_a_graph_casts_what_several_layers_read_once_and_again_in_the_backward_pass(
    rewriting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Float8BlockBackend, "is_available", lambda self, device: device.type == "cpu")
    cuts = {
        "no": rewriting(min_cut_rematerialization_partition, products_by_hand),
        "inputs": rewriting(RecomputePartitioner(), products_by_hand),
        "products": rewriting(RecomputePartitioner(RecomputePolicy(products=True)), products_by_hand),
    }
    torch.manual_seed(0)
    model, x = LlamaBlocks(128, 1, 256, heads=2).bfloat16(), torch.randn(2, 128, 128).bfloat16().requires_grad_()
    grads = {}
    for recompute, cut in cuts.items():
        model.zero_grad()
        x.grad = None
        grads[recompute] = cut.gradients(model, x, plan_of(**RECIPE), () if recompute == "no" else recompute)
    for recompute in ("inputs", "products"):
        assert all(map(torch.equal, grads["no"], grads[recompute]))
    # Four inputs (query, key and value share one, gate and up another) and seven weights; then seven gradients, and
    # the inputs and weights that are cast again; the second half of the gate takes the codes of its operands once more.
    casts = {key: [graph.get("float8_block_cast") for graph in cut.seen[:2]] for key, cut in cuts.items()}
    assert casts == {"no": [11, 7], "inputs": [11, 18], "products": [11, 20]}
