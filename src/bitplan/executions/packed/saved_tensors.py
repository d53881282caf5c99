"""Tensors that autograd saves for the backward pass, stored in their low-precision form (eager execution ``packed``).

Autograd passes every tensor that it saves to a pair of hooks. A tensor that a plan has rounded is on its format's
grid (:mod:`bitplan.runtime.rounded_mark`), so it is stored in the format's own bits and restored bit for bit. All other
tensors are saved unchanged, among them parameters and the model's inputs, which are in memory anyway. One packed copy
serves all operations that save the same tensor.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bitplan.compiler.torch_private import DisableTorchFunction, top_saved_tensors_hooks
from bitplan.errors import BitplanWarning, PlanError, QuantizeError
from bitplan.numerics import chunks
from bitplan.numerics.chunks import chunked_on_gpu
from bitplan.numerics.dtypes import TORCH_16_BIT, TORCH_FLOAT8
from bitplan.numerics.packing import PackedTensor, pack_rounded
from bitplan.numerics.scaling import divide
from bitplan.runtime.rounded_mark import Packable, packable, recomputable
from bitplan.runtime.sharding import is_distributed, local_part

#: Formats that torch has a dtype for: a cast each way is faster than packing codes.
_DTYPES = TORCH_16_BIT | TORCH_FLOAT8


class PackedCopy:
    """A tensor in its format's own bits, shared by all operations that save the tensor."""

    def __init__(self, mark: Packable, whole: Tensor) -> None:
        self.packed: PackedTensor | None = None
        self.cast: Tensor | None = None
        self.scale: Tensor | None = None
        self.dtype = whole.dtype
        if not mark.scales and mark.quantizer.format in _DTYPES:
            self.cast = whole.to(_DTYPES[mark.quantizer.format])
        else:
            with chunked_on_gpu():
                float8 = _float8_dtype(mark, whole)
                if float8 is not None:
                    # The quotient is within one ulp of a grid point, so torch's cast gives the code of that point.
                    self.scale = mark.scales[0].clone()
                    self.cast = divide(whole, self.scale).to(float8)
                else:
                    self.packed = pack_rounded(mark.quantizer, whole, mark.scales)
        self._unpacked: weakref.ref[Tensor] | None = None

    @property
    def nbytes(self) -> int:
        if self.packed is not None:
            return self.packed.nbytes
        assert self.cast is not None
        scale = 0 if self.scale is None else self.scale.untyped_storage().nbytes()
        return self.cast.untyped_storage().nbytes() + scale

    def unpack(self) -> Tensor:
        unpacked = None if self._unpacked is None else self._unpacked()
        if unpacked is None:
            unpacked = self._restore()
            self._unpacked = weakref.ref(unpacked)
        return unpacked

    def _restore(self) -> Tensor:
        if self.packed is not None:
            with chunked_on_gpu():
                return self.packed.unpack()
        assert self.cast is not None
        values = self.cast.to(self.dtype)
        return values if self.scale is None else values * self.scale


def _float8_dtype(mark: Packable, whole: Tensor) -> torch.dtype | None:
    """The float8 dtype for a tensor with one scale that is packed in one chunk; None if it does not apply.

    The quotient takes as much memory as the tensor, so large tensors are packed in chunks instead.
    """
    dtype = _DTYPES.get(mark.quantizer.format)  # type: ignore[arg-type]
    if dtype is None or dtype.itemsize != 1 or whole.dtype != torch.float32:
        return None
    if mark.quantizer.overflow == "special" or len(mark.scales) != 1 or mark.scales[0].numel() != 1:
        return None
    return dtype if len(chunks.chunks_of(whole)) == 1 else None


@dataclass
class PackedRef:
    """The value that a hook returns to autograd for a saved tensor: the packed copy, and the tensor's view of it."""

    copy: PackedCopy
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class UnpackedRef:
    """A tensor that is saved unchanged, with its version: autograd does not check what hooks return."""

    def __init__(self, tensor: Tensor) -> None:
        # An output that its own autograd node saved would refer to that node, and without a backward pass the graph and
        # the parameters would never be freed. Autograd attaches the node again when it unpacks.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version

    def unpack(self) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype}, shape {list(self.tensor.shape)}] is at version {self.tensor._version}, and "
                f"version {self.version} was saved."
            )
        return self.tensor


@dataclass
class RecomputedRef:
    """A rounded weight that is not saved: the backward pass rounds it again."""

    make: Callable[[], Tensor]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        return local_part(self.make()).as_strided(self.shape, self.stride, self.offset)


class ShardRef:
    """A DTensor whose local part is not saved as it is."""

    def __init__(self, local: PackedRef | RecomputedRef | ShardRef, tensor: Any) -> None:
        self.local = local
        self.mesh, self.placements = tensor.device_mesh, tensor.placements
        self.shape, self.stride = tensor.shape, tensor.stride()

    def unpack(self) -> Tensor:
        from torch.distributed.tensor import DTensor

        local = local_part(unpack(self.local))  # a weight that is rounded again is a DTensor
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


SavedRef = PackedRef | UnpackedRef | RecomputedRef | ShardRef


class SavedTensorPacker:
    """The saved-tensor hooks of an attached plan, and the bytes of the packed copies.

    :param packs: whether rounded tensors are packed. Without, only tensors that are made again are not saved.
    """

    def __init__(self, packs: bool = True) -> None:
        self.packs = packs
        #: Bytes of all packed copies that exist.
        self.packed_bytes = 0
        #: Bytes that the same tensors would take unpacked.
        self.plain_bytes = 0
        self._warned = False

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Pack the tensors that are saved inside, unless other hooks are active.

        Activation checkpointing has its own hooks, in forward and in recomputation; hooks inside of those would disable
        it. For all other hooks the user is warned, because nothing is packed then.
        """
        others: Any = top_saved_tensors_hooks(False)
        if others is not None or not torch.is_grad_enabled():
            if (
                others is not None
                and self.packs
                and not self._warned
                and getattr(others[0], "__module__", "") != checkpoint.__module__
            ):
                self._warned = True
                warnings.warn(
                    "other saved-tensor hooks are active around the model, so nothing is packed inside of them: "
                    "leave them, or attach with execution='emulate'.",
                    BitplanWarning,
                    stacklevel=3,
                )
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
            yield

    def pack(self, tensor: Tensor) -> SavedRef:
        # Autograd functions of users, and checkpointing, save tensors inside a module's scope, which would treat the
        # operations of packing as the model's and round them.
        with DisableTorchFunction():
            return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> SavedRef:
        if is_distributed(tensor):
            local = self._pack(local_part(tensor))
            return UnpackedRef(tensor) if isinstance(local, UnpackedRef) else ShardRef(local, tensor)
        source = recomputable(tensor)
        if source is not None:
            return RecomputedRef(source.make, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        mark = packable(tensor) if self.packs else None
        if mark is None:
            return UnpackedRef(tensor)
        copy: PackedCopy | None = None if mark.copy is None else mark.copy()
        if copy is None:
            try:
                with torch.no_grad():
                    copy = PackedCopy(mark, tensor.detach().as_strided(mark.shape, mark.stride, mark.offset))
            except QuantizeError:  # NaN in a format that has no code for it is saved unchanged
                return UnpackedRef(tensor)
            mark.copy = weakref.ref(copy)
            while mark.on_packed:
                mark.on_packed.pop()(copy)
            self._count(copy.nbytes, tensor.untyped_storage().nbytes())
            weakref.finalize(copy, self._count, -copy.nbytes, -tensor.untyped_storage().nbytes())
        return PackedRef(copy, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - mark.offset)

    def _count(self, packed: int, plain: int) -> None:
        self.packed_bytes += packed
        self.plain_bytes += plain


def unpack(saved: SavedRef) -> Tensor:
    """Restore the argument of :meth:`SavedTensorPacker.pack`, bit for bit."""
    if isinstance(saved, UnpackedRef):
        return saved.unpack()
    if isinstance(saved, ShardRef):
        return saved.unpack()
    if torch.is_grad_enabled():
        raise PlanError(
            "packed execution, and any plan under FSDP2, saves tensors without their history, so there is no second "
            "derivative: attach with execution='emulate' to an unsharded model for create_graph=True."
        )
    with DisableTorchFunction():  # as for packing: a backward pass may run inside of a forward pass
        if isinstance(saved, RecomputedRef):
            return saved.unpack()
        return saved.copy.unpack().as_strided(saved.shape, saved.stride, saved.offset)
