"""What the presets of selectors find in models of other libraries: lists known from the architectures."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from zoo_models import MODELS, import_torchvision

import bitplan as bp
from bitplan.analysis.explain import explain_selections
from bitplan.capture.selectors import expand_plan, find_selections, fold_sites
from bitplan.plans import Plan

PRESETS = ["fp8-train", "fp8-train-small", "packed-fp8", "packed-fp8-mlp"]


def _llama(layers: int = 2) -> dict[str, list[str]]:
    block = f"model.layers.*.{{}}/linear.0 ({layers})"
    attention = [block.format(f"self_attn.{name}_proj") for name in "qkvo"]
    gate = [block.format("mlp.gate_proj"), block.format("mlp.up_proj")]
    return {
        "weight-product": [*attention, *gate, block.format("mlp.down_proj"), "lm_head/linear.0"],
        "first-product": [f"model.layers.0.self_attn.{name}_proj/linear.0" for name in "qkv"],
        "last-product": ["lm_head/linear.0"],
        "gate": gate,
        "residual": [f"model.layers.*/add.0 ({layers})", f"model.layers.*/add.1 ({layers})"],
        "mlp": gate,
    }


#: Model -> selector -> the tensors that it finds. "mlp" is what fp8-train saves in E4M3.
FACTS: dict[str, dict[str, list[str]]] = {
    "llama": _llama(),
    "qwen3": _llama(),
    "phi3": {  # one product for both halves
        "gate": ["model.layers.*.mlp.gate_up_proj/linear.0 (2)"],
        "mlp": ["model.layers.*.mlp.gate_up_proj/linear.0 (2)"],
        "last-product": ["lm_head/linear.0"],
    },
    "mixtral": {
        "router": ["model.layers.*.mlp.gate/linear.0 (2)"],
        "gate": ["model.layers.*.mlp.experts/grouped_mm.0 (2)"],
        "last-product": ["lm_head/linear.0"],
    },
    "gpt2": {
        "weight-product": [
            "transformer.h.*.attn.c_attn/addmm.0 (2)",
            "transformer.h.*.attn.c_proj/addmm.0 (2)",
            "transformer.h.*.mlp.c_fc/addmm.0 (2)",
            "transformer.h.*.mlp.c_proj/addmm.0 (2)",
            "lm_head/linear.0",
        ],
        "first-product": ["transformer.h.0.attn.c_attn/addmm.0"],
        "last-product": ["lm_head/linear.0"],
        "gate": [],
        "residual": ["transformer.h.*/add.0 (2)", "transformer.h.*/add.1 (2)"],
        "mlp": ["transformer.h.*.mlp.c_fc/addmm.0 (2)"],
    },
    "gptj": {  # attention and MLP side by side: the second sum adds the stream
        "residual": ["transformer.h.*/add.1 (2)"],
        "mlp": ["transformer.h.*.mlp.fc_in/linear.0 (2)"],
    },
    "bert": {
        "last-product": ["cls.predictions.decoder/linear.0"],
        "residual": ["bert.encoder.layer.*.attention.output/add.0 (2)", "bert.encoder.layer.*.output/add.0 (2)"],
        "norm-readers": [
            "bert.embeddings/add.1",
            "bert.encoder.layer.*.attention.output/add.0 (2)",
            "bert.encoder.layer.*.output/add.0 (2)",
            "cls.predictions.transform.transform_act_fn/gelu.0",
        ],
        "mlp": ["bert.encoder.layer.*.intermediate.dense/linear.0 (2)"],
        "gate": [],
    },
    "t5": {
        "last-product": ["lm_head/linear.0"],
        "residual": ["encoder.block.*.layer.*/add.0 (2)", "decoder.block.*.layer.*/add.0 (3)"],
        "mlp": [
            "encoder.block.0.layer.1.DenseReluDense.wi/linear.0",
            "decoder.block.0.layer.2.DenseReluDense.wi/linear.0",
        ],
        "gate": [],
    },
    "clip": {"last-product": ["visual_projection/linear.0", "text_projection/linear.0"], "gate": []},
    "vit": {
        "first-product": ["patch_embed.proj/conv2d.0"],
        "last-product": ["head/linear.0"],
        "residual": ["blocks.*/add.0 (6)", "blocks.*/add.1 (6)"],
        "mlp": ["blocks.*.mlp.fc1/linear.0 (6)"],
        "gate": [],
    },
    "convnext": {
        "first-product": ["stem.0/conv2d.0"],
        "last-product": ["head.fc/linear.0"],
        "residual": ["stages.*.blocks.*/add.0 (9)"],
        "mlp": ["stages.*.blocks.*.mlp.fc1/linear.0 (9)"],
    },
    "resnet": {  # one block a stage, each with a projected shortcut but the first
        "last-product": ["fc/linear.0"],
        "residual": ["layer1.0/add.0", "layer2.0/add.0", "layer3.0/add.0", "layer4.0/add.0"],
        "mlp": [],
        "gate": [],
    },
    "gcn": {"first-product": ["convs.0.lin/linear.0"], "last-product": ["convs.1.lin/linear.0"], "residual": []},
    "transformer_mask": {
        "last-product": ["head/linear.0"],
        "residual": [
            *(f"transformer.encoder.layers.0/add.{number}" for number in range(2)),
            *(f"transformer.decoder.layers.0/add.{number}" for number in range(3)),
        ],
        "mlp": [f"transformer.{part}.layers.0.linear1/linear.0" for part in ("encoder", "decoder")],
    },
}


def require(library: str) -> None:
    if library in ("timm", "torch_geometric", "transformers") and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@cache
def selections(name: str) -> dict[str, list[str]]:
    zoo = MODELS[name]
    require(zoo.library)
    model, batch = zoo.make(), zoo.make_batch()
    names = ["weight-product", "first-product", "last-product", "gate", "residual", "norm-readers", "router"]
    rules = [{"select": select, "activation": "e3m2", "strict": False} for select in names]
    plan = Plan.from_dict({"version": 1, "rules": rules})
    operations = expand_plan(plan, model, batch)[1]
    lists = dict(zip(names, (found.folded for found in find_selections(plan, operations)), strict=True))
    saved = find_selections(Plan.preset("fp8-train"), operations)[1:]
    sites = [operation.label for operation in operations]
    chosen = {site for selection in saved for site in selection.sites}
    return {**lists, "mlp": fold_sites(dict.fromkeys(site for site in sites if site in chosen))}


@pytest.mark.parametrize(
    ("name", "selector"), [(name, selector) for name, facts in FACTS.items() for selector in facts]
)
def test_selectors_find_what_the_architecture_says(name: str, selector: str) -> None:
    assert selections(name)[selector] == FACTS[name][selector]


def test_the_head_is_found_with_and_without_labels() -> None:
    zoo = MODELS["llama"]
    require(zoo.library)
    batch: Any = zoo.make_batch()
    plan = Plan.from_dict({"version": 1, "rules": [{"select": "last-product", "keep": True}]})
    for inputs in (batch, {"input_ids": batch["input_ids"]}):  # without labels, caches are returned, too
        assert explain_selections(zoo.make(), plan, inputs)[0].sites == ("lm_head/linear.0",)


# --- presets


@cache
def _target(name: str) -> tuple[nn.Module, Any]:
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 2), torch.randn(2, 4, 16)
    if name == "resnet50":
        require("timm")
        import_torchvision()
        import timm

        return timm.create_model("resnet50"), torch.randn(2, 3, 32, 32)
    zoo = MODELS[name]
    require(zoo.library)
    return zoo.make(), zoo.make_batch()


#: Model -> its last product.
HEADS = {
    **dict.fromkeys(("llama", "gpt2", "t5"), "lm_head/linear.0"),
    "bert": "cls.predictions.decoder/linear.0",
    "vit": "head/linear.0",
    "convnext": "head.fc/linear.0",
    "resnet50": "fc/linear.0",
    "encoder": "layers.1.linear2/linear.0",
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", HEADS)
def test_presets_attach_and_round(name: str, preset: str) -> None:
    model, batch = _target(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Native execution warns on a machine without FP8 units.
        run = bp.attach(model, preset, example=batch, execution="emulate" if preset.startswith("fp8") else None)
    with run:
        coverage = run.coverage()
        if preset.startswith("fp8"):
            # All but the last product, and the products inside attention.
            attention = ("matmul", "scaled_dot_product_attention")
            left = [site for site in coverage.unrounded if not site.rpartition("/")[2].startswith(attention)]
            assert left == [HEADS[name]]
        formats = {str(row.quantizer) for row in run.table() if row.site.role == "activation" and row.quantizer}
        expected = {"e4m3"} if name != "resnet50" or preset == "packed-fp8" else set()
        if preset in ("fp8-train-small", "packed-fp8-mlp"):
            expected = expected | {"bf16"}
        assert formats == expected
