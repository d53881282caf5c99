"""A graph pass of Inductor that replaces custom operations by launches of their Triton kernels.

Until a graph is partitioned into forward and backward the operations stay, because the partitioners look for them. Then
each is replaced by its allocations and launches, which Inductor generates itself. Only host time changes; the kernels
are the same.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from bitplan.compiler import amax_fusion, gated_fusion, kernel_ops, norm_fusion, patterns, rotary_tables, torch_patches
from bitplan.compiler.kernel_ops import OPERATIONS, KernelOp
from bitplan.compiler.torch_patches import Undo, replace_attribute
from bitplan.compiler.torch_private import (
    CustomGraphPass,
    detect_fake_mode,
    force_stride_order,
    get_default_op_list,
    get_hash_for_files,
    inductor_config,
    select_decomp_table,
    triton_access_analyses,
    triton_kernel_wrap,
    triton_kernel_wrapper_functional,
)
from bitplan.errors import BitplanError, BitplanWarning

#: Whether compiled graphs launch the kernels themselves; a switch for comparisons, and for torch versions that cannot.
INLINES_KERNELS = True
#: The Inductor option that holds the pass.
OPTION = "post_grad_custom_pre_pass"
#: Metadata that a replaced node passes on.
_PROVENANCE = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")


class KernelInliningPass(CustomGraphPass):
    """The fusions and :func:`inline_kernels` as one Inductor pass, after the passes that the user has set."""

    def __init__(self, earlier: Iterable[Callable[[fx.Graph], None]] = ()) -> None:
        self.earlier = tuple(earlier)

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.earlier:
            graph_pass(graph)
        torch_patches.apply(cache_access_analyses)
        rotary_tables.write_tables(graph)
        gated_fusion.fuse_gates(graph)
        norm_fusion.fuse_norms(graph)
        amax_fusion.record_amax_in_casts(graph)
        amax_fusion.batch_amax_kernels(graph)
        inline_kernels(graph)

    def uuid(self) -> Any:
        """The cache key; None, which disables Inductor's caches, where an earlier pass has none."""
        others = [earlier.uuid() if isinstance(earlier, CustomGraphPass) else None for earlier in self.earlier]
        files = (source for operation in OPERATIONS.values() for source in operation.sources())
        passes = (kernel_ops, patterns, rotary_tables, gated_fusion, norm_fusion, amax_fusion)
        switches = (
            rotary_tables.WRITES_TABLES,
            gated_fusion.FUSES,
            norm_fusion.FUSES,
            norm_fusion.FUSES_SUMS,
            amax_fusion.RECORDS_IN_CASTS,
            amax_fusion.BATCHES_AMAX,
        )
        paths = (__file__, *(module.__file__ for module in passes), *dict.fromkeys(files))
        ours = get_hash_for_files(paths, str(switches))
        return None if None in others else (ours, *others)

    # torch.compile compares the options of two calls to decide whether a graph can be reused.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelInliningPass) and self.earlier == other.earlier

    def __hash__(self) -> int:
        return hash(self.earlier)


def with_kernel_inlining(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor options with the pass added after the passes that these options, or Inductor's global ones, have."""
    settings = dict(options or {})
    current = settings.get(OPTION, getattr(inductor_config, OPTION))
    earlier = current if isinstance(current, (list, tuple)) else () if current is None else (current,)
    if not INLINES_KERNELS or any(isinstance(graph_pass, KernelInliningPass) for graph_pass in earlier):
        return settings
    if isinstance(current, (list, tuple)):  # newer torch versions take several passes
        return settings | {OPTION: [*earlier, KernelInliningPass()]}
    return settings | {OPTION: KernelInliningPass(earlier)}


def inline_kernels(graph: fx.Graph, device: str = "cuda", operations: Mapping[str, KernelOp] = OPERATIONS) -> int:
    """Replace custom operations on that device by their launches, where possible. Returns how many were replaced."""
    by_target = {getattr(torch.ops.bitplan, name).default: operation for name, operation in operations.items()}
    count = 0
    written: set[fx.Node] = set()
    for node in list(graph.nodes):
        operation = by_target.get(node.target) if node.op == "call_function" else None
        if operation is None or not operation.can_inline(node, device):
            continue
        try:
            launches = _inline(graph, node, operation)
        except UnknownWritesError as error:
            sentence = f"{operation.name} stays an operation of the compiled graph, which is slower: {error}"
            warnings.warn(sentence, BitplanWarning, stacklevel=2)
            continue
        for launch in launches:
            _materialize_inputs(graph, launch, written)
        count += 1
    return count


def _inline(graph: fx.Graph, node: fx.Node, operation: KernelOp) -> list[fx.Node]:
    """Trace the operation's launches on its inputs and insert them in its place. Returns the launches."""
    inputs = list(dict.fromkeys(node.all_input_nodes))
    positions = {source: position for position, source in enumerate(inputs)}

    def launch(*values: Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: values[positions[source]])
        return operation.launch(*args, **kwargs, wrap=torch.library.wrap_triton)

    values = [source.meta["val"] for source in inputs]
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        functional = torch.func.functionalize(launch)
        traced = make_fx(functional, decomposition_table=select_decomp_table())(*values)
    placeholders = [traced_node for traced_node in traced.graph.nodes if traced_node.op == "placeholder"]
    copies = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(node):
        for traced_node in traced.graph.nodes:
            # Mutated inputs are results, too, and the outer graph copies them back itself.
            is_copy = traced_node.target is torch.ops.aten.copy_.default
            if traced_node.op not in ("placeholder", "output") and not is_copy:
                copies[traced_node] = graph.node_copy(traced_node, copies.__getitem__)
                copies[traced_node].meta.update({key: node.meta[key] for key in _PROVENANCE if key in node.meta})
    results: Any = fx.map_arg(traced.graph.output_node().args[0], copies.__getitem__)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return [copied for copied in copies.values() if copied.target is triton_kernel_wrapper_functional]


def _materialize_inputs(graph: fx.Graph, launch: fx.Node, written: set[fx.Node]) -> None:
    """Make Inductor write a kernel's inputs to memory once, instead of once per argument.

    For inputs of operations that it does not know Inductor does so by itself.
    """
    kinds = get_default_op_list()
    options: dict[str, Any] = launch.kwargs
    arguments = options["kwargs"]
    mutated = [arguments[name] for name in options["tensors_to_clone"]]
    inputs = (value for value in arguments.values() if isinstance(value, fx.Node) and value not in mutated)
    for source in dict.fromkeys(inputs):
        while kinds.is_view(source):
            source = source.all_input_nodes[0]
        value = source.meta["val"]
        is_in_memory = source in written or source.op == "placeholder" or _is_launch_result(source)
        if is_in_memory or not torch.ops.aten.is_non_overlapping_and_dense.default(value):
            continue
        with graph.inserting_after(source):
            dense = graph.call_function(force_stride_order)
        dense.meta.update({key: source.meta[key] for key in ("val", *_PROVENANCE) if key in source.meta})
        source.replace_all_uses_with(dense)
        dense.args = (source, value.stride())
        written.add(dense)


def _is_launch_result(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].target is triton_kernel_wrapper_functional


def cache_access_analyses() -> Undo:
    """A patch of torch: caches the analysis of which tensors a kernel of ours writes, by the dtypes of its arguments.

    torch compiles the kernel to Triton IR for it, three times for every launch in a graph: about a minute for some
    hundred launches.
    """
    restore = [
        replace_attribute(triton_kernel_wrap, name, _cached(analyse))
        for name, analyse in triton_access_analyses().items()
    ]

    def undo() -> None:
        for restore_function in restore:
            restore_function()

    return undo


def _cached(analyse: Callable[..., Any]) -> Callable[..., Any]:
    results: dict[Any, Any] = {}

    @functools.wraps(analyse)
    def cached(kernel: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        function = kernel
        while hasattr(function, "fn"):
            function = function.fn
        if not function.__module__.startswith("bitplan.") or any(rest):
            return analyse(kernel, kwargs, *rest)
        key = (function, *((name, _argument_key(value)) for name, value in kwargs.items()))
        if key not in results:
            results[key] = analyse(kernel, kwargs, *rest)
        tensors = {name for name, value in kwargs.items() if isinstance(value, Tensor)}
        if tensors and tensors <= written_tensors(results[key]):
            raise UnknownWritesError(f"torch could not analyse what {function.__name__} writes.")
        return results[key]

    return cached


class UnknownWritesError(BitplanError):
    """Torch assumes that a kernel of ours writes all of its arguments, its inputs and unused ones, too.

    It does so silently where its analysis fails. Copies of one tensor that is given for several arguments then take
    each other's place, and results are those of memory that nobody has written.
    """


def written_tensors(accesses: Any) -> set[str]:
    """The arguments that a kernel writes, by the analysis of torch 2.11 or of torch 2.13."""
    return set(accesses) if isinstance(accesses, list) else {access.name for access in accesses.read_writes.writes}


def _argument_key(value: Any) -> str:
    """The part of an argument that the kernel's code depends on: a tensor's dtype, the value of anything else."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    return str(value.get_dtype()) if hasattr(value, "get_dtype") else repr(value)
