"""Operations of ours in a compiled graph, opened: Inductor sees their Triton kernels and launches them itself.

Until a graph is cut into forward and backward the operations stay as they are, since the rules for what is kept and
what is computed again go by them. Then each is replaced by what it does: tensors that are allocated, and launches. Only
the time that the host takes changes; the kernels are the same.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from bitplan.compiler import amax_joining, patterns, torch_patches
from bitplan.compiler import amax_recording as record_noting
from bitplan.compiler import gated_fusion as gated_fusing
from bitplan.compiler import kernel_ops as kernel_operations
from bitplan.compiler import norm_fusion as norm_fusing
from bitplan.compiler.amax_joining import join_amax_kernels
from bitplan.compiler.amax_recording import record_amax_in_casts
from bitplan.compiler.gated_fusion import fuse_gates
from bitplan.compiler.kernel_ops import OPERATIONS, KernelOp
from bitplan.compiler.norm_fusion import fuse_norms
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

#: Whether compiled graphs launch the kernels themselves; to compare, or where a version of torch cannot.
INLINES_KERNELS = True
#: The option of Inductor that holds the pass.
OPTION = "post_grad_custom_pre_pass"
_TOLD_ON = ("stack_trace", "nn_module_stack", "seq_nr", "partitioner_tag")


class KernelInliningPass(CustomGraphPass):
    """:func:`inline_kernels` as Inductor takes it, after the passes that somebody else had set."""

    def __init__(self, earlier: Iterable[Callable[[fx.Graph], None]] = ()) -> None:
        self.earlier = tuple(earlier)

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.earlier:
            each(graph)
        torch_patches.apply(cache_access_analyses)
        fuse_gates(graph)
        fuse_norms(graph)
        record_amax_in_casts(graph)
        join_amax_kernels(graph)
        inline_kernels(graph)

    def uuid(self) -> Any:
        """What Inductor's caches know it by; None, which turns them off, where an earlier pass has no such word."""
        others = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.earlier]
        files = (source for operation in OPERATIONS.values() for source in operation.sources())
        rewriting = (patterns, gated_fusing, norm_fusing, record_noting, amax_joining)
        rules = (__file__, kernel_operations.__file__, *(module.__file__ for module in rewriting))
        fuses = f"{gated_fusing.FUSES} {norm_fusing.FUSES} {norm_fusing.FUSES_SUMS}"
        switches = f"{fuses} {record_noting.NOTES} {amax_joining.JOINS}"
        ours = get_hash_for_files((*rules, *dict.fromkeys(files)), switches)
        return None if None in others else (ours, *others)

    # torch.compile compares the options of two calls to tell whether a graph can be used again.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelInliningPass) and self.earlier == other.earlier

    def __hash__(self) -> int:
        return hash(self.earlier)


def with_kernel_inlining(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of Inductor, with the pass behind what is set there or, if nothing is, for all of Inductor."""
    settings = dict(options or {})
    theirs = settings.get(OPTION, getattr(inductor_config, OPTION))
    earlier = theirs if isinstance(theirs, (list, tuple)) else () if theirs is None else (theirs,)
    if not INLINES_KERNELS or any(isinstance(each, KernelInliningPass) for each in earlier):
        return settings
    if isinstance(theirs, (list, tuple)):  # later versions of torch take several
        return settings | {OPTION: [*earlier, KernelInliningPass()]}
    return settings | {OPTION: KernelInliningPass(earlier)}


def inline_kernels(graph: fx.Graph, device: str = "cuda", operations: Mapping[str, KernelOp] = OPERATIONS) -> int:
    """Replace each operation of ours on that device by its launches, where these are possible. How many there were."""
    known = {getattr(torch.ops.bitplan, name).default: each for name, each in operations.items()}
    found = 0
    written: set[fx.Node] = set()
    for node in list(graph.nodes):
        operation = known.get(node.target) if node.op == "call_function" else None
        if operation is not None and operation.can_inline(node, device):
            for launch in _open(graph, node, operation):
                _write_inputs(graph, launch, written)
            found += 1
    return found


def _open(graph: fx.Graph, node: fx.Node, operation: KernelOp) -> list[fx.Node]:
    """Trace what the operation does to its inputs, and put that in its place. The launches in it."""
    inputs = list(dict.fromkeys(node.all_input_nodes))
    numbers = {each: number for number, each in enumerate(inputs)}

    def launched(*values: Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: values[numbers[each]])
        return operation.launched(*args, **kwargs, wrap=torch.library.wrap_triton)

    values = [each.meta["val"] for each in inputs]
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        functional = torch.func.functionalize(launched)
        traced = make_fx(functional, decomposition_table=select_decomp_table())(*values)
    placeholders = [each for each in traced.graph.nodes if each.op == "placeholder"]
    copies = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(node):
        for each in traced.graph.nodes:
            # What is written into an input is a result, too; the graph says itself what becomes of it.
            if each.op not in ("placeholder", "output") and each.target is not torch.ops.aten.copy_.default:
                copies[each] = graph.node_copy(each, copies.__getitem__)
                copies[each].meta.update({key: node.meta[key] for key in _TOLD_ON if key in node.meta})
    results: Any = fx.map_arg(traced.graph.output_node().args[0], copies.__getitem__)
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return [each for each in copies.values() if each.target is triton_kernel_wrapper_functional]


def _write_inputs(graph: fx.Graph, launch: fx.Node, written: set[fx.Node]) -> None:
    """Have Inductor write the tensors that a kernel reads into memory once, and not for each argument that they are.

    So it does by itself with what operations read that it does not know.
    """
    kinds = get_default_op_list()
    told: dict[str, Any] = launch.kwargs
    given = told["kwargs"]
    own = [given[name] for name in told["tensors_to_clone"]]
    for source in dict.fromkeys(each for each in given.values() if isinstance(each, fx.Node) and each not in own):
        while kinds.is_view(source):
            source = source.all_input_nodes[0]
        value = source.meta["val"]
        is_there = source in written or source.op == "placeholder" or _is_of_launch(source)
        if is_there or not torch.ops.aten.is_non_overlapping_and_dense.default(value):
            continue
        with graph.inserting_after(source):
            whole = graph.call_function(force_stride_order)
        whole.meta.update({key: source.meta[key] for key in ("val", *_TOLD_ON) if key in source.meta})
        source.replace_all_uses_with(whole)
        whole.args = (source, value.stride())
        written.add(whole)


def _is_of_launch(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].target is triton_kernel_wrapper_functional


def cache_access_analyses() -> Undo:
    """A patch of torch: it looks once, and not at each launch, what a kernel of ours writes with arguments of the same
    kinds.

    It translates the kernel to see, three times for every launch in a graph: of some hundred launches, a minute.
    """
    restore = [
        replace_attribute(triton_kernel_wrap, name, _remembering(look))
        for name, look in triton_access_analyses().items()
    ]

    def undo() -> None:
        for restore_function in restore:
            restore_function()

    return undo


def _remembering(look: Callable[..., Any]) -> Callable[..., Any]:
    seen: dict[Any, Any] = {}

    @functools.wraps(look)
    def looked(kernel: Any, kwargs: dict[str, Any], *rest: Any) -> Any:
        function = kernel
        while hasattr(function, "fn"):
            function = function.fn
        if not function.__module__.startswith("bitplan.") or any(rest):
            return look(kernel, kwargs, *rest)
        key = (function, *((name, _kind_of(value)) for name, value in kwargs.items()))
        if key not in seen:
            seen[key] = look(kernel, kwargs, *rest)
        return seen[key]

    return looked


def _kind_of(value: Any) -> str:
    """What a kernel's code depends on: a tensor's type, the value of anything else."""
    if isinstance(value, Tensor):
        return str(value.dtype)
    return str(value.get_dtype()) if hasattr(value, "get_dtype") else repr(value)
