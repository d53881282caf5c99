"""Plans for training frameworks: torchao is run, the others are checked against the schemas of their loaders."""

from __future__ import annotations

import fnmatch
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import bitplan as bp
from bitplan.errors import PlanError
from bitplan.gemm.products import Product
from bitplan.integrations.export import EXPORT_FORMATS, Export, export_plan
from bitplan.integrations.export.layers import LinearLayer, find_layers
from bitplan.integrations.import_plan import import_plan

F8 = {"format": "e4m3", "scale": "tensor"}
G8 = {"format": "e5m2", "scale": "tensor"}
FP8_TENSOR = {"x": F8, "w": F8, "dy": G8}
SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


LINEAR = ["embed", *(f"layers.{i}.{name}" for i in range(3) for name in ("up", "down")), "head"]


def net() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, 8, 16)


def plan_of(*rules: dict[str, Any], **keys: Any) -> bp.Plan:
    return bp.Plan.from_dict({"version": 1, "rules": list(rules), **keys})


def exported(to: str, *rules: dict[str, Any], **keys: Any) -> Export:
    return plan_of(*rules, **keys).export(to, *net())


def linear(match: Any = "*", **places: Any) -> dict[str, Any]:
    return {"match": match, "op": "linear", **places}


def reasons(export: Export) -> str:
    return "\n".join(export.lines)


def executed(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), names)
    return names


def planned_layers(plan: bp.Plan) -> dict[str, LinearLayer]:
    model, batch = net()
    return {layer.path: layer for layer in find_layers(plan, model, batch).layers}


# --- The layers that exporters start from


def test_operands_are_those_of_explain() -> None:
    plan = plan_of(linear(x=F8, w=F8, dy=G8), linear("layers.1", fprop="int8"), {"match": "head", "keep": True})
    model, batch = net()
    layers = planned_layers(plan)
    assert list(layers) == LINEAR
    rows = {row.site.name: row.words for row in bp.explain(model, plan, batch)}
    for path, layer in layers.items():
        for slot in SLOTS:
            operand = layer.operands[slot]
            assert (None if operand is None else str(operand.quantizer)) == rows[f"{path}/linear.0:{slot}"]


def test_an_operand_may_arrive_rounded() -> None:
    layers = planned_layers(plan_of({"match": "layers.0.up", "weight": F8, "activation": F8}))
    assert {slot for slot in SLOTS if layers["layers.0.up"].operands[slot]} == {"fprop.w", "dgrad.w"}
    assert not layers["layers.0.down"].is_rounded  # relu's own output is not rounded


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        ({"format": "e4m3"}, ["none"] * 6),
        (F8, ["tensor"] * 6),
        ({"format": "e4m3", "scale": "vector"}, ["vector"] * 6),
        # Per feature: of w the outputs, which dgrad sums over; of x and dy what fprop and dgrad sum over.
        ({"format": "e4m3", "scale": "channel"}, ["other", "vector", "other", "other", "vector", "vector"]),
        ({"format": "e4m3", "scale": "block", "block": 16}, ["block"] * 6),
        ({"format": "e4m3", "scale": "block", "block": 16, "axis": 0}, [*["other"] * 3, "block", *["other"] * 2]),
        ("mxfp8", ["block"] * 6),
    ],
)
def test_granularity_is_seen_from_the_summed_axes(quantizer: Any, expected: list[str]) -> None:
    layer = planned_layers(plan_of(linear(**dict.fromkeys(SLOTS, quantizer))))["layers.0.up"]
    assert [layer.operands[slot].granularity(slot) for slot in SLOTS] == expected  # type: ignore[union-attr]


def test_a_shared_vector_scale_varies_along_the_sum_of_the_second_product() -> None:
    layer = planned_layers(plan_of(linear(x={"format": "e4m3", "scale": "vector"})))["head"]
    assert layer.operands["fprop.x"].granularity("fprop.x") == "vector"  # type: ignore[union-attr]
    assert layer.operands["wgrad.x"].granularity("wgrad.x") == "other"  # type: ignore[union-attr]


# --- torchao: run, and compared operand by operand


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
    """The operands that bitplan multiplies, by slot, in the order of the step."""
    operands: dict[str, list[Tensor]] = {slot: [] for slot in SLOTS}

    def recorder(name: str, slots: tuple[str, str], positions: tuple[int, int]) -> Any:
        original = getattr(Product, name)

        def run(self: Product, *args: Any) -> Any:
            for slot, position in zip(slots, positions, strict=True):
                operands[slot].append(args[position].detach().reshape(-1, args[position].shape[-1]))
            return original(self, *args)

        return run

    monkeypatch.setattr(Product, "forward", recorder("forward", ("fprop.x", "fprop.w"), (0, 1)))
    monkeypatch.setattr(Product, "grad_x", recorder("grad_x", ("dgrad.dy", "dgrad.w"), (0, 2)))
    monkeypatch.setattr(Product, "grad_w", recorder("grad_w", ("wgrad.dy", "wgrad.x"), (0, 1)))
    return operands


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def torchao_operands(
    export: Export,
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module | None = None,
    batch: Tensor | None = None,
    loss: Callable[[Tensor], Tensor] = mean_square,
) -> dict[str, list[Tensor]]:
    """The operands of one step of the converted model, by slot."""
    from torchao.float8 import float8_linear

    cast = float8_linear.hp_tensor_to_float8_dynamic
    order = {"input": ["fprop.x", "wgrad.x"], "weight": ["fprop.w", "dgrad.w"], "grad_output": ["dgrad.dy", "wgrad.dy"]}
    operands: dict[str, list[Tensor]] = {slot: [] for slot in SLOTS}
    in_backward = []

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        float8 = cast(tensor, *args, **kwargs)
        role = kwargs["gemm_input_role"].value
        if role == "grad_output":
            slot = order[role][len(operands["dgrad.dy"]) > len(operands["wgrad.dy"])]
        else:
            slot = order[role][bool(in_backward)]
        value = float8._data.to(torch.float32) / float8._scale
        value = value.t() if role == "weight" else value
        operands[slot].append(value.reshape(-1, value.shape[-1]))
        return float8

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", record)
    if model is None or batch is None:
        model, batch = net()
    value = loss(executed(export.text)["convert"](model, emulate=True)(batch))
    in_backward.append(True)
    value.backward()
    return operands


@pytest.mark.parametrize("scale", ["tensor", "vector"])
def test_torchao_multiplies_the_same_operands_bit_for_bit(
    scale: str, multiplied: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales that are powers of two, dividing by them and multiplying by their reciprocals is the same."""
    f8 = {"format": "e4m3", "scale": scale, "power_of_two": True}
    g8 = f8 | {"format": "e5m2"}
    plan = plan_of(linear(**{slot: g8 if slot.endswith("dy") else f8 for slot in SLOTS}))
    model, batch = net()
    with bp.attach(model, plan, example=batch):
        model(batch).square().mean().backward()
    export = plan.export("torchao", *net(), strict=True)
    theirs = torchao_operands(export, monkeypatch)
    for slot in SLOTS:
        # The input needs no gradient, so that bitplan leaves out the first dgrad.
        skipped = len(theirs[slot]) - len(multiplied[slot])
        assert skipped == int(slot.startswith("dgrad"))
        pairs = list(zip(multiplied[slot], theirs[slot][: len(multiplied[slot])], strict=True))
        assert len(pairs) >= 7
        # Equal inputs of a layer give equal operands; sums of products differ in their last bits from layer to layer.
        ours, other = pairs[0]
        assert torch.equal(ours, other), slot
        assert all(torch.allclose(ours, other, rtol=0.13, atol=1e-6) for ours, other in pairs)
        assert len(ours.unique()) < ours.numel()  # rounded at all


@pytest.mark.parametrize("scale", ["tensor", "vector"])
def test_torchao_with_scales_of_any_value_differs_in_single_codes(
    scale: str, multiplied: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all six operands of a layer that gets the same input and the same gradient from both."""
    torch.manual_seed(0)
    model, batch, gradient = nn.Linear(64, 48), torch.randn(32, 64, requires_grad=True), torch.randn(32, 48)
    plan = plan_of(linear(**{slot: {"format": "e4m3", "scale": scale} for slot in SLOTS}))
    exact = {"x": batch.detach(), "w": model.weight.detach().clone(), "dy": gradient}

    def loss(output: Tensor) -> Tensor:
        return (output * gradient).sum()

    with bp.attach(model, plan, example=batch.detach()):
        loss(model(batch)).backward()
    export = plan.export("torchao", nn.Sequential(model), batch.detach(), strict=True)
    theirs = torchao_operands(export, monkeypatch, nn.Sequential(model), batch, loss)
    for slot in SLOTS:
        ours, other, plain = multiplied[slot][0], theirs[slot][0], exact[slot.partition(".")[2]]
        error = (ours - plain).abs().mean()
        assert error > 0.005 * plain.abs().mean(), slot  # it is rounded
        assert (ours - other).abs().mean() < 0.02 * error, slot  # and both round alike
        assert torch.allclose(ours, other, rtol=0.13, atol=1e-4), slot  # to at most the next code


def test_torchao_leaves_a_product_without_formats_in_high_precision() -> None:
    plan = plan_of(linear(fprop=F8, dgrad=F8))
    export = plan.export("torchao", *net(), strict=True)
    (arguments, paths), *rest = executed(export.text)["TREATMENTS"]
    assert not rest
    assert paths == LINEAR
    disabled = {field for field, value in arguments.items() if "DISABLED" in str(value)}
    assert disabled == {"cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight"}
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    executed(plan.export("torchao", model, torch.randn(4, 16)).text)["convert"](model, emulate=True)
    x = torch.randn(4, 16)
    model(x).sum().backward()
    assert torch.allclose(model[0].weight.grad, torch.ones(4, 16).t() @ x)  # type: ignore[arg-type]


def test_torchao_gets_one_call_per_treatment_with_disjoint_layers() -> None:
    vector = {"format": "e4m3", "scale": "vector", "power_of_two": True}
    export = exported(
        "torchao",
        linear(**FP8_TENSOR),
        linear("layers.1", **dict.fromkeys(SLOTS, vector)),
        linear(["embed", "head"], keep=True),
    )
    names = executed(export.text)
    assert [paths for _, paths in names["TREATMENTS"]] == [
        ["layers.0.up", "layers.0.down", "layers.2.up", "layers.2.down"],
        ["layers.1.up", "layers.1.down"],
    ]
    model = names["convert"](net()[0], emulate=True)
    kinds = {path: type(module).__name__ for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds == {path: "Float8Linear" if path.startswith("layers") else "Linear" for path in LINEAR}
    assert export.layers == 6


def test_a_layer_with_two_names_is_exported_under_both() -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"fc": nn.Linear(16, 16)})})
    model["again"] = nn.ModuleDict({"fc": model["block"]["fc"]})  # type: ignore[index]
    model.forward = lambda x: model["again"]["fc"](model["block"]["fc"](x))  # type: ignore[method-assign, index]
    export = plan_of(linear(**FP8_TENSOR)).export("torchao", model, torch.randn(2, 16), strict=True)
    converted = executed(export.text)["convert"](model, emulate=True)
    assert {type(converted[name]["fc"]).__name__ for name in ("block", "again")} == {"Float8Linear"}


def test_the_exported_file_refuses_another_model() -> None:
    names = executed(exported("torchao", linear(**FP8_TENSOR)).text)
    with pytest.raises(ValueError, match="embed"):
        names["convert"](nn.Sequential(nn.Linear(4, 4)))


def test_torchao_says_what_it_cannot_do() -> None:
    export = exported("torchao", linear(**FP8_TENSOR), linear("layers.0.up", **{"fprop.w": "keep"}))
    assert "layers.0.up/linear.0:fprop.x: torchao rounds both operands of fprop or neither" in reasons(export)
    export = exported("torchao", linear(**FP8_TENSOR), linear("head", **{"wgrad.x": G8}))
    assert "head/linear.0:wgrad.dy, head/linear.0:wgrad.x: torchao cannot multiply" in reasons(export)
    export = exported("torchao", linear(x=F8, w=F8, dy=F8), linear("head", **{"wgrad.x": G8}))
    assert "head/linear.0:wgrad.x: torchao has one dtype for x (e4m3 in fprop.x): wgrad is left" in reasons(export)
    executed(export.text)["convert"](net()[0], emulate=True)
    delayed = F8 | {"history": 4}
    assert "current scales only" in reasons(exported("torchao", linear(x=delayed, w=F8, dy=G8)))
    stochastic = G8 | {"rounding": "stochastic"}
    assert "not stochastic" in reasons(exported("torchao", linear(x=F8, w=F8, dy=stochastic)))
    assert "instead of none" in reasons(exported("torchao", linear(x="e4m3", w="e4m3", dy="e5m2")))
    assert exported("torchao", linear(**FP8_TENSOR)).omissions == ()


def test_everything_beyond_linear_layers_is_reported() -> None:
    plan = plan_of(
        linear(
            x={"until": "90%", "use": F8, "then": "keep"}, w=F8 | {"promote": {"to": "bf16", "underflow": 0.1}}, dy=G8
        ),
        {"match": "*", "op": "relu", "activation": "e4m3", "grad_activation": "e5m2"},
        optimizer={"state": "int8"},
        execution={"kind": "packed"},
    )
    text = reasons(plan.export("torchao", *net()))
    assert "changes over time (e4m3 tensor until 90%, then left alone)" in text
    assert "not promoted" in text
    assert "layers.0/relu.0:activation, layers.1/relu.0:activation, layers.2/relu.0:activation: the saved" in text
    assert "relu.0:grad_activation" in text
    assert "optimizer: " in text
    assert "execution: " in text
    with pytest.raises(PlanError, match="strict"):
        plan.export("torchao", *net(), strict=True)
    # Inference has no gradients and no optimizer, and a run's last step.
    with pytest.raises(PlanError, match="nothing that compressed-tensors can do"):
        plan_of(linear(fprop={"until": "90%", "use": F8, "then": "keep"})).export("compressed-tensors", *net())
    served = plan_of(linear(fprop={"until": "90%", "use": G8, "then": F8}, dy=G8)).export("compressed-tensors", *net())
    assert served.omissions == ()
    assert served.layers == len(LINEAR)


def test_a_step_of_a_run_can_be_chosen() -> None:
    plan = plan_of(linear(x=F8, w={"until": "50%", "use": F8, "then": "keep"}, dy=F8))
    assert plan.export("torchao", *net(), step=0, steps=10, strict=True).layers == len(LINEAR)
    late = plan.export("torchao", *net(), step=9, steps=10)
    assert "both operands of fprop" in reasons(late)


# --- Megatron


MEGATRON_RECIPES = {
    "fp8_quantization_recipe": {"tensorwise", "blockwise", "mxfp8"},
    "fp4_quantization_recipe": {"nvfp4"},
    "fp8_format": {"e4m3", "hybrid"},
    "override_nonquantized_autocast": {True, False},
}


def megatron_configs(text: str, paths: list[str]) -> dict[str, dict[str, Any] | None]:
    """Path -> training recipe, read as Megatron reads the file: strictly, and the first match wins."""
    document = yaml.safe_load(text)
    assert set(document) == {"configs", "matchers"}
    for config in document["configs"].values():
        assert set(config) == {"transformer_engine_config_type", "training_recipe"}
        assert config["transformer_engine_config_type"] == "TEQuantizationParams"
        recipe = config["training_recipe"]
        assert all(recipe[key] in MEGATRON_RECIPES[key] for key in recipe)
        assert not {"fp8_quantization_recipe", "fp4_quantization_recipe"} <= set(recipe)
    for matcher in document["matchers"].values():
        assert set(matcher) == {"config", "type", "pattern", "enabled"}
        assert matcher["type"] == "glob"
        assert matcher["config"] in document["configs"]
    enabled = [matcher for matcher in document["matchers"].values() if matcher.get("enabled", False)]
    chosen = {}
    for path in paths:
        first = next((matcher for matcher in enabled if fnmatch.fnmatch(path, matcher["pattern"])), None)
        chosen[path] = None if first is None else document["configs"][first["config"]]["training_recipe"]
    return chosen


def test_megatron_has_the_recipe_of_every_layer() -> None:
    export = exported(
        "megatron", linear(**FP8_TENSOR), linear("layers.1", fprop="mxfp8", dgrad="mxfp8", wgrad="mxfp8"),
        linear("layers.2.down", x=F8, w=F8, dy=F8), linear("head", keep=True),
    )  # fmt: skip
    recipes = megatron_configs(export.text, [*LINEAR, "unknown.layer"])
    shown = {path: (recipe or {}).get("fp8_quantization_recipe", "bf16") for path, recipe in recipes.items()}
    assert shown == {
        **dict.fromkeys(LINEAR, "tensorwise"),
        "layers.1.up": "mxfp8",
        "layers.1.down": "mxfp8",
        "head": "bf16",
        "unknown.layer": "bf16",
    }
    assert recipes["layers.0.up"]["fp8_format"] == "hybrid"  # type: ignore[index]
    assert recipes["layers.2.down"]["fp8_format"] == "e4m3"  # type: ignore[index]
    # Megatron ignores a recipe outside of --fp8-format unless it says so.
    assert all(recipe["override_nonquantized_autocast"] for recipe in recipes.values() if recipe)
    assert export.omissions == ()
    assert export.layers == 7


def test_megatron_leaves_in_bf16_what_it_cannot_mix() -> None:
    export = exported(
        "megatron", linear(**FP8_TENSOR), linear("layers.0", **{"wgrad.x": "keep"}), linear("head", x="int8")
    )
    recipes = megatron_configs(export.text, LINEAR)
    assert [path for path, recipe in recipes.items() if recipe == {}] == ["layers.0.up", "layers.0.down", "head"]
    assert "wgrad.x is not" in reasons(export)
    assert "no recipe for these formats together (int8, e4m3, e5m2)" in reasons(export)
    assert "current scales only" in reasons(exported("megatron", linear(x=F8 | {"history": 4}, w=F8, dy=G8)))


def test_patterns_of_megatron_fit_no_module_that_is_not_meant() -> None:
    """A glob's ``*`` also fits dots and names."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ModuleDict({"norm": nn.LayerNorm(16), "0": nn.Linear(16, 16)}))
    model[1].forward = lambda x: model[1]["0"](model[1]["norm"](x))  # type: ignore[method-assign, index, operator]
    export = plan_of(linear(**FP8_TENSOR)).export("megatron", model, torch.randn(2, 16))
    recipes = megatron_configs(export.text, ["0", "1", "1.norm", "1.0"])
    assert [path for path, recipe in recipes.items() if recipe] == ["0", "1.0"]


@pytest.mark.parametrize("preset", ["fp8-linear", "mxfp8-linear"])
def test_a_plan_comes_back_from_megatron(preset: str, tmp_path: Path) -> None:
    export = bp.Plan.preset(preset).export("megatron", *net())
    export.save(tmp_path / "megatron.yaml")
    back = import_plan(tmp_path / "megatron.yaml", "megatron")
    assert planned_layers(back.plan) == planned_layers(bp.Plan.preset(preset))


# --- Transformer Engine's debug features


def te_debug_sections(text: str, paths: list[str]) -> dict[str, dict[str, Any]]:
    """Path -> features, read as nvdlfw_inspect reads the file; names are those that it infers."""
    document = yaml.safe_load(text)
    for section in document.values():
        assert set(section) == {"enabled", "layers", "transformer_engine"}
        assert section["enabled"] is True
        assert set(section["layers"]) == {"layer_name_regex_pattern"}
        for name, feature in section["transformer_engine"].items():
            keys = {
                "FakeQuant": {"enabled", "gemms_struct"},
                "DisableQuantizationGEMM": {"enabled", "gemms"},
                "DisableQuantizationLayer": {"enabled"},
            }[name]
            assert set(feature) == keys
    chosen = {}
    for path in paths:
        patterns = {name: section["layers"]["layer_name_regex_pattern"] for name, section in document.items()}
        (name,) = [name for name, pattern in patterns.items() if re.compile(pattern).search(f"model.{path}")]
        chosen[path] = document[name]["transformer_engine"]
    return chosen


def test_te_debug_rounds_the_operands_of_every_layer_in_one_section() -> None:
    export = exported(
        "te-debug", linear(**FP8_TENSOR), linear("layers.1", fprop=F8, dgrad="keep", wgrad="keep"),
        linear("layers.2.down", fprop="mxfp8", wgrad="keep"), linear("head", keep=True),
    )  # fmt: skip
    features = te_debug_sections(export.text, LINEAR)
    assert features["head"] == {"DisableQuantizationLayer": {"enabled": True}}
    fprop, dgrad, wgrad = features["layers.0.up"]["FakeQuant"]["gemms_struct"]
    assert (fprop["gemm"], dgrad["gemm"], wgrad["gemm"]) == ("fprop", "dgrad", "wgrad")
    assert {row["tensor"]: row["quant_format"] for row in dgrad["tensors_struct"]} == {
        "gradient": "FP8E5M2", "weight": "FP8E4M3",
    }  # fmt: skip
    assert {row["tensor"] for row in wgrad["tensors_struct"]} == {"gradient", "activation"}
    mixed = features["layers.1.down"]
    assert {row["quant_format"] for row in mixed["FakeQuant"]["gemms_struct"][0]["tensors_struct"]} == {"FP8E4M3"}
    # A product that FakeQuant does not name would stay in FP8.
    assert mixed["DisableQuantizationGEMM"] == {"enabled": True, "gemms": ["dgrad", "wgrad"]}
    # TE 2.20 passes the text MXFP8E4M3 on as a dtype, which raises in the first step.
    (part,) = features["layers.2.down"]["FakeQuant"]["gemms_struct"]
    assert part["gemm"] == "dgrad"
    assert "MXFP8" not in export.text
    assert export.lines == [
        "layers.2.down/linear.0:fprop.x, layers.2.down/linear.0:fprop.w: te-debug has no mxfp8: left as it is"
    ]


def test_te_debug_does_not_confuse_a_layer_with_one_whose_name_ends_alike() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(8, 8), "model": nn.ModuleDict({"fc": nn.Linear(8, 8)})})
    model.forward = lambda x: model["fc"](model["model"]["fc"](x))  # type: ignore[method-assign, index, operator]
    plan = plan_of(linear("model.fc", **FP8_TENSOR))
    features = te_debug_sections(plan.export("te-debug", model, torch.randn(2, 8)).text, ["fc", "model.fc"])
    assert "FakeQuant" in features["model.fc"]
    assert "FakeQuant" not in features["fc"]
    root = plan_of(linear(**FP8_TENSOR)).export("te-debug", nn.Linear(8, 8), torch.randn(2, 8))
    (section,) = yaml.safe_load(root.text).values()
    assert re.search(section["layers"]["layer_name_regex_pattern"], "model")


# --- Transformer Engine's CustomRecipe


class Recorded:
    """What a class of Transformer Engine was called with."""

    def __init__(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kind, self.args, self.kwargs = kind, args, kwargs


#: The arguments that the constructors have, positional ones first.
TE_ARGUMENTS = {
    "Float8CurrentScalingQuantizer": (["fp8_dtype", "device"], {"force_pow_2_scales"}),
    "Float8BlockQuantizer": (["fp8_dtype"], {"rowwise", "columnwise", "force_pow_2_scales", "block_scaling_dim"}),
    "MXFP8Quantizer": (["fp8_dtype"], set()),
    "NVFP4Quantizer": ([], {"stochastic_rounding"}),
    "IdentityQuantizer": ([], set()),
    "HybridQuantizer": ([], {"rowwise_quantizer", "columnwise_quantizer"}),
    "DelayedScalingRequest": ([], {"fp8_format", "amax_history_len", "margin"}),
    "CustomRecipe": ([], {"qfactory"}),
}
TE_MODULES = {
    "common.recipe": ["CustomRecipe"],
    "pytorch.quantization": ["DelayedScalingRequest"],
    "pytorch.tensor.float8_blockwise_tensor": ["Float8BlockQuantizer"],
    "pytorch.tensor.float8_tensor": ["Float8CurrentScalingQuantizer"],
    "pytorch.tensor.hybrid_tensor": ["HybridQuantizer"],
    "pytorch.tensor.identity_tensor": ["IdentityQuantizer"],
    "pytorch.tensor.mxfp8_tensor": ["MXFP8Quantizer"],
    "pytorch.tensor.nvfp4_tensor": ["NVFP4Quantizer"],
}


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with Transformer Engine's names, whose classes check the names of their arguments."""

    def recorder(kind: str) -> Any:
        positional, keywords = TE_ARGUMENTS[kind]

        def make(*args: Any, **kwargs: Any) -> Recorded:
            assert len(args) == len(positional)
            assert set(kwargs) == keywords
            return Recorded(kind, args, kwargs)

        return make

    names = {"", "common", "pytorch", "pytorch.tensor", *TE_MODULES}
    modules = {f"transformer_engine.{name}".rstrip("."): types.ModuleType("stub") for name in names}
    for name, kinds in TE_MODULES.items():
        for kind in kinds:
            setattr(modules[f"transformer_engine.{name}"], kind, recorder(kind))
    modules["transformer_engine.common.recipe"].Format = types.SimpleNamespace(E4M3="E4M3", HYBRID="HYBRID")  # type: ignore[attr-defined]
    dtypes = types.SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2")
    modules["transformer_engine.pytorch"].DType = dtypes  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def quantizer_for(export: Export, name: str, tensor: str, module_type: str = "linear") -> Recorded:
    role = types.SimpleNamespace(module_type=module_type, tensor_type=tensor, name=name)
    quantizer: Recorded = executed(export.text)["recipe"].kwargs["qfactory"](role)
    return quantizer


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_quantizes_each_operand() -> None:
    stochastic = {"format": "nvfp4", "rounding": "stochastic"}
    mixed = {"fprop": "mxfp8", "dgrad.w": "nvfp4", "dgrad.dy": stochastic, "wgrad.x": "nvfp4", "wgrad.dy": stochastic}
    export = exported(
        "transformer-engine", linear(**FP8_TENSOR), linear("layers.1", **mixed), linear("head", keep=True)
    )
    assert export.omissions == ()
    plain = quantizer_for(export, "layers.0.up", "grad_output")
    assert (plain.kind, plain.args[0]) == ("Float8CurrentScalingQuantizer", "e5m2")
    assert quantizer_for(export, "decoder.layers.0.up", "weight").args[0] == "e4m3"  # a name with something in front
    hybrid = quantizer_for(export, "layers.1.down", "input")
    assert hybrid.kind == "HybridQuantizer"
    assert [hybrid.kwargs[key].kind for key in ("rowwise_quantizer", "columnwise_quantizer")] == [
        "MXFP8Quantizer", "NVFP4Quantizer",
    ]  # fmt: skip
    assert quantizer_for(export, "layers.1.down", "grad_output").kwargs == {"stochastic_rounding": True}
    assert quantizer_for(export, "head", "input").kind == "IdentityQuantizer"
    assert quantizer_for(export, "head.layers.0.u", "input").kind == "IdentityQuantizer"
    assert quantizer_for(export, "layers.0.up", "output").kind == "IdentityQuantizer"
    assert executed(export.text)["quantizer"](None).kind == "IdentityQuantizer"


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_has_delayed_scales_of_whole_layers() -> None:
    f8, g8 = F8 | {"history": 16, "margin": 1}, G8 | {"history": 16, "margin": 1}
    export = exported("transformer-engine", linear(x=f8, w=f8, dy=g8))
    request = quantizer_for(export, "head", "input")
    assert request.kind == "DelayedScalingRequest"
    assert request.kwargs == {"fp8_format": "HYBRID", "amax_history_len": 16, "margin": 1}
    assert export.omissions == ()
    export = exported("transformer-engine", linear(x=f8, w=f8 | {"history": 4}, dy=g8))
    assert quantizer_for(export, "head", "input").kind == "Float8CurrentScalingQuantizer"
    assert "one history" in reasons(export)


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_multiplies_formats_of_one_kind_only() -> None:
    export = exported("transformer-engine", linear(**FP8_TENSOR), linear("head", **{"fprop.w": "mxfp8"}))
    assert "head/linear.0:fprop.w: transformer-engine cannot multiply" in reasons(export)
    hybrid = quantizer_for(export, "head", "input")
    assert hybrid.kwargs["rowwise_quantizer"].kind == "IdentityQuantizer"
    assert hybrid.kwargs["columnwise_quantizer"].kind == "Float8CurrentScalingQuantizer"


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_does_not_confuse_a_layer_with_one_whose_name_ends_alike() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(16, 16), "model": nn.ModuleDict({"fc": nn.Linear(16, 16)})})
    model.forward = lambda x: model["fc"](model["model"]["fc"](x))  # type: ignore[method-assign, index, operator]
    rules = linear(**FP8_TENSOR), {"match": "model.fc", "keep": True}
    export = plan_of(*rules).export("transformer-engine", model, torch.randn(2, 16), strict=True)
    assert export.layers == 1
    assert quantizer_for(export, "fc", "weight").kind == "Float8CurrentScalingQuantizer"
    assert quantizer_for(export, "decoder.fc", "weight").kind == "Float8CurrentScalingQuantizer"
    assert quantizer_for(export, "model.fc", "weight").kind == "IdentityQuantizer"


# --- torchtitan


def torchtitan_converter(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    class Converter:
        def __init__(self, name: str) -> None:
            self.name = name

        def Config(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
            return self.name, kwargs

    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.quantization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in ("Float8LinearConverter", "MXFP8LinearConverter"):
        setattr(sys.modules["torchtitan.components.quantization"], name, Converter(name))
    (converter,) = executed(text)["CONVERTERS"]
    return converter  # type: ignore[no-any-return]


def test_torchtitan_converts_the_layers_by_parts_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = {"format": "e4m3", "scale": "vector", "power_of_two": True}
    rules = [linear(**dict.fromkeys(SLOTS, vector)), linear(["head", "layers.1.up"], keep=True)]
    export = exported("torchtitan", *rules)
    name, arguments = torchtitan_converter(export.text, monkeypatch)
    assert name == "Float8LinearConverter"
    assert arguments["recipe_name"] == "rowwise"
    assert [path for path in LINEAR if not any(text in path for text in arguments["filter_fqns"])] == [
        path for path in LINEAR if path not in ("head", "layers.1.up")
    ]
    assert export.omissions == ()
    mx = exported("torchtitan", linear("layers.1", fprop="mxfp8", dgrad="mxfp8", wgrad="mxfp8"))
    name, arguments = torchtitan_converter(mx.text, monkeypatch)
    assert name == "MXFP8LinearConverter"
    assert [path for path in LINEAR if any(text in path for text in arguments["fqns"])] == [
        "layers.1.up",
        "layers.1.down",
    ]


def test_torchtitan_has_recipes_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = {"format": "e4m3", "scale": "vector", "power_of_two": True}
    forward = dict.fromkeys(("fprop.x", "fprop.w", "dgrad.dy"), vector) | {"dgrad.w": vector | {"scale": "tensor"}}
    export = exported("torchtitan", linear(**forward))
    assert torchtitan_converter(export.text, monkeypatch)[1]["recipe_name"] == "rowwise_with_gw_hp"
    assert export.omissions == ()
    text = reasons(exported("torchtitan", linear(**FP8_TENSOR)))
    assert "scales per vector, not per tensor" in text
    assert "e4m3, not e5m2" in text


def test_torchtitan_leaves_out_layers_that_its_converter_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10))
    vector = {"format": "e4m3", "scale": "vector", "power_of_two": True}
    export = plan_of(linear(**dict.fromkeys(SLOTS, vector))).export("torchtitan", model, torch.randn(2, 16))
    assert export.layers == 1
    assert export.lines == ["1: torchtitan leaves out layers with dimensions that 16 does not divide"]
    assert torchtitan_converter(export.text, monkeypatch)[1]["filter_fqns"] == []
    with pytest.raises(PlanError, match="16 does not divide"):
        plan_of(linear(**dict.fromkeys(SLOTS, vector))).export("torchtitan", model[1:], torch.randn(2, 16))


def test_torchtitan_cannot_name_a_layer_whose_name_is_part_of_anothers() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ModuleDict({"0": nn.Linear(16, 16)}))
    model[1].forward = lambda x: model[1]["0"](x)  # type: ignore[method-assign, index, operator]
    vector = {"format": "e4m3", "scale": "vector", "power_of_two": True}
    with pytest.raises(PlanError, match=r"'0' is a part of '1\.0'"):
        plan_of(linear("1", **dict.fromkeys(SLOTS, vector))).export("torchtitan", model, torch.randn(2, 16))


# --- Mistakes


@pytest.mark.parametrize("to", list(EXPORT_FORMATS))
def test_a_plan_without_anything_to_export_raises(to: str) -> None:
    with pytest.raises(PlanError, match=f"nothing that {to} can do"):
        exported(to, {"match": "head", "activation": "e4m3"})  # which no linear layer reads


@pytest.mark.parametrize(
    ("preset", "to", "token"),
    [
        ("int8-all", "torchao", "not in int8"),  # and not the embedding, which it rounds, too
        ("nvfp4-late", "torchao", "not in nvfp4"),
        ("fp8-late", "compressed-tensors", "at the end of a run it rounds no operand"),
        ("int8-linear", "megatron", "wgrad.dy, wgrad.x is not"),
    ],
)
def test_the_reason_why_nothing_can_be_exported_is_that_of_the_layers(preset: str, to: str, token: str) -> None:
    with pytest.raises(PlanError, match=token):
        bp.Plan.preset(preset).export(to, *net())


@pytest.mark.parametrize(
    ("arguments", "token"),
    [
        ({"to": "torchoa"}, "torchao"),
        ({"to": "torchao", "version": "0.3"}, "0.18"),
        ({"to": "megatron", "weights": "folder"}, "compressed-tensors"),
    ],
)
def test_mistakes_are_one_sentence(arguments: dict[str, Any], token: str) -> None:
    with pytest.raises(PlanError, match=re.escape(token)) as error:
        export_plan("fp8-linear", arguments.pop("to"), *net(), **arguments)
    assert "\n" not in str(error.value)


def test_names_that_do_not_match_raise() -> None:
    with pytest.raises(PlanError, match="layers"):
        exported("torchao", linear("layer.0", **FP8_TENSOR))


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    export = exported("megatron", linear(**FP8_TENSOR))
    (tmp_path / "old.yaml").write_text("mine")
    with pytest.raises(PlanError, match=r"nowhere"):
        export.save(tmp_path / "nowhere" / "new.yaml")
    with pytest.raises(PlanError, match="nothing"):
        exported("megatron", linear(x="int8")).save(tmp_path / "old.yaml")
    assert (tmp_path / "old.yaml").read_text() == "mine"
    export.save(tmp_path / "old.yaml")
    assert (tmp_path / "old.yaml").read_text() == export.text
    assert [file.name for file in tmp_path.iterdir()] == ["old.yaml"]


def test_names_are_quoted() -> None:
    model = nn.Sequential()
    model.add_module("a'b\n\"c{", nn.Linear(16, 16))
    plan = plan_of(linear(**FP8_TENSOR))
    (_, paths), *_ = executed(plan.export("torchao", model, torch.randn(2, 16)).text)["TREATMENTS"]
    assert paths == ["a'b\n\"c{"]
    recipes = megatron_configs(plan.export("megatron", model, torch.randn(2, 16)).text, paths)
    assert recipes[paths[0]] != {}
