"""What autograd keeps for the backward pass, kept in its low-precision form (eager execution ``packed``).

Autograd hands every tensor that it wants to keep to a pair of hooks. A tensor that a plan has rounded lies on its
format's grid, so it is stored there in the format's own bits, and comes back bit for bit. Everything else is kept as it
is, parameters and the model's inputs among them, which live anyway.

*Which* tensors have been rounded, and how, is noted on their **storage** (torch keeps one Python object for a storage
as long as it lives): views and detached aliases of a tensor share it, another tensor that is given the same address
later does not. One packed copy serves all operations that keep the tensor.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bitplan.compiler.torch_private import DisableTorchFunction, top_saved_tensors_hooks
from bitplan.errors import BitplanWarning, PlanError, QuantizeError
from bitplan.numerics import chunks
from bitplan.numerics.chunks import chunked_on_gpu
from bitplan.numerics.dtypes import TORCH_16_BIT, TORCH_FLOAT8
from bitplan.numerics.formats import Format
from bitplan.numerics.mutable_format import LiveFormat
from bitplan.numerics.packing import MAX_PACKED_BITS, PackedTensor, pack_rounded
from bitplan.numerics.quantizer import Quantizer
from bitplan.numerics.scaling import divide

_MARK = "_bitplan_mark"

#: Formats that torch has a dtype for: a cast each way is faster than packing codes.
_TYPES = TORCH_16_BIT | TORCH_FLOAT8


@dataclass
class RoundedMark:
    """How the values of a whole storage have been rounded."""

    quantizer: Quantizer
    scales: tuple[Tensor, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    #: torch's count of writes when the mark was made: after a write it says nothing any more.
    version: int
    #: The packed copy, as long as something keeps it.
    copy: weakref.ref[PackedCopy] | None = None
    #: Who can do with the packed copy, once there is one, and keep less of their own.
    waiting: list[Callable[[PackedCopy], None]] = field(default_factory=list)


class PackedCopy:
    """A tensor in its format's own bits; all that keep the tensor share it."""

    def __init__(self, mark: RoundedMark, whole: Tensor) -> None:
        self.packed: PackedTensor | None = None
        self.cast: Tensor | None = None
        self.scale: Tensor | None = None
        self.dtype = mark.dtype
        if not mark.scales and mark.quantizer.format in _TYPES:
            self.cast = whole.to(_TYPES[mark.quantizer.format])
        else:
            with chunked_on_gpu():
                float8 = _float8_dtype(mark, whole)
                if float8 is not None:
                    # The quotient is next to a number of the grid, so that torch's cast gives that number's code.
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
        known = None if self._unpacked is None else self._unpacked()
        if known is None:
            known = self._whole()
            self._unpacked = weakref.ref(known)
        return known

    def _whole(self) -> Tensor:
        if self.packed is not None:
            with chunked_on_gpu():
                return self.packed.unpack()
        assert self.cast is not None
        values = self.cast.to(self.dtype)
        return values if self.scale is None else values * self.scale


def _float8_dtype(mark: RoundedMark, whole: Tensor) -> torch.dtype | None:
    """torch's type for the codes of a tensor with one scale that is packed in one go; None where it is not so.

    The quotient takes as much memory as the tensor: large ones are packed in parts.
    """
    dtype = _TYPES.get(mark.quantizer.format)  # type: ignore[arg-type]
    if dtype is None or dtype.itemsize != 1 or whole.dtype != torch.float32:
        return None
    if mark.quantizer.overflow == "special" or len(mark.scales) != 1 or mark.scales[0].numel() != 1:
        return None
    return dtype if len(chunks.chunks_of(whole)) == 1 else None


@dataclass
class PackedRef:
    """What a hook gives to autograd in a tensor's place: the packed copy, and which part of it the tensor was."""

    copy: PackedCopy
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def mark_rounded(tensor: Tensor, quantizer: Quantizer, scales: Sequence[Tensor]) -> None:
    """Note that `quantizer` has rounded `tensor` with these scales."""
    assert not isinstance(quantizer.format, LiveFormat)
    if not is_smaller(quantizer.format, tensor.dtype) or not tensor.numel() or tensor.is_inference():
        return
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return  # a part of something larger, or the same memory several times
    mark = RoundedMark(
        *(quantizer, tuple(scales), tensor.shape, tensor.stride(), int(tensor.storage_offset())),
        *(tensor.dtype, tensor._version),
    )
    setattr(tensor.untyped_storage(), _MARK, mark)


def copy_mark(copy: Tensor, original: Tensor) -> None:
    """Note what is known of `original` for a tensor that has just received its values, perhaps in another type."""
    mark = rounded_mark(original)
    if mark is not None and copy.shape == mark.shape and original.shape == mark.shape:
        mark_rounded(copy, mark.quantizer, mark.scales)


def rounded_mark(tensor: Tensor) -> RoundedMark | None:
    """What is known of the storage that `tensor` looks at; None where nothing is, or no longer."""
    if tensor.layout != torch.strided:
        return None  # a sparse tensor has no storage of its own
    mark: RoundedMark | None = getattr(tensor.untyped_storage(), _MARK, None)
    return mark if mark is not None and mark.version == tensor._version and mark.dtype == tensor.dtype else None


def is_smaller(target: Format, dtype: torch.dtype) -> bool:
    """Whether the format's own bits are fewer than those of `dtype`."""
    return target.bits <= MAX_PACKED_BITS and target.bits_per_value < dtype.itemsize * 8


class SavedTensorPacker:
    """The hooks of one attached plan, and what they have done."""

    def __init__(self) -> None:
        #: Bytes of all packed copies that are kept at the moment.
        self.packed_bytes = 0
        #: What the same tensors would take in their own types.
        self.plain_bytes = 0
        self._warned = False

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Keep packed what is saved inside, unless someone else's hooks are at work.

        Checkpointing has hooks of its own, in forward and in recomputation: hooks inside of those would switch it off.
        Of others the user is told, since nothing is packed then.
        """
        others: Any = top_saved_tensors_hooks(False)
        if others is not None or not torch.is_grad_enabled():
            if (
                others is not None
                and not self._warned
                and getattr(others[0], "__module__", "") != checkpoint.__module__
            ):
                self._warned = True
                warnings.warn(
                    "other hooks on saved tensors are at work around the model, so nothing is packed inside of them: "
                    "leave them, or attach with execution='emulate'.",
                    BitplanWarning,
                    stacklevel=3,
                )
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
            yield

    def pack(self, tensor: Tensor) -> Any:
        # What an autograd function of the user's saves (checkpointing's among them) is packed while a module's scope is
        # at work, which would take packing for operations of the model and round them.
        with DisableTorchFunction():
            return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> Any:
        mark = rounded_mark(tensor)
        if mark is None:
            return _without_graph(tensor)
        copy = None if mark.copy is None else mark.copy()
        if copy is None:
            try:
                with torch.no_grad():
                    copy = PackedCopy(mark, tensor.detach().as_strided(mark.shape, mark.stride, mark.offset))
            except QuantizeError:  # NaN in a format that has no code for it is kept as it is
                return _without_graph(tensor)
            mark.copy = weakref.ref(copy)
            while mark.waiting:
                mark.waiting.pop()(copy)
            self._count(copy.nbytes, tensor.untyped_storage().nbytes())
            weakref.finalize(copy, self._count, -copy.nbytes, -tensor.untyped_storage().nbytes())
        return PackedRef(copy, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - mark.offset)

    def _count(self, packed: int, plain: int) -> None:
        self.packed_bytes += packed
        self.plain_bytes += plain


def _without_graph(tensor: Tensor) -> Tensor:
    """The tensor to save where it is not packed.

    An output that its own autograd node saved would refer to that node, and without a backward pass the graph and the
    parameters would never be freed. Autograd attaches the node again when it unpacks.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


def unpack(kept: Any) -> Tensor:
    if not isinstance(kept, PackedRef):
        return kept  # type: ignore[no-any-return]
    if torch.is_grad_enabled():
        raise PlanError(
            "packed execution keeps tensors without their history, so there is no second derivative: "
            "attach with execution='emulate' for create_graph=True."
        )
    with DisableTorchFunction():  # as for packing: a backward pass may be run inside of a forward one
        return kept.copy.unpack().as_strided(kept.shape, kept.stride, kept.offset)
