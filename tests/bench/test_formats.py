"""The benchmark's document: what it holds and what it leaves out. Times are not judged here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import benchmarks.formats as bench
from benchmarks import peers
from benchmarks.timing import seconds_per_call
from bitplan.machine import describe_machine
from bitplan.numerics.formats import FloatFormat
from bitplan.numerics.reference import Rounding

ROW_KEYS = {
    *("who", "format", "rounding", "mode", "ns_per_element", "share_of_copy", "terabytes_per_second"),
    *("rounded", "target", "reached"),
}


def float_named(name: str) -> FloatFormat:
    number_format = bench.get_format(name)
    assert isinstance(number_format, FloatFormat)
    return number_format


def broken_peer(target: FloatFormat, rounding: Rounding) -> Callable[[Tensor], object]:
    def fails(x: Tensor) -> object:
        raise RuntimeError("no such kernel")

    return fails


def absent_peer(target: FloatFormat, rounding: Rounding) -> None:
    return None


@pytest.fixture(scope="module")
def document() -> Any:
    """One run over a float that torch has too, with a peer that works, one that fails and one that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        chosen = {"torch cast": peers.torch_cast, "broken": broken_peer, "absent": absent_peer}
        patch.setattr(peers, "CPU_PEERS", chosen)
        seen: list[bench.Row] = []
        made = bench.bench_formats(("e5m2", "int8"), elements=256, samples=1, on_row=seen.append)
    assert [row.who for row in seen] == [row["who"] for row in made["rows"]]
    return made


def test_every_way_is_measured_once(document: Any) -> None:
    ways = [(row["who"], row["format"], row["rounding"], row["mode"]) for row in document["rows"]]
    assert ways == [
        ("bitplan", "e5m2", "nearest", "eager"),
        ("bitplan", "e5m2", "nearest", "compiled"),
        ("bitplan", "e5m2", "nearest", "compiled, tensor parameters"),
        ("torch cast", "e5m2", "nearest", "eager"),
        ("torch cast", "e5m2", "nearest", "compiled"),
        ("bitplan", "e5m2", "stochastic", "eager"),
        ("bitplan", "e5m2", "stochastic", "compiled"),
    ]


def test_rows_hold_times_and_what_was_set_out_to_reach(document: Any) -> None:
    for row in document["rows"]:
        assert row.keys() == ROW_KEYS
        assert row["ns_per_element"] > 0
        assert row["share_of_copy"] > 0
        assert row["terabytes_per_second"] == pytest.approx(8e-3 / row["ns_per_element"])
        if row["who"] == "bitplan":
            assert row["rounded"]
            assert row["target"] == bench.CPU_TARGETS[row["rounding"], row["mode"]]
            assert row["reached"] == (row["ns_per_element"] <= row["target"])
        else:
            assert (row["target"], row["reached"]) == (None, None)


def test_the_head_names_machine_versions_and_size(document: Any) -> None:
    assert document["benchmark"] == "formats"
    assert (document["device"], document["elements"], document["threads"]) == ("cpu", 256, 1)
    assert document["copy_ns_per_element"] > 0
    assert document["machine"] == describe_machine(torch.device("cpu"))
    assert document["machine"]["cpu"]
    assert document["machine"]["versions"].keys() >= {"bitplan", "python", "torch"}
    assert "gpu" not in document["machine"]


def test_ours_is_set_against_torchs_cast_where_both_round(document: Any) -> None:
    ratios = {(item["format"], item["mode"]): item for item in document["torch_ratios"]}
    rounded = {row["mode"] for row in document["rows"] if row["who"] == "torch cast" and row["rounded"]}
    assert set(ratios) == {("e5m2", mode) for mode in rounded}
    assert "eager" in rounded
    for number_format in ratios.values():
        assert number_format["reached"] == (number_format["ratio"] <= bench.TORCH_RATIO)


def test_a_conversion_that_did_not_round_is_no_rival() -> None:
    """Inductor drops a cast to bfloat16 and back: fast, and worth nothing."""

    def row(who: str, nanoseconds: float, rounded: bool) -> bench.Row:
        return bench.Row(who, "bf16", "nearest", "compiled", nanoseconds, 1.0, 1.0, rounded, None, None)

    ours = row("bitplan", 2.0, rounded=True)
    assert bench._torch_ratios([ours, row("torch cast", 1.0, rounded=False)]) == []
    assert bench._torch_ratios([ours, row("torch cast", 1.0, rounded=True)]) == [
        {"format": "bf16", "mode": "compiled", "ratio": 2.0, "reached": False}
    ]


def test_threads_are_given_back_even_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    seen = []

    def stop(*arguments: Any) -> float:
        seen.append(torch.get_num_threads())
        raise RuntimeError("stop")

    monkeypatch.setattr(bench, "seconds_per_call", stop)
    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="stop"):
            bench.bench_formats(("e4m3",), elements=8, samples=1)
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_is_no_float_is_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="bitplan"):
        made = bench.bench_formats(("int8", "mxfp4"), elements=8, samples=1)
    assert made["rows"] == []
    assert [record.getMessage() for record in caplog.records] == [
        "int8 is no float format and is left out.",
        "mxfp4 is no float format and is left out.",
    ]


def test_a_peer_that_fails_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "CPU_PEERS", {"broken": broken_peer, "absent": absent_peer})
    with caplog.at_level(logging.WARNING, logger="bitplan"):
        assert peers.working_peers("e4m3", "nearest", torch.ones(4)) == {}
    assert [record.getMessage() for record in caplog.records] == ["broken is not measured for e4m3: no such kernel"]
    assert peers.working_peers("int8", "nearest", torch.ones(4)) == {}


@pytest.mark.parametrize("peer", ["torch cast", "ml_dtypes", "gfloat"])
def test_peers_round_what_they_know_and_decline_the_rest(peer: str) -> None:
    if peer != "torch cast":
        pytest.importorskip(peer)
    x = torch.linspace(-3, 3, 50)
    make = peers.CPU_PEERS[peer]
    call = make(float_named("e5m2"), "nearest")
    assert call is not None
    assert torch.equal(torch.as_tensor(call(x)).float(), bench.quantize(x, "e5m2"))
    assert make(float_named("e5m2"), "stochastic") is None
    assert make(float_named("e4m3b4"), "nearest") is None


def test_a_peer_that_is_not_installed_is_not_measured() -> None:
    assert peers._optional("no_such_package_anywhere") is None


def test_the_numbers_meet_every_region_of_the_formats() -> None:
    x = bench._spread_numbers(4096, torch.device("cpu"))
    assert torch.equal(x, bench._spread_numbers(4096, torch.device("cpu")))
    assert float(x.abs().min()) < 2.0**-10
    assert float(x.abs().max()) > 128


def test_timing_calls_the_function_and_gives_seconds() -> None:
    calls = []
    assert seconds_per_call(lambda: calls.append(sum(range(2000))), torch.device("cpu"), samples=2) > 0
    assert len(calls) >= 4
