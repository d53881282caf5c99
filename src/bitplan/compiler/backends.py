"""The backends of torch.compile: Inductor, with partitioners of packed and of native execution.

A partitioner must be set where a graph is compiled, which is at the first call and not where ``torch.compile`` is
called. Hence these backends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import fx

from bitplan.compiler import torch_private
from bitplan.compiler.tracing import constant_when_traced
from bitplan.errors import PlanError

if TYPE_CHECKING:
    from bitplan.compiler.partitioning import RecomputePolicy
    from bitplan.compiler.torch_private import CustomPartitionerFn

#: The name of the backend of packed execution in ``torch.compile(model, backend=...)``.
BACKEND = "bitplan"


def compile_packed(
    gm: fx.GraphModule, example_inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph with Inductor, saving codes for the backward pass."""
    from bitplan.compiler.partitioning import PackedPartitioner

    return _compile(gm, example_inputs, mode, options, PackedPartitioner())


def compile_packed_aggressively(
    gm: fx.GraphModule, example_inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The same, recomputing whatever pointwise operations and reductions can restore."""
    from bitplan.compiler.partitioning import PackedPartitioner

    return _compile(gm, example_inputs, mode, options, PackedPartitioner(is_aggressive=True))


def compile_native_plainly(
    gm: fx.GraphModule, example_inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph with kernels of native execution and torch's own partitioner."""
    return _compile(gm, example_inputs, mode, options, None)


@cache
def native_backend(policy: RecomputePolicy) -> Callable[..., Callable[..., Any]]:
    """The backend of a policy; cached, because torch reuses graphs only of the same backend object."""
    from bitplan.compiler.partitioning import RecomputePartitioner

    def compile_native(
        gm: fx.GraphModule, example_inputs: Any, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        return _compile(gm, example_inputs, mode, options, RecomputePartitioner(policy))

    return compile_native


def _compile(
    gm: fx.GraphModule,
    example_inputs: Any,
    mode: str | None,
    options: dict[str, Any] | None,
    partitioner: CustomPartitionerFn | None,
) -> Callable[..., Any]:
    from bitplan.compiler.attention_masks import fold_attention_masks
    from bitplan.compiler.launching import with_kernel_inlining

    fold_attention_masks(gm)

    mode_options = torch_private.list_mode_options(mode or "default")
    settings = {**mode_options, **with_kernel_inlining(options)}
    if partitioner is not None:
        settings["custom_partitioner_fn"] = partitioner
    compiled: Any = torch_private.compile_fx(gm, example_inputs, config_patches=settings)
    return compiled  # type: ignore[no-any-return]


def register_backend() -> None:
    """Register the backend of packed execution with torch.compile."""
    if BACKEND not in torch_private.list_backends(exclude_tags=()):
        torch_private.register_backend(compile_packed, BACKEND)  # type: ignore[no-untyped-call, unused-ignore]


def _is_packed_backend() -> bool:
    """While torch.compile traces: whether the backend is that of packed execution."""
    compiler: Any = torch_private.InstructionTranslator.current_tx().output.compiler_fn
    for _ in range(8):  # torch wraps backends in each other
        if compiler is None or getattr(compiler, "compiler_name", None) == BACKEND:
            return compiler is not None
        if getattr(compiler, "__name__", None) in (compile_packed.__name__, compile_packed_aggressively.__name__):
            return True
        compiler = next(
            (
                getattr(compiler, name)
                for name in ("_torchdynamo_orig_backend", "compiler_fn", "__wrapped__", "_orig_backend")
                if getattr(compiler, name, None) is not None
            ),
            None,
        )
    return False


@constant_when_traced
def refuse_other_backends() -> None:
    """Raise if a packed model is compiled by a backend that would save tensors in full precision."""
    if not _is_packed_backend():
        raise PlanError(
            "this backend would save tensors in full precision: compile a packed model with run.compile(), or with "
            "torch.compile(model, backend='bitplan')."
        )
