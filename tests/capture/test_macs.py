"""MACs against torch's flop counter where it has a formula, and against numbers made by hand where it has none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bitplan.capture.recording import Operation, record
from bitplan.errors import CostError
from bitplan.gemm.macs import Multiplication, multiplications
from bitplan.lab.models.graph_networks import normalised_adjacency


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def products_of(model: nn.Module | Callable[..., Any], *inputs: Any) -> list[Multiplication]:
    model = model if isinstance(model, nn.Module) else Calls(model)
    return [product for operation in record(model, inputs) for product in multiplications(operation)]


def macs_of(model: nn.Module | Callable[..., Any], *inputs: Any) -> int:
    return sum(product.macs for product in products_of(model, *inputs))


def flops_of(model: Callable[..., Any], *inputs: Any, context: AbstractContextManager[Any] | None = None) -> int:
    with FlopCounterMode(display=False) as counter, context or nullcontext():
        model(*inputs)
    return int(counter.get_total_flops())


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Linear(5, 7), (rand(2, 3, 5),)),
        (nn.Linear(5, 7), (rand(5),)),
        (nn.Conv1d(4, 6, 3, stride=2, padding=1), (rand(2, 4, 9),)),
        (nn.Conv2d(4, 6, (3, 2), groups=2, dilation=2), (rand(2, 4, 9, 8),)),
        (nn.Conv2d(8, 8, 3, groups=8, bias=False, padding="same"), (rand(1, 8, 5, 5),)),
        (nn.Conv3d(2, 3, 2), (rand(1, 2, 4, 4, 4),)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2), (rand(2, 4, 5),)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), (rand(2, 4, 5, 6),)),
        (nn.ConvTranspose3d(2, 3, 2), (rand(1, 2, 3, 3, 3),)),
        (torch.matmul, (rand(3, 4), rand(4, 5))),
        (torch.matmul, (rand(6, 1, 3, 4), rand(2, 4, 5))),
        (lambda x, w: x @ w, (rand(2, 3, 4), rand(4, 5))),
        (torch.bmm, (rand(2, 3, 4), rand(2, 4, 5))),
        (torch.addmm, (rand(5), rand(3, 4), rand(4, 5))),
        (torch.baddbmm, (rand(2, 3, 5), rand(2, 3, 4), rand(2, 4, 5))),
        (lambda x, w: torch.einsum("bij, bjk -> bik", x, w), (rand(2, 3, 4), rand(2, 4, 5))),
        (lambda x, w: torch.einsum("b...d,kd->b...k", x, w), (rand(2, 3, 4, 5), rand(6, 5))),
        (lambda x, w: torch.einsum("ij,jk", [x, w]), (rand(3, 4), rand(4, 5))),
        (lambda x, w: torch.tensordot(x, w, dims=([1, 2], [0, 1])), (rand(2, 3, 4), rand(3, 4, 5))),
        (torch.inner, (rand(2, 3, 4), rand(5, 4))),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_half_of_what_torchs_flop_counter_says(model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    assert macs_of(model, *inputs) == flops_of(model, *inputs) / 2 > 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_equals_its_math_whatever_is_masked(is_causal: bool) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key=key, value=value, is_causal=is_causal)

    inputs = (rand(2, 4, 6, 8), rand(2, 4, 9, 8), rand(2, 4, 9, 5))
    counted = flops_of(attend, *inputs, context=sdpa_kernel(SDPBackend.MATH)) / 2
    assert macs_of(attend, *inputs) == counted == 2 * 4 * 6 * 9 * (8 + 5)


def test_grouped_queries_count_every_query() -> None:
    inputs = (rand(1, 8, 6, 4), rand(1, 2, 6, 4), rand(1, 2, 6, 4))
    assert macs_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), *inputs) == 2 * 8 * 36 * 4


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 3, "vdim": 5}])
def test_multi_head_attention_with_its_projections(options: dict[str, Any]) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    inputs = (rand(4, 6, 8), rand(4, 7, options.get("kdim", 8)), rand(4, 7, options.get("vdim", 8)))
    with sdpa_kernel(SDPBackend.MATH):
        assert macs_of(model, *inputs) == flops_of(model, *inputs) / 2 > 0


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
)
def test_recurrent_layers_count_each_weight_once_a_step(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    model = kind(3, 5, **options)
    counted = flops_of(model, rand(7, 4, 3), context=torch.backends.mkldnn.flags(enabled=False)) / 2
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    assert macs_of(model, rand(7, 4, 3)) == counted == 7 * 4 * matrices


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_a_projecting_lstm_counts_its_third_matrix() -> None:
    model = nn.LSTM(3, 5, proj_size=2)
    assert macs_of(model, rand(7, 4, 3)) == 7 * 4 * (4 * 5 * 3 + 4 * 5 * 2 + 2 * 5)


def test_packed_sequences_count_the_steps_that_there_are() -> None:
    # Made by hand: torch looks into the lengths, which fake tensors do not have.
    packed = nn.utils.rnn.pack_padded_sequence(rand(7, 2, 3), torch.tensor([7, 4]))
    model, state = nn.LSTM(3, 5), (rand(1, 2, 5), rand(1, 2, 5))
    call = (packed.data, packed.batch_sizes, state, model._flat_weights, True, 1, 0.0, True, False)
    operation = Operation("", "lstm", 0, [], [], [packed.data], True, details={"args": call, "kwargs": {}})
    assert sum(product.macs for product in multiplications(operation)) == (7 + 4) * 20 * (3 + 5)


def test_only_the_first_layers_input_comes_from_outside() -> None:
    x = rand(7, 4, 3)
    products = products_of(nn.LSTM(3, 5, num_layers=2, bidirectional=True), x)
    assert [product.x is not None for product in products] == [True, False, True, False] + [False] * 4


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind: Callable[..., nn.Module]) -> None:
    model = kind(3, 5)
    assert macs_of(model, rand(4, 3)) == flops_of(model, rand(4, 3)) / 2 > 0


@pytest.mark.parametrize(
    ("x", "w", "macs"), [((4,), (4,), 4), ((3, 4), (4,), 12), ((2, 3, 4), (4,), 24), ((4,), (4, 5), 20)]
)
def test_vectors(x: tuple[int, ...], w: tuple[int, ...], macs: int) -> None:
    assert macs_of(torch.matmul, rand(*x), rand(*w)) == macs


def test_sums_of_a_batch_and_matrix_with_vector() -> None:
    assert macs_of(torch.addbmm, rand(3, 5), rand(2, 3, 4), rand(2, 4, 5)) == 2 * 3 * 4 * 5
    assert macs_of(torch.addmv, rand(3), rand(3, 4), rand(4)) == 12


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (torch.sparse.mm, 5),
        (lambda a, h: a @ h, 5),
        (lambda a, h: a.t() @ h, 5),
        (lambda a, h: torch.addmm(torch.zeros(4, 5), a, h), 5),
        (lambda a, h: a @ h[:, 0], 1),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_sparse_products_count_the_values_that_are_there(
    function: Callable[..., Any], columns: int, layout: torch.layout
) -> None:
    adjacency = normalised_adjacency(torch.tensor([[0, 1], [1, 2]]), 4)  # two edges both ways, four nodes themselves
    matrix = adjacency if layout == torch.sparse_coo else adjacency.to_sparse_csr()
    assert macs_of(function, matrix, rand(4, 5)) == 8 * columns


def test_two_sparse_matrices_are_refused() -> None:
    matrix = normalised_adjacency(torch.tensor([[0, 1], [1, 2]]), 4)
    with pytest.raises(CostError, match=r"sparse_matmul\.0 multiplies"):
        macs_of(torch.sparse.mm, matrix, matrix)


@pytest.mark.parametrize(
    ("function", "inputs", "name"),
    [
        (F.bilinear, (rand(2, 3), rand(2, 4), rand(5, 3, 4)), "_trilinear"),
        (lambda *all_of: torch.linalg.multi_dot(all_of), (rand(2, 3), rand(3, 4), rand(4, 5)), "mm"),
        (lambda *all_of: torch.einsum("ij,jk,kl", *all_of), (rand(2, 3), rand(3, 4), rand(4, 5)), "bmm"),
    ],
)
def test_a_product_that_cannot_be_counted_raises(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], name: str
) -> None:
    with pytest.raises(CostError, match=rf"multiplies \({name}\) in a way that bitplan cannot count: write it with"):
        macs_of(function, *inputs)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        lambda x: x * x + x,
        lambda x: F.layer_norm(x, (4,)),
        lambda x: torch.einsum("ij->ji", x),
        torch.cumsum,
    ],
)
def test_everything_else_counts_nothing(function: Callable[..., Any]) -> None:
    arguments = (rand(3, 4), 0) if function is torch.cumsum else (rand(3, 4),)
    assert products_of(function, *arguments) == []
