"""The benchmark's parts; its numbers are not tested, a machine's are its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import benchmarks.losses as losses
import benchmarks.memory as bench
import bitplan
from benchmarks.contenders import (
    VARIANTS,
    Checkpointed,
    Contender,
    WithLoss,
    checkpoint_blocks,
    optimizer_for,
    with_own_code,
)
from benchmarks.memory import Aim, Row, aim_reached, bench_memory, chosen_variants, headline
from benchmarks.own_plans import own_plan
from benchmarks.real_data import stream_for
from bitplan.analysis.targets import Target, batch_size, move_target
from bitplan.errors import BitplanError
from bitplan.lab.models.built_in import BUILT_IN
from bitplan.lab.models.language_models import GPT
from bitplan.lab.models.resnet import cifar_resnet
from bitplan.lab.targets import load_target

ROW = Row("bf16", False, 1000, 500, {}, 10.0, 0.0, 100.0, 1.0)


def eager(model: str, **more: Any) -> dict[str, Any]:
    """The one real measurement here: what compiles would take minutes."""
    return bench_memory(model, ("bf16-eager", "packed-eager"), turns=1, in_processes=False, **more)


def test_a_row_has_memory_speed_and_loss() -> None:
    news: list[str] = []
    result = eager("gpt-tiny", batch=2, loss_steps=3, on_news=news.append)
    plain, packed = result["rows"]
    assert (plain["variant"], packed["variant"]) == ("bf16-eager", "packed-eager")
    assert packed["kept"] < plain["kept"]
    assert plain["peak"] == plain["memory"]["peak"]
    assert all(row["samples_per_second"] == pytest.approx(2000 / row["milliseconds"]) for row in result["rows"])
    assert all(4 < row["loss"] < 7 for row in result["rows"])
    assert (result["batch"], result["optimizer"], result["autocast"]) == (2, "adamw", "bfloat16")
    assert "standard library" in result["loss_data"]
    assert result["headline"]["ours"] == "packed-eager"
    assert result["failed"] == {}
    assert result["aim"] is None
    assert len(result["curves"]["bf16-eager"]) == 3
    assert any("ready after" in sentence for sentence in news)


def test_an_optimizer_that_is_not_there_is_told_before_anything_starts() -> None:
    news: list[str] = []
    with pytest.raises(BitplanError, match="there is no optimizer 'lion' here"):
        eager("gpt-tiny", batch=2, optimizer="lion", loss_steps=1, loss_jobs=2, on_news=news.append)
    assert news == []


def test_processes_beside_lose_what_this_one_does() -> None:
    def curves(**more: Any) -> tuple[dict[str, Any], Any]:
        result = bench_memory("gpt-tiny", ("packed-eager",), batch=2, turns=1, loss_steps=2, in_processes=False, **more)
        return result, result["curves"]["packed-eager"]

    _, here = curves()
    _, beside = curves(loss_jobs=2)
    smaller, of_smaller = curves(loss_batch=1)
    assert beside == here
    assert (smaller["batch"], smaller["loss_batch"]) == (2, 1)
    assert of_smaller != here


@pytest.mark.parametrize("model", ["mobilenet-v2-imagenet", "gpt-1024-bytes"])
def test_the_plan_of_a_model_rounds_something_in_it(model: str) -> None:
    target = load_target(model)
    explained = bitplan.explain(target.model, own_plan(bench._PLAN_OF[model]), target.batch, target.loss)
    assert sum(row.quantizer is not None for row in explained) > 20


def test_all_contenders_train_from_the_same_weights_on_the_same_data() -> None:
    target = move_target(load_target("gpt-tiny"), torch.device("cpu"), 2)
    stream = stream_for(target)
    assert stream is not None
    make = optimizer_for("adamw", VARIANTS["bf16-eager"])
    contender = Contender(target, VARIANTS["bf16-eager"], own_plan("packed"), False, make)
    first = contender.losses(stream.batch, 3)
    contender.first_steps()
    assert contender.losses(stream.batch, 3) == first
    assert first[0] != first[2]


def test_a_variant_that_fails_leaves_the_others_their_rows() -> None:
    target = "tests-linear"
    made = Target(nn.Linear(8, 8), torch.randn(4, 8), None)
    with pytest.MonkeyPatch.context() as patch:
        for module in (bench, losses):
            patch.setattr(module, "load_target", lambda text: made)
        result = bench_memory(
            target,
            ("bf16-checkpointed", "bf16-eager"),
            None,
            "cpu",
            None,
            "sgd",
            turns=1,
            loss_steps=0,
            in_processes=False,
        )
    assert [row["variant"] for row in result["rows"]] == ["bf16-eager"]
    assert result["failed"]["bf16-checkpointed"] == "BitplanError: the model has no blocks to checkpoint."


def test_by_default_all_compiled_ways_take_part() -> None:
    assert list(chosen_variants(None, "sgd")) == ["bf16", "bf16-checkpointed", "bf16-aggressive", "packed"]
    assert list(chosen_variants(["packed", "bf16", "packed"], "sgd")) == ["packed", "bf16"]
    with pytest.raises(BitplanError, match="there is no variant 'fp8'"):
        chosen_variants(["fp8"], "sgd")


def test_an_optimizer_of_8_bits_needs_its_package_and_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "has_torchao", lambda: False)
    assert "bf16-adamw8bit" not in chosen_variants(None, "adamw")
    with pytest.raises(BitplanError, match="pip install torchao"):
        chosen_variants(["bf16-adamw8bit"], "adamw")
    monkeypatch.setattr(bench, "has_torchao", lambda: True)
    assert "bf16-adamw8bit" in chosen_variants(None, "adamw")
    with pytest.raises(BitplanError, match="--optimizer adamw"):
        optimizer_for("sgd", VARIANTS["bf16-adamw8bit"])
    with pytest.raises(BitplanError, match="there is no optimizer 'lion'"):
        optimizer_for("lion", VARIANTS["bf16"])


def test_the_headline_is_against_the_best_of_the_others() -> None:
    rows = [
        ROW,
        replace(ROW, variant="bf16-aggressive", peak=600, samples_per_second=80.0),
        replace(ROW, variant="packed", ours=True, peak=300, samples_per_second=90.0),
    ]
    assert headline(rows) == {
        "ours": "packed",
        "smallest": "bf16-aggressive",
        "times_smaller": 2.0,
        "times_as_fast_as_smallest": 90 / 80,
        "fastest": "bf16",
        "times_smaller_than_fastest": 1000 / 300,
        "times_as_fast": 0.9,
    }
    assert headline(rows[:2]) is None


@pytest.mark.parametrize(
    ("aim", "reached"),
    [
        (Aim(peak=300, samples_per_second=90), True),
        (Aim(peak=299, samples_per_second=90), False),
        (Aim(peak=300, samples_per_second=91), False),
        (Aim(times_smaller=3.3, times_as_fast=0.9), True),
        (Aim(times_smaller=3.4, times_as_fast=0.9), False),
        (Aim(times_smaller=3.3, times_as_fast=0.95), False),
    ],
)
def test_an_aim_is_reached_whole_or_not(aim: Aim, reached: bool) -> None:
    rows = [ROW, replace(ROW, variant="packed", ours=True, peak=300, samples_per_second=90.0)]
    result = aim_reached(aim, rows, torch.device("cuda"))
    assert result is not None
    assert result["reached_by"] == (["packed"] if reached else [])
    assert aim_reached(aim, rows, torch.device("cpu")) is None
    assert aim_reached(None, rows, torch.device("cuda")) is None


def test_the_models_of_the_aims_are_built_in() -> None:
    assert {model for model, _ in bench.AIMS} <= set(BUILT_IN)


def test_blocks_are_checkpointed_and_layers_are_not() -> None:
    model = GPT(tokens=16, length=4, layers=3, heads=1, features=8)
    assert checkpoint_blocks(model) == 3
    assert all(isinstance(block, Checkpointed) for block in model.blocks)
    assert checkpoint_blocks(cifar_resnet(20)) == 9
    assert checkpoint_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == 0


def test_each_contender_has_code_of_its_own() -> None:
    first, second = with_own_code(WithLoss), with_own_code(WithLoss)
    assert len({id(code) for code in (first.forward.__code__, second.forward.__code__, WithLoss.forward.__code__)}) == 3
    module = first(nn.Linear(2, 2), None)
    assert module(None, torch.ones(1, 2)).dim() == 0


# --- real data ---


def test_digits_are_enlarged_to_the_size_of_the_images() -> None:
    target = Target(nn.Linear(2, 2), (torch.randn(5, 3, 24, 24), torch.randint(10, (5,))), nn.functional.cross_entropy)
    stream = stream_for(target)
    assert stream is not None
    images, labels = stream.batch(0)
    assert images.shape == (5, 3, 24, 24)
    assert labels.shape == (5,)
    assert images.is_contiguous()
    assert torch.equal(images, stream.batch(0)[0])
    assert not torch.equal(images, stream.batch(1)[0])
    channels_last = target.batch[0].contiguous(memory_format=torch.channels_last)
    there = stream_for(Target(target.model, (channels_last, target.batch[1]), target.loss))
    assert there is not None
    assert there.batch(0)[0].is_contiguous(memory_format=torch.channels_last)


def test_text_is_shifted_by_one_token() -> None:
    stream = stream_for(load_target("gpt-tiny"))
    assert stream is not None
    inputs, following = stream.batch(3)
    assert inputs.shape == following.shape == (8, 64)
    assert torch.equal(inputs[:, 1:], following[:, :-1])
    assert int(inputs.max()) < 256


def test_what_has_no_real_data_says_so() -> None:
    assert stream_for(load_target("gcn")) is None
    with pytest.raises(BitplanError, match="--loss-steps 0"):
        bench_memory("gcn", ("bf16-eager",), loss_steps=1)


# --- placing ---


def test_a_batch_is_cut_and_repeated() -> None:
    target = load_target("gpt-tiny", shapes_only=True)
    for size in (3, 20):
        assert batch_size(move_target(target, torch.device("cpu"), size).batch) == size
    keyed = Target(nn.Linear(2, 2), {"a": torch.arange(4), "b": torch.ones(())})
    cut = move_target(keyed, torch.device("cpu"), 6).batch
    assert cut["a"].tolist() == [0, 1, 2, 3, 0, 1]
    assert batch_size(cut) == 6
