"""Packed execution, compiled: the numbers of emulate in float32, and a graph that keeps codes instead of tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graph_backend import compile_without_inductor
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import bitplan
from bitplan.compiler import partitioning
from bitplan.compiler.partitioning import PackedPartitioner
from bitplan.lab.models.language_models import GPT
from bitplan.lab.models.resnet import BasicBlock
from bitplan.plans import Plan


def plan_of(**places: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", **places}]})


PLANS = {
    "unscaled": plan_of(activation="e4m3", grad_activation="e5m2"),
    "scaled": plan_of(activation={"format": "int8", "scale": "tensor"}, grad_activation="e5m2"),
    "min-max": plan_of(activation={"format": "int4", "scale": "tensor", "range": "minmax"}),
    "three bits": plan_of(activation={"format": "e1m1none", "scale": "tensor"}),
    "sixteen bits": plan_of(activation="bf16"),
    "stochastic": plan_of(activation={"format": "e3m2", "rounding": "stochastic"}),
    "blocks": plan_of(activation="mxfp8"),
}
Made = tuple[nn.Module, Tensor]


class Residual(nn.Module):
    """A block of a residual network: enough for chains of codes, and quick to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3, padding=1), BasicBlock(8, 8, 1, "conv")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.stem(x).relu())  # type: ignore[no-any-return]


def residual() -> Made:
    return Residual(), torch.randn(4, 3, 16, 16)


def convolutions() -> Made:
    """A chain of codes as in a block, without the sum: half as long to trace."""
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


def transformer() -> Made:
    return GPT(tokens=64, length=32, layers=1, heads=2, features=32), torch.randint(64, (4, 32))


class Residuals(nn.Module):
    """Blocks of a transformer without attention: norm, linear layer, sum."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(blocks))
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return x


def residuals() -> Made:
    return Residuals(2), torch.randn(32, 64)


class Graphs:
    """A backend that runs what the partitioner makes as it is, and counts the bytes between the two parts."""

    def __init__(self, partition: Any) -> None:
        self.partition, self.kept = partition, 0
        self.types: dict[torch.dtype, int] = {}

    def split(self, gm: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        forward, backward = self.partition(gm, inputs, **settings)
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        for node in output.args[0][settings["num_fwd_outputs"] :]:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and node.op != "placeholder":
                size = value.numel() * value.element_size()
                self.kept += size
                self.types[value.dtype] = self.types.get(value.dtype, 0) + size
        return forward, backward

    def backend(self) -> Any:
        def run(gm: fx.GraphModule, inputs: Any) -> Any:
            def boxed(arguments: list[Any]) -> Any:
                return gm.forward(*arguments)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        decompositions = select_decomp_table()
        return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=self.split, decompositions=decompositions)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """An embedding's gradient is summed in any order by several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(made: Made, plan: Plan | None, execution: str, graphs: Graphs) -> list[Tensor]:
    torch.compiler.reset()
    model, x = copy.deepcopy(made[0]), made[1]
    run = None if plan is None else bitplan.attach(model, plan, example=x, execution=execution)
    y = torch.compile(model, fullgraph=True, backend=graphs.backend())(x)
    y.square().mean().backward()
    if run is not None:
        run.detach()
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture
def _any_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitplan.executions.packed.execution.refuse_other_backends", lambda: None)


def compared(made: Made, plan: Plan) -> tuple[Graphs, Graphs]:
    emulated, packed = Graphs(min_cut_rematerialization_partition), Graphs(PackedPartitioner())
    a, b = trained(made, plan, "emulate", emulated), trained(made, plan, "packed", packed)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return emulated, packed


@functools.cache
def packed_and_emulated(name: str, make: Callable[[], Made]) -> tuple[Graphs, Graphs]:
    torch.manual_seed(0)
    return compared(make(), PLANS[name])


CASES = {
    "unscaled": (residual, transformer),
    "scaled": (residual, convolutions),
    "min-max": (convolutions,),
    "three bits": (convolutions,),
    "sixteen bits": (convolutions,),
    "stochastic": (convolutions,),
    "blocks": (residuals,),  # the rows of convolutions are shorter than a block
}


@pytest.mark.usefixtures("_any_backend")
@pytest.mark.parametrize(("name", "make"), [(name, make) for name, makers in CASES.items() for make in makers])
def test_a_packed_graph_computes_the_same_bits_and_keeps_codes(name: str, make: Callable[[], Made]) -> None:
    emulated, packed = packed_and_emulated(name, make)
    small = sum(size for dtype, size in packed.types.items() if dtype.itemsize <= 2)
    assert small > 0.55 * packed.kept  # the rest: attention's result, which its backward pass reads, and small factors
    assert packed.kept < emulated.kept / (1.9 if name == "sixteen bits" else 3.5)
    if make is residual and name == "unscaled":  # at most two sevenths of float32
        torch.manual_seed(0)
        plain = Graphs(min_cut_rematerialization_partition)
        trained(make(), None, "emulate", plain)
        assert packed.kept <= plain.kept / 3.5, f"{plain.kept / packed.kept:.2f}"


@pytest.mark.usefixtures("_any_backend")
def test_a_format_of_half_the_bits_takes_half_the_bytes() -> None:
    """Views of codes are no codes in a chain: each of them would be saved."""
    names = ("scaled", "min-max", "three bits")
    eight, four, three = (packed_and_emulated(name, convolutions)[1].kept for name in names)
    assert 0.49 * eight < four < 0.52 * eight
    assert 0.36 * eight < three < 0.39 * eight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("_any_backend")
def test_the_result_of_attention_is_saved_once() -> None:
    """Its backward pass reads the unrounded result, so its code is recomputed; only q, k and v are saved as codes."""
    torch.manual_seed(0)
    made = nn.Sequential(Attention()), torch.randn(4, 32, 16)
    _, packed = compared(made, PLANS["unscaled"])
    assert packed.types[torch.uint8] == 4 * 32 * 48
    assert 4 * 4 * 32 * 16 <= packed.types[torch.float32] < 5 * 4 * 32 * 16


@pytest.mark.usefixtures("_any_backend")
@pytest.mark.parametrize("rows", [4, 256])
def test_a_code_that_shortens_no_chain_is_not_saved(rows: int) -> None:
    """A block saves its product or its sum, and no norm, also where its weight is larger than its batch."""
    torch.manual_seed(0)
    blocks, packed = 6, Graphs(PackedPartitioner())
    trained((Residuals(blocks), torch.randn(rows, 64)), PLANS["unscaled"], "packed", packed)
    assert (blocks - 1) * 64 * rows <= packed.types[torch.uint8] <= blocks * 64 * rows
    assert packed.types[torch.float32] == 2 * 4 * blocks * rows  # means and variances


@pytest.mark.usefixtures("_any_backend")
@pytest.mark.parametrize("largest", [0, 1 << 20])
def test_casts_of_small_parameters_are_not_made_twice(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioning, "LARGEST_CAST", largest)
    packed = Graphs(PackedPartitioner())
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        trained((model, x), PLANS["unscaled"], "packed", packed)
    # The input's own cast, too; but not the first layer's weight, which backward does not want.
    assert packed.types.get(torch.bfloat16, 0) == (2 * (64 * 16 + 8 * 32) if largest else 0)


def test_inductor_compiles_it_and_trains_alike() -> None:
    """As emulated eagerly: without biases, whose gradients are sums, no kernel of Inductor adds in another order."""
    torch.manual_seed(0)
    layers = nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 4, bias=False)
    model, x = nn.Sequential(*layers), torch.randn(16, 32)
    results = []
    for execution in ("emulate", "packed"):
        torch.compiler.reset()
        twin = copy.deepcopy(model)
        with bitplan.attach(twin, plan_of(activation="e4m3"), example=x, execution=execution) as run:
            called = run.compile() if execution == "packed" else twin
            for _ in range(2):
                y = called(x)
                y.square().mean().backward()
                run.step()
        results.append([y.detach(), *(p.grad for p in twin.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_graph_that_is_compiled_elsewhere_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    torch.compiler.reset()
    with (
        bitplan.attach(model, PLANS["unscaled"], example=x, execution="packed"),
        pytest.raises(RuntimeError, match=r"run\.compile\(\)"),  # torch wraps what is raised while it traces
    ):
        torch.compile(model, backend="aot_eager")(x)


def test_the_backend_goes_by_its_name() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    torch.compiler.reset()
    with bitplan.attach(model, PLANS["unscaled"], example=x, execution="packed"):
        expected = model(x)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="bitplan")(x), expected)


def test_a_format_that_is_changed_gets_a_graph_of_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of four bits cannot hold eight: the old graph would give NaN."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(8, 16)
    quantizers = {"low": {"format": "int", "bits": 4, "scale": "tensor"}}
    plan = Plan.from_dict({"version": 1, "quantizers": quantizers, "rules": [{"match": "*", "activation": "low"}]})
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with bitplan.attach(model, plan, example=x, execution="packed") as run:
        compiled = compile_without_inductor(run, model, monkeypatch)
        for name in ("int4", "int8", "int3", "int8"):
            run.set_format("low", name)
            assert torch.equal(compiled(x), model(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
