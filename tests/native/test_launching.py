"""Operations of ours opened in a compiled graph: what replaces them, and where it is asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.config as inductor_config
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.inductor_prims import force_stride_order
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bitplan
from bitplan import Plan
from bitplan.compiler import launching, torch_private
from bitplan.compiler.batch_norm_fusion import cast_with_channel_stats_reference
from bitplan.compiler.kernel_ops import OPERATIONS, KernelOp
from bitplan.compiler.launching import (
    OPTION,
    KernelInliningPass,
    cache_access_analyses,
    inline_kernels,
    with_kernel_inlining,
)
from bitplan.errors import BitplanWarning
from bitplan.executions.native import product  # noqa: F401 - registers all casts
from bitplan.executions.native.float8_cast import amax_reference, cast_float8, cast_reference

E4M3 = torch.float8_e4m3fn


def stand_in(name: str, plain: Callable[..., Any]) -> KernelOp:
    """An operation that launches nothing: what a CPU does takes the place of the kernels."""
    return KernelOp(name, lambda *arguments, wrap: plain(*arguments), OPERATIONS[name].supports, ())


PLAIN = {
    "float8_amax": stand_in("float8_amax", amax_reference),
    "float8_cast": stand_in("float8_cast", cast_reference),
    "cast_with_channel_stats": stand_in("cast_with_channel_stats", cast_with_channel_stats_reference),
}


def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Every operation, one of whose results is not used and one of which is used twice."""
    cast = cast_float8(2 * x, E4M3, returns_amax=True)
    code, var, mean = torch.ops.bitplan.cast_with_channel_stats(y + 1, E4M3)
    return cast.rows.float() * cast.scale, cast.columns.float() + cast.scale, code.float(), var + mean, cast.tile_amax


def traced(*arguments: Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(step, tracing_mode=mode)(*arguments)


def names_of(graph: fx.Graph) -> list[str]:
    """Operations of ours."""
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    result = (target.name() for target in targets if isinstance(target, torch._ops.OpOverload))
    return [name.removeprefix("bitplan::") for name in result if name.startswith("bitplan::")]


def inputs(layout: torch.memory_format = torch.channels_last) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 7), torch.randn(2, 3, 4, 4).contiguous(memory_format=layout)


def test_what_an_operation_does_takes_its_place() -> None:
    module = traced(*inputs())
    expected = module(*inputs())
    assert names_of(module.graph) == ["float8_amax", "float8_cast", "cast_with_channel_stats"]
    assert inline_kernels(module.graph, "cpu", PLAIN) == 3
    module.graph.lint()
    module.recompile()
    assert names_of(module.graph) == []
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")
    for ours, other in zip(module(*inputs()), expected, strict=True):
        assert torch.equal(ours, other)


def test_operations_stay_on_other_devices_with_unknown_sizes_and_in_other_layouts() -> None:
    module = traced(*inputs())
    assert inline_kernels(module.graph) == 0
    assert len(names_of(module.graph)) == 3
    unknown = traced(*inputs(), mode="symbolic")
    assert inline_kernels(unknown.graph, "cpu", PLAIN) == 0
    rows_first = traced(*inputs(torch.contiguous_format))
    assert inline_kernels(rows_first.graph, "cpu", PLAIN) == 2
    assert names_of(rows_first.graph) == ["cast_with_channel_stats"]


class Theirs(CustomGraphPass):
    """A pass of somebody else."""

    def __init__(self, word: str | None = "theirs") -> None:
        self.word = word
        self.seen: list[list[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(names_of(graph))

    def uuid(self) -> Any:
        return self.word


def test_it_comes_behind_the_passes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_kernel_inlining(None) == {OPTION: KernelInliningPass()}
    theirs = Theirs()
    graph = traced(*inputs()).graph
    with_kernel_inlining({OPTION: theirs})[OPTION](graph)
    assert [len(seen) for seen in theirs.seen] == [3]
    with inductor_config.patch({OPTION: theirs}):
        assert with_kernel_inlining({"max_autotune": False}) == {
            "max_autotune": False,
            OPTION: KernelInliningPass([theirs]),
        }
    assert with_kernel_inlining({OPTION: [theirs]}) == {OPTION: [theirs, KernelInliningPass()]}
    once = with_kernel_inlining({})
    assert with_kernel_inlining(once) == once
    monkeypatch.setattr(launching, "INLINES_KERNELS", False)
    assert with_kernel_inlining({OPTION: theirs}) == {OPTION: theirs}


def test_caches_know_it_by_what_it_does() -> None:
    alone = KernelInliningPass().uuid()
    assert alone is not None
    assert alone == KernelInliningPass().uuid()
    behind = {KernelInliningPass([Theirs(word)]).uuid() for word in ("one", "other")}
    assert len({alone, *behind}) == 3
    assert KernelInliningPass([Theirs(None)]).uuid() is None  # such a pass turns caches off, with ours or without
    assert KernelInliningPass([lambda graph: None]).uuid() is None
    sources = {source for operation in OPERATIONS.values() for source in operation.sources()}
    assert {source.rpartition("/")[2] for source in sources} == {
        "float8_cast.py",
        "float8_cast_kernel.py",
        "float8_block_cast.py",
        "float8_block_cast_kernel.py",
        "gated_cast.py",
        "gated_cast_kernel.py",
        "batch_norm_fusion.py",
        "batch_norm_fusion_kernel.py",
        "norm_cast.py",
        "norm_cast_kernel.py",
        "recorded_cast.py",
    }


def test_torch_looks_once_into_a_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def look(kernel: Any, kwargs: dict[str, Any], descriptors: Any) -> list[str]:
        looks.append(kernel.fn.fn.__module__)
        return ["count"]

    for name in ("identify_mutated_tensors", "identify_accessed_tensors"):
        monkeypatch.setattr(launching.triton_kernel_wrap, name, look, raising=False)
    undo = cache_access_analyses()
    looked: Any = launching.triton_kernel_wrap.identify_mutated_tensors
    arguments: dict[str, Any] = {"x": torch.ones(3), "count": 3}
    for module in ("bitplan.compiler.batch_norm_fusion_kernel", "elsewhere"):
        written = type("written", (), {"__module__": module})  # where a function would be
        kernel = SimpleNamespace(fn=SimpleNamespace(fn=written))
        for values in (
            arguments,
            {**arguments, "x": torch.ones(7)},
            {**arguments, "count": 4},
            {**arguments, "x": torch.ones(3).half()},
        ):
            assert looked(kernel, values, {}) == ["count"]
    assert looks == ["bitplan.compiler.batch_norm_fusion_kernel"] * 3 + ["elsewhere"] * 4
    undo()
    assert launching.triton_kernel_wrap.identify_accessed_tensors is look


@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
@pytest.mark.parametrize("version", ["2.11", "2.13"])
def test_a_kernel_that_torch_cannot_analyse_stays_an_operation(version: str) -> None:
    """Where torch assumes that all arguments are written, one tensor given for two of them would be two copies."""

    def kernel(x: Tensor, out: Tensor) -> None: ...

    kernel.__module__ = "bitplan.native.some_kernel"

    def analysis(written: list[str]) -> Any:
        accesses = [SimpleNamespace(name=name) for name in written]
        return written if version == "2.11" else SimpleNamespace(read_writes=SimpleNamespace(writes=accesses))

    def launch(written: list[str], x: Tensor, *arguments: Any, wrap: Any) -> Tensor:
        analyse = launching._cached(lambda kernel, kwargs, *rest: analysis(written))
        analyse(SimpleNamespace(fn=kernel), {"x": x, "out": x}, {})
        return amax_reference(x, *arguments)

    for written, replaced in ((["out"], 1), (["x", "out"], 0)):
        operation = KernelOp("float8_amax", partial(launch, written), OPERATIONS["float8_amax"].supports, ())
        gm = make_fx(lambda x: torch.ops.bitplan.float8_amax(x, None), tracing_mode="fake")(torch.ones(3))
        assert inline_kernels(gm.graph, "cpu", {"float8_amax": operation}) == replaced
        assert len(names_of(gm.graph)) == 1 - replaced
        gm.recompile()
        assert gm(torch.tensor([1.0, -2.0, 0.5])).item() == 2.0
    again = make_fx(lambda x: torch.ops.bitplan.float8_amax(x, None), tracing_mode="fake")(torch.ones(3))
    with pytest.warns(BitplanWarning, match="float8_amax stays an operation of the compiled graph"):
        inline_kernels(again.graph, "cpu", {"float8_amax": operation})


@pytest.mark.parametrize("recompute", [(), "inputs", "products"])
def test_native_models_are_compiled_with_it(monkeypatch: pytest.MonkeyPatch, recompute: Any) -> None:
    torch._dynamo.reset()
    requests: list[Any] = []

    def compile_fx(gm: fx.GraphModule, example_inputs: Any, config_patches: Any = None, **rest: Any) -> Any:
        requests.append(config_patches)
        return gm.forward

    monkeypatch.setattr("bitplan.compiler.torch_private.compile_fx", compile_fx)
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    model, x = nn.Linear(32, 16), torch.randn(6, 32)
    rule = {operand: {"format": "int8", "scale": "tensor"} for operand in ("x", "w", "dy")}
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", **rule}]})
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, recompute=recompute)) as run:
        run.compile()(x)
    assert [settings[OPTION] for settings in requests] == [KernelInliningPass()]


def test_packed_models_are_compiled_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.compiler.backends import compile_packed

    requests: list[Any] = []

    def compile_fx(gm: fx.GraphModule, example_inputs: Any, config_patches: Any = None, **rest: Any) -> Any:
        requests.append(config_patches)

    monkeypatch.setattr(torch_private, "compile_fx", compile_fx)  # first: it keeps what it finds in torch
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    compile_packed(traced(*inputs()), inputs(), options={"max_autotune": False})
    assert requests[0][OPTION] == KernelInliningPass()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, whose kernels are traced")
@pytest.mark.usefixtures("gpu_in_name")
def test_kernels_become_launches_that_write_nothing_but_their_results() -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

    with FakeTensorMode():
        x = torch.empty(130, 300, dtype=torch.bfloat16)
        y = torch.empty(4, 24, 9, 9, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        module = make_fx(step)(x, y)
    assert inline_kernels(module.graph, "cpu") == 3
    module.graph.lint()
    assert names_of(module.graph) == []
    launches = module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    result: dict[str, tuple[Any, set[str]]] = {}
    for node in launches:
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        result[kernel.fn.__name__] = (node.kwargs["grid"], set(node.kwargs["tensors_to_clone"]))
    assert result == {
        "_partial_amax": ([(512, 1, 1)], {"out"}),
        "_cast_tile": ([(6, 1, 1)], {"as_rows", "as_columns", "scale_out", "tile_amax"}),
        "_cast_and_sum": ([(3, 1, 1)], {"codes_out", "means", "squares"}),
        "_combine_chunks": ([(2, 1, 1)], {"var", "mean"}),
    }
    # What the kernels read is written down once, before them; results have the layouts that the operations have.
    forced = module.graph.find_nodes(op="call_function", target=force_stride_order)
    assert [node.args[0].name for node in forced] == ["mul", "add"]
    empties = module.graph.find_nodes(op="call_function", target=torch.ops.aten.empty_strided.default)
    assert y.stride() in {node.meta["val"].stride() for node in empties}
