"""What the benchmark of speed writes down; no test asserts a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from benchmarks import runners, speed, speed_variants, switching
from benchmarks.own_plans import own_plan
from benchmarks.real_data import TextStream
from benchmarks.speed import Aim, ForeignShape, OwnShape, Row
from benchmarks.speed_variants import SpeedVariant, planned, unchanged
from bitplan.analysis.memory.fakes import storage_bytes
from bitplan.analysis.targets import Target
from bitplan.errors import BitplanError

#: The peers before the fixture replaces them.
ALL_PEERS = speed_variants.peers


def _broken(model: nn.Module, x: torch.Tensor) -> None:
    raise RuntimeError("does not work here")


@pytest.fixture(autouse=True)
def small_and_uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No peers but a broken one, a shape that is quick, and nothing compiled; the backends that were asked for."""
    backends: list[str] = []
    small = OwnShape(lambda: (nn.Linear(16, 16, bias=False), torch.randn(8, 16)), aim=Aim("2 CPU cores", 1e9))
    monkeypatch.setattr(
        speed_variants, "peers", lambda device, is_grouped: [SpeedVariant("a peer", _broken, is_peer=True)]
    )
    monkeypatch.setitem(speed.SHAPES, "small", small)
    monkeypatch.setattr("bitplan.executions.native.crossover.SIZES", {"cpu": (8,)})

    def compiled(model: Any, **arguments: Any) -> Any:
        if isinstance(model, nn.Module):  # measuring the crossover compiles functions
            backends.append(str(arguments.get("backend")))
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    return backends


def own_shape(name: str) -> OwnShape:
    shape = speed.SHAPES[name]
    assert isinstance(shape, OwnShape)
    return shape


def measured(shape: str, *plans: str, **settings: Any) -> dict[str, Any]:
    return speed.bench_speed([shape], plans, turns=1, switches=False, in_processes=False, **settings)


def test_every_variant_has_a_row_and_what_fails_is_told() -> None:
    seen: list[str] = []
    document = measured("small", on_news=lambda sentence: seen.append(sentence.split(": ")[0]))
    rows = document["rows"]["small"]
    assert [row["variant"] for row in rows] == ["bf16", "native-int8", "native-int8-tensor"]
    assert seen == ["small, a peer failed", *(f"small, {row['variant']}" for row in rows)]
    assert rows[0]["ratio"] == 1.0
    assert all(row["milliseconds"] > 0 and row["peak"] is None and row["loss"] is None for row in rows)
    assert document["failed"] == {"small": {"a peer": "RuntimeError: does not work here"}}
    assert {row["size"] for row in document["crossover"]} <= {8}
    assert set(document["plans"]) == {"native-int8", "native-int8-tensor"}
    assert document["aims"]["small"]["reached_by"] == ["native-int8", "native-int8-tensor"]


def test_forward_and_backward_take_no_notice_of_a_plan_for_optimizer_state() -> None:
    shape = speed.SHAPES["small"]
    assert not shape.full_step
    (_, variant, *_) = speed_variants.variants_of(["fp8-train-small"], torch.device("cpu"), shape, False, False)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    run = variant.change(model, torch.randn(4, 16))
    assert run is not None
    run.step()


def test_every_plan_may_spare_memory(small_and_uncompiled: list[str]) -> None:
    document = measured("small", "native-int8", recompute=True)
    variants = [row["variant"] for row in document["rows"]["small"]]
    sparing = [f"native-int8, recompute {what}" for what in ("weights", "activations", "inputs", "products")]
    assert variants == ["bf16", "native-int8", *sparing]
    assert ["compile_native at" in backend for backend in small_and_uncompiled] == [*[False] * 3, *[True] * 3]


def test_every_plan_may_compile_equal_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = OwnShape(lambda: (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(8, 16)))
    monkeypatch.setitem(speed.SHAPES, "blocks", blocks)
    found: list[int] = []
    monkeypatch.setattr("bitplan.runtime.attachment.equal_blocks", lambda m: found.append(len(list(m))) or list(m))
    rows = measured("blocks", "native-int8", regional=True)["rows"]["blocks"]
    assert [row["variant"] for row in rows] == ["bf16", "native-int8", "native-int8, equal blocks once"]
    assert found == [2]


def test_plans_in_fp8_may_have_fast_sums(small_and_uncompiled: list[str]) -> None:
    """A row of another unit's that bore their name would be the same row twice."""
    document = measured("small", "native-int8", "native-fp8", fast_accumulation=True, peers=False)
    variants = [row["variant"] for row in document["rows"]["small"]]
    in_fp8 = ["native-fp8", "native-fp8, fast accumulation", "native-fp8, fast accumulation throughout"]
    assert variants == ["bf16", "native-int8", *in_fp8]


def test_each_variant_learns_from_the_same_text_and_is_held_against_its_emulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bitplan.lab.models.language_models import LlamaBlocks, random_states

    blocks = OwnShape(lambda: (LlamaBlocks(32, 1, 64, heads=2), random_states(2, 16, 32)))
    monkeypatch.setitem(speed.SHAPES, "blocks", blocks)
    document = measured("blocks", "native-int8-tensor", loss_steps=12, peers=False)
    assert document["failed"] == {}
    losses, rows = document["losses"]["blocks"], document["rows"]["blocks"]
    names = ["bf16", "native-int8-tensor", "native-int8-tensor, emulated", "bf16, other order"]
    assert list(losses["loss"]) == names
    plain, low, emulated, other = (losses["curves"][name] for name in names)
    assert len(plain) == 12
    assert plain[-1] < plain[0] - 0.1  # it learns
    assert other != pytest.approx(plain, abs=1e-3)
    assert low == pytest.approx(emulated, abs=0.03)
    assert low == pytest.approx(plain, abs=0.1)
    assert low != plain
    assert rows[0]["loss_gap"] == 0.0
    assert rows[1]["loss_gap"] == losses["loss"]["native-int8-tensor"] - losses["loss"]["bf16"]
    assert losses["native_agrees"] == (abs(losses["native_less_emulated"]) <= losses["spread"])
    assert losses["batch"] == [1, 16]


def test_the_text_that_judges_is_no_part_of_the_text_that_is_learnt_from() -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    learnt, judged = runners.texts(tokens, 1)
    assert torch.equal(torch.cat([learnt.text, judged.text]), TextStream(tokens, 0).text)
    assert len(learnt.text) > len(judged.text) > 0
    assert torch.equal(judged.batch(3)[0], runners.texts(tokens, 2)[1].batch(3)[0])  # the same for every seed
    assert not torch.equal(learnt.batch(3)[0], runners.texts(tokens, 2)[0].batch(3)[0])


def test_a_full_step_has_an_optimizer_whose_state_the_plan_keeps_small() -> None:
    pytest.importorskip("torchao")
    document = measured("gpt-1b-tiny")
    assert [row["variant"] for row in document["rows"]["gpt-1b-tiny"]][:3] == [
        *("bf16", "native-fp8-gpt", "native-fp8-gpt, recompute activations")
    ]
    held = {}
    for small, change in ((False, unchanged), (True, lambda model, x: planned(own_plan("native-fp8-gpt"), model, x))):
        target = speed.SHAPES["gpt-1b-tiny"].text_target(torch.device("cpu"))
        assert target is not None
        runner = runners.FullStep(target, SpeedVariant("", change))
        before = {name: value.detach().clone() for name, value in runner.module.named_parameters()}
        runner.step()
        assert all(not torch.equal(before[name], value) for name, value in runner.module.named_parameters())
        held[small] = storage_bytes(runner.training.optimizer_state())
        own = storage_bytes(runner.holds())
        assert own > held[small] + sum(value.nbytes for value in before.values())
    assert held[True] < held[False]


def test_gpt_1b_has_a_billion_parameters() -> None:
    with torch.device("meta"):
        model, tokens = own_shape("gpt-1b").make()
    assert 1.0e9 < sum(parameter.numel() for parameter in model.parameters()) < 1.05e9
    assert tokens.numel() == 16 * 1024


def test_formats_change_in_turns() -> None:
    plan = switching.switching_plan(own_plan("native-int8-tensor"))
    result = switching.measure_switches(torch.device("cpu"))
    assert [item["to"] for item in result["switches"]] == ["native-int8-tensor", "bf16"] * 2
    assert result["switching"]["reached"]  # nothing is compiled here at all
    assert plan.moves


def _tiny_llama() -> Target:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, use_cache=False
    )
    ids = torch.randint(64, (2, 16))
    return Target(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, lambda output: output.loss)


def test_models_of_other_libraries_run_under_presets_as_these_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed.SHAPES, "foreign", ForeignShape(_tiny_llama))
    document = measured("foreign", "fp8-train", loss_steps=0, peers=False)
    assert document["failed"] == {}
    plain, planned_row = document["rows"]["foreign"]
    assert (plain["fallbacks"], planned_row["variant"]) == (0, "fp8-train")
    assert planned_row["fallbacks"] > 0  # there is no FP8 unit here, and the row says so


def test_the_peers_have_options_of_their_own_while_they_compile() -> None:
    by_name = {variant.name: variant for variant in ALL_PEERS(torch.device("cuda"), False)}
    aggressive = by_name["torch activation pass e4m3, aggressive recompute"]
    before = functorch_config.aggressive_recomputation
    with aggressive.compile_options():
        options = inductor_config.post_grad_fusion_options["activation_quantization_aten_pass"]
        assert options == {"quant_type": "torch.float8_e4m3fn", "use_scaling": True}
        assert functorch_config.aggressive_recomputation
    assert functorch_config.aggressive_recomputation is before
    assert "activation_quantization_aten_pass" not in inductor_config.post_grad_fusion_options
    with by_name["bf16, activation budget 0.5"].compile_options():
        assert functorch_config.activation_memory_budget == 0.5


def test_an_aim_is_reached_by_a_row_that_reaches_all_of_it() -> None:
    def row(name: str, milliseconds: float, peak: int | None, ours: bool = True) -> Row:
        return Row(name, ours, "no", milliseconds, 0.0, 1.0, peak, 0, 1, 0.0)

    rows = [row("bf16", 10, 10, ours=False), row("fast", 5, 12), row("small", 12, 5), row("both", 6, 6)]
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    first, second = Aim("one H200", 6.0, 6), Aim("one H200", beats_all=True)
    assert [(speed.reached(aim, rows, cuda) or {})["reached_by"] for aim in (first, second)] == [["both"], ["both"]]
    assert speed.reached(first, rows, cpu) == {
        "on": "one H200", "milliseconds": 6.0, "peak": 6, "beats_all": False, "reached_by": None
    }  # fmt: skip
    assert speed.reached(None, rows, cuda) is None


def test_the_peak_is_a_runners_own_whatever_else_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU would tell it: others hold 1,000 bytes when this one is made, and 5,000 when it is measured."""
    runner = runners.ForwardAndBackward(nn.Linear(16, 16), torch.randn(8, 16), SpeedVariant("bf16", unchanged))
    runner.device = torch.device("cuda")
    own = [tensor.to("meta") for tensor in runner.holds()]
    monkeypatch.setattr(runners, "storage_bytes", lambda tensors: 700)
    monkeypatch.setattr(type(runner), "holds", lambda self: own)
    for name, value in (("memory_allocated", 5_700), ("max_memory_allocated", 6_000)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    runner.measure_peak()
    assert runner.peak == 700 + 300


def test_a_shape_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(BitplanError, match="there is no shape 'llama-4069'; did you mean llama-4096"):
        speed.bench_speed(["llama-4069"])


@pytest.mark.parametrize("name", speed_variants.OWN_PLANS)
def test_the_plans_of_the_benchmark_run_all_three_products_natively(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.executions.native.backends import Float8Backend, Int8Backend

    for kind in (Int8Backend, Float8Backend):
        monkeypatch.setattr(kind, "is_available", lambda self, device: True)
    model, x = own_shape("llama-tiny").make()
    with planned(own_plan(name), model.bfloat16(), x.bfloat16()) as run:
        assert run.fallbacks() == []
        model(x.bfloat16()).sum().backward()
