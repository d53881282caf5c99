"""Plans for inference: configs that the packages accept, and weights that they load."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import bitplan as bp
from bitplan.errors import PlanError
from bitplan.integrations.export import Export
from bitplan.integrations.import_plan import import_plan

INT8 = {"format": "int8", "scale": "vector"}
TOKENS = torch.tensor([1, 4, 2, 8, 5, 7]).repeat(3, 4)
TOKENS = torch.stack([row.roll(shift) for shift, row in enumerate(TOKENS)])
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, max_position_embeddings=64, **sizes, **settings))


def plan_of(*rules: dict[str, Any]) -> bp.Plan:
    return bp.Plan.from_dict({"version": 1, "rules": list(rules)})


def linear(match: Any = "*", **places: Any) -> dict[str, Any]:
    return {"match": match, "op": "linear", **places}


def export(to: str, model: nn.Module, *rules: dict[str, Any], **options: Any) -> Export:
    return plan_of(*rules).export(to, model, BATCH, lambda output: output.loss, **options)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


def paths_of(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]


# --- Train so, serve so


def trained(plan: bp.Plan, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a model trained under the plan: under it, without it, and as Transformers loads it from `folder`."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = bp.attach(model, plan, optimizer=optimizer, example=BATCH)
    losses = []
    for _ in range(15):
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    planned = logits(model)
    run.detach()
    exported = plan.export("compressed-tensors", model, BATCH, lambda output: output.loss, weights=folder, strict=True)
    assert exported.layers == 14
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    served = logits(loaded)
    for path in paths_of(model)[:-1]:
        weight = model.get_submodule(path).weight
        assert torch.equal(loaded.get_submodule(path).weight, _rounded(weight, plan))
        assert not torch.equal(loaded.get_submodule(path).weight, weight)
    return planned, logits(model), served


def _rounded(weight: Tensor, plan: bp.Plan) -> Tensor:
    """The weight as the plan's first rule rounds it for the forward product."""
    quantizers = dict(plan.all_rules[0].quantizers)
    spec = quantizers.get("fprop.w") or quantizers["fprop"]
    axis = {"axis": 1} if spec.scale in ("vector", "block") else {}  # type: ignore[union-attr]
    return bp.quantize(weight.detach(), spec.format, scale=spec.scale, block=spec.block, **axis)  # type: ignore[union-attr]


def test_a_model_trained_on_int8_operands_is_served_on_them(tmp_path: Path) -> None:
    """compressed-tensors divides inputs by amax / 127.5 and bitplan by amax / 127, so that their codes differ."""
    plan = plan_of(linear(fprop=INT8), {"match": "lm_head", "keep": True})
    planned, unplanned, served = trained(plan, tmp_path / "served")
    largest = planned.abs().max()
    assert (served - planned).abs().max() < 0.01 * largest
    assert (served - unplanned).abs().max() > 1e-4 * largest  # it is quantized
    assert torch.equal(served.argmax(-1), planned.argmax(-1))
    stored = load_file(tmp_path / "served" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert "model.layers.0.mlp.up_proj.weight_scale" in stored
    assert stored["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("places", "packing"),
    [
        ({"fprop.w": {"format": "int4", "scale": "block", "block": 16}}, "pack-quantized"),
        ({"fprop.w": {"format": "int3", "scale": "vector"}}, "pack-quantized"),
        ({"fprop": {"format": "e4m3", "scale": "vector"}}, "float-quantized"),
        ({"fprop.w": {"format": "e4m3", "scale": "tensor"}}, "naive-quantized"),
    ],
)
def test_weights_and_scales_of_the_same_values_give_the_same_logits(
    places: dict[str, Any], packing: str, tmp_path: Path
) -> None:
    plan = plan_of(linear(**places), {"match": "lm_head", "keep": True})
    planned, unplanned, served = trained(plan, tmp_path / "served")
    config = json.loads((tmp_path / "served" / "config.json").read_text())["quantization_config"]
    assert config["format"] == packing
    assert (served - planned).abs().max() < 1e-4 * planned.abs().max()
    assert (served - unplanned).abs().max() > 1e-3 * planned.abs().max()


def test_mxfp8_weights_are_stored_as_the_package_unpacks_them(tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = nn.Sequential(nn.Linear(64, 32))
    plan = plan_of(linear(fprop="mxfp8"))
    exported = plan.export("compressed-tensors", model, torch.randn(2, 64), weights=tmp_path / "served", strict=True)
    stored = load_file(tmp_path / "served" / "model.safetensors")
    config = QuantizationConfig(**json.loads(exported.text))
    compressor = BaseCompressor.get_value_from_registry(config.format)
    scheme = config.config_groups["group_0"]
    parts = {name.removeprefix("0."): tensor for name, tensor in stored.items() if "bias" not in name}
    weight = compressor.decompress(parts, scheme)["weight"].float()
    assert torch.equal(weight, bp.quantize(model[0].weight.detach(), "mxfp8", axis=1))


def test_a_tied_head_is_left_as_it_is(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    exported = export("compressed-tensors", model, linear(fprop=INT8), weights=tmp_path / "served")
    assert "lm_head/linear.0:fprop.w: the weight is that of model.embed_tokens.weight, too" in "\n".join(exported.lines)
    assert json.loads(exported.text)["ignore"] == ["lm_head"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert logits(loaded).isfinite().all()


# --- Configs


@pytest.mark.parametrize("plan", ["int8-linear", "fp8-linear", "mxfp8-linear", "fp8-train"])
def test_the_package_accepts_the_config(plan: str) -> None:
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    exported = bp.Plan.preset(plan).export("compressed-tensors", llama(), BATCH, lambda output: output.loss)
    config = QuantizationConfig(**json.loads(exported.text))
    for group in config.config_groups.values():
        assert infer_module_format(nn.Linear, group).value == group.format
    assert config.ignore == (["lm_head"] if plan == "fp8-train" else [])


def test_layers_with_several_schemes_are_named() -> None:
    exported = export(
        "compressed-tensors", llama(), linear(fprop=INT8), linear("model.layers.1", fprop="nvfp4"),
        linear("model.layers.0.mlp", **{"fprop.w": "keep"}), {"match": "lm_head", "keep": True},
    )  # fmt: skip
    config = json.loads(exported.text)
    assert config["format"] == "mixed-precision"
    assert sorted(config["config_groups"]["group_0"]["targets"]) == [
        f"model.layers.0.self_attn.{name}_proj" for name in "koqv"
    ]
    assert config["config_groups"]["group_1"]["weights"]["strategy"] == "tensor_group"
    assert config["ignore"] == ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head"]  # fmt: skip  # noqa: E501
    text = "\n".join(exported.lines)
    assert "mlp.gate_proj/linear.0:fprop.x" in text
    assert "rounded weights only" in text


def test_what_serving_cannot_do_is_reported() -> None:
    lines = "\n".join(export("compressed-tensors", llama(), linear(fprop={"format": "int8", "scale": "tensor", "range": "minmax"})).lines)  # fmt: skip  # noqa: E501
    assert "minimum and maximum" in lines
    exported = export("compressed-tensors", llama(), linear(fprop=INT8), linear("lm_head", x="e5m2"))
    assert "lm_head/linear.0:fprop.x: compressed-tensors has no e5m2" in "\n".join(exported.lines)
    block = {"format": "int8", "scale": "block", "block": 40}
    exported = export("compressed-tensors", llama(), linear(fprop=INT8), linear("lm_head", **{"fprop.w": block}))
    assert "whole blocks of 40" in "\n".join(exported.lines)
    assert json.loads(exported.text)["ignore"] == ["lm_head"]


def test_modelopt_configures_every_quantizer() -> None:
    model = llama()
    exported = export(
        "modelopt", model, linear(fprop=INT8), linear("model.layers.1", fprop="nvfp4"),
        linear("model.layers.0.mlp.up_proj", **{"fprop.x": "keep"}), {"match": "lm_head", "keep": True},
    )  # fmt: skip
    document = yaml.safe_load(exported.text)
    assert set(document) == {"quant_cfg", "algorithm"}
    assert document["quant_cfg"][0] == {"quantizer_name": "*", "enable": False}
    for entry in document["quant_cfg"][1:]:
        assert set(entry) == {"quantizer_name", "cfg", "enable"}
        assert set(entry["cfg"]) <= {"num_bits", "axis", "block_sizes", "type"}
        assert not {"axis", "block_sizes"} <= set(entry["cfg"])
        assert set(entry["cfg"].get("block_sizes", ())) <= {-1, "type", "scale_bits"}
    chosen: dict[str, Any] = {}
    for path in paths_of(model):
        for quantizer in ("weight_quantizer", "input_quantizer"):
            for entry in document["quant_cfg"]:  # the last entry wins
                if fnmatch.fnmatch(f"{path}.{quantizer}", entry["quantizer_name"]):
                    chosen[f"{path}.{quantizer}"] = entry.get("cfg") if entry["enable"] else None
    assert chosen["model.layers.0.mlp.down_proj.weight_quantizer"] == {"num_bits": 8, "axis": 0}
    per_token = {"num_bits": 8, "type": "dynamic", "block_sizes": {-1: None}}
    assert chosen["model.layers.0.mlp.down_proj.input_quantizer"] == per_token
    assert chosen["model.layers.0.mlp.up_proj.input_quantizer"] is None
    nvfp4 = {"num_bits": [2, 1], "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": [4, 3]}}
    assert chosen["model.layers.1.self_attn.q_proj.weight_quantizer"] == nvfp4
    assert chosen["lm_head.weight_quantizer"] is None
    assert exported.omissions == ()


def test_a_plan_comes_back_from_compressed_tensors(tmp_path: Path) -> None:
    model = llama()
    rules = [linear(fprop=INT8), linear("model.layers.1", fprop="mxfp8"), {"match": "lm_head", "keep": True}]
    export("compressed-tensors", model, *rules, weights=None).save(tmp_path / "config.json")
    back = import_plan(tmp_path, "compressed-tensors").plan
    rows = [
        {row.site.name: row.words for row in bp.explain(model, plan, BATCH, lambda output: output.loss)}
        for plan in (back, plan_of(*rules))
    ]
    assert rows[0] == rows[1]


def test_modelopt_leaves_convolutions_alone() -> None:
    """Its convolutions have quantizers of the same names, and ``*`` also fits dots."""
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    block = {"format": "int4", "scale": "block", "block": 16}
    exported = plan_of(linear("1", fprop=block), linear("2", fprop={"format": "e4m3", "scale": "tensor"})).export(
        "modelopt", model, torch.randn(2, 4, 32)
    )
    entries = {entry["quantizer_name"]: entry for entry in yaml.safe_load(exported.text)["quant_cfg"][1:]}
    assert list(entries) == [
        f"{path}.{name}" for name in ("weight_quantizer", "input_quantizer") for path in ("1", "*.*")
    ]
    assert not any(fnmatch.fnmatch("0.weight_quantizer", name) for name in entries)
    assert entries["1.weight_quantizer"]["cfg"] == {"num_bits": 4, "block_sizes": {-1: 16}}
    assert entries["*.*.input_quantizer"]["cfg"] == {"num_bits": [4, 3], "axis": None, "type": "dynamic"}
    assert entries["1.input_quantizer"]["cfg"] == {"num_bits": 4, "type": "dynamic", "block_sizes": {-1: 16}}
    assert exported.omissions == ()


# --- Folders


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(PlanError, match="served is there already"):
        export("compressed-tensors", llama(), linear(fprop=INT8), weights=folder)
    assert [file.name for file in folder.iterdir()] == ["mine.txt"]

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export("compressed-tensors", llama(), linear(fprop=INT8), weights=tmp_path / "new")
    assert [file.name for file in tmp_path.iterdir()] == ["served"]


@pytest.mark.parametrize(
    ("quantizer", "token"),
    [
        ("nvfp4", "nvfp4"),
        ({"format": "int8", "scale": "vector", "rounding": "stochastic"}, "stochastic"),
        ({"format": "int8", "scale": "tensor", "range": "minmax"}, "scale: vector"),
    ],
)
def test_weights_that_cannot_be_stored_raise(quantizer: Any, token: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=token):
        export("compressed-tensors", llama(), linear(fprop=quantizer), weights=tmp_path / "served")
    assert not list(tmp_path.iterdir())


def test_a_model_without_weights_raises(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(PlanError, match="meta"):
        plan_of(linear(fprop=INT8)).export("compressed-tensors", model, torch.empty(2, 8, device="meta"), weights=tmp_path / "s")  # fmt: skip  # noqa: E501
