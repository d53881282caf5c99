"""Exported files in the hands of the frameworks' own loaders, where these are installed.

They are no dependencies of the tests: ``pip install nvdlfw-inspect megatron-core nvidia-modelopt`` brings them.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import bitplan as bp
from bitplan.integrations.import_plan import import_plan

F8 = {"format": "e4m3", "scale": "tensor"}
G8 = {"format": "e5m2", "scale": "tensor"}


class Net(nn.Module):
    """A convolution, and linear layers of which names are parts of others' names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 1)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(32, 32), "up2": nn.Linear(32, 32)}) for _ in range(3)
        )
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for layer in self.layers:
            x = layer["up2"](torch.relu(layer["up"](x)))  # type: ignore[index]
        return self.head(x)  # type: ignore[no-any-return]


#: Rules that overlap: the last one that fits decides.
PLAN = bp.Plan.from_dict(
    {
        "version": 1,
        "rules": [
            {"match": "*", "op": "linear", "x": F8, "w": F8, "dy": G8},
            {"match": "layers.*.up2", "op": "linear", "x": F8, "w": F8, "dy": F8},
            {"match": "layers.1", "op": "linear", "keep": True},
            {"match": "layers.1.up", "op": "linear", "x": F8, "w": F8, "dy": G8},
        ],
    }
)
PATHS = [*(f"layers.{number}.{name}" for number in range(3) for name in ("up", "up2")), "head"]
#: The format of gradients by layer; None for a layer in high precision.
GRADIENTS = dict.fromkeys(PATHS, "e5m2") | {"layers.0.up2": "e4m3", "layers.1.up2": None, "layers.2.up2": "e4m3"}


def exported(to: str, plan: bp.Plan = PLAN) -> str:
    torch.manual_seed(0)
    return plan.export(to, Net(), torch.randn(2, 8, 32), strict=True).text


def test_megatron_finds_the_recipes() -> None:
    quant_config = pytest.importorskip("megatron.core.quantization.quant_config")
    config = quant_config.RecipeConfig.from_config_dict(yaml.safe_load(exported("megatron")))
    formats = {"e5m2": "hybrid", "e4m3": "e4m3"}
    for path in [*PATHS, "conv", "layers.1"]:
        recipe = config.match(quant_config.MatchContext(path, None)).config["training_recipe"]
        gradient = GRADIENTS.get(path)
        assert recipe.get("fp8_format") == (None if gradient is None else formats[gradient]), path


def test_a_plan_of_megatrons_file_decides_as_its_first_match() -> None:
    quant_config = pytest.importorskip("megatron.core.quantization.quant_config")
    recipes = {
        name: {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
        for name, recipe in (
            ("high", {}),
            ("mx", {"fp8_quantization_recipe": "mxfp8"}),
            ("tensor", {"fp8_quantization_recipe": "tensorwise"}),
        )
    }
    patterns = [("high", "*.[!0]*.fc2"), ("mx", "*.1.*"), ("tensor", "*.fc[2^]"), ("high", "*.1?.*"), ("mx", "*fc1")]
    matchers = {
        f"m{number}": {"config": name, "type": "glob", "pattern": pattern, "enabled": True}
        for number, (name, pattern) in enumerate(patterns)
    }
    document = {"configs": recipes, "matchers": matchers}
    plan = import_plan(document, "megatron").plan
    config = quant_config.RecipeConfig.from_config_dict(document)
    shown = {"high": "None", "mx": "mxfp8", "tensor": "e4m3 tensor", None: "None"}
    for path in (f"layers.{number}.{name}" for number in range(12) for name in ("fc1", "fc2", "fc^", "fc1.norm")):
        expected = shown[config.match_to_config_key(quant_config.MatchContext(path, None))]
        assert str(plan.decide(path, "linear.0")["fprop.w"].quantizer) == expected, path


@pytest.fixture
def config_manager(tmp_path: Path) -> Iterator[Any]:
    manager = pytest.importorskip("nvdlfw_inspect.config_manager").ConfigManager
    pytest.importorskip("nvdlfw_inspect.logging").initialize_logger(str(tmp_path))
    yield manager
    manager.reset()


def test_nvdlfw_inspect_finds_every_layer_in_one_section(config_manager: Any, tmp_path: Path) -> None:
    (tmp_path / "debug.yaml").write_text(exported("te-debug"))
    features = dict.fromkeys(("FakeQuant", "DisableQuantizationGEMM", "DisableQuantizationLayer"))
    registry = {"transformer_engine": types.SimpleNamespace(features=features)}
    config_manager._load_config(tmp_path / "debug.yaml", registry)
    for path in PATHS:
        features = config_manager.get_config_for_layer(f"model.{path}")["transformer_engine"]
        if GRADIENTS[path] is None:
            assert features == {"DisableQuantizationLayer": {"enabled": True}}
            continue
        (dgrad,) = [gemm for gemm in features["FakeQuant"]["gemms_struct"] if gemm["gemm"] == "dgrad"]
        formats = {row["tensor"]: row["quant_format"] for row in dgrad["tensors_struct"]}
        assert formats == {"gradient": f"FP8{GRADIENTS[path]}".upper(), "weight": "FP8E4M3"}
    assert config_manager.get_config_for_layer("model.conv") == {}


@pytest.mark.parametrize(
    "quantizer", [{"format": "int8", "scale": "vector"}, {"format": "e4m3", "scale": "vector"}, F8], ids=str
)
def test_modelopt_rounds_the_same_operands(quantizer: dict[str, str]) -> None:
    """Up to the last bits of a division."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    rules = [{"match": "*", "op": "linear", "fprop": quantizer}, {"match": "head", "keep": True}]
    plan = bp.Plan.from_dict({"version": 1, "rules": rules})
    document = yaml.safe_load(exported("modelopt", plan))
    torch.manual_seed(0)
    model, batch = Net().eval(), torch.randn(2, 8, 32)
    plain = model(batch)
    with bp.attach(model, plan, example=batch), torch.no_grad():
        ours = model(batch)
    mtq.quantize(model, document, lambda quantized: quantized(torch.randn(3, 8, 32)))  # scales of inputs are current
    enabled = {path for path, module in model.named_modules() if getattr(module, "is_enabled", False)}
    assert enabled == {
        f"{path}.{name}" for path in PATHS if path != "head" for name in ("weight_quantizer", "input_quantizer")
    }
    theirs = model(batch)
    rounding = (ours - plain).abs().mean()
    assert (theirs - plain).abs().mean() > 0.8 * rounding  # it is rounded
    assert (theirs - ours).abs().mean() < 0.01 * rounding  # and to the same values
