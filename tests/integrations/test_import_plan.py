"""Plans from other frameworks' configs decide as these do."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import bitplan as bp
from bitplan.errors import PlanError
from bitplan.integrations.import_plan import IMPORT_FORMATS, ImportedPlan, import_plan

SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
CUSTOM = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": "package.module.factory"}
BF16: dict[str, Any] = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
MXFP8 = BF16 | {"training_recipe": {"fp8_quantization_recipe": "mxfp8", "override_nonquantized_autocast": True}}
TENSORWISE = BF16 | {
    "training_recipe": {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
    "evaluation_recipe": {},
}


def recipe(**keys: Any) -> dict[str, Any]:
    return BF16 | {"training_recipe": keys}


def operands(imported: ImportedPlan, path: str) -> list[str]:
    decision = imported.plan.decide(path, "linear")
    return [str(decision[slot].quantizer or "-") for slot in SLOTS]


# --- torchao


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("tensorwise", ["e4m3 tensor", "e4m3 tensor", "e5m2 tensor", "e4m3 tensor", "e5m2 tensor", "e4m3 tensor"]),
        ("rowwise", ["e4m3 vector power-of-two"] * 6),
        (
            "rowwise_with_gw_hp",
            [*["e4m3 vector power-of-two"] * 3, "e4m3 tensor power-of-two", "-", "-"],
        ),
    ],
)
def test_recipes_of_torchao(recipe: str, expected: list[str]) -> None:
    imported = import_plan(recipe, "torchao")
    assert operands(imported, "any.layer") == expected
    assert imported.plan.decide("any.layer", "relu").changes_nothing
    assert any("module_filter_fn" in note for note in imported.notes)


def test_a_config_of_torchao_and_a_file_with_one(tmp_path: Path) -> None:
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name("rowwise")
    (tmp_path / "own.py").write_text(
        "from torchao.float8 import Float8LinearConfig\nconfig = Float8LinearConfig.from_recipe_name('rowwise')\n"
        "def make():\n    return config\n"
    )
    plans = [
        import_plan(source, "torchao").plan for source in (config, f"{tmp_path}/own.py", f"{tmp_path}/own.py:make")
    ]
    assert plans[0].rules == plans[1].rules == plans[2].rules


def test_a_plan_comes_back_from_torchao(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    exported = bp.Plan.preset("fp8-linear").export("torchao", model, torch.randn(2, 16))
    names: dict[str, Any] = {"__name__": "exported"}
    exec(exported.text, names)
    from torchao.float8 import Float8LinearConfig

    ((arguments, _),) = names["TREATMENTS"]
    imported = import_plan(Float8LinearConfig(**arguments), "torchao")
    preset = bp.Plan.preset("fp8-linear").decide("0", "linear")
    assert operands(imported, "0") == [str(preset[slot].quantizer) for slot in SLOTS]


# --- Megatron: the first match wins


def megatron(configs: dict[str, Any], *matchers: tuple[str, str] | tuple[str, str, bool]) -> dict[str, Any]:
    rows = {}
    for number, (config, pattern, *enabled) in enumerate(matchers):
        rows[f"m{number}"] = {"config": config, "type": "glob", "pattern": pattern, "enabled": (enabled or [True])[0]}
    return {"configs": configs, "matchers": rows}


def test_the_first_matcher_of_megatron_wins(tmp_path: Path) -> None:
    document = megatron(
        {"high": BF16, "mx": MXFP8, "tensor": TENSORWISE},
        ("high", "*.router"),
        ("mx", "*.layers.[01].*"),
        ("mx", "*.fc?", False),
        ("tensor", "*"),
    )
    (tmp_path / "recipes.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    imported = import_plan(tmp_path / "recipes.yaml", "megatron")
    assert operands(imported, "decoder.layers.0.router") == ["-"] * 6
    assert operands(imported, "decoder.layers.1.fc1") == ["mxfp8"] * 6
    assert operands(imported, "decoder.layers.2.fc1")[:3] == [
        "e4m3 tensor eval=off", "e4m3 tensor eval=off", "e5m2 tensor eval=off",
    ]  # fmt: skip
    assert operands(imported, "decoder.layers.2.router.deeper")[0] != "-"  # their globs fit whole paths only
    assert any("matchers.m2 is not enabled" in note for note in imported.notes)
    assert any("under --fp8-format or --fp4-format only" in note for note in imported.notes)


@pytest.mark.parametrize(
    "pattern", ["*.[0-1].fc?", "a[^b].*", "a[!^].*", r"a[\]\*", "a[]b].x", "a[b", "a]**.x", "[!]b]", "[z-a]"]
)
def test_globs_fit_as_in_megatron(pattern: str) -> None:
    plan = import_plan(megatron({"mx": MXFP8}, ("mx", pattern)), "megatron").plan
    for path in (
        "x.0.fc1",
        "x.2.fc1",
        "ab.x",
        "ac.x",
        "a^.x",
        "a].x",
        "a\\b",
        "a\\",
        "a[b",
        "a[b.x",
        "c",
        "b",
        "",
        "a.b",
    ):
        is_rounded = plan.decide(path, "linear.0")["fprop.x"].quantizer is not None
        assert is_rounded == fnmatch.fnmatchcase(path, pattern), path


def test_an_imported_plan_is_an_ordinary_document(tmp_path: Path) -> None:
    imported = import_plan(megatron({"mx": MXFP8}, ("mx", "*.nothing"), ("mx", "0")), "megatron")
    imported.plan.save(tmp_path / "plan.yaml")
    plan = bp.Plan.load(tmp_path / "plan.yaml")
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.warns(bp.errors.BitplanWarning, match="nothing"), bp.attach(model, plan, example=torch.randn(2, 32)):
        pass


@pytest.mark.parametrize(
    ("document", "token"),
    [
        ({}, "configs"),
        ({"configs": {}}, "matchers"),
        (megatron({"mx": MXFP8}, ("mxx", "*")), "did you mean mx"),
        (megatron({"mx": MXFP8 | {"extra": 1}}, ("mx", "*")), "extra"),
        (megatron({"mx": BF16 | {"training_recipe": {"fp8_recipe": "mxfp8"}}}, ("mx", "*")), "fp8_recipe"),
        (megatron({"mx": BF16 | {"training_recipe": CUSTOM}}, ("mx", "*")), "package.module.factory"),
        (megatron({"mx": {"training_recipe": {}}}, ("mx", "*")), "TEQuantizationParams"),
        (megatron({"high": BF16}, ("high", "*")), "rounds nothing"),
        ({"configs": {}, "matchers": {}, "more": 1}, "more"),
        (
            megatron({"mx": recipe(fp8_quantization_recipe="mxfp8", fp4_quantization_recipe="nvfp4")}, ("mx", "*")),
            "one of",
        ),
        (megatron({"mx": recipe(fp8_quantization_recipe="delayed")}, ("mx", "*")), "delayed"),
        (megatron({"mx": recipe(fp8_quantization_recipe="mxfp")}, ("mx", "*")), "did you mean mxfp8"),
        (megatron({"mx": recipe(fp8_quantization_recipe=["mxfp8"])}, ("mx", "*")), "list"),
        (megatron({"mx": recipe(fp8_quantization_recipe="mxfp8", fp8_format="e5m2")}, ("mx", "*")), "e5m2"),
        (megatron({"mx": recipe(override_quantized_autocast="no")}, ("mx", "*")), "override_quantized_autocast"),
        ({"configs": {"mx": MXFP8}, "matchers": {"m": {"enabled": True, "type": "glob", "pattern": "*"}}}, "config"),
    ],
)
def test_what_megatron_would_refuse_raises(document: dict[str, Any], token: str) -> None:
    with pytest.raises(PlanError, match=token) as error:
        import_plan(document, "megatron")
    assert "\n" not in str(error.value)


# --- compressed-tensors


def arguments(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def test_groups_of_compressed_tensors() -> None:
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": arguments(8, "channel"),
            "input_activations": arguments(8, "token", dynamic=True),
        },
        "group_1": {
            "targets": [r"re:.*\.experts\."],
            "weights": arguments(4, "group", group_size=128, symmetric=False),
        },
        "group_2": {
            "targets": ["model.layers.0.mlp.up_proj"],
            "weights": arguments(8, "block", type="float", block_structure=[128, 64]),
            "input_activations": arguments(8, "tensor", type="float"),
        },
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head", "Embedding"]}
    imported = import_plan({"model_type": "llama", "quantization_config": config}, "compressed-tensors")
    assert operands(imported, "model.layers.1.mlp.up_proj")[:3] == ["int8 vector", "int8 vector", "-"]
    assert operands(imported, "model.experts.3.up")[1] == "int4 block 128 minmax"
    assert operands(imported, "model.layers.0.mlp.up_proj")[:2] == ["e4m3 tensor", "e4m3 block 128x64"]
    assert operands(imported, "lm_head") == ["-"] * 6
    notes = "\n".join(imported.notes)
    assert "not from calibration" in notes
    assert "Embedding" in notes


@pytest.mark.parametrize(
    "preset", ["FP8", "FP8_DYNAMIC", "NVFP4", "MXFP4", "MXFP8", "W4A16", "W8A8", "FP8_BLOCK", "W4A16_ASYM"]
)
def test_presets_of_the_package_can_be_imported(preset: str) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads(QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"]).model_dump_json())
    imported = import_plan(config, "compressed-tensors")
    formats = {"FP8": "e4m3", "NVF": "nvfp4", "MXF": preset.lower(), "W4A": "int4", "W8A": "int8"}
    assert operands(imported, "layer")[1].startswith(formats[preset[:3]])


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("{", "no compressed-tensors config"),
        ("[]", "no mapping"),
        ("{}", "config_groups"),
        ('{"config_groups": {"W8A8": ["Linear"]}}', "W8A8"),
        ('{"config_groups": {"a": {"targets": ["Linear"], "weights": {"bits": 8}}}}', "bits"),
        ('{"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 5, "type": "float"}}}}', "float 5"),
        ('{"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "column"}}}}', "column"),
        ('{"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": "8"}}}}', "num_bits"),
        ('{"config_groups": {"a": {"targets": ["Linear"], "weights": {"strategy": "block"}}}}', "block_structure"),
        ('{"config_groups": {"a": {"targets": "Linear", "weights": {}}}}', "targets"),
    ],
)
def test_what_is_no_config_raises(text: str, token: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=token) as error:
        import_plan(tmp_path, "compressed-tensors")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "format", "token"),
    [
        ("nowhere.json", "compressed-tensors", "nowhere.json"),
        ("nowhere.yaml", "megatron", "nowhere.yaml"),
        ("nowhere.py:config", "torchao", "nowhere.py"),
        ("rowise", "torchao", "rowwise"),
        ("rowwise", "torchoa", "torchao"),
        (3, "megatron", "int"),
    ],
)
def test_sources_that_cannot_be_found_raise(source: Any, format: str, token: str) -> None:
    with pytest.raises(PlanError, match=token):
        import_plan(source, format)


def test_a_yaml_file_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text("configs: !!python/object/apply:os.system ['touch evil']\n")
    with pytest.raises(PlanError, match="evil"):
        import_plan(tmp_path / "evil.yaml", "megatron")
    assert set(IMPORT_FORMATS) == {"torchao", "compressed-tensors", "megatron"}


@pytest.mark.parametrize("name", ["deepseek-v3", "nvfp4"])
def test_published_recipes_go_to_megatron_and_back(name: str) -> None:
    """Tiles of weights, lines, stochastic gradients and the rotation are Megatron's own, so nothing is left out."""
    plan = bp.Plan.preset(name).to_dict()
    if name == "deepseek-v3":  # Megatron's scales of blocks are powers of two
        plan["quantizers"] = {key: {**value, "power_of_two": True} for key, value in plan["quantizers"].items()}
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)]
    model, x = nn.Sequential(*layers), torch.randn(4, 256)
    exported = bp.Plan.from_dict(plan).export("megatron", model, x, strict=True)
    imported = import_plan(yaml.safe_load(exported.text), "megatron")
    with bp.attach(model, plan, example=x, execution="emulate") as run:
        decision = run.plan.decide("2", "linear.0")
    expected = [str(decision[slot].quantizer or "-") for slot in SLOTS]
    back = operands(imported, "2")
    assert [text.replace("block 1x128", "block 128") for text in expected] == back
    assert any("16x16" in text or "128x128" in text for text in back)


def test_tiles_go_to_transformer_engine_and_modelopt() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)), torch.randn(4, 256)
    engine = bp.Plan.preset("deepseek-v3").export("transformer-engine", model, x, strict=True)
    assert '"weight": (partial(fp8_tile, DType.kFloat8E4M3, False)' in engine.text
    assert '"input": (partial(fp8_block, DType.kFloat8E4M3, False)' in engine.text
    modelopt = bp.Plan.preset("deepseek-v3").export("modelopt", model, x)
    assert "-2: 128" in modelopt.text
    with pytest.raises(PlanError, match="lines of inputs only"):
        bp.Plan.preset("deepseek-v3").export("compressed-tensors", model, x)
