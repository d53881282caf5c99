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

#: Operations whose values depend on the same position of their inputs only.
POINTWISE = frozenset(
    """
    add sub mul div neg abs sign pow float_power square sqrt rsqrt reciprocal exp exp2 expm1 log log1p log2 log10 sin
    cos tan tanh sinh cosh atan erf erfc erfinv sigmoid logit relu relu6 gelu silu mish softplus softsign tanhshrink
    elu celu selu leaky_relu prelu rrelu hardtanh hardswish hardsigmoid hardshrink softshrink threshold logsigmoid
    log_sigmoid glu clamp clamp_min clamp_max clip minimum maximum where masked_fill lerp addcmul addcdiv nan_to_num
    remainder fmod round floor ceil trunc dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout
    feature_alpha_dropout
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)
#: Those that are linear in each of their inputs.
LINEAR_POINTWISE = frozenset(
    "add sub mul div neg dropout dropout1d dropout2d dropout3d feature_dropout where masked_fill lerp addcmul".split()  # noqa: SIM905
)

#: Norms as single operations.
NORMS = frozenset(
    """
    layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm normalize native_layer_norm
    native_group_norm native_batch_norm
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)

#: Operations, other than products, that save their input for the backward pass.
SAVES_INPUT = NORMS | frozenset(
    """
    gelu silu mish softplus softsign hardswish hardsigmoid hardshrink softshrink hardtanh relu6 leaky_relu prelu rrelu
    elu celu selu threshold logsigmoid log_sigmoid glu erf logit square pow abs log log1p log2 log10 sin cos clamp
    clamp_min clamp_max clip minimum maximum amax amin norm linalg_vector_norm var std var_mean std_mean prod cumprod
    logsumexp max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d
    avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d nll_loss mse_loss l1_loss
    smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div scaled_dot_product_attention
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
)
#: Operations that save an input if another input needs a gradient.
SAVES_FACTORS = frozenset(("mul", "div", "addcmul", "addcdiv", "lerp"))
#: Operations that save their result.
SAVES_OUTPUT = frozenset(
    """
    relu sigmoid tanh tan softmax softmin log_softmax exp exp2 expm1 sqrt rsqrt reciprocal scaled_dot_product_attention
    """.split()  # noqa: SIM905 - a paragraph of names reads better than a page of quotes
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
    name = getattr(func, "__name__", "__get__")
    if name[-1:] == "_" and getattr(func, "__module__", None) == "torch.nn.init":
        return None  # a lazy module initialises its weights in the scope of the module around it
    return _name_of_text(name)


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
