"""Registry of the custom operations that are Triton kernels on a GPU, with the functions that launch these.

A custom operation in a compiled graph goes through torch's dispatcher and through Python: 50 to 70 microseconds of host
time per call on an H200 host, and a step has hundreds of calls. Inductor launches a Triton kernel that it sees in the
graph in a tenth of that; :mod:`bitplan.compiler.launching` replaces the operations registered here by their launches.

The operation ``bitplan::NAME`` of a module ``M`` is launched by the function ``launch_NAME`` of the module
``M_kernel``, which imports Triton and is therefore imported at the first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx


def launch_directly(kernel: Any) -> Any:
    """The argument ``wrap`` of kernels that are launched outside torch.compile: the kernel as it is."""
    return kernel


@dataclass(frozen=True)
class KernelOp:
    """The kernels behind ``torch.ops.bitplan.<name>``."""

    name: str
    #: Takes the operation's arguments and ``wrap``, which is applied to every kernel before its launch.
    launch: Callable[..., Any]
    #: Whether the kernels support these arguments; otherwise the operation stays in the graph.
    supports: Callable[..., bool]
    #: The modules that define it, for the cache key.
    modules: tuple[str, ...]

    def can_inline(self, node: fx.Node, device: str) -> bool:
        """Whether the node can be replaced by launches: tensors on that device, with static shapes."""
        values = [source.meta["val"] for source in node.all_input_nodes]
        is_static = all(
            isinstance(value, Tensor)
            and value.device.type == device
            and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
            for value in values
        )
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        return is_static and self.supports(*args, **kwargs)

    def sources(self) -> tuple[str, ...]:
        """The files of its modules; a cached compiled graph is valid as long as they are unchanged."""
        specs = (find_spec(name) for name in self.modules)
        return tuple(spec.origin for spec in specs if spec is not None and spec.origin is not None)


#: All registered operations, by name.
OPERATIONS: dict[str, KernelOp] = {}


def register_kernels(name: str, module: str, supports: Callable[..., bool]) -> KernelOp:
    """Let compiled graphs launch the kernels of ``torch.ops.bitplan.<name>``, which `module` defines."""

    def launch(*args: Any, wrap: Any = launch_directly, **kwargs: Any) -> Any:
        return getattr(import_module(f"{module}_kernel"), f"launch_{name}")(wrap, *args, **kwargs)

    operation = OPERATIONS[name] = KernelOp(name, launch, supports, (module, f"{module}_kernel"))
    return operation


def register(library: Any, name: str, reference: Callable[..., Any], fake: Callable[..., Any], module: str) -> None:
    """Implement an operation that `library` defines: kernels on a GPU, plain torch elsewhere; and register its kernels.

    :param reference: the implementation in plain torch.
    :param fake: returns uninitialised results of the right shapes, for tracing.
    :param module: the module that defines the operation.
    """
    operation = register_kernels(name, module, lambda first, *_: first.numel() > 0)

    def run_on_gpu(*args: Any) -> Any:
        if not args[0].numel():
            return reference(*args)
        with torch.cuda.device(args[0].get_device()):
            return operation.launch(*(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args))

    library.impl(name, reference, "CompositeExplicitAutograd")
    library.impl(name, run_on_gpu, "CUDA")
    torch.library.register_fake(f"bitplan::{name}", fake, lib=library)
