"""Which torch functions make tensors, under what names, and which of them are products.

Interception sees functions as torch's dispatch names them: ``torch.relu``, ``F.relu``, ``Tensor.relu_`` and
``Tensor.__iadd__`` are four objects. :func:`name_of` gives the one name that sites and plans use (``relu``, ``add``),
or None for what makes no tensor of its own: views, casts, copies, queries, and functions without tensor inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from bitplan.compiler.tracing import constant_when_traced

#: Views, and copies that change no value.
_NO_NEW_VALUES = frozenset(
    """
    view view_as reshape reshape_as permute transpose transpose_ t t_ T mT H mH adjoint flatten ravel unflatten squeeze
    squeeze_ unsqueeze unsqueeze_ expand expand_as broadcast_to broadcast_tensors chunk split split_with_sizes
    tensor_split hsplit vsplit dsplit unbind select narrow getitem as_strided diagonal swapaxes swapdims movedim
    moveaxis unfold real imag detach detach_ contiguous clone to float half bfloat16 double type type_as cpu cuda
    alias lift_fresh requires_grad_ retain_grad register_hook data pin_memory identity numpy index_select gather
    tile repeat repeat_interleave roll flip masked_select take take_along_dim empty_like zeros_like ones_like full_like
    rand_like randn_like randint_like new_empty new_zeros new_ones new_full new_tensor zero_ fill_ copy_ set_ resize_
    setitem constant_pad_nd pad kept_copy to_sparse to_dense coalesce indices values crow_indices col_indices
    to_copy unsafe_view reshape_alias
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)

#: Those whose values do not depend on the tensor that they are given.
FACTORIES_LIKE = frozenset(
    """
    empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full
    new_tensor
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)

#: Questions about tensors, and everything else whose answer is no activation.
_NO_TENSOR = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset data_ptr element_size item tolist len bool int index
    format repr str hash iter contains get_device is_contiguous is_floating_point is_complex is_signed is_same_size
    is_inference is_nonzero is_pinned is_shared backward get set delete argmax argmin argsort sort topk unique
    nonzero eq ne lt le gt ge isnan isinf isfinite allclose equal any all logical_and logical_or logical_not
    logical_xor result_type can_cast promote_types has_torch_function untyped_storage storage is_leaf
    manual_seed tril_indices triu_indices bincount searchsorted bucketize deepcopy reduce_ex dir sizeof
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)

#: One name for several spellings.
_SPELLINGS = {
    "mm": "matmul",
    "mv": "matmul",
    "dot": "matmul",
    "vdot": "matmul",
    "linalg_matmul": "matmul",
    "rmatmul": "matmul",
    "radd": "add",
    "iadd": "add",
    "rsub": "sub",
    "isub": "sub",
    "subtract": "sub",
    "rmul": "mul",
    "imul": "mul",
    "multiply": "mul",
    "truediv": "div",
    "rtruediv": "div",
    "itruediv": "div",
    "divide": "div",
    "rdiv": "div",
    "idiv": "div",
    "rpow": "pow",
    "ipow": "pow",
    "concat": "cat",
    "concatenate": "cat",
    "sparse_mm": "sparse_matmul",
}

#: Products y = x w: the positions (and keywords) of x and w among the arguments.
PRODUCTS: dict[str, tuple[tuple[int, str], tuple[int, str]]] = {
    "linear": ((0, "input"), (1, "weight")),
    "conv1d": ((0, "input"), (1, "weight")),
    "conv2d": ((0, "input"), (1, "weight")),
    "conv3d": ((0, "input"), (1, "weight")),
    "conv_transpose1d": ((0, "input"), (1, "weight")),
    "conv_transpose2d": ((0, "input"), (1, "weight")),
    "conv_transpose3d": ((0, "input"), (1, "weight")),
    "matmul": ((0, "input"), (1, "other")),
    "bmm": ((0, "input"), (1, "mat2")),
    "addmm": ((1, "mat1"), (2, "mat2")),
    "baddbmm": ((1, "batch1"), (2, "batch2")),
    "einsum": ((1, "x"), (2, "w")),
    "grouped_mm": ((0, "self"), (1, "mat2")),
}

#: Single calls that hide products; opened up when a rule asks for something inside.
FUSED = frozenset(
    {"scaled_dot_product_attention", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu"}
)

#: Whole regions that torch.compile shows to modes as one call; the first argument is the region's function.
REGIONS = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint"})


#: Operations that return their input where they drop nothing.
DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})


def drops_nothing(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a dropout has probability 0, or is in evaluation: torch then returns the input itself.

    >>> drops_nothing((torch.ones(1), 0.0, True), {}), drops_nothing((torch.ones(1),), {})
    (True, False)
    """
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    return len(args) > 0 and (probability == 0 or not training)


@constant_when_traced
def name_of(func: Callable[..., Any]) -> str | None:
    """The canonical name, or None where `func` makes no tensor of its own.

    >>> name_of(torch.Tensor.__iadd__), name_of(torch.relu_), name_of(torch.Tensor.view)
    ('add', 'relu', None)
    """
    return _name_of_text(getattr(func, "__name__", "__get__"))


@lru_cache(maxsize=4096)
def _name_of_text(raw: str) -> str | None:
    if raw in ("__get__", "__set__"):
        return None
    raw = raw.partition(".")[0]  # an operator of torch.ops has the name of its overload: mm.default
    bare = raw[2:-2] if raw.startswith("__") and raw.endswith("__") else raw
    if bare in _NO_NEW_VALUES or bare in _NO_TENSOR:
        return None
    bare = bare.rstrip("_").lstrip("_")
    if bare in _NO_NEW_VALUES or bare in _NO_TENSOR:
        return None
    return _SPELLINGS.get(bare, bare)


@constant_when_traced
def works_in_place(func: Callable[..., Any]) -> bool:
    """Whether `func` changes its first argument, by its name.

    >>> works_in_place(torch.relu_), works_in_place(torch.Tensor.__iadd__), works_in_place(torch.relu)
    (True, True, False)
    """
    return _names_in_place(getattr(func, "__name__", ""))


@lru_cache(maxsize=4096)
def _names_in_place(name: str) -> bool:
    name = name.partition(".")[0]
    if name.startswith("__"):
        return name.startswith("__i") and name.strip("_") in _SPELLINGS
    return name.endswith("_")


@constant_when_traced
def inplace_position(func: Callable[..., Any]) -> int:
    """The position of the argument ``inplace`` of a function of torch.nn.functional; -1 where there is none.

    >>> inplace_position(torch.nn.functional.hardtanh), inplace_position(torch.relu)
    (3, -1)
    """
    if getattr(func, "__module__", None) != "torch.nn.functional" or not inspect.isfunction(func):
        return -1
    return _inplace_position(func)


@lru_cache(maxsize=256)
def _inplace_position(func: Callable[..., Any]) -> int:
    names = list(inspect.signature(func).parameters)
    return names.index("inplace") if "inplace" in names else -1


@constant_when_traced
def out_of_place(func: Callable[..., Any]) -> Callable[..., Any]:
    """The twin of an in-place function that returns a new tensor."""
    name = getattr(func, "__name__", "").partition(".")[0]
    plain = _SPELLINGS[name.strip("_")] if name.startswith("__") else name.rstrip("_")
    for home in (torch.Tensor, torch, torch.nn.functional):
        twin = getattr(home, plain, None)
        if twin is not None:
            return twin  # type: ignore[no-any-return]
    raise AttributeError(f"torch has no out-of-place twin of {name}")
