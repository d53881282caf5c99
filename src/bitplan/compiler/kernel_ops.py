"""The operations of ours that are Triton kernels on a GPU, and how each of them launches its kernels.

An operation that a compiled graph calls as it is goes through torch's dispatcher and through Python: 50 to 70
microseconds of the host's time on an H200, of which a step has hundreds. Inductor launches a kernel in a tenth of that
where it knows the kernel; :mod:`bitplan.compiler.launching` shows it those of the operations that are listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class KernelOp:
    """``torch.ops.bitplan.<name>``, opened."""

    name: str
    #: Takes what the operation takes, and ``wrap``, through which it passes every kernel before it launches that.
    launched: Callable[..., Any]
    #: Whether the kernels can do it for these arguments, or else the operation itself has to see to it.
    is_possible: Callable[..., bool]
    #: The modules where it is written down.
    modules: tuple[str, ...]

    def can_inline(self, node: fx.Node, device: str) -> bool:
        """Whether the kernels can take the node's place: tensors on that device, of sizes that are known."""
        values = [each.meta["val"] for each in node.all_input_nodes]
        is_known = all(
            isinstance(value, Tensor)
            and value.device.type == device
            and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
            for value in values
        )
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        return is_known and self.is_possible(*args, **kwargs)

    def sources(self) -> tuple[str, ...]:
        """The files of these; a compiled graph that was stored holds for as long as they stay the same."""
        specs = (find_spec(name) for name in self.modules)
        return tuple(spec.origin for spec in specs if spec is not None and spec.origin is not None)


#: All that were listed, by name.
OPERATIONS: dict[str, KernelOp] = {}


def register_kernels(
    name: str, launched: Callable[..., Any], is_possible: Callable[..., bool], modules: tuple[str, ...]
) -> None:
    """Let compiled graphs launch the kernels of ``torch.ops.bitplan.<name>`` themselves."""
    OPERATIONS[name] = KernelOp(name, launched, is_possible, modules)


def register(
    library: Any,
    name: str,
    launched: Callable[..., Any],
    in_torch: Callable[..., Any],
    of_shape: Callable[..., Any],
    modules: tuple[str, ...],
) -> None:
    """Let an operation that `library` defines be kernels on a GPU and plain torch elsewhere, and list it.

    :param of_shape: gives results that are not computed, for tracing.
    """
    library.impl(name, in_torch, "CompositeExplicitAutograd")
    library.impl(name, _on_gpu(launched, in_torch), "CUDA")
    torch.library.register_fake(f"bitplan::{name}", of_shape, lib=library)
    register_kernels(name, launched, lambda first, *_: first.numel() > 0, modules)


def _on_gpu(launched: Callable[..., Any], in_torch: Callable[..., Any]) -> Callable[..., Any]:
    """What an operation does on a GPU: launch its kernels there, on tensors that lie row by row. Nothing takes none."""

    def computed(*given: Any) -> Any:
        if not given[0].numel():
            return in_torch(*given)
        with torch.cuda.device(given[0].get_device()):
            return launched(*(each.contiguous() if isinstance(each, Tensor) else each for each in given))

    return computed


def itself(kernel: Any) -> Any:
    """A kernel as it is launched without torch.compile."""
    return kernel
