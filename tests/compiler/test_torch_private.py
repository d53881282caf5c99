"""Probes of every private torch symbol that bitplan uses: it exists, and behaves as it is used.

`make test-oldest` runs these on the oldest supported torch. Add a row to ``PROBES`` with every new symbol.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from bitplan.compiler import torch_private
from bitplan.errors import BitplanError

SOURCE = Path(__file__).parents[2] / "src" / "bitplan"
PRIVATE_MODULE = SOURCE / "compiler" / "torch_private.py"


class CallLog(TorchFunctionMode):
    """Records the names of the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def joint_graph() -> fx.GraphModule:
    """Forward and backward of a small perceptron in one graph, with the names that the partitioner expects."""

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, ...]:
        x, w = primals
        y = torch.nn.functional.gelu(x @ w)
        return (y, *torch.autograd.grad(y, primals, tangents))

    primals = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    graph = make_fx(joint, tracing_mode="fake")(primals, [torch.randn(4, 4)])
    for number, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node.target = ("primals_1", "primals_2", "tangents_1")[number]
        node.name = node.target
    graph.recompile()
    return graph


# --- probes, in the order of torch_private.SYMBOLS


def probe_disable_torch_function() -> None:
    with CallLog() as log:
        with torch_private.DisableTorchFunction():
            torch.ones(2) + 1
        assert log.calls == []


def probe_function_stack() -> None:
    depth = torch_private.torch_function_stack_depth()
    with CallLog() as log:
        assert torch_private.torch_function_stack_depth() == depth + 1
        assert torch_private.torch_function_mode_at(depth) is log


def probe_top_saved_tensors_hooks() -> None:
    assert torch_private.top_saved_tensors_hooks(False) is None

    def pack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        hooks = torch_private.top_saved_tensors_hooks(False)
    assert hooks is not None
    assert hooks[0] is pack


def probe_dispatch_mode() -> None:
    seen: list[Any] = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    assert seen
    assert all(isinstance(func, torch_private.OpOverload) for func in seen)


def probe_int_mm() -> None:
    a, b = torch.randint(-128, 128, (32, 32), dtype=torch.int8), torch.randint(-128, 128, (32, 32), dtype=torch.int8)
    product = torch_private.int_mm(a, b)
    assert product.dtype == torch.int32
    assert torch.equal(product.double(), a.double() @ b.double())


def probe_vnni() -> None:
    assert isinstance(torch_private.is_vnni_supported(), bool)


def probe_scaled_mm() -> None:
    a, b = (torch.randn(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    two, one = torch.tensor(2.0), torch.tensor(1.0)
    product = torch_private.scaled_mm(a, b.t(), scale_a=two, scale_b=one, out_dtype=torch.float32, use_fast_accum=False)
    torch.testing.assert_close(product, 2 * a.float() @ b.float().t(), rtol=1e-3, atol=1e-3)


def probe_scaled_grouped_mm() -> None:
    """On a GPU its numbers are compared by tests/gpu; fake tensors tell whether a graph can hold it."""
    with torch_private.FakeTensorMode():
        a = torch.empty(8, 16, device="cuda", dtype=torch.float8_e4m3fn)
        b = torch.empty(2, 32, 16, device="cuda", dtype=torch.float8_e4m3fn).transpose(1, 2)
        scales = torch.empty(8, device="cuda"), torch.empty(2, 32, device="cuda")
        ends = torch.empty(2, device="cuda", dtype=torch.int32)
        product = torch_private.scaled_grouped_mm(a, b, *scales, ends, out_dtype=torch.bfloat16, use_fast_accum=False)
    assert product.shape == (8, 32)
    assert product.dtype == torch.bfloat16


def probe_foreach_copy() -> None:
    targets = [torch.zeros(2), torch.zeros(3)]
    torch_private.foreach_copy_(targets, [torch.ones(2), torch.ones(3)])
    assert all(bool(target.all()) for target in targets)


def probe_fake_tensors() -> None:
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.empty(2, 3)
        assert isinstance(fake, torch_private.FakeTensor)
        assert torch_private.detect_fake_mode([fake]) is mode
        with torch_private.unset_fake_temporarily():
            assert not isinstance(torch.ones(2), torch_private.FakeTensor)
        with pytest.raises(torch_private.DataDependentOutputException):
            fake.sum().item()
        with pytest.raises(torch_private.DynamicOutputShapeException):
            fake.nonzero()


def probe_unsupported_fake_tensors() -> None:
    assert issubclass(torch_private.UnsupportedFakeTensorException, RuntimeError)


def probe_wrapper_subclass() -> None:
    assert not torch_private.is_traceable_wrapper_subclass(torch.ones(1))


def probe_tree_functions() -> None:
    tree = {"a": [1, (2.0,)]}
    assert torch_private.tree_leaves(tree) == [1, 2.0]
    assert torch_private.tree_map(lambda leaf: leaf * 2, tree) == {"a": [2, (4.0,)]}
    assert torch_private.tree_map_only(float, lambda leaf: leaf * 2, tree) == {"a": [1, (4.0,)]}


def probe_profiler() -> None:
    assert not torch_private.is_profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assert torch_private.is_profiler_enabled()
        torch.ones(1000)
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None

    def sizes(events: list[Any]) -> Iterator[int]:
        for event in events:
            if event.tag == torch_private.ProfilerEventType.Allocation:
                yield event.extra_fields.alloc_size
            yield from sizes(event.children)

    assert 4000 in list(sizes(profile.profiler.kineto_results.experimental_event_tree()))


def probe_checkpoint_generator() -> None:
    """checkpoint() looks the generator up in its module at every call, where bitplan replaces it."""
    calls: list[str] = []

    def replacement(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append("called")
        return original(function, *args, **kwargs)

    original = torch_private.checkpoint_generator
    assert original is getattr(torch.utils.checkpoint, torch_private.CHECKPOINT_GENERATOR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.checkpoint, torch_private.CHECKPOINT_GENERATOR, replacement)
        x = torch.ones(2, requires_grad=True)
        torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
    assert calls
    assert issubclass(torch.utils.checkpoint.CheckpointFunction, torch.autograd.Function)


def probe_ddp_buffers() -> None:
    wrapper = SimpleNamespace(module=torch.nn.BatchNorm1d(2), parameters_to_ignore={"num_batches_tracked"})
    torch_private.ddp_assign_buffers(wrapper)  # type: ignore[arg-type]
    assert list(wrapper.named_module_buffers) == ["running_mean", "running_var"]
    assert wrapper.modules_buffers == list(wrapper.named_module_buffers.values())
    assert torch_private.DDP_ASSIGN_BUFFERS in vars(torch.nn.parallel.DistributedDataParallel)


def probe_fsdp() -> None:
    group = torch_private.FSDPParamGroup
    assert torch_private.FSDP_REGISTER_POST_BACKWARD in vars(group)
    assert isinstance(group._reshard_after_forward, property)
    for name in ("fsdp_params", "mesh_info", "_all_gather_comm", "_reduce_scatter_comm"):
        assert f"self.{name}" in inspect.getsource(group.__init__)
    assert hasattr(torch.distributed.fsdp.FSDPModule, "_get_fsdp_state")


def probe_transforms() -> None:
    def keys() -> list[str]:
        assert torch_private.are_transforms_active()
        return [level.key().name for level in torch_private.transform_stack() or []]

    seen: list[list[str]] = []

    def function(x: Tensor) -> Tensor:
        seen.append(keys())
        return x.sum()

    assert not torch_private.are_transforms_active()
    assert not torch_private.transform_stack()
    torch.func.grad(function)(torch.ones(2))
    torch.func.vmap(torch.func.grad(function))(torch.ones(2, 2))
    assert seen == [["Grad"], ["Vmap", "Grad"]]
    assert torch_private.TransformType.Grad.name == "Grad"


def probe_tracing_context() -> None:
    assert torch_private.TracingContext.try_get() is None


def probe_recording() -> None:
    """An opaque function runs on fake tensors, then on functional ones without and with a recorder."""
    passes = []

    def views_bits(x: Tensor) -> Tensor:
        key, key_set = torch_private.DispatchKey, torch_private.DispatchKeySet
        passes.append((type(x), torch_private.get_proxy_mode() is not None))
        with torch_private.ExcludeDispatchKeyGuard(key_set(key.AutogradFunctionality) | key_set(key.ADInplaceOrView)):
            return (x.detach() if x.requires_grad else x).view(torch.int32) & 1

    targets: list[str] = []

    def record_targets(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    torch.compiler.reset()
    torch.compiler.allow_in_graph(views_bits)
    backend = aot_autograd(fw_compiler=record_targets)
    assert torch.compile(lambda x: views_bits(x), backend=backend)(torch.ones(2)).tolist() == [0, 0]
    fake, functional = torch_private.FakeTensor, torch_private.FunctionalTensor
    assert {(fake, False), (functional, False), (functional, True)} <= set(passes)
    assert targets == ["aten.view.dtype", "aten.bitwise_and.Scalar"]


def probe_dynamo_config() -> None:
    config: Any = torch_private.dynamo_config
    limit = config.recompile_limit
    with config.patch(recompile_limit=limit + 1):
        assert config.recompile_limit == limit + 1
    assert config.recompile_limit == limit
    assert hasattr(config, "allow_rnn")


def probe_dynamo_errors() -> None:
    assert issubclass(torch_private.Unsupported, torch_private.TorchDynamoException)
    with pytest.raises(torch_private.Unsupported):
        torch.compile(lambda x: (torch._dynamo.graph_break(), x)[1], backend="eager", fullgraph=True)(torch.ones(1))


def probe_instruction_translator() -> None:
    """While a function is traced, the translator knows the backend that gets the graph."""
    backends: list[Any] = []

    @torch.compiler.assume_constant_result  # type: ignore[no-untyped-call, untyped-decorator]
    def note_backend() -> int:
        backends.append(torch_private.InstructionTranslator.current_tx().output.compiler_fn)
        return 1

    torch.compile(lambda x: x + note_backend(), backend="eager", fullgraph=True)(torch.ones(1))
    assert backends
    assert backends[0] is not None


def probe_overridable_functions() -> None:
    functions = torch_private.get_overridable_functions()
    assert isinstance(functions, set)
    assert functions is torch_private.get_overridable_functions()
    assert torch.add in functions


def probe_tensor_variable() -> None:
    reads = []
    original = torch_private.TensorVariable.var_getattr

    def log_read(self: Any, tx: Any, name: str) -> Any:
        is_in_mode = tx.symbolic_torch_function_state.in_torch_function_mode()
        reads.append((name, self.dtype, self.ndim, is_in_mode))
        return self.call_method(tx, "t", [], {}) if name == "T" else original(self, tx, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private.TensorVariable, "var_getattr", log_read)
        compiled = torch.compile(lambda x: x.T + 1, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2, 3)).shape == (3, 2)
    assert ("T", torch.float32, 2, False) in reads


def probe_autograd_function_variable() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 2 * grads[0]

    states = []
    variable = torch_private.AutogradFunctionApplyVariable
    original = variable.trace_backward_graph

    def log_state(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        states.append(tx.symbolic_torch_function_state.torch_function_mode_enabled)
        return original(self, tx, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variable, "trace_backward_graph", log_state)
        torch.compile(Double.apply, backend="eager", fullgraph=True)(torch.ones(2, requires_grad=True))
    assert states == [True]


def probe_output_graph() -> None:
    flags = []
    original = torch_private.OutputGraph.call_user_compiler

    def log_flag(self: Any, gm: fx.GraphModule, *args: Any) -> Any:
        flags.append(self.has_user_defined_allowed_in_graph)
        allowed = [n for n in gm.graph.nodes if n.op == "call_function" and torch_private.is_callable_allowed(n.target)]
        assert [node.target for node in allowed] == [double]
        return original(self, gm, *args)

    def double(x: Tensor) -> Tensor:
        return 2 * x

    torch.compiler.allow_in_graph(double)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private.OutputGraph, "call_user_compiler", log_flag)
        torch.compile(lambda x: double(x) + 1, backend="eager", fullgraph=True)(torch.ones(2))
    assert flags == [True]


def probe_frame_strategy() -> None:
    def inner(x: Tensor) -> Tensor:
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        return inner(x) + 1

    skip = torch_private.FrameExecStrategy(torch_private.FrameAction.SKIP, torch_private.FrameAction.SKIP)
    torch_private.set_code_exec_strategy(inner.__code__, skip)
    graphs: list[str] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(str(graph.code))
        return graph.forward

    torch.compile(inner, backend=backend)(torch.ones(2))
    assert graphs == []
    torch.compile(outer, backend=backend, fullgraph=True)(torch.ones(2))
    assert len(graphs) == 1
    assert "sin" in graphs[0]


def probe_backend_registry() -> None:
    torch_private.register_backend(lambda graph, inputs: graph.forward, "bitplan_probe")
    assert "bitplan_probe" in torch_private.list_backends(exclude_tags=())


def probe_functorch_config() -> None:
    from bitplan.compiler.partitioning import PARTITIONER_OPTIONS

    config: Any = torch_private.functorch_config
    with config.patch(PARTITIONER_OPTIONS):
        assert all(getattr(config, name) is value for name, value in PARTITIONER_OPTIONS.items())


def probe_cse() -> None:
    graph = make_fx(lambda x: x.exp() + x.exp())(torch.ones(2)).graph
    reduced = torch_private.fx_graph_cse(graph)
    assert len(reduced.find_nodes(op="call_function", target=torch.ops.aten.exp.default)) == 1


def probe_op_list() -> None:
    kinds = torch_private.get_default_op_list()
    nodes = {node.target: node for node in joint_graph().graph.nodes}
    product, view = nodes[torch.ops.aten.mm.default], nodes[torch.ops.aten.t.default]
    assert kinds.is_compute_intensive(product)
    assert not kinds.is_fusible(product)
    assert kinds.is_view(view)
    assert kinds.is_recomputable(nodes[torch.ops.aten.gelu.default])
    assert not kinds.is_random(product)


def probe_partition() -> None:
    graph = joint_graph()
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    forward, backward = torch_private.min_cut_rematerialization_partition(graph, inputs, num_fwd_outputs=1)
    assert isinstance(forward, fx.GraphModule)
    assert any(str(node.target).startswith("tangents") for node in backward.graph.find_nodes(op="placeholder"))


def probe_inductor_config() -> None:
    from bitplan.compiler.launching import OPTION

    assert hasattr(torch_private.inductor_config, OPTION)
    assert hasattr(torch_private.inductor_config, "custom_partitioner_fn")


def probe_compile_fx() -> None:
    """Stops before code is generated, as the memory estimate does."""
    stages: list[fx.GraphModule] = []

    def last_stage(graph: fx.GraphModule, example_inputs: Any, **settings: Any) -> Any:
        stages.append(graph)
        return graph.forward

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Any:
        return torch_private.compile_fx(graph, example_inputs, inner_compile=last_stage, config_patches={})

    x = torch.ones(3)
    assert torch.equal(torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(x), x + 1)
    assert len(stages) == 1


def probe_mode_options() -> None:
    assert torch_private.list_mode_options("default") == {}
    assert torch_private.list_mode_options("reduce-overhead", None)


def probe_custom_passes() -> None:
    for base in (torch_private.CustomGraphPass, torch_private.CustomPartitionerFn):
        assert {"__call__", "uuid"} <= base.__abstractmethods__  # type: ignore[attr-defined]
    first, second = (torch_private.get_hash_for_files((__file__,), extra) for extra in ("a", "b"))
    assert first != second
    assert first == torch_private.get_hash_for_files((__file__,), "a")


def probe_decompositions() -> None:
    assert torch.ops.aten.silu.default in torch_private.select_decomp_table()


def probe_force_stride_order() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(torch_private.force_stride_order(value, value.stride()), value)


def probe_triton_wrapper() -> None:
    assert torch_private.triton_access_analyses()
    assert callable(torch_private.triton_kernel_wrapper_functional)
    assert torch_private.triton_kernel_wrap.triton_kernel_wrapper_functional is (
        torch_private.triton_kernel_wrapper_functional
    )


#: Symbol -> the probe of its behaviour.
def probe_fake_process_group() -> None:
    dist.init_process_group("fake", rank=0, world_size=512, store=torch_private.FakeStore())
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)  # returns at once
        assert (dist.get_world_size(), tensor.tolist()) == (512, [1.0, 1.0])
    finally:
        dist.destroy_process_group()


PROBES: dict[str, Callable[[], None]] = {
    "DisableTorchFunction": probe_disable_torch_function,
    "torch_function_stack_depth": probe_function_stack,
    "torch_function_mode_at": probe_function_stack,
    "top_saved_tensors_hooks": probe_top_saved_tensors_hooks,
    "TorchDispatchMode": probe_dispatch_mode,
    "OpOverload": probe_dispatch_mode,
    "int_mm": probe_int_mm,
    "is_vnni_supported": probe_vnni,
    "scaled_mm": probe_scaled_mm,
    "scaled_grouped_mm": probe_scaled_grouped_mm,
    "foreach_copy_": probe_foreach_copy,
    "FakeTensor": probe_fake_tensors,
    "FakeTensorMode": probe_fake_tensors,
    "unset_fake_temporarily": probe_fake_tensors,
    "DataDependentOutputException": probe_fake_tensors,
    "DynamicOutputShapeException": probe_fake_tensors,
    "UnsupportedFakeTensorException": probe_unsupported_fake_tensors,
    "detect_fake_mode": probe_fake_tensors,
    "FakeStore": probe_fake_process_group,
    "is_traceable_wrapper_subclass": probe_wrapper_subclass,
    "tree_leaves": probe_tree_functions,
    "tree_map": probe_tree_functions,
    "tree_map_only": probe_tree_functions,
    "is_profiler_enabled": probe_profiler,
    "ProfilerEventType": probe_profiler,
    "checkpoint_generator": probe_checkpoint_generator,
    "ddp_assign_buffers": probe_ddp_buffers,
    "FSDPParamGroup": probe_fsdp,
    "are_transforms_active": probe_transforms,
    "transform_stack": probe_transforms,
    "TransformType": probe_transforms,
    "TracingContext": probe_tracing_context,
    "FunctionalTensor": probe_recording,
    "get_proxy_mode": probe_recording,
    "ExcludeDispatchKeyGuard": probe_recording,
    "DispatchKey": probe_recording,
    "DispatchKeySet": probe_recording,
    "dynamo_config": probe_dynamo_config,
    "TorchDynamoException": probe_dynamo_errors,
    "Unsupported": probe_dynamo_errors,
    "InstructionTranslator": probe_instruction_translator,
    "OutputGraph": probe_output_graph,
    "is_callable_allowed": probe_output_graph,
    "get_overridable_functions": probe_overridable_functions,
    "TensorVariable": probe_tensor_variable,
    "AutogradFunctionApplyVariable": probe_autograd_function_variable,
    "FrameAction": probe_frame_strategy,
    "FrameExecStrategy": probe_frame_strategy,
    "set_code_exec_strategy": probe_frame_strategy,
    "list_backends": probe_backend_registry,
    "register_backend": probe_backend_registry,
    "functorch_config": probe_functorch_config,
    "fx_graph_cse": probe_cse,
    "get_default_op_list": probe_op_list,
    "min_cut_rematerialization_partition": probe_partition,
    "inductor_config": probe_inductor_config,
    "compile_fx": probe_compile_fx,
    "list_mode_options": probe_mode_options,
    "CustomGraphPass": probe_custom_passes,
    "CustomPartitionerFn": probe_custom_passes,
    "get_hash_for_files": probe_custom_passes,
    "select_decomp_table": probe_decompositions,
    "force_stride_order": probe_force_stride_order,
    "triton_kernel_wrap": probe_triton_wrapper,
    "triton_kernel_wrapper_functional": probe_triton_wrapper,
}


@pytest.mark.parametrize("name", sorted(torch_private.SYMBOLS))
def test_symbol_exists(name: str) -> None:
    resolved = torch_private.resolve(torch_private.SYMBOLS[name])
    # A model of an earlier test that is still alive keeps a planned function in the place of this one.
    assert getattr(torch_private, name) is resolved or resolved.__module__.startswith("bitplan.")


@pytest.mark.parametrize("probe", sorted(set(PROBES.values()), key=lambda probe: probe.__name__))
def test_symbol_behaves_as_it_is_used(probe: Callable[[], None]) -> None:
    probe()


def test_every_symbol_has_a_probe() -> None:
    assert set(PROBES) == set(torch_private.SYMBOLS)


def test_missing_symbol_is_one_sentence() -> None:
    with pytest.raises(BitplanError) as raised:
        torch_private.resolve("torch._dynamo:no_such_function")
    message = str(raised.value)
    assert "torch._dynamo.no_such_function" in message
    assert torch.__version__ in message
    assert "2.11 to 2.13" in message
    assert "\n" not in message


# --- no other file touches private torch


def private_uses(source: str) -> Iterator[str]:
    """Private modules and attributes of torch in a source text, also as strings that name them."""
    tree = ast.parse(source)
    aliases = {"torch"}  # names bound to torch or to a module or class of it
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torch":
                    aliases.add(name.asname or "torch")
                    if is_private(name.name):
                        yield name.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                aliases.add(name.asname or name.name)
                path = f"{node.module}.{name.name}"
                if is_private(path):
                    yield path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            root, _, rest = path.partition(".")
            # Attributes of nn.Module and operator names (torch.ops.aten._x) are not private symbols of torch.
            if root in aliases - {"Tensor", "nn"} and is_private(rest) and not rest.startswith("ops."):
                yield path
        elif (
            isinstance(node, ast.Constant)
            and id(node) not in docstrings
            and re.search(r"torch\._(?!_)", str(node.value))
        ):
            yield str(node.value)


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def test_no_other_file_touches_private_torch() -> None:
    uses = {
        str(file.relative_to(SOURCE)): sorted(set(private_uses(file.read_text(encoding="utf-8"))))
        for file in SOURCE.rglob("*.py")
        if file != PRIVATE_MODULE
    }
    assert {file: result for file, result in uses.items() if result} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._functorch.config as config",
        "from torch._guards import TracingContext",
        "from torch.utils._pytree import tree_map",
        "import torch\ntorch._foreach_copy_([], [])",
        "import torch.utils.checkpoint as c\nc._checkpoint_without_reentrant_generator",
        "import logging\nlogging.getLogger('torch._subclasses')",
    ],
)
def test_private_uses_are_found(source: str) -> None:
    assert list(private_uses(source))


def test_public_uses_are_not_reported() -> None:
    source = '"""About torch._dynamo."""\nimport torch\ntorch.__version__\ntorch.ops.aten._scaled_mm\ntorch.nn.Linear'
    assert list(private_uses(source)) == []


def test_inductor_reads_the_key_that_makes_it_store_a_result() -> None:
    from torch._inductor.graph import GraphLowering

    assert torch_private.REALIZE_TO_STRIDES in inspect.getsource(GraphLowering.run_node)


def test_a_module_that_is_compiled_in_place_holds_its_compiled_call_in_the_attribute() -> None:
    module = torch.nn.Linear(2, 2)
    assert getattr(module, torch_private.COMPILED_CALL) is None
    module.compile(backend="eager")
    assert torch_private.COMPILED_CALL in vars(module)
    del vars(module)[torch_private.COMPILED_CALL]
    assert getattr(module, torch_private.COMPILED_CALL) is None
