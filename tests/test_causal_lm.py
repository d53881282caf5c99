"""Causal language models of transformers with their loss in chunks: equal to their own loss, or refused."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from head_losses import LargestTensor
from torch import Tensor
from zoo_models import import_torchvision

import bitplan
from bitplan.errors import PlanError
from bitplan.integrations.causal_lm import CausalLMLoss, compute_loss_in_chunks

pytest.importorskip("transformers")
VOCABULARY, LENGTH = 300, 20
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY},
    "gemma2": {**SIZES, "final_logit_softcapping": 0.1},
    "granite": {**SIZES, "logits_scaling": 5.0},
    "phi": SIZES,  # a head with a bias
}


def build(kind: str, **settings: Any) -> Any:
    import_torchvision()
    import transformers

    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings)).eval()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_the_models_own(kind: str) -> None:
    model = build(kind, **MODELS[kind])
    chunked = CausalLMLoss(model, batch(), chunk=8)
    own, loss = model(**batch()).loss, chunked(**batch())
    assert float(loss) == pytest.approx(float(own), rel=1e-5)
    expected = gradients(model, own)
    with LargestTensor() as largest:
        actual = gradients(model, chunked(**batch()))
    assert largest.elements < 2 * LENGTH * VOCABULARY
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    for items in (7, torch.tensor(7)):
        mean = model(**batch(), num_items_in_batch=items).loss
        assert float(chunked(**batch(), num_items_in_batch=items)) == pytest.approx(float(mean), rel=1e-5)


def test_logits_are_capped_and_scaled() -> None:
    """That is, the cases above would notice if they were not."""
    for kind in ("gemma2", "granite"):
        model = build(kind, **MODELS[kind])
        chunked = CausalLMLoss(model, batch())
        own = float(model(**batch()).loss)
        chunked.layout = replace(chunked.layout, logit_softcap=None, logit_scale=1.0)
        assert abs(float(chunked(**batch())) - own) > 1e-5 * own


def test_a_forward_that_does_more_is_refused() -> None:
    with pytest.raises(PlanError, match="does more"):
        CausalLMLoss(build("bert", **SIZES, is_decoder=True), batch())
    with pytest.raises(PlanError, match="router"):
        CausalLMLoss(build("mixtral", **SIZES, num_local_experts=4, output_router_logits=True), batch())
    with pytest.raises(PlanError, match="causal language model"):
        CausalLMLoss(torch.nn.Linear(2, 2), batch())
    with pytest.raises(PlanError, match="labels"):
        CausalLMLoss(build("phi", **SIZES), {"input_ids": batch()["input_ids"]})


def test_models_of_other_kinds_are_refused() -> None:
    """In one sentence, whatever happens in the model: a search tries this with every model."""
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(3, VOCABULARY, (8, 96))  # more than are compared, so that parts of them have gaps in memory
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **small))
    with pytest.raises(PlanError, match="does more"):
        CausalLMLoss(bert, {"input_ids": ids, "labels": ids})
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(vocab_size=VOCABULARY, d_model=32, num_mel_bins=8, **sizes, **widths, **tokens)
    whisper = transformers.WhisperForConditionalGeneration(config)
    with pytest.raises(PlanError, match="runs by itself") as refused:
        CausalLMLoss(whisper, {"input_features": torch.randn(8, 8, 3000), "labels": ids})
    assert "\n" not in str(refused.value)


def test_modes_of_the_model_are_restored() -> None:
    model = build("gpt2", **MODELS["gpt2"])
    model.transformer.h[0].train()
    before = [module.training for module in model.modules()]
    CausalLMLoss(model, batch())
    assert [module.training for module in model.modules()] == before


RULES = [
    {"match": "*.mlp.*", "op": "linear", "x": {"format": "e4m3", "scale": "tensor"}, "w": "e4m3"},
    {"match": "lm_head", "x": {"format": "e4m3", "scale": "tensor"}, "w": "e4m3", "dy": "e5m2"},
]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_plan_of_the_model_holds(compiled: bool) -> None:
    model = build("llama", **MODELS["llama"])
    model.lm_head.weight.data *= 10
    plain = float(model(**batch()).loss)
    with bitplan.attach(model, {"version": 1, "rules": RULES}, example=batch()) as run:
        own = model(**batch()).loss
        expected = gradients(model, own)
        chunked = CausalLMLoss(model, batch(), chunk=8)
        step = run.compile(chunked) if compiled else chunked
        loss = step(**batch())
        assert float(loss) == pytest.approx(float(own), rel=1e-5)
        assert float(loss) != pytest.approx(plain, rel=1e-4)
        actual = gradients(model, loss)
        for name, gradient in actual.items():
            assert float((gradient - expected[name]).norm()) <= 2e-2 * float(expected[name].norm()), name


def test_the_model_itself_computes_its_loss_in_chunks_while_it_trains() -> None:
    model = build("llama", **MODELS["llama"])
    own, plain, keys = model(**batch()), type(model), list(model.state_dict())
    signature = inspect.signature(model.forward)
    undo = compute_loss_in_chunks(model, batch(), chunk=8)
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model(**batch()).logits, own.logits)
    model.train()
    output = model(**batch())
    assert output.logits is None
    assert float(output.loss) == pytest.approx(float(own.loss), rel=1e-5)
    assert model(input_ids=batch()["input_ids"]).logits is not None
    twin = copy.deepcopy(model)
    twin.lm_head.weight.data.zero_()
    assert float(twin(**batch()).loss) != pytest.approx(float(own.loss), rel=1e-4)
    assert float(model(**batch()).loss) == pytest.approx(float(own.loss), rel=1e-5)
    with pytest.raises(PlanError, match="once"):
        compute_loss_in_chunks(model, batch())
    undo()
    assert type(model) is plain
    assert model(**batch()).logits is not None


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_a_plan_attached_to_such_a_model(execution: str) -> None:
    """Its sites are recorded while the loss is computed in chunks."""
    model = build("llama", **MODELS["llama"]).train()
    model.lm_head.weight.data *= 10
    losses = []
    for chunked in (False, True):
        undo = compute_loss_in_chunks(model, batch(), chunk=8) if chunked else lambda: None
        with bitplan.attach(model, {"version": 1, "rules": RULES}, example=batch(), execution=execution) as run:
            output = model(**batch())
            assert (output.logits is None) == chunked
            losses.append((float(output.loss), gradients(model, output.loss)))
            run.step()
            sites = str(bitplan.list_sites(model, batch()))
        undo()
        assert "lm_head" in sites
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    for name, gradient in losses[1][1].items():
        assert float((gradient - losses[0][1][name]).norm()) <= 1e-3 * float(gradient.norm()), name


def test_the_cost_of_the_head_is_counted() -> None:
    model = build("llama", **MODELS["llama"]).train()
    plan = {"version": 1, "rules": RULES}
    whole = bitplan.estimate_cost(model, plan, batch())
    compute_loss_in_chunks(model, batch())
    chunked = bitplan.estimate_cost(model, plan, batch())
    assert chunked.to_dict()["macs"] == whole.to_dict()["macs"]


def test_presets_know_the_head_of_such_a_model() -> None:
    """`fp8-train` leaves the last product alone, also if its result is a loss."""
    results = []
    for chunked in (False, True):
        model = build("llama", **MODELS["llama"]).train()
        if chunked:
            compute_loss_in_chunks(model, batch(), chunk=8)
        with bitplan.attach(model, "fp8-train", example=batch(), execution="emulate"):
            loss = model(**batch()).loss
            results.append((float(loss), gradients(model, loss)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    for name, gradient in results[1][1].items():
        assert float((gradient - results[0][1][name]).norm()) <= 1e-5 * float(gradient.norm()), name
