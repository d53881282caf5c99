"""A head's cross-entropy in chunks of tokens: equal to torch's own, and never a tensor of tokens x vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_losses import LargestTensor
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitplan.errors import BitplanError
from bitplan.runtime import head_loss_ops
from bitplan.runtime.head_loss import linear_cross_entropy
from bitplan.runtime.head_loss_ops import chunk_size

TOKENS, FEATURES, VOCABULARY = 21, 16, 50


def operands(dtype: torch.dtype = torch.float64, bias: bool = True) -> list[Any]:
    torch.manual_seed(0)
    hidden = torch.randn(3, TOKENS // 3, FEATURES, dtype=torch.float64)
    weight, offset = (
        torch.randn(VOCABULARY, FEATURES, dtype=torch.float64),
        torch.randn(VOCABULARY, dtype=torch.float64),
    )
    return [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight)] + [
        offset.to(dtype).requires_grad_() if bias else None
    ]


def targets(ignored: int = 4) -> Tensor:
    torch.manual_seed(1)
    classes = torch.randint(0, VOCABULARY, (TOKENS,))
    classes[torch.randperm(TOKENS)[:ignored]] = -100
    return classes.view(3, -1)


def reference(hidden: Tensor, weight: Tensor, classes: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """By way of the logits, in the dtype of the operands."""
    options.pop("chunk", None)
    cap, scale = options.pop("logit_softcap", None), options.pop("logit_scale", 1.0)
    if options.pop("shift", False):
        classes = F.pad(classes[..., 1:], (0, 1), value=options.get("ignore_index", -100))
    logits = F.linear(hidden, weight, bias)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    loss = F.cross_entropy(logits.flatten(0, -2), classes.flatten(), **options)
    return loss.view(classes.shape) if options.get("reduction") == "none" else loss


def loss_and_grads(
    function: Callable[..., Tensor], tensors: list[Any], classes: Tensor, **options: Any
) -> list[Tensor]:
    hidden, weight, bias = tensors
    for tensor in tensors:
        if tensor is not None:
            tensor.grad = None
    loss = function(hidden, weight, classes, bias=bias, **options)
    weights = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    (loss * weights).sum().backward()
    return [loss.detach(), *(tensor.grad.clone() for tensor in tensors if tensor is not None and tensor.requires_grad)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2},
    "smoothed rows": {"label_smoothing": 0.2, "reduction": "none"},
    "capped": {"logit_softcap": 3.0},
    "scaled and capped": {"logit_softcap": 3.0, "logit_scale": 0.3, "label_smoothing": 0.1},
    "scaled": {"logit_scale": 0.3, "reduction": "sum"},
    "shifted": {"shift": True},
    "other ignored class": {"ignore_index": 7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk", [None, 1, 4, 7, 21, 1000])
def test_loss_and_gradients_in_float64(options: dict[str, Any], chunk: int | None) -> None:
    classes = targets(0 if "ignore_index" in options else 4)
    expected = loss_and_grads(reference, operands(), classes, **options)
    actual = loss_and_grads(linear_cross_entropy, operands(), classes, chunk=chunk, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_of_logits_may_begin_at_aligned_addresses(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where others are slow to multiply; here 50 classes have 56 columns, which change nothing."""
    monkeypatch.setitem(head_loss_ops._ALIGNMENT, "cpu", 64)
    widths: set[int] = set()
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **more: widths.add(a.stride(0)) or original(a, b, **more))
    classes = targets(0 if "ignore_index" in options else 4)
    expected = loss_and_grads(reference, operands(), classes, **options)
    actual = loss_and_grads(linear_cross_entropy, operands(), classes, chunk=4, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
        assert ours.is_contiguous()
    assert 56 in widths
    assert 50 not in widths


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_low_precision_is_close_and_not_exact(reduction: str) -> None:
    """bfloat16 logits, losses in float32: the error is bfloat16's, no more and no less."""
    exact = loss_and_grads(reference, operands(), targets(), reduction=reduction)
    actual = loss_and_grads(linear_cross_entropy, operands(torch.bfloat16), targets(), reduction=reduction, chunk=4)
    assert actual[0].dtype == torch.float32
    for ours, theirs in zip(actual, exact, strict=True):
        error = float((ours.double() - theirs).norm() / theirs.norm())
        assert 1e-5 < error < 2e-2


def test_float16_gradients_wait_for_the_loss_scale() -> None:
    """A gradient of 1/tokens/vocabulary is below float16's smallest number; times a loss scale it is not."""
    scale = 2.0**20
    hidden, weight, _ = operands(torch.float16, bias=False)
    hidden, weight = (hidden * 1e-3).detach().requires_grad_(), (weight * 1e-3).detach().requires_grad_()
    classes = torch.zeros(3, TOKENS // 3, dtype=torch.long)
    (linear_cross_entropy(hidden, weight, classes, chunk=4) * 1e-6 * scale).backward()
    assert weight.grad is not None
    grads = [weight.grad.clone()]
    weight.grad = None
    (reference(hidden, weight, classes) * 1e-6 * scale).backward()
    torch.testing.assert_close(grads[0], weight.grad, rtol=2e-2, atol=1e-6)


def test_no_tensor_of_tokens_by_vocabulary() -> None:
    tokens, features, vocabulary = 64, 4, 100
    hidden = torch.randn(tokens, features, requires_grad=True)
    weight = torch.randn(vocabulary, features, requires_grad=True)
    classes = torch.randint(0, vocabulary, (tokens,))
    for reduction in ("mean", "none"):
        with LargestTensor() as largest:
            linear_cross_entropy(hidden, weight, classes, reduction=reduction, chunk=8).sum().backward()
        assert largest.elements == 8 * vocabulary
    with LargestTensor() as largest:
        reference(hidden, weight, classes).backward()
    assert largest.elements == tokens * vocabulary


def test_chunks_of_nearly_equal_size() -> None:
    assert chunk_size(16384, 128256, None) == 2048
    assert chunk_size(2049, 128256, None) == 1040
    assert chunk_size(10, 1 << 30, None) == 16
    assert chunk_size(10, 50, 3) == 3


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_and_no_tokens_as_in_torch(reduction: str) -> None:
    classes = torch.full((3, TOKENS // 3), -100)
    ours = loss_and_grads(linear_cross_entropy, operands(), classes, reduction=reduction, chunk=4)
    theirs = loss_and_grads(reference, operands(), classes, reduction=reduction)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)
    assert bool(ours[0].isnan().any()) == (reduction == "mean")
    hidden, weight, _ = operands()
    none = linear_cross_entropy(hidden[:0], weight, torch.empty(0, TOKENS // 3, dtype=torch.long), reduction=reduction)
    none.sum().backward()
    assert not weight.grad.any()


def test_frozen_parts_get_no_gradient() -> None:
    full = loss_and_grads(linear_cross_entropy, operands(), targets(), chunk=4)
    for frozen in range(3):
        tensors = operands()
        tensors[frozen].requires_grad_(False)
        actual = loss_and_grads(linear_cross_entropy, tensors, targets(), chunk=4)
        expected = [full[0], *(grad for position, grad in enumerate(full[1:]) if position != frozen)]
        assert all(map(torch.equal, actual, expected))
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(*operands()[:2], targets(), chunk=4, bias=operands()[2]), full[0])


def test_tied_embedding() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, FEATURES, dtype=torch.float64)
    grads = []
    for function in (linear_cross_entropy, reference):
        embedding.zero_grad()
        function(embedding(targets(0)), embedding.weight, targets(), shift=True, chunk=4).backward()
        assert embedding.weight.grad is not None
        grads.append(embedding.weight.grad.clone())
    torch.testing.assert_close(*grads)


def test_backward_twice_with_a_retained_graph() -> None:
    hidden, weight, _ = operands()
    loss = linear_cross_entropy(hidden, weight, targets(), chunk=4)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, weight)[0])


def test_in_a_checkpointed_region_and_under_autocast() -> None:
    hidden, weight, bias = operands(torch.float32)
    plain = loss_and_grads(linear_cross_entropy, [hidden, weight, bias], targets(), chunk=4)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(linear_cross_entropy, *args, use_reentrant=False, **kwargs)

    again = loss_and_grads(checkpointed, [hidden, weight, bias], targets(), chunk=4)
    assert all(map(torch.equal, plain, again))
    with torch.autocast("cpu", torch.bfloat16):
        low = loss_and_grads(linear_cross_entropy, [hidden, weight, bias], targets(), chunk=4)
        expected = loss_and_grads(reference, [hidden, weight, bias], targets())
    for actual, theirs, full in zip(low, expected, plain, strict=True):
        assert actual.dtype == torch.float32
        assert not torch.equal(actual, full)
        torch.testing.assert_close(actual, theirs, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none", "logit_softcap": 3.0, "shift": True}], ids=["mean", "rows"]
)
def test_compiled_equals_eager(backend: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    function: Any = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    eager = loss_and_grads(linear_cross_entropy, operands(torch.float32), targets(), chunk=4, **options)
    compiled = loss_and_grads(function, operands(torch.float32), targets(), chunk=4, **options)
    for actual, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_step_on_a_gpu_is_compiled() -> None:
    """The same functions as on a CPU, fused by Inductor: here by its C++ backend."""
    torch.manual_seed(0)
    logits, classes, factors = torch.randn(6, 40).bfloat16(), torch.tensor([3, -100, 0, 39, 5, 5]), torch.rand(6)
    settings = (-100, 0.1, 0.5, 2.0)
    for columns in (40, 48):
        eager = head_loss_ops._combined_step(logits, classes, factors, settings, columns)
        compiled = head_loss_ops._compiled(head_loss_ops._combined_step)(logits, classes, factors, settings, columns)
        torch.testing.assert_close(compiled, eager)
        assert eager[1].shape == (6, columns)
        assert not eager[1][:, 40:].any()


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"reduction": "median"}, "reduction"),
        ({"chunk": 0}, "chunk"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"logit_softcap": -1.0}, "logit_softcap"),
    ],
)
def test_wrong_options(options: dict[str, Any], token: str) -> None:
    hidden, weight, _ = operands()
    with pytest.raises(BitplanError, match=token):
        linear_cross_entropy(hidden, weight, targets(), **options)


def test_targets_of_another_shape() -> None:
    hidden, weight, _ = operands()
    with pytest.raises(BitplanError, match="targets"):
        linear_cross_entropy(hidden, weight, targets().flatten())


def test_a_head_that_does_more_than_a_product() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    hidden, _, _ = operands(torch.float32)
    with pytest.raises(BitplanError, match="Scaled"):
        linear_cross_entropy(hidden, Scaled(FEATURES, VOCABULARY), targets())
    head = nn.Linear(FEATURES, VOCABULARY)
    loss = linear_cross_entropy(hidden, head, targets(), chunk=4)
    torch.testing.assert_close(loss, reference(hidden, head.weight, targets(), head.bias))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_torch_func_grad(reduction: str) -> None:
    hidden, weight, bias = (tensor.detach() for tensor in operands())

    def loss(function: Callable[..., Tensor], weight: Tensor) -> Tensor:
        return function(hidden, weight, targets(), bias=bias, reduction=reduction).sum()

    actual = torch.func.grad(lambda weight: loss(linear_cross_entropy, weight))(weight)
    torch.testing.assert_close(actual, torch.func.grad(lambda weight: loss(reference, weight))(weight))
