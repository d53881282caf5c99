"""Casting to float8 in both layouts: the codes of the quantizers, from one reading."""

from __future__ import annotations

import collections
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

import bitplan
from bitplan import Plan
from bitplan.compiler.partitioning import RecomputePartitioner, RecomputePolicy
from bitplan.executions.native.float8_cast import FORMATS, cast_float8
from bitplan.lab.models.language_models import LlamaBlocks
from bitplan.numerics.quantizer import make_quantizer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor"}
G8: dict[str, Any] = {"format": "e5m2", "scale": "tensor"}


def plan_of(**rule: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **rule}]})


def same(first: Tensor, second: Tensor) -> bool:
    """Equal to the bit, NaN being NaN."""
    first, second = first.float(), second.float()
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num().view(torch.int32), second.nan_to_num().view(torch.int32)
    )


SAMPLES: dict[str, Tensor] = {
    "random": torch.randn(37, 53, generator=torch.Generator().manual_seed(0)) * 7,
    "one": torch.tensor([[-3.0]]),
    "zeros": torch.tensor([[0.0, -0.0, 0.0]]),
    "tiny": torch.tensor([[1e-40, -1e-39, 1e-45]]),
    "huge": torch.tensor([[3e38, -1e38, 1.0]]),
    "infinite": torch.tensor([[torch.inf, -1.0, 2.0]]),
    "nan": torch.tensor([[torch.nan, -1.0, 2.0]]),
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_codes_are_those_of_the_quantizer(sample: str, dtype: torch.dtype, kind: torch.dtype) -> None:
    x = SAMPLES[sample].to(dtype)
    for scale, power_of_two in ((None, False), ("tensor", False), ("tensor", True)):
        quantizer = make_quantizer(FORMATS[kind], scale=scale, power_of_two=power_of_two)  # type: ignore[arg-type]
        expected = quantizer.encode(x)
        cast = cast_float8(x, kind, scaled=scale is not None, power_of_two=power_of_two)
        assert cast.rows.dtype == cast.columns.dtype == kind
        assert same(cast.rows, expected.elements)
        assert same(cast.columns, expected.elements.t())
        assert cast.columns.is_contiguous()
        assert same(cast.scale, expected.scales[0].reshape(()) if scale else torch.ones(()))


def test_a_reach_decides_where_it_is_known() -> None:
    x = torch.tensor([[1.0, -900.0, 3e38]])
    known = cast_float8(x, E4M3, history_amax=torch.tensor(896.0), returns_amax=True)
    assert known.rows.float().tolist() == [[0.5, -448.0, 448.0]]
    assert known.scale == 2
    assert known.tile_amax.amax() == torch.tensor(3e38)
    unknown = cast_float8(x, E4M3, history_amax=torch.tensor(0.0))
    assert torch.equal(unknown.rows.float(), cast_float8(x, E4M3).rows.float())
    assert unknown.tile_amax.numel() == 0


def test_an_empty_matrix_and_a_layout_that_is_not_asked_for() -> None:
    cast = cast_float8(torch.empty(0, 5), E4M3)
    assert cast.rows.shape == (0, 5)
    assert cast.columns.shape == (5, 0)
    assert cast_float8(torch.ones(2, 3), E4M3, as_rows=False).rows.numel() == 0
    assert cast_float8(torch.ones(2, 3), E4M3, as_columns=False).columns.numel() == 0


def test_torch_finds_the_operations_well_defined() -> None:
    x = torch.randn(5, 7)
    for history_amax in (None, torch.tensor(2.0)):
        torch.library.opcheck(torch.ops.bitplan.float8_amax, (x, history_amax))
        parts = torch.ops.bitplan.float8_amax(x, history_amax)
        arguments = (x, E4M3, parts, history_amax, False, True, True, True)
        torch.library.opcheck(torch.ops.bitplan.float8_cast, arguments)


def test_compiled_it_is_one_graph_for_all_sizes_and_gives_the_same() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cast = cast_float8(x, E5M2)
        return cast.rows, cast.columns, cast.scale

    counter = CompileCounter()  # type: ignore[no-untyped-call]
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((3, 5), (17, 130), (200, 64)):
        x = torch.randn(shape)
        for ours, plain in zip(compiled(x), both(x), strict=True):
            assert same(ours, plain)
    assert counter.frame_count == 1


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rule", "casts"),
    [
        ({"x": F8, "w": F8, "dy": G8}, 3),
        (dict.fromkeys(("fprop", "dgrad", "wgrad"), F8), 3),
        ({"fprop": F8, "dgrad": {**F8, "power_of_two": True}, "wgrad": F8}, 5),
        ({"x": "e4m3", "w": "e4m3", "dy": "e5m2"}, 3),
    ],
)
def test_a_step_reads_every_operand_once(rule: dict[str, Any], casts: int) -> None:
    model, x = nn.Linear(32, 16), torch.randn(6, 32, requires_grad=True)
    with bitplan.attach(model, plan_of(**rule), example=x, execution=bitplan.Native(min_macs=0)) as run:
        assert run.fallbacks() == []
        with Counted() as counted:
            model(x).sum().backward()
    assert counted.seen["bitplan::float8_cast"] == casts


@pytest.mark.parametrize(
    "quantizer",
    [{**F8, "rounding": "stochastic"}, {"format": "float", "bits": 8, "exponent_bits": 4, "scale": "tensor"}],
)
def test_what_is_more_than_a_cast_goes_the_long_way(quantizer: dict[str, Any]) -> None:
    model, x = nn.Linear(32, 16), torch.randn(6, 32, requires_grad=True)
    with (
        bitplan.attach(model, plan_of(x=quantizer, w=F8, dy=G8), example=x, execution=bitplan.Native(min_macs=0)),
        Counted() as counted,
    ):
        model(x).sum().backward()
    assert counted.seen["bitplan::float8_cast"] == 2


def test_of_a_layers_input_and_weight_a_byte_an_element_is_kept() -> None:
    model, x = nn.Linear(64, 8, bias=False), torch.randn(128, 64, requires_grad=True)
    kept: list[Tensor] = []
    with (
        bitplan.attach(model, plan_of(x=F8, w=F8, dy=G8), execution=bitplan.Native(min_macs=0)),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        model(x).sum().backward()
    assert sum(t.numel() * t.element_size() for t in kept) == 128 * 64 + 8 * 64 + 2 * 4


class Cut:
    """A backend of torch.compile that notes what is kept, and runs graphs as they are."""

    def __init__(self, partitioner: Any) -> None:
        self.bytes = 0
        self.casts: list[int] = []
        compilers = {name: lambda gm, arguments: self._noted(gm) for name in ("fw_compiler", "bw_compiler")}
        self.backend = aot_autograd(**compilers, partition_fn=partitioner, keep_inference_input_mutations=True)

    def _noted(self, gm: torch.fx.GraphModule) -> Any:
        nodes = gm.graph.nodes
        self.casts.append(sum(node.target is torch.ops.bitplan.float8_cast.default for node in nodes))
        if len(self.casts) == 1:
            (output,) = (node for node in nodes if node.op == "output")
            kept = [arg.meta["val"] for arg in output.args[0][1:] if arg.op != "placeholder"]
            sizes = {id(t.untyped_storage()): t.numel() * t.element_size() for t in kept if isinstance(t, Tensor)}
            self.bytes = sum(sizes.values())
        return torch._functorch.aot_autograd.make_boxed_func(gm.forward)


def gradients(again: str, cut: Cut | None, **more: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = LlamaBlocks(64, 1, 128, heads=2).bfloat16()
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    plan = plan_of(x=F8 | more, w=F8 | more, dy=G8 | more)
    execution = bitplan.Native(min_macs=0, recompute=() if again == "no" else again)
    with bitplan.attach(model, plan, example=x, execution=execution) as run:
        run._execution.recast_in_backward = execution.recast_operands
        called = model if cut is None else torch.compile(model, fullgraph=True, backend=cut.backend)
        called(x).sum().backward()
    return [p.grad.float() for p in (x, *model.parameters()) if p.grad is not None]


def test_a_graph_casts_what_several_layers_read_once_and_keeps_codes_or_casts_again() -> None:
    cuts = {
        "no": Cut(min_cut_rematerialization_partition),
        "weights": Cut(min_cut_rematerialization_partition),
        "inputs": Cut(RecomputePartitioner()),
        "products": Cut(RecomputePartitioner(RecomputePolicy(products=True))),
    }
    plain = gradients("no", None)
    for again, cut in cuts.items():
        for ours, eager in zip(gradients(again, cut), plain, strict=True):
            assert (ours - eager).norm() <= 1e-2 * eager.norm()
    # Four inputs (query, key and value share one, gate and up another) and seven weights; then seven gradients, and
    # what is cast again; the second half of the gate takes the codes of its operands once more, row by row.
    casts = {"no": [11, 7], "weights": [11, 14], "inputs": [11, 18], "products": [11, 20]}
    assert {again: cut.casts for again, cut in cuts.items()} == casts
    tokens, width, hidden = 64, 64, 128
    weights = 4 * width**2 + 3 * width * hidden
    assert cuts["no"].bytes - cuts["weights"].bytes == pytest.approx(weights, abs=100)
    assert cuts["weights"].bytes - cuts["inputs"].bytes == pytest.approx(tokens * (3 * width + hidden), abs=100)
    assert cuts["inputs"].bytes - cuts["products"].bytes == pytest.approx(2 * tokens * hidden, abs=100)


def test_with_scales_of_the_past_too_a_tensor_is_cast_once() -> None:
    cut = Cut(min_cut_rematerialization_partition)
    for ours, dynamic in zip(gradients("no", cut, history=4), gradients("no", None), strict=True):
        assert (ours - dynamic).norm() <= 1e-2 * dynamic.norm()  # a first step has no past
    assert cut.casts == [11, 7]


@pytest.mark.usefixtures("without_inductor")
def test_products_are_recomputed_without_changing_the_results() -> None:
    model, x = nn.Linear(32, 16), torch.randn(6, 32)
    execution = bitplan.Native(min_macs=0, recompute="products")
    with bitplan.attach(model, plan_of(x=F8, w=F8, dy=G8), example=x, execution=execution) as run:
        eager = model(x)
        assert torch.allclose(run.compile()(x), eager, atol=1e-5)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernels"
)
def test_the_kernels_give_the_same_bits() -> None:
    """In a process of their own: Triton decides when it is imported whether kernels are interpreted."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 50
