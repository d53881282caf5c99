"""Every private torch symbol that bitplan uses, and the only module that touches one.

Each symbol is one row of :data:`SYMBOLS`: where torch has it and what bitplan needs it for. A name is resolved when it
is first read, so that importing bitplan imports neither ``torch._dynamo`` nor ``torch._inductor`` (over a second), and
a torch release that moved or removed a symbol fails here with one message. ``tests/compiler/test_torch_private.py``
probes that every symbol exists and behaves as it is used.

All symbols were probed on torch 2.11.0 and 2.13.0, the ends of the supported range. Code that torch.compile traces
imports names from here with ``from ... import``: it then refers to torch's own object, which the tracer knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from bitplan.errors import TorchVersionError

if TYPE_CHECKING:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    import torch.utils.checkpoint
    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._dynamo.backends.registry import list_backends as list_backends
    from torch._dynamo.backends.registry import register_backend as register_backend
    from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
    from torch._dynamo.exc import Unsupported as Unsupported
    from torch._dynamo.output_graph import OutputGraph as OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslator as InstructionTranslator
    from torch._dynamo.trace_rules import is_callable_allowed as is_callable_allowed
    from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable as AutogradFunctionApplyVariable
    from torch._dynamo.variables.tensor import TensorVariable as TensorVariable
    from torch._dynamo.variables.torch import get_overridable_functions as get_overridable_functions
    from torch._functorch.compile_utils import fx_graph_cse as fx_graph_cse
    from torch._functorch.partitioners import get_default_op_list as get_default_op_list
    from torch._functorch.partitioners import (
        min_cut_rematerialization_partition as min_cut_rematerialization_partition,
    )
    from torch._guards import TracingContext as TracingContext
    from torch._guards import detect_fake_mode as detect_fake_mode
    from torch._higher_order_ops import triton_kernel_wrap as triton_kernel_wrap
    from torch._higher_order_ops.triton_kernel_wrap import (
        triton_kernel_wrapper_functional as triton_kernel_wrapper_functional,
    )
    from torch._inductor import list_mode_options as list_mode_options
    from torch._inductor.compile_fx import compile_fx as compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
    from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files
    from torch._inductor.decomposition import select_decomp_table as select_decomp_table
    from torch._inductor.inductor_prims import force_stride_order as force_stride_order
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
    from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only

    DispatchKey = torch._C.DispatchKey
    DispatchKeySet = torch._C.DispatchKeySet
    ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard
    ProfilerEventType = torch._C._profiler._EventType
    TransformType = torch._C._functorch.TransformType
    are_transforms_active = torch._C._are_functorch_transforms_active
    checkpoint_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    ddp_assign_buffers = torch.nn.parallel.DistributedDataParallel._assign_modules_buffers
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup

    dynamo_config = torch._dynamo.config
    FrameAction = torch._C._dynamo.eval_frame._FrameAction
    FrameExecStrategy = torch._C._dynamo.eval_frame._FrameExecStrategy
    foreach_copy_ = torch._foreach_copy_
    functorch_config = torch._functorch.config
    inductor_config = torch._inductor.config
    int_mm = torch._int_mm
    is_profiler_enabled = torch._C._autograd._profiler_enabled
    is_vnni_supported = torch.cpu._is_vnni_supported
    scaled_grouped_mm = torch._scaled_grouped_mm
    scaled_mm = torch._scaled_mm
    top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    set_code_exec_strategy = torch._C._dynamo.eval_frame.set_code_exec_strategy
    torch_function_mode_at = torch._C._get_function_stack_at
    torch_function_stack_depth = torch._C._len_torch_function_stack
    transform_stack = torch._C._functorch.get_interpreter_stack

SUPPORTED_VERSIONS = "2.11 to 2.13"

#: Name in this module -> symbol of torch ("module:attribute", or a module). Comments say what a group is for.
SYMBOLS: dict[str, str] = {
    # Modes and hooks: run code of ours without the scopes around it, find the innermost scope, and keep the
    # saved-tensor hooks that were set before ours.
    "DisableTorchFunction": "torch._C:DisableTorchFunction",
    "torch_function_stack_depth": "torch._C:_len_torch_function_stack",
    "torch_function_mode_at": "torch._C:_get_function_stack_at",
    "top_saved_tensors_hooks": "torch._C._autograd:_top_saved_tensors_default_hooks",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "OpOverload": "torch._ops:OpOverload",
    # GEMMs on low-precision units, whether a CPU has one, and copies of many small tensors by one kernel.
    "int_mm": "torch:_int_mm",
    "is_vnni_supported": "torch.cpu:_is_vnni_supported",
    "scaled_mm": "torch:_scaled_mm",
    "scaled_grouped_mm": "torch:_scaled_grouped_mm",
    "foreach_copy_": "torch:_foreach_copy_",
    # Fake tensors: shapes and dtypes without data, for recording models and estimating memory.
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor:unset_fake_temporarily",
    "DataDependentOutputException": "torch._subclasses.fake_tensor:DataDependentOutputException",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "UnsupportedFakeTensorException": "torch._subclasses.fake_tensor:UnsupportedFakeTensorException",
    "detect_fake_mode": "torch._guards:detect_fake_mode",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    # The store of process groups that send nothing; its module registers their backend, "fake".
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    # Tensors inside nested containers.
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map": "torch.utils._pytree:tree_map",
    "tree_map_only": "torch.utils._pytree:tree_map_only",
    # The CPU allocator's events, by which memory is measured without a GPU.
    "is_profiler_enabled": "torch._C._autograd:_profiler_enabled",
    "ProfilerEventType": "torch._C._profiler:_EventType",
    # Behind checkpoint(use_reentrant=False): patched, so that recomputed functions keep the scope of their module.
    "checkpoint_generator": "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    # Which buffers DistributedDataParallel broadcasts before every forward: patched, so that those of a plan stay.
    "ddp_assign_buffers": "torch.nn.parallel:DistributedDataParallel._assign_modules_buffers",
    # The parameters that fully_shard gathers together: patched, so that inputs of modules keep what is known of them.
    "FSDPParamGroup": "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup",
    # Whether code runs inside torch.func.grad, vmap and the like, and inside which of them.
    "are_transforms_active": "torch._C:_are_functorch_transforms_active",
    "transform_stack": "torch._C._functorch:get_interpreter_stack",
    "TransformType": "torch._C._functorch:TransformType",
    # torch.compile's tracer: whether it runs, its tensors, whether it writes operations down, its limits, its errors,
    # which backend a graph goes to and what happens to one that it cannot compile, which functions of users graphs may
    # call, which it shows to modes, how it reads a tensor's attributes and traces autograd functions, and the backend
    # registry.
    "TracingContext": "torch._guards:TracingContext",
    "FunctionalTensor": "torch._subclasses.functional_tensor:FunctionalTensor",
    "get_proxy_mode": "torch.fx.experimental.proxy_tensor:get_proxy_mode",
    "ExcludeDispatchKeyGuard": "torch._C:_ExcludeDispatchKeyGuard",
    "DispatchKey": "torch._C:DispatchKey",
    "DispatchKeySet": "torch._C:DispatchKeySet",
    "dynamo_config": "torch._dynamo.config",
    "TorchDynamoException": "torch._dynamo.exc:TorchDynamoException",
    "Unsupported": "torch._dynamo.exc:Unsupported",
    "InstructionTranslator": "torch._dynamo.symbolic_convert:InstructionTranslator",
    "OutputGraph": "torch._dynamo.output_graph:OutputGraph",
    "is_callable_allowed": "torch._dynamo.trace_rules:is_callable_allowed",
    "get_overridable_functions": "torch._dynamo.variables.torch:get_overridable_functions",
    "TensorVariable": "torch._dynamo.variables.tensor:TensorVariable",
    "AutogradFunctionApplyVariable": "torch._dynamo.variables.higher_order_ops:AutogradFunctionApplyVariable",
    # Which frames torch.compile leaves alone when they are called outside of a graph.
    "FrameAction": "torch._C._dynamo.eval_frame:_FrameAction",
    "FrameExecStrategy": "torch._C._dynamo.eval_frame:_FrameExecStrategy",
    "set_code_exec_strategy": "torch._C._dynamo.eval_frame:set_code_exec_strategy",
    "list_backends": "torch._dynamo.backends.registry:list_backends",
    "register_backend": "torch._dynamo.backends.registry:register_backend",
    # Cutting a joint graph into forward and backward, and the partitioner's classification of operations.
    "functorch_config": "torch._functorch.config",
    "fx_graph_cse": "torch._functorch.compile_utils:fx_graph_cse",
    "get_default_op_list": "torch._functorch.partitioners:get_default_op_list",
    "min_cut_rematerialization_partition": "torch._functorch.partitioners:min_cut_rematerialization_partition",
    # Inductor: compiling a graph with options, our partitioners and graph passes with a cache key, and decompositions.
    "inductor_config": "torch._inductor.config",
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "list_mode_options": "torch._inductor:list_mode_options",
    "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",
    "CustomPartitionerFn": "torch._inductor.custom_graph_pass:CustomPartitionerFn",
    "get_hash_for_files": "torch._inductor.custom_graph_pass:get_hash_for_files",
    "select_decomp_table": "torch._inductor.decomposition:select_decomp_table",
    "force_stride_order": "torch._inductor.inductor_prims:force_stride_order",
    # Launches of Triton kernels inside a graph.
    "triton_kernel_wrap": "torch._higher_order_ops.triton_kernel_wrap",
    "triton_kernel_wrapper_functional": "torch._higher_order_ops.triton_kernel_wrap:triton_kernel_wrapper_functional",
}

#: Modules of torch that lie between an operation's caller and a torch-function mode, on the call stack.
DISPATCH_MODULES = frozenset(
    {
        "torch._ops",
        "torch._tensor",
        "torch.functional",
        "torch.fx.interpreter",
        "torch.nn.functional",
        "torch.overrides",
    }
)
#: Prefix of the modules that run compiled graphs.
FUNCTORCH_MODULES = "torch._functorch"
#: Prefix of the modules that gather, split and cast tensors around the calls of a sharded model's modules.
DISTRIBUTED_MODULES = "torch.distributed."
#: The logger that reports operations that fail on fake tensors.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
#: The attribute of torch.utils.checkpoint that holds ``checkpoint_generator``.
CHECKPOINT_GENERATOR = SYMBOLS["checkpoint_generator"].partition(":")[2]
#: The attribute of DistributedDataParallel that holds ``ddp_assign_buffers``.
DDP_ASSIGN_BUFFERS = SYMBOLS["ddp_assign_buffers"].rpartition(".")[2]
#: The method of ``FSDPParamGroup`` that passes the inputs of a module through an autograd function.
FSDP_REGISTER_POST_BACKWARD = "_register_post_backward_hook"
#: The attribute that torch.compiler.assume_constant_result sets on a function; calling that imports ``torch._dynamo``.
CONSTANT_MARK = "_dynamo_marked_constant"
#: The attribute of a module that ``nn.Module.compile()`` sets.
COMPILED_CALL = "_compiled_call_impl"
#: The key of a node's metadata that makes Inductor store the node's result, in the order of its traced strides.
REALIZE_TO_STRIDES = "inductor_realize_to_strides"


def __getattr__(name: str) -> Any:
    """Resolve a symbol of :data:`SYMBOLS` when it is first read."""
    if name not in SYMBOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolve(SYMBOLS[name])
    globals()[name] = value
    return value


def resolve(path: str) -> Any:
    """The module, or the attribute of a module, that `path` names."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
        return attrgetter(attribute)(module) if attribute else module
    except (ImportError, AttributeError) as error:
        raise TorchVersionError(
            f"torch {torch.__version__} has no {path.replace(':', '.')}, which bitplan uses: install a torch version "
            f"from {SUPPORTED_VERSIONS}."
        ) from error


def triton_access_analyses() -> dict[str, Callable[..., Any]]:
    """Torch's functions that find out which tensors a Triton kernel writes, by their names in ``triton_kernel_wrap``.

    torch 2.11 has ``identify_mutated_tensors``, torch 2.13 ``identify_accessed_tensors``.
    """
    wrapper = resolve(SYMBOLS["triton_kernel_wrap"])
    names = ("identify_mutated_tensors", "identify_accessed_tensors")
    analyses = {name: getattr(wrapper, name) for name in names if hasattr(wrapper, name)}
    if not analyses:
        resolve(f"{SYMBOLS['triton_kernel_wrap']}:{names[-1]}")  # raises: neither name exists
    return analyses
