"""The scripts under experiments/, and the results that they left."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bitplan.errors import BitplanError
from bitplan.lab.tasks.task import Metric

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for path in (ROOT / "experiments").glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
ACCURACY, PERPLEXITY = Metric("accuracy", "higher", 0.1), Metric("perplexity", "lower", 500.0)

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """What a script defines, after it ran with these words."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))

    def ran(script: Path, *text: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, text)])
        return runpy.run_path(str(script), run_name="__main__")

    return ran


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_says_what_it_does(script: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(script, "--help")
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert f"experiments/{script.name}" in output
    # These two read results and make none.
    assert ("--quick" in output) == (script.stem not in ("claims", "reread"))
    assert script.name in (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", RESULTS, ids=lambda path: path.stem)
def test_every_result_says_how_it_was_made(file: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["command"].startswith("python experiments/")
    assert "/" not in content["command"].removeprefix("python experiments/")
    assert content["machine"]
    assert content["versions"]["torch"]
    assert content["seeds"]
    assert all(isinstance(seed, int) for seed in content["seeds"])


def test_an_experiment_goes_on_from_a_result(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / f"ptb.{part}.txt").write_text("a b c d\nb d a\n" * 20, encoding="utf-8")
    text = (tmp_path, "--quick", "--set", "vocabulary=9")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    run(ROOT / "experiments" / "ptb.py", *text, "--runs", tmp_path / "a", "--out", first, "--plans", "FP32", "CR")
    run(ROOT / "experiments" / "ptb.py", *text, "--runs", tmp_path / "b", "--out", second, "--go-on-from", first)
    assert "FP32 (seed 0), CR (seed 0): taken from" in capsys.readouterr().out
    assert not list((tmp_path / "b").glob("**/cr-s0"))
    assert list((tmp_path / "b").glob("**/rr-s0"))
    before, after = (json.loads(file.read_text(encoding="utf-8")) for file in (first, second))
    records = {plan["plan"]: plan for plan in after["studies"][0]["plans"]}
    assert list(records) == ["FP32", "static 8", "CR", "RR", "ER"]
    assert [records["FP32"], records["CR"]] == before["studies"][0]["plans"]
    assert after["studies"][0]["curves"]["CR"] == before["studies"][0]["curves"]["CR"]
    assert after["goes_on_from"] == before["command"]
    other = {
        **records["CR"],
        "values": {"1": 3.0},
        "metrics": {"1": {"perplexity": 3.0}},
        "seconds": 1.0,
        "mean_bits": 8,
    }
    studies = [{**before["studies"][0], "plans": [records["FP32"], other]}]
    third, words_of_two = tmp_path / "third.json", (*text, "--plans", "FP32", "CR")
    third.write_text(json.dumps({**before, "studies": studies}), encoding="utf-8")
    run(
        ROOT / "experiments" / "ptb.py", *words_of_two, "--runs", tmp_path / "c", "--out", second, "--go-on-from", third
    )
    assert [path.parent.name for path in (tmp_path / "c").glob("**/run.json")] == ["cr-s0"]
    _, both = json.loads(second.read_text(encoding="utf-8"))["studies"][0]["plans"]
    value = records["CR"]["values"]["0"]
    assert both["values"] == {"0": value, "1": 3.0}
    assert (both["metric"], both["deviation"]) == pytest.approx(((value + 3) / 2, abs(value - 3) / 2**0.5))
    assert both["mean_bits"] == pytest.approx((records["CR"]["mean_bits"] + 8) / 2)
    assert both["seconds"] > 1
    first.write_text(json.dumps({**before, "experiment": "cifar"}), encoding="utf-8")
    with pytest.raises(SystemExit, match="is a result of cifar"):
        run(ROOT / "experiments" / "ptb.py", *text, "--runs", tmp_path / "d", "--go-on-from", first)
    assert before["float32_products"] == "float32"
    first.write_text(json.dumps({**before, "float32_products": "TF32"}), encoding="utf-8")
    with pytest.raises(SystemExit, match="has products in TF32, and here they are in float32"):
        run(ROOT / "experiments" / "ptb.py", *text, "--runs", tmp_path / "d", "--go-on-from", first)


@pytest.mark.parametrize(("device", "products"), [("cuda", "TF32"), ("cuda:1", "TF32"), ("cpu", "float32")])
def test_products_on_a_gpu_are_in_tf32_here_and_in_workers(
    run: Run, monkeypatch: pytest.MonkeyPatch, device: str, products: str
) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0")
    chosen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    common = Namespace(**run(ROOT / "experiments" / "common.py"))
    assert common.Experiment("ptb", Namespace(device=device)).products == products
    assert (os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == "1") is (products == "TF32")
    assert chosen == (["high"] if products == "TF32" else [])


def test_only_convolutions_go_on_from_a_result_with_other_products(run: Run, tmp_path: Path) -> None:
    run(ROOT / "experiments" / "common.py")
    earlier = importlib.import_module("earlier")
    facts = {"machine": {"gpu": "H200"}, "versions": {"torch": "2.11.0"}}
    for name in ("cifar", "ptb"):
        old = tmp_path / f"{name}.json"  # from before results told their products
        old.write_text(json.dumps({"experiment": name, "studies": [], "command": "", **facts}), encoding="utf-8")
        arguments = (old, name, facts["machine"], facts["versions"])
        assert earlier.Earlier(*arguments, "float32").content
        if name == "cifar":
            assert earlier.Earlier(*arguments, "TF32").content
        else:
            with pytest.raises(BitplanError, match="has products in float32, and here they are in TF32"):
                earlier.Earlier(*arguments, "TF32")


def test_an_experiment_is_rehearsed_and_gone_on_with(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "valid", "test"):
        (tmp_path / f"ptb.{part}.txt").write_text("a b c d\nb d a\n" * 20, encoding="utf-8")
    text = (tmp_path, "--quick", "--runs", tmp_path / "runs", "--set", "vocabulary=9")
    run(ROOT / "experiments" / "ptb.py", *text, "--minutes", "0")  # over before it began
    nothing = json.loads((tmp_path / "runs" / "ptb.json").read_text(encoding="utf-8"))
    assert nothing["is_part"]
    assert nothing["studies"][0]["plans"] == []
    run(ROOT / "experiments" / "ptb.py", *text, "--plans", "FP32", "CR")
    first = json.loads((tmp_path / "runs" / "ptb.json").read_text(encoding="utf-8"))
    (study,) = first["studies"]
    assert not first["is_part"]
    assert [plan["plan"] for plan in study["plans"]] == ["FP32", "CR"]
    assert study["short_run"]
    assert study["reading"] == "A rehearsal: nothing follows from it."
    assert study["plans"][1]["test_perplexity"] == study["plans"][1]["metrics"]["0"]["test_perplexity"]
    assert str(tmp_path) not in json.dumps(first)
    assert f"python experiments/ptb.py {tmp_path.name} --quick" in first["command"]
    run(ROOT / "experiments" / "ptb.py", *text)
    (study,) = json.loads((tmp_path / "runs" / "ptb.json").read_text(encoding="utf-8"))["studies"]
    assert [plan["plan"] for plan in study["plans"]] == ["FP32", "static 8", "CR", "RR", "ER"]
    assert study["plans"][0]["seconds"] == first["studies"][0]["plans"][0]["seconds"]  # not made again
    assert "All of it is in" in capsys.readouterr().out


def test_a_mistake_is_told_in_a_sentence(run: Run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"ptb\.py: there is no file or folder"):
        run(ROOT / "experiments" / "ptb.py", tmp_path / "nowhere", "--quick", "--runs", tmp_path / "runs")
    with pytest.raises(SystemExit, match=r"ptb\.py: --set steps says nothing"):
        run(ROOT / "experiments" / "ptb.py", tmp_path, "--quick", "--set", "steps", "--runs", tmp_path / "runs")


@pytest.fixture
def common(run: Run) -> Namespace:
    return Namespace(**run(ROOT / "experiments" / "common.py"))


def plan(name: str, *values: float, cost: float = 0.05, deviation: float = 0.0) -> dict[str, Any]:
    return {
        "plan": name,
        "metric": sum(values) / len(values) if values else None,
        "deviation": deviation,
        "values": dict(enumerate(values)),
        "diverged": [] if values else [0],
        "relative_to_fp32": cost,
    }


def test_a_control_below_its_floor_makes_a_short_run(common: Namespace) -> None:
    assert common.is_short([plan("FP32", 0.8)], 0.85, ACCURACY)
    assert not common.is_short([plan("FP32", 0.85)], 0.85, ACCURACY)
    assert common.is_short([plan("FP32", 95.0)], 92.0, PERPLEXITY)
    assert not common.is_short([plan("FP32", 90.0)], 92.0, PERPLEXITY)
    assert common.is_short([plan("FP32")], 92.0, PERPLEXITY)
    assert common.is_short([plan("CR", 80.0)], 92.0, PERPLEXITY)


def test_plans_are_read_against_the_static_one(common: Namespace) -> None:
    static = plan("static 8", 90.5, 91.5, deviation=0.5)
    plans = [
        *(plan("FP32", 90.0), static, plan("CR", 89.5, 90.49), plan("RR", 93.0, 94.01), plan("ER")),
        *(plan("LR", 90.7, 91.71), plan("LT", 89.0, 93.0), plan("CT", 91.0)),
    ]
    reported = common.against(plans, ("CR", "RR", "ER", "LR", "LT", "CT"), "static 8", PERPLEXITY)
    assert "Diverged: ER." in reported
    assert "Better than static 8: CR (-1.0050)." in reported
    assert "Worse by over 1% than static 8: RR (+2.5050)." in reported
    assert "Within 1% of static 8: LR (+0.2050)." in reported
    assert "Undecided beside static 8: LT (+0.0000), CT (+0.0000)." in reported  # a wide interval; one seed


def test_of_one_seed_there_is_no_verdict(common: Namespace) -> None:
    plans = [plan("FP32", 90.0), plan("static 8", 91.0), plan("CR", 90.0), plan("RR", 93.0)]
    reported = common.against(plans, ("CR", "RR"), "static 8", PERPLEXITY)
    assert "Undecided beside static 8: CR (-1.0000), RR (+2.0000)." in reported
    assert "static 8 91.0000." in reported
    assert not any(words in reported for words in ("etter than", "ithin", "orse by"))


def schedules(*accuracies: float, noise: float = 0.0) -> list[dict[str, Any]]:
    """RR and RTH, the balanced schedules CR and LR, and ER, with these accuracies; static plans beside them."""
    names, costs = ("RR", "RTH", "CR", "LR", "ER"), (0.025, 0.025, 0.04, 0.04, 0.05)
    chosen = [
        plan(name, accuracy - noise, accuracy + noise, cost=cost)
        for name, cost, accuracy in zip(names, costs, accuracies, strict=True)
    ]
    control = plan("static at the cost of CR", 0.85, 0.85, cost=0.0401)
    return [plan("FP32", 0.9, 0.9, cost=1.0), plan("static 8", 0.5, 0.5, cost=0.06), control, *chosen]


def test_the_order_of_schedules_is_one_of_groups(common: Namespace) -> None:
    clear = common.order_by_cost(schedules(0.7, 0.71, 0.8, 0.81, 0.9), ACCURACY)
    assert clear["is_sure"]  # whatever the static plans do, which are no schedules
    assert clear["trend"] == {"concordant": 8.0, "pairs": 8, "p_value": pytest.approx(1 / 30)}
    assert clear["means"]["balanced"] == pytest.approx(0.805)
    assert clear["pearson"]["value"] > 0.98
    (equal,) = clear["equal_cost"]
    assert (equal["control"], equal["schedules"]) == ("static at the cost of CR", ["CR", "LR"])
    assert (equal["pairs"], equal["mean"]) == (2, pytest.approx(-0.045))
    assert "2 schedules less static at the cost of CR, paired by 2 seeds: -0.0450" in clear["words"]
    assert "8 of 8 pairs, p = 0.033" in clear["words"]
    other = common.order_by_cost(schedules(0.8, 0.71, 0.7, 0.9, 0.75), ACCURACY)
    assert not other["is_sure"]
    assert "no order that is sure" in other["words"]
    falling = common.order_by_cost(schedules(0.7, 0.71, 0.8, 0.81, 0.9), PERPLEXITY)
    assert falling["trend"]["concordant"] == 0  # a lower perplexity is better
    assert falling["pearson"]["value"] == -clear["pearson"]["value"]
    assert "Pearson of cost with minus perplexity over 5 schedules -0.9" in falling["words"]
    rising = common.order_by_cost(schedules(0.9, 0.89, 0.8, 0.79, 0.7), PERPLEXITY)
    assert rising["is_sure"]


def test_few_schedules_and_one_seed_have_no_order(common: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitplan.significance.DRAWS", 100)
    assert common.order_by_cost(schedules(0.7, 0.71, 0.8, 0.81, 0.9)[:6], ACCURACY) is None
    once = [{**record, "values": {0: record["metric"]}} for record in schedules(0.7, 0.71, 0.8, 0.81, 0.9)]
    result = common.order_by_cost(once, ACCURACY)
    assert not result["is_sure"]
    assert "one seed, so no verdict" in result["words"]
    assert "equal_cost" not in result


def test_schedules_of_which_a_seed_diverged_have_no_order(common: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitplan.significance.DRAWS", 100)
    plans = schedules(0.7, 0.71, 0.8, 0.81, 0.9)
    for broken in ({"diverged": [2]}, {"diverged": [0, 1], "metric": None, "values": {}}):
        once = [{**record, **broken} if record["plan"] == "CR" else record for record in plans]
        result = common.order_by_cost(once, ACCURACY)
        assert not result["is_sure"]
        assert "CR diverged, so no verdict" in result["words"]
        assert "equal_cost" not in result
    control = [{**record, "diverged": [2]} if record["plan"].startswith("static at") else record for record in plans]
    result = common.order_by_cost(control, ACCURACY)
    assert "diverged" not in result["words"]  # the order is one of schedules
    assert "equal_cost" not in result


def test_a_result_on_one_series_is_not_taken_for_another(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{hour},{hour % 24},{hour % 7}" for hour in range(400)]
    (tmp_path / "other.csv").write_text("\n".join(["hour,first,second", *rows]) + "\n", encoding="utf-8")
    words = ("--quick", "--models", "dlinear", "--data", tmp_path / "other.csv")
    script, first = ROOT / "experiments" / "forecast.py", tmp_path / "first.json"
    run(script, *words, "--runs", tmp_path / "runs", "--out", first)
    capsys.readouterr()
    run(script, *words, "--runs", tmp_path / "b", "--go-on-from", first)
    assert "taken from" in capsys.readouterr().out
    run(script, *words[:3], "--runs", tmp_path / "runs", "--go-on-from", first)
    assert "taken from" not in capsys.readouterr().out
    (study,) = json.loads((tmp_path / "runs" / "forecast.json").read_text(encoding="utf-8"))["studies"]
    assert study["study"] == "dlinear on demand"


def test_a_deficit_of_which_a_seed_diverged_is_not_judged(common: Namespace) -> None:
    deficits = importlib.import_module("deficits")
    names = ("FP32", deficits.NONE, deficits.LONGER, "half from 0%", "half from 50%")
    plans = [plan(name, 0.9, 0.91, 0.92) for name in names]
    plans[3] = {**plan("half from 0%", 0.9, 0.91), "diverged": [2]}
    reading = deficits.reading(plans, ACCURACY)
    assert "Diverged: half from 0%." in reading
    assert "from 0% diverged, from 12.5% not run" in reading
    assert "from 50% +0.0000 (undecided)" in reading
