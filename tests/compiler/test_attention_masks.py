"""Constant masks of attention are dropped while compiling, where eager code of transformers passes none."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import bitplan
from bitplan.compiler import attention_masks, torch_private
from bitplan.compiler.attention_masks import fold_attention_masks

TOKENS = 8
ATTENTION: Any = F.scaled_dot_product_attention


class Folding:
    """A backend of torch.compile that folds masks and notes the arguments of attention."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[dict[str, Any]] = []

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        self.count += fold_attention_masks(gm)
        self.calls += [dict(node.kwargs) for node in gm.graph.find_nodes(op="call_function", target=ATTENTION)]
        return gm.forward


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], *inputs: Any, **settings: Any) -> tuple[Any, Folding]:
    backend = Folding()
    return torch.compile(function, fullgraph=True, backend=backend)(*inputs, **settings), backend


# --- models of transformers


def llama(kind: str = "Llama", **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **settings,
    )
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


def test_a_compiled_llama_has_the_attention_of_an_eager_one() -> None:
    model, ids = llama(), torch.randint(32, (2, TOKENS))
    output, backend = compiled(model, ids)
    assert backend.count == 2
    for call in backend.calls:
        assert (call["attn_mask"], call["is_causal"], call["enable_gqa"]) == (None, True, True)
        assert call["key"].meta["example_value"].shape[1] == 2  # heads are not repeated
    assert torch.equal(output.logits, model(ids).logits)


def test_gradients_are_those_of_the_masked_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), torch.randint(32, (2, TOKENS))
    results = []
    for folds in (True, False):
        torch._dynamo.reset()
        monkeypatch.setattr(attention_masks, "FOLDS", folds)
        model.zero_grad()
        output, backend = compiled(model, input_ids=ids, labels=ids)
        assert backend.count == 2 * folds
        assert all((call["attn_mask"] is None) == folds for call in backend.calls)
        output.loss.backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(results[0]) > 10
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_masks_of_inputs_and_windows_stay() -> None:
    ids = torch.randint(32, (2, TOKENS))
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    for model, settings in (
        (llama(), {"attention_mask": padded}),
        (llama(), {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}),  # two sequences in one
        (llama("Mistral", sliding_window=4), {}),
    ):
        torch._dynamo.reset()
        output, backend = compiled(model, ids, **settings)
        assert backend.count == 0
        assert len(backend.calls) == 2
        torch.testing.assert_close(output.logits, model(ids, **settings).logits)


def test_a_window_that_hides_nothing_goes() -> None:
    model, ids = llama("Mistral", sliding_window=TOKENS + 1), torch.randint(32, (2, TOKENS))
    output, backend = compiled(model, ids)
    assert backend.count == 2
    torch.testing.assert_close(output.logits, model(ids).logits)


# --- masks by hand


def causal(x: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def full(x: Tensor) -> Tensor:
    return torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)


def shifted(x: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(1)


def additive(x: Tensor) -> Tensor:
    return torch.zeros(TOKENS, TOKENS).masked_fill(~causal(x), -torch.inf)


def written(x: Tensor) -> Tensor:
    mask = causal(x)
    mask[3, 0] = False
    return mask


def written_through_a_view(x: Tensor) -> Tensor:
    mask = causal(x)
    mask[3].logical_and_(torch.zeros(TOKENS, dtype=torch.bool))
    mask[:, 0] |= True
    return mask


def random(x: Tensor) -> Tensor:
    return torch.rand(TOKENS, TOKENS) >= 0


def of_input(x: Tensor) -> Tensor:
    return causal(x) & (x[0, 0, 0, 0] == x[0, 0, 0, 0])


def one_row(x: Tensor) -> Tensor:
    return torch.ones(1, TOKENS, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask_of", "is_causal"),
    [(causal, True), (full, False)]
    + [(make, None) for make in (shifted, additive, written, written_through_a_view, random, of_input, one_row)],
)
def test_only_constants_that_say_nothing_else_go(mask_of: Callable[[Tensor], Tensor], is_causal: bool | None) -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, mask_of(x))

    x = torch.randn(2, 3, TOKENS, 4)
    output, backend = compiled(attend, x)
    assert backend.count == (is_causal is not None)
    if is_causal is not None:
        assert (backend.calls[0]["attn_mask"], backend.calls[0]["is_causal"]) == (None, is_causal)
    torch.testing.assert_close(output, attend(x))


def test_fewer_queries_than_keys_keep_their_mask() -> None:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[:, :, :4], x, x, torch.ones(4, TOKENS, dtype=torch.bool).tril())

    _, backend = compiled(attend, torch.randn(2, 3, TOKENS, 4))
    assert backend.count == 0


def test_dynamic_sizes_keep_their_mask() -> None:
    def attend(x: Tensor) -> Tensor:
        size = x.shape[2]
        return F.scaled_dot_product_attention(x, x, x, torch.ones(size, size, dtype=torch.bool).tril())

    backend = Folding()
    called = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for size in (TOKENS, TOKENS + 2):
        called(torch.randn(2, 3, size, 4))
    assert backend.count == 0


# --- executions


@pytest.mark.parametrize(
    "execution",
    [bitplan.Packed(), bitplan.Native(min_macs=0), bitplan.Native(min_macs=0, recompute="inputs")],
    ids=["packed", "native", "native-recompute"],
)
def test_every_compiled_execution_folds(monkeypatch: pytest.MonkeyPatch, execution: Any) -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x).unflatten(-1, (2, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(y, y, y, causal(x))

    seen = note_attention(monkeypatch)
    model, x = Attend(), torch.randn(2, TOKENS, 16)
    with bitplan.attach(model, "fp8-linear", example=x, execution=execution) as run:
        run.compile()(x)
    assert seen == {True: 1}


def note_attention(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[bool]:
    """How often attention is causal in graphs that are given to Inductor, which does not compile them."""
    seen: collections.Counter[bool] = collections.Counter()

    def compile_fx(gm: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        seen.update(node.kwargs["is_causal"] for node in gm.graph.find_nodes(op="call_function", target=ATTENTION))
        return gm.forward

    monkeypatch.setattr(torch_private, "compile_fx", compile_fx, raising=False)
    return seen


@pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")
def test_a_planned_llama_is_one_graph_without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch 2.11, where a graph break left the mask in another graph, too."""
    seen = note_attention(monkeypatch)
    model, ids = llama().bfloat16(), torch.randint(32, (2, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    execution = bitplan.Native(min_macs=0, recompute="inputs")
    with bitplan.attach(model, "fp8-train", example=batch, execution=execution) as run:
        run.compile(fullgraph=True)(**batch)
    assert seen == {True: 2}
