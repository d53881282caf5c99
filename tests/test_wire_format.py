"""Strings that are hashed, and what saved runs hold, as they have always been.

Every expected value is written out here and imported from nowhere: a name that is changed in the code must fail here,
because with it stored runs would no longer go on bit for bit. Adapt imports and attribute names to a renaming, never
the values. The behaviour is checked through :func:`bitplan.attach` and the tasks wherever it shows there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import bitplan
from bitplan.gemm.sampling import Sampling
from bitplan.lab.models.built_in import BUILT_IN
from bitplan.lab.tasks import find_task
from bitplan.lab.tasks.task import generator, shuffled
from bitplan.lab.train import train
from bitplan.numerics import wire_format
from bitplan.numerics.noise import key_of, keys_of, random_bits
from bitplan.plans import Plan

_TINY = f"{Path(__file__).parent / 'train' / 'tiny_task.py'}:Tiny"

# --- strings ---


def test_constants() -> None:
    assert wire_format.ROLES == ("weight", "activation", "grad_activation", "grad_weight")
    assert wire_format.SLOTS == ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
    assert (wire_format.FPROP, wire_format.DGRAD, wire_format.WGRAD) == ("fprop", "dgrad", "wgrad")
    assert wire_format.LOSS_PATH == "loss"
    assert (wire_format.TRAINING, wire_format.EVALUATION) == (1, 2)
    labels = {name: value for name, value in vars(wire_format).items() if isinstance(value, str) and name.isupper()}
    assert {name: value for name, value in labels.items() if name not in ("FPROP", "DGRAD", "WGRAD", "LOSS_PATH")} == {
        "ORDER": "order",
        "MIRROR": "mirror",
        "AUGMENTATION": "augmentation",
        "WINDOWS": "windows",
        "WINDOWS_AND_MASKS": "windows and masks",
        "HELD_OUT_MASKS": "held-out masks",
        "NEIGHBOURS": "neighbours",
        "DIGITS_GRAPH": "digits graph",
        "GRAPH_SPLIT": "graph split",
        "DIGIT_SCENE": "digit scene",
        "EPISODE": "episode",
        "HELD_OUT_EPISODE": "held-out episode",
        "RANDOM_EPISODE": "random episode",
        "ACTIONS": "actions",
        "RANDOM_ACTIONS": "random actions",
        "TRAINING_SET": "training",
        "HELD_OUT_SET": "held out",
        "SIGNS": "hadamard signs",
    }


def test_composed_keys() -> None:
    assert wire_format.op_site("conv2d", 0) == "conv2d.0"
    assert wire_format.reduction_site("model.layers.0[0]", 1, 2) == "reduce model.layers.0[0] from 1, 2"
    assert wire_format.site_path("layer1.0.conv1", "conv2d.0") == "layer1.0.conv1/conv2d.0"
    assert wire_format.place_key("conv2d.0", "activation") == "conv2d.0:activation"
    assert wire_format.place_key("", "weight") == ":weight"
    assert wire_format.consumer_site("relu.0", "conv2d.0") == "relu.0>conv2d.0"
    assert wire_format.parameter_key("conv1.weight") == "parameter conv1.weight"
    assert [wire_format.parameter_suffix(name) for name in ("weight", "bias")] == ["", "(bias)"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("weight", 130897217),
        ("grad_activation", 3916975033),
        ("fprop.x", 2673305576),
        ("conv2d.0:activation", 613856781),
        (":weight", 661705088),
        ("relu.0>conv2d.0:grad_activation", 2729791852),
        ("parameter conv1.weight", 3887703370),
        ("conv1", 285681077),
        ("loss", 3726709001),
        ("fprop", 1585082118),
        ("conv1/conv2d.0", 1524487627),
    ],
)
def test_hashes_of_texts(text: str, number: int) -> None:
    assert wire_format.text_hash(text) == number


# --- random bits ---


@pytest.mark.parametrize(
    ("seed", "step", "site", "key", "bits"),
    [
        (0, 0, 0, (1068192813, 55664683), [2070666437, -1951460123, 1692147427, -1040226823]),
        (1, 2, 3, (-1550748247, -59459520), [743311677, 2024384310, -1450321737, 1466498704]),
        (7, 100, 285681077, (840761283, 1994490011), [1758730325, -335884477, 237630364, 802685342]),
        (0, 5, 3887703370, (1139268779, 1556815882), [1507941816, 526817348, -643954306, -540604372]),
        # Beyond 32 bits; such seeds used to be folded to 32 bits and to share streams with smaller ones.
        (2**40, 3, 1, (-1770378896, -1572832920), [-355620208, 265170226, -639417293, 1464596162]),
    ],
)
def test_keys_and_random_bits(seed: int, step: int, site: int, key: tuple[int, int], bits: list[int]) -> None:
    import numpy as np

    assert key_of(seed, step, site) == key
    assert keys_of(seed, step, np.array([site], np.uint32)).tolist() == [list(key)]
    assert random_bits(torch.empty(4), seed, step, site).tolist() == bits


_EYE, _TIES = torch.eye(4), torch.full((4, 4), 2.5)
_STOCHASTIC = {"format": "e2m1", "rounding": "stochastic"}  # 2.5 becomes 2 or 3


def rounded_up(tensor: Tensor) -> int:
    """Which ties became 3, as the bits of a number."""
    values = tensor.detach().flatten().tolist()
    assert set(values) <= {2.0, 3.0}
    return int("".join(str(int(value) - 2) for value in values), 2)


@pytest.mark.parametrize(
    ("place", "x", "w", "dy", "shown", "steps"),
    [
        ("weight", _EYE, _TIES, _EYE, "y", [0xB926, 0xEE8D]),
        ("activation", _EYE, _TIES, _EYE, "y", [0xAFB5, 0x3105]),
        ("grad_activation", _EYE, _EYE, _TIES, "dw", [0x22D7, 0x3FA6]),
        ("grad_weight", _EYE, _EYE, _TIES, "dw", [0xDDAD, 0x26F1]),
        ("fprop.x", _TIES, _EYE, _EYE, "y", [0x1F01, 0x4842]),
        ("fprop.w", _EYE, _TIES, _EYE, "y", [0xC3BB, 0x8A9F]),
        ("dgrad.dy", _EYE, _EYE, _TIES, "dx", [0x8170, 0x0F74]),
        ("dgrad.w", _EYE, _TIES, _EYE, "dx", [0x3C37, 0x90BA]),
        ("wgrad.dy", _EYE, _EYE, _TIES, "dw", [0x480F, 0xF314]),
        ("wgrad.x", _TIES, _EYE, _EYE, "dw", [0xFA50, 0xCAE4]),
    ],
)
def test_stochastic_rounding_in_every_place(
    place: str, x: Tensor, w: Tensor, dy: Tensor, shown: str, steps: list[int]
) -> None:
    layer = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(layer)
    with torch.no_grad():
        layer.weight.copy_(w)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "0", place: _STOCHASTIC}]})
    seen = []
    with bitplan.attach(model, plan, seed=3) as run:
        for _ in steps:
            layer.weight.grad, inputs = None, x.clone().requires_grad_()
            y = model(inputs)
            y.backward(dy)
            seen.append(rounded_up({"y": y, "dx": inputs.grad, "dw": layer.weight.grad}[shown]))
            run.step()
    assert seen == steps


def test_stochastic_rounding_of_a_gradient_at_its_consumer() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(_EYE)
    rule = {"match": "0", "grad_activation": _STOCHASTIC, "grad_at": "consumer"}
    with bitplan.attach(model, Plan.from_dict({"version": 1, "rules": [rule]}), seed=3):
        model(_EYE).backward(_TIES)
    assert rounded_up(model[0].weight.grad) == 0xC5BA


def test_stochastic_rounding_of_a_bias_and_of_a_loss() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(2.5)
    with bitplan.attach(
        model, Plan.from_dict({"version": 1, "rules": [{"match": "0", "weight": _STOCHASTIC}]}), seed=3
    ):
        assert rounded_up(model(_EYE)[0]) == 0xA
    with bitplan.attach(
        model, Plan.from_dict({"version": 1, "rules": [{"match": "loss", "activation": _STOCHASTIC}]}), seed=3
    ) as run:
        assert rounded_up(run.loss(lambda y: y * 0 + 2.5)(model(_EYE))[0]) == 0x5


def test_samples_of_products() -> None:
    def some(pass_: str) -> list[int]:
        chosen: list[int] = Sampling(seed=0).draw("conv1/conv2d.0", pass_, torch.device("cpu")).indices(4, 100).tolist()
        return chosen

    assert some("fprop") == [11, 26, 31, 57]
    assert some("wgrad") == [48, 59, 76, 93]


# --- data ---


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every tuple that data are drawn by, as the text that is hashed."""
    texts: list[str] = []
    blake2b = hashlib.blake2b

    def recording(data: bytes = b"", **options: Any) -> Any:
        if data.startswith(b"("):
            texts.append(data.decode())
        return blake2b(data, **options)

    monkeypatch.setattr(hashlib, "blake2b", recording)
    return texts


@pytest.mark.parametrize(
    ("task", "settings", "texts"),
    [
        ("digits", [], ["('order', 12345, 0)", "('augmentation', 12345, 2)"]),
        (
            "detection",
            ["batch=2"],
            [
                "('order', 12345, 0)",
                "('mirror', 12345, 2)",
                "('digit scene', 'training', 5941)",
                "('digit scene', 'training', 6570)",
            ],
        ),
        ("lm", [], ["('windows', 12345, 2)"]),
        ("mlm", [], ["('windows and masks', 12345, 2)"]),
        (
            "graph",
            ["model=sage", "fanout=2,2", "batch=500"],
            [
                "('digits graph',)",
                "('order', 12345, 5)",
                "('order', 12345, 6)",
                "('order', 12345, 7)",
                "('neighbours', 12345, 2)",
            ],
        ),
    ],
)
def test_labels_that_tasks_draw_by(hashed: list[str], task: str, settings: list[str], texts: list[str]) -> None:
    made = find_task(task, settings, 12345)
    hashed.clear()
    made.batch(2)
    assert hashed == texts


def test_generators_of_labels() -> None:
    assert generator("order", 0, 0).initial_seed() == 8105155533265743171
    assert generator("digits graph").initial_seed() == 3315730409499697845
    assert torch.randint(1000, (4,), generator=generator("crop", 1, 2)).tolist() == [573, 387, 131, 151]
    assert shuffled(0, 8, 100, 0).tolist() == [42, 6, 30, 54, 57, 99, 77, 83]


def test_seeds_of_steps_and_evaluations(tmp_path: Path) -> None:
    seeds: list[int] = []
    task = find_task(_TINY, ["steps=2"], 5)
    for name in ("loss", "evaluate"):
        method = getattr(task, name)

        def recording(*args: Any, method: Callable[..., Any] = method) -> Any:
            seeds.append(torch.initial_seed())
            return method(*args)

        setattr(task, name, recording)
    train(task, None, folder=tmp_path / "run")
    assert seeds[:3] == [14883696396317476272, 1327894373925082671, 2008459124778373389]  # two steps, an evaluation


# --- models ---


def _digest(names: list[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "entries", "digest", "parameters", "digest_of_parameters"),
    [
        ("resnet20", 128, "bb4311ebd0dfff1c", 65, "be3b0f11db152b78"),
        ("resnet38", 236, "801d270de2f1ac3f", 119, "556a8b630ddf49ae"),
        ("resnet56", 344, "0e9088db7f09be06", 173, "b9e7cf0ede15842f"),
        ("resnet74", 452, "16fd368a1ac90212", 227, "41b648b11cbc5ffc"),
        ("resnet110", 668, "5ec4ede099314ec6", 335, "e9efd56ee8c53891"),
        ("resnet152", 920, "d0b2ac0a909ea62e", 461, "dd957e17fffb2c78"),
        ("resnet164", 983, "a6b3d9ff60a94caf", 494, "c863dda514dbbd24"),
        ("resnet18", 122, "9268dc0b58c121fa", 62, "0c180f3fc68950a8"),
        ("mobilenet-v2", 344, "5d2ccef2fd8a557f", 173, "dcb49fa479429cce"),
        ("squeezenet", 177, "31b375014a84d710", 102, "20d3c158869b68d0"),
        ("shufflenet-v2", 338, "b150d943f5d6d8a6", 170, "63a46c210d587bec"),
        ("resnet18-imagenet", 122, "9268dc0b58c121fa", 62, "0c180f3fc68950a8"),
        ("resnet34-imagenet", 218, "dda2a3cd4cee8570", 110, "1f889f5d089dc3b2"),
        ("resnet50", 320, "1af8b678ba440de2", 161, "cf835085e25a0e54"),
        ("mobilenet-v2-imagenet", 314, "72bf9f3d3389115c", 158, "c80dbd58305d9edf"),
        ("gpt2-small", 149, "0ea61113748d706a", 148, "c0d3821c94716a57"),
        ("gpt-1024", 149, "0ea61113748d706a", 148, "c0d3821c94716a57"),
        ("gpt-1024-bytes", 149, "0ea61113748d706a", 148, "c0d3821c94716a57"),
        ("gpt-tiny", 29, "82694c31693d8c00", 28, "22cd4f0a0a152518"),
        ("lstm", 7, "5f0c84e833ebbd33", 7, "5f0c84e833ebbd33"),
        ("gcn", 6, "310033f817449c70", 6, "310033f817449c70"),
        ("gat", 8, "9833f0d2dd934134", 8, "9833f0d2dd934134"),
        ("retinanet-resnet18", 156, "084ba1d4b277c467", 96, "18a92be7672f65be"),
        ("retinanet-resnet101", 660, "bb8c4a17939d8595", 348, "2f163c308e58f81b"),
    ],
)
def test_order_and_names_of_parameters(
    name: str, entries: int, digest: str, parameters: int, digest_of_parameters: str
) -> None:
    with torch.device("meta"):
        model = BUILT_IN[name]().model
    state, own = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    assert (len(state), _digest(state)) == (entries, digest)
    assert (len(own), _digest(own)) == (parameters, digest_of_parameters)


def test_every_built_in_model_is_pinned() -> None:
    (mark,) = test_order_and_names_of_parameters.pytestmark  # type: ignore[attr-defined]
    assert [row[0] for row in mark.args[1]] == list(BUILT_IN)


def test_names_and_numbers_of_sites() -> None:
    target = BUILT_IN["gpt-tiny"]()
    names = [site.name for site in bitplan.list_sites(target.model, target.batch, target.loss)]
    assert len(names) == 162
    assert names[:5] == [
        "token_embedding/embedding.0:weight",
        "token_embedding/embedding.0:activation",
        "place_embedding/embedding.0:weight",
        "place_embedding/embedding.0:activation",
        "/add.0:activation",
    ]
    assert [name for name in names if name.startswith("blocks.1") and "grad" not in name] == [
        "blocks.1.norm1/layer_norm.0:weight",
        "blocks.1.norm1/layer_norm.0:weight(bias)",
        "blocks.1.norm1/layer_norm.0:activation",
        "blocks.1.attention.qkv/linear.0:weight",
        "blocks.1.attention.qkv/linear.0:weight(bias)",
        "blocks.1.attention.qkv/linear.0:fprop.x",
        "blocks.1.attention.qkv/linear.0:fprop.w",
        "blocks.1.attention.qkv/linear.0:activation",
        "blocks.1.attention/scaled_dot_product_attention.0:activation",
        "blocks.1.attention.out/linear.0:weight",
        "blocks.1.attention.out/linear.0:weight(bias)",
        "blocks.1.attention.out/linear.0:fprop.x",
        "blocks.1.attention.out/linear.0:fprop.w",
        "blocks.1.attention.out/linear.0:activation",
        "blocks.1/add.0:activation",
        "blocks.1.norm2/layer_norm.0:weight",
        "blocks.1.norm2/layer_norm.0:weight(bias)",
        "blocks.1.norm2/layer_norm.0:activation",
        "blocks.1.up/linear.0:weight",
        "blocks.1.up/linear.0:weight(bias)",
        "blocks.1.up/linear.0:fprop.x",
        "blocks.1.up/linear.0:fprop.w",
        "blocks.1.up/linear.0:activation",
        "blocks.1/gelu.0:activation",
        "blocks.1.down/linear.0:weight",
        "blocks.1.down/linear.0:weight(bias)",
        "blocks.1.down/linear.0:fprop.x",
        "blocks.1.down/linear.0:fprop.w",
        "blocks.1.down/linear.0:activation",
        "blocks.1/add.1:activation",
    ]
    assert names[70:86] == [
        "head/linear.0:activation",
        "loss/cross_entropy.0:activation",
        "loss/cross_entropy.0:grad_activation",
        "head/linear.0:grad_activation",
        "head/linear.0:dgrad.dy",
        "head/linear.0:dgrad.w",
        "head/linear.0:wgrad.dy",
        "head/linear.0:wgrad.x",
        "norm/layer_norm.0:grad_activation",
        "norm/layer_norm.0:grad_weight",
        "norm/layer_norm.0:grad_weight(bias)",
        "blocks.1/add.1:grad_activation",
        "blocks.1.down/linear.0:grad_activation",
        "blocks.1.down/linear.0:grad_weight",
        "blocks.1.down/linear.0:grad_weight(bias)",
        "blocks.1.down/linear.0:dgrad.dy",
    ]
    target = BUILT_IN["resnet20"]()
    names = [site.name for site in bitplan.list_sites(target.model, target.batch, target.loss)]
    assert (len(names), _digest(names)) == (408, "66789d7f61247f15")


# --- what is saved ---

_PLAN = """
version: 1
name: pinned
description: everything that a state can hold
schedules:
  cycle: {name: CR, low: 3, high: 8, cycles: 2}
quantizers:
  w: {format: e3m2, rounding: stochastic}
  a: {format: int, bits: cycle, scale: tensor, range: minmax, eval: ema}
  g: {format: e5m2, scale: tensor, history: 16, margin: 1}
  late: {until: 50%, use: {format: e4m3, scale: tensor}, then: bf16}
  p: {format: e4m3, scale: tensor, promote: {to: bf16, underflow: 0.05}}
rules:
- {match: "*", weight: w, activation: a, grad_activation: g}
- {match: "2", weight: p, fprop.x: late}
"""
#: As JSON, so that the order of keys counts, too.
_PLAN_AS_JSON = (
    '{"version": 1, "name": "pinned", "description": "everything that a state can hold", '
    '"schedules": {"cycle": {"name": "CR", "low": 3, "high": 8, "cycles": 2}}, '
    '"quantizers": {"w": {"format": "e3m2", "rounding": "stochastic"}, '
    '"a": {"format": "int", "bits": "cycle", "scale": "tensor", "range": "minmax", "eval": "ema"}, '
    '"g": {"format": "e5m2", "scale": "tensor", "history": 16, "margin": 1}, '
    '"late": {"until": "50%", "use": {"format": "e4m3", "scale": "tensor"}, "then": "bf16"}, '
    '"p": {"format": "e4m3", "scale": "tensor", "promote": {"to": "bf16", "underflow": 0.05}}}, '
    '"rules": [{"match": "*", "weight": "w", "activation": "a", "grad_activation": "g"}, '
    '{"match": "2", "weight": "p", "fprop.x": "late"}]}'
)


def test_a_plan_as_a_mapping() -> None:
    plan = Plan.from_yaml(_PLAN)
    assert json.dumps(plan.to_dict()) == json.dumps(plan.flattened().to_dict()) == _PLAN_AS_JSON


def test_the_state_of_a_run_and_its_tables() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    with bitplan.attach(model, Plan.from_yaml(_PLAN), steps=10, example=torch.ones(3, 4), seed=5) as run:
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            run.step()
        state = run.state_dict()
        (table,) = (buffer for buffer in model[0].buffers() if buffer.dtype == torch.int32)
        table = table.clone()
    records = state.pop("records")
    assert json.dumps(state.pop("plan")) == _PLAN_AS_JSON
    assert json.dumps(state) == (
        '{"step": 2, "seed": 5, "formats": {"": ["int5"], "0": ["int5"], "1": ["int5"], "2": ["int5"]}, '
        '"steps": [[["int3", "int3", "int3", "int3"], 2, [0]]], "total": 10, "phase": [0], "position": [2, 10]}'
    )
    assert {path: (names, tuple(record.shape)) for path, (names, record) in records.items()} == {
        "0": ({"linear.0:activation": 0, "linear.0:grad_activation": 1}, (2, 57)),
        "1": ({"relu.0:activation": 0, "relu.0:grad_activation": 1}, (2, 57)),
        "2": (
            {
                "linear.0:weight": 0,
                "linear.0:weight(bias)": 1,
                "linear.0:activation": 2,
                "linear.0:grad_activation": 3,
            },
            (4, 57),
        ),
    }
    columns = {
        row: {column: value for column, value in enumerate(records["2"][1][row].tolist()) if value} for row in (0, 2, 3)
    }
    assert columns == {
        0: {12: inf, 13: -inf, 19: pytest.approx(0.05), 24: 1.0},  # may be promoted
        2: {12: inf, 13: -inf, 14: 1.0, 15: 10.5, 19: inf, 24: 1.0},  # has a running mean of its range
        3: {12: inf, 13: -inf, 19: inf, 23: 16.0, 24: 2.0, 25: 1.0, 26: 1.0},  # remembers its largest magnitudes
    }
    # The module's key, the keys of weight and bias, and the format that the schedule changes.
    assert table.shape == (4, 13)
    assert table[:3, :2].tolist() == [[1372131562, 742108892], [-173163784, -1019934226], [1465692442, -72615851]]
    assert table[3].tolist() == [0, 1106771968, *[0] * 11]


def test_the_contents_of_a_checkpoint(tmp_path: Path) -> None:
    quantizer = {"format": "int4", "scale": "tensor", "range": "minmax", "eval": "ema"}
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "0", "activation": quantizer}]})
    train(find_task(_TINY, ["steps=2"], 5), plan, folder=tmp_path)
    content = json.loads((tmp_path / "checkpoints" / "step-00000002.json").read_text())
    assert list(content) == ["bitplan_checkpoint", "step", "sha256", "run", "state", "json_sha256"]
    assert list(content["state"]) == ["model", "optimizer", "attachment", "memory", "loss_scale", "loop"]
    assert list(content["state"]["loop"]) == ["loss", "metrics", "best", "told", "bits", "cost"]
    assert list(content["state"]["attachment"]) == [
        *("step", "seed", "plan", "formats", "records", "steps", "total", "phase", "position")
    ]
    assert content["state"]["attachment"]["records"] == {
        "0": {"$tuple": [{"linear.0:activation": 0}, {"$tensor": "attachment.records.0.1"}]}
    }
    assert sorted(load_file(tmp_path / "checkpoints" / "step-00000002.safetensors")) == [
        "attachment.records.0.1",
        "model.0.bias",
        "model.0.weight",
        "model.1.bias",
        "model.1.num_batches_tracked",
        "model.1.running_mean",
        "model.1.running_var",
        "model.1.weight",
        "model.4.bias",
        "model.4.weight",
        "optimizer.state.0.momentum_buffer",
        "optimizer.state.1.momentum_buffer",
        "optimizer.state.2.momentum_buffer",
        "optimizer.state.3.momentum_buffer",
        "optimizer.state.4.momentum_buffer",
        "optimizer.state.5.momentum_buffer",
    ]
