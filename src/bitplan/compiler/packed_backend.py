"""The backend ``bitplan`` of torch.compile: Inductor, with the graph cut so that codes are kept instead of tensors.

The cut must be set where a graph is really compiled, which is at the first call and not where ``torch.compile`` is
written; a backend of our own is that place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from bitplan.compiler import torch_private
from bitplan.compiler.tracing import constant_when_traced
from bitplan.errors import PlanError

#: The name by which ``torch.compile(model, backend=...)`` knows it.
BACKEND = "bitplan"


def compile_packed(
    gm: fx.GraphModule,
    example_inputs: Any,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph with Inductor, keeping codes for the backward pass."""
    from bitplan.compiler.launching import with_kernel_inlining
    from bitplan.compiler.partitioning import PackedPartitioner

    asked = with_kernel_inlining(options)
    settings = {
        **torch_private.list_mode_options(mode or "default"),
        **asked,
        "custom_partitioner_fn": PackedPartitioner(),
    }
    compiled: Any = torch_private.compile_fx(gm, example_inputs, config_patches=settings)
    return compiled  # type: ignore[no-any-return]


def register_backend() -> None:
    """Let torch.compile know the backend by its name."""
    if BACKEND not in torch_private.list_backends(exclude_tags=()):
        torch_private.register_backend(compile_packed, BACKEND)  # type: ignore[no-untyped-call, unused-ignore]


def is_compiled_by_us() -> bool:
    """While torch.compile traces: whether the graph goes to our backend."""
    compiler: Any = torch_private.InstructionTranslator.current_tx().output.compiler_fn
    for _ in range(8):  # torch wraps backends in each other
        if compiler is None or getattr(compiler, "compiler_name", None) == BACKEND:
            return compiler is not None
        if getattr(compiler, "__name__", None) == compile_packed.__name__:
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
    """Raise where a packed model is compiled by a backend that would keep its tensors in full."""
    if not is_compiled_by_us():
        raise PlanError(
            "this compilation would keep tensors in full: compile a packed model with run.compile(), "
            "or with torch.compile(model, backend='bitplan')."
        )
