"""PEFT on frozen weights in few bits: LoRA and DoRA, merging, saving, loading, checkpointing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan as bp
from bitplan.errors import PlanError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)


def batch() -> dict[str, Tensor]:
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module) -> list[Tensor]:
    loss = model(**batch()).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert gradients
    assert all(g is not None and g.abs().sum() > 0 for g in gradients)
    return [loss.detach(), *gradients]


def base(model: Any) -> Any:
    return model.base_model.model.model.layers[0].self_attn.q_proj.base_layer


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_gradients_reach_the_adapters_with_the_bits_of_emulate(options: dict[str, Any]) -> None:
    results = []
    for execution in ("emulate", "packed"):
        model = make(**options)
        bp.attach(model, "lora-4bit", example=batch(), execution=execution)
        assert (base(model)._parameters["weight"] is None) == (execution == "packed")
        assert isinstance(model.base_model.model.lm_head.weight, nn.Parameter)
        results.append(step(model))
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], step(make(**options))[0])


def test_gradient_checkpointing_changes_nothing() -> None:
    results = []
    for is_checkpointed in (False, True):
        model = make()
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        bp.attach(model, "lora-4bit", example=batch())
        results.append(step(model.train()))
    assert all(map(torch.equal, *results))


def test_adapters_are_products_like_any_other() -> None:
    model = make()
    rule = {"match": "re:.*lora_A.*", "op": "linear", "x": "e4m3", "w": "e4m3"}
    document = {"version": 1, "rules": [{"match": "*layers*", "frozen": "nf4"}, rule]}
    run = bp.attach(model, document, example=batch(), execution="packed")
    rounded = {row.words for row in run.table() if "lora_A" in row.site.module and row.site.role == "fprop.x"}
    assert rounded == {"e4m3"}
    step(model)


def test_merging_keeps_full_precision(tmp_path: Path) -> None:
    model = make().eval()
    run = bp.attach(model, "lora-4bit", example=batch())
    expected, frozen = model(**batch()).logits, base(model).weight.clone()
    with pytest.warns(bp.errors.BitplanWarning, match="full precision"):
        model.merge_adapter()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert torch.allclose(layer.base_layer.weight, frozen + layer.get_delta_weight("default"), atol=1e-6)
    assert torch.allclose(model(**batch()).logits, expected, atol=1e-4)
    model.unmerge_adapter()
    assert torch.allclose(base(model).weight, frozen, atol=1e-6)
    with pytest.raises(PlanError, match="detach"):
        model.merge_and_unload()
    run.detach()
    merged = model.merge_and_unload()
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert torch.allclose(merged(**batch()).logits, expected, atol=1e-4)
    merged.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(**batch()).logits, merged(**batch()).logits)


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model = make().eval()
    plain = copy.deepcopy(model.base_model.model)
    names = [*model.state_dict()]
    bp.attach(model, "lora-4bit", example=batch())
    assert [*model.state_dict()] == names
    model.save_pretrained(tmp_path)
    logits = model(**batch()).logits
    for name, module in list(plain.named_modules()):
        if hasattr(module, "base_layer"):
            parent = plain.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], module.base_layer)
    again = peft.PeftModel.from_pretrained(plain, tmp_path).eval()
    bp.attach(again, "lora-4bit", example=batch())
    assert torch.equal(base(again).weight, base(model).weight)
    assert torch.equal(again(**batch()).logits, logits)
