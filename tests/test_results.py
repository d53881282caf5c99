"""The tables and sentences of docs/results say what their JSON files say."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bitplan.files import strict
from bitplan.lab.targets import load_target
from bitplan.lab.tasks.rl import PPOSettings
from bitplan.planners.advise import TAU
from bitplan.planners.assign import AssignRequest, make_assignment
from bitplan.planners.assign.levels import PAPER
from bitplan.plans.schedules import TEN, schedule
from bitplan.significance import judge

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TEXT = (RESULTS / "assignments.md").read_text()
NETWORKS = {"SqueezeNet, %": "squeezenet", "ResNet-18, %": "resnet18", "GPT, perplexity": "gpt"}
ORDERS = {
    "largest first": "",
    "the same, no promotion": ", no promotion",
    "by sensitivity": ", sensitivity",
    "random": ", random",
    "smallest first": ", smallest",
}


def plans_of(study: str) -> dict[str, dict[str, Any]]:
    (result,) = json.loads((RESULTS / f"assignments-{study}.json").read_text())["studies"]
    return {plan["plan"]: plan for plan in result["plans"]}


def table(header: str, text: str = TEXT) -> list[dict[str, str]]:
    """Column -> cell, of every row of the table whose header line contains these words."""
    lines = [line.strip() for line in text.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.startswith("|") and header in line)
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    names, _, *cells = rows
    # The column after a network's belongs to it: "ratio" and "peak" stand there several times.
    columns = [f"{names[at - 1]}: {name}" if names.count(name) > 1 else name for at, name in enumerate(names)]
    return [dict(zip(columns, row, strict=True)) for row in cells]


def figure(plan: dict[str, Any], scale: float) -> str:
    return f"{scale * plan['metric']:.2f} ± {scale * plan['deviation']:.2f}"


def is_close(cell: str, expected: str) -> bool:
    """Up to one in the last place: means of two seeds are often ties, which floats round either way."""
    reported, recorded = ([float(part) for part in text.split(" ± ")] for text in (cell, expected))
    return all(abs(first - second) < 0.0101 for first, second in zip(reported, recorded, strict=True))


@pytest.mark.parametrize(("column", "study"), NETWORKS.items())
def test_accuracies_and_ratios(column: str, study: str) -> None:
    plans, scale = plans_of(study), 1 if study == "gpt" else 100
    rows = [row for row in table("| ratio | ResNet-18, % |") if row[column]]
    assert {row[""] for row in rows} == {name for name in plans if "," not in name}
    for row in rows:
        plan = plans[row[""]]
        assert is_close(row[column], figure(plan, scale)), row
        assert len(plan["values"]) == 2, "two seeds, as the text says"
        reported = row[f"{column}: ratio"]
        assert reported == ("" if row[""] == "FP32" else f"{plan['ratio']:.3f}"), row


@pytest.mark.parametrize(("column", "study"), NETWORKS.items())
def test_peaks(column: str, study: str) -> None:
    plans = plans_of(study)
    for row in table("| peak | ResNet-18, % |"):
        if row[column]:
            assert row[f"{column}: peak"] == f"{plans[row['']]['packed_peak'] / 2**20:.0f}", row


def test_the_long_study() -> None:
    plans, rows = plans_of("resnet18-long"), table("20,000 iterations")
    assert [row["20,000 iterations"] for row in rows] == list(plans)
    for row in rows:
        plan = plans[row["20,000 iterations"]]
        assert is_close(row["accuracy, %"], figure(plan, 100)), row
        assert row["by seed"] == ", ".join(f"{100 * value:.2f}" for value in plan["values"].values()), row
        assert row["ratio"] == ("" if row["20,000 iterations"] == "FP32" else f"{plan['ratio']:.3f}"), row
        assert row["packed peak, MiB"] == f"{plan['packed_peak'] / 2**20:.0f}", row
    kept, operator = plans["r = 0.7"], plans["operator"]
    assert f"at {kept['ratio'] / operator['ratio']:.1f} times the operator baseline's ratio" in one_line(TEXT)


@pytest.mark.parametrize("ratio", ["r = 0.5", "r = 0.9"])
def test_orders(ratio: str) -> None:
    plans, rows = plans_of("squeezenet"), table("| r = 0.5 | groups |")
    assert [row[""] for row in rows] == list(ORDERS)
    for row in rows:
        assert is_close(row[ratio], figure(plans[ratio + ORDERS[row[""]]], 100)), row


@pytest.mark.parametrize("ratio", ["r = 0.5", "r = 0.9"])
@pytest.mark.parametrize("order", ["largest", "smallest", "random"])
def test_groups_that_an_order_makes_low(ratio: str, order: str) -> None:
    """Sensitivity's, which a probe on a GPU decides, cannot be counted here."""
    target = load_target("squeezenet")
    requests = AssignRequest(ratio=float(ratio.removeprefix("r = ")), order=order)
    result = make_assignment(target.model, target.batch, target.loss, requests, PAPER)
    (reported,) = [row for row in table("| r = 0.5 | groups |") if row[""].removesuffix(" first") == order]
    assert reported[f"{ratio}: groups"] == str(result.demoted)


# --- Cyclic schedules: cost and accuracy

SUMMARY = (RESULTS / "README.md").read_text()
GRAPHS = (RESULTS / "graphs.md").read_text()


def studies_of(name: str) -> list[dict[str, Any]]:
    studies: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["studies"]
    return studies


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts that read stored results again and write the tables, as they import each other."""
    folder, before = str(RESULTS.parents[1] / "experiments"), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield {name: importlib.import_module(name) for name in ("claims", "reread")}
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if folder in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.mark.parametrize("file", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_readings_and_statistics_follow_from_the_stored_runs(scripts: dict[str, ModuleType], file: str) -> None:
    """Orders, correlations, differences and verdicts; the mean of every plan is that of its runs."""
    result = json.loads((RESULTS / f"{file}.json").read_text())
    assert json.loads(json.dumps(strict(scripts["reread"].read_again(result)))) == result
    if result["experiment"] == "range_test":
        return  # has bounds instead: test_range_tests
    for study in result["studies"]:
        for plan in study["plans"]:
            values = list(plan["values"].values())
            mean = plan["metric"] if "metric" in plan else plan["accuracy"]
            assert (mean is None) == (not values)
            if values:
                assert mean == pytest.approx(sum(values) / len(values))


def test_the_tables_of_claims_and_readings_are_those_of_the_results(scripts: dict[str, ModuleType]) -> None:
    claims = scripts["claims"]
    for name in claims.PAGES:
        page = (RESULTS / name).read_text()
        assert claims.with_tables(name, page) == page, "run python experiments/claims.py --write"
    rows = table("| what the paper says |", SUMMARY)
    assert len(rows) == len(claims.claims())
    # One seed decides nothing, and neither does an interval that contains both the margin and zero.
    alone = [row for row in rows if "1 seed" in row["what was run"]]
    assert len(alone) >= 6
    assert {row["verdict"].partition(":")[0] for row in alone} == {"undecided"}


def test_the_sentences_below_the_claims() -> None:
    (base,) = (plan for plan in studies_of("cifar")[0]["plans"] if plan["plan"] == "FP32")
    assert f"for 8,000 iterations: {100 * base['metric']:.1f} % where" in one_line(SUMMARY)
    assert "steps=8000" in studies_of("cifar")[0]["settings"]
    seeds = {name: studies_of(name)[0]["plans"][0]["values"] for name in ("ptb", "sst2", "detection", "deficits")}
    assert {len(values) for values in seeds.values()} == {1}
    for name in ("squeezenet", "resnet18", "gpt", "resnet18-long"):
        assert {len(plan["values"]) for plan in plans_of(f"{name}").values()} == {2}


def test_the_table_of_graphs() -> None:
    studies = studies_of("graphs")
    rows = table("ten schedules, worst to best", GRAPHS)
    assert len(rows) == len(studies)
    for row, study in zip(rows, studies, strict=True):
        plans, order = {plan["plan"]: plan for plan in study["plans"]}, study["order"]
        assert row["FP32"] == f"{plans['FP32']['metric']:.4f}"
        assert row["static 8"] == f"{plans['static 8']['metric']:.4f} ± {plans['static 8']['deviation']:.4f}"
        schedules = [name for names in order["groups"].values() for name in names]
        worst, best = (choose(plans[name]["metric"] for name in schedules) for choose in (min, max))
        assert [float(word) for word in row["ten schedules, worst to best"].split() if "." in word] == [
            round(worst, 4),
            round(best, 4),
        ]
        means = " / ".join(f"{mean:.4f}" for mean in order["means"].values())
        assert row["high-saving / balanced / low-saving"] == means
        assert row["pairs in the order of cost"] == pairs_text(order)
        low, high = order["pearson"]["interval"]
        assert row["Pearson (95 %)"] == f"{order['pearson']['value']:+.2f} ({low:+.2f} to {high:+.2f})"
    text = one_line(GRAPHS)
    assert not any(study["order"]["is_sure"] for study in studies)
    first, *others = (study["order"]["seed_share"] for study in studies)
    assert f"alone explains {first:.0%} of the variance between schedules there".replace("%", " %") in text
    assert f"and {min(others):.0%} or more in the others".replace("%", " %") in text
    reversed_pairs = studies[0]["order"]["trend"]
    assert f"{reversed_pairs['pairs'] - reversed_pairs['concordant']:g} of 28 pairs the other way round" in text


def pairs_text(order: dict[str, Any]) -> str:
    trend = order["trend"]
    return f"{trend['concordant']:g} of {trend['pairs']}, p = {trend['p_value']:.2f}"


def test_the_order_of_the_small_graph_study() -> None:
    (row,) = [row for row in table("| FP-Agg | Q-Agg |", GRAPHS) if row["accuracy on test nodes"].startswith("pairs")]
    first, second = studies_of("graphs-cora-cpu")
    assert (row["FP-Agg"], row["Q-Agg"]) == (pairs_text(first["order"]), pairs_text(second["order"]))


# --- Measured error

METRICS = (RESULTS / "metrics.md").read_text()
FORMATS = ("int8 tensor", "e4m3 tensor")


def rank_text(correlation: dict[str, Any]) -> str:
    low, high = correlation["interval"]
    return f"{correlation['value']:+.2f} ({low:+.2f} to {high:+.2f})"


def test_the_table_of_measured_errors() -> None:
    bert, resnet = ({plan["plan"]: plan for plan in study["plans"]} for study in studies_of("metrics"))
    rows = {row["rounded"]: row for row in table("| rounded |", METRICS)}
    assert set(rows) == set(bert) - {"bf16"} == set(resnet) - {"bf16"}
    for name, row in rows.items():
        for network, plans in (("BERT", bert), ("ResNet", resnet)):
            predicted, gap = plans[name]["predicted"], plans[name]["gap"]
            expected = "" if predicted is None else f"{predicted['all']:.2f}"
            assert row[f"{network}: predicted"] == expected, name
            assert float(row[f"{network}: predicted: gap"]) == pytest.approx(gap, abs=0.0006 if gap < 10 else 0.06), (
                name
            )


def test_what_the_measured_errors_tell() -> None:
    text, (bert, resnet) = one_line(METRICS), studies_of("metrics")
    plans = {study["study"]: {plan["plan"]: plan for plan in study["plans"]} for study in (bert, resnet)}
    spreads = [float(study["reading"].split("that learn, is ")[1].split(". ")[0]) for study in (bert, resnet)]
    assert f"move the loss by {spreads[0]:.2f} (BERT;" in text
    assert f"and by {spreads[1]:.2f} (ResNet)" in text
    rounded = {study: [plan for plan in own.values() if plan["predicted"]] for study, own in plans.items()}
    good = [plan for plan in rounded["bert"] if plan["predicted"]["all"] <= 0.255]
    bad = [plan for plan in rounded["bert"] if plan["predicted"]["all"] >= 0.435]
    assert len(good) + len(bad) == len(rounded["bert"])
    assert max(plan["gap"] for plan in good) < spreads[0]
    assert min(plan["gap"] for plan in bad) >= 1.5
    assert max(plan["gap"] for plan in rounded["resnet"] if plan["predicted"]["all"] <= 0.285) == pytest.approx(
        0.061, abs=0.0005
    )
    dgrad = [[stage[name]["dgrad"] for stage in bert["measurement"]["stages"].values()] for name in FORMATS]
    assert f"is {min(dgrad[0]):.2f} to {max(dgrad[0]):.2f} in `dgrad`, that of E4M3 {max(dgrad[1]):.2f}" in text
    costs = [100 * own["advice"]["relative_to_fp32"] for own in plans.values()]
    assert "at {:.1f} and {:.1f} % of FP32's bit operations".format(*costs) in text
    assert all(own["advice"]["gap"] < spread for own, spread in zip(plans.values(), spreads, strict=True))
    levels = ["{:.3f}".format(study["advice"]["tau"]) for study in (bert, resnet)]
    assert "90 % level of E4M3 on the model at hand, {} and {}".format(*levels) in text
    assert min(study["advice"]["tau"] for study in (bert, resnet)) > TAU
    for study, name in ((bert, "BERT"), (resnet, "ResNet")):
        assert f"{name} {rank_text(study['spearman']['all'])}" in text
    assert f"`wgrad.dy` {rank_text(bert['spearman']['wgrad.dy'])}" in text
    runs = sum(len(plan["values"]) for own in plans.values() for plan in own.values())
    assert f"{runs} of {2 * sum(map(len, plans.values()))} runs" in text


# --- Range tests

RANGE_TESTS = (RESULTS / "range-test.md").read_text()


@pytest.mark.parametrize(("name", "model"), [("mobilenet-v2", "MobileNet-v2"), ("resnet38", "ResNet-38")])
def test_range_tests(name: str, model: str) -> None:
    content = json.loads((RESULTS / f"range-test-{name}.json").read_text())
    (study,) = content["studies"]
    (tested,) = study["plans"]
    assert content["command"] in RANGE_TESTS
    rows = {row["bits"]: row[model] for row in table(f"| {model} |", RANGE_TESTS) if row[model]}
    assert rows == {
        str(width["bits"]): f"{width['level']:.2f} ({-100 * width['change']:+.1f} %)" for width in tested["widths"]
    }
    before = {f"{width['before']:.2f}" for width in tested["widths"] if not width["learns"]}
    text = one_line(RANGE_TESTS)
    bound = "none" if study["bound"] is None else str(study["bound"])
    steps = f"{model}: bound {bound} (published: {study['published']}), windows of {tested['window']} steps"
    assert f"{steps} at {tested['rate']:g} of its peak rate, a loss of {before.pop()} before" in text
    assert not before
    (missed,) = [width for width in tested["widths"] if width["bits"] == study["published"]]
    assert 0.09 < missed["change"] < content["threshold"] == 0.1
    assert f"{100 * missed['change']:.1f}" in text.split("narrowly, by falls of ")[1].split(":")[0]


# --- Deficits: what a whole run costs

DEFICITS = (RESULTS / "deficits.md").read_text()
#: Rows of the table -> the plan, and how many budgets its run is long.
LENGTHS = {
    "8 bits, no deficit": ("no deficit", 1.0),
    "the same, for two budgets": ("no deficit, 100% longer", 2.0),
    "3 bits for 25 % of a budget, *then* a full one at 8": ("early 25%, then a full budget", 1.25),
    "for 50 %": ("early 50%, then a full budget", 1.5),
    "for 100 %": ("early 100%, then a full budget", 2.0),
    "3 bits for half of the budget, from its start": ("half from 0%", 1.0),
    "from 12.5 % on": ("half from 12.5%", 1.0),
    "from 25 % on": ("half from 25%", 1.0),
    "from 50 % on, to the end": ("half from 50%", 1.0),
    "a static plan of equal cost": ("static at the cost of half", 1.0),
    "first half, weights alone": ("half from 0%, weights only", 1.0),
    "first half, activations alone": ("half from 0%, activations only", 1.0),
    "first half, gradients alone": ("half from 0%, gradients only", 1.0),
}


def test_what_the_deficits_tell() -> None:
    text, (images, graph) = one_line(DEFICITS), studies_of("deficits")
    reached = {plan["plan"]: 100 * plan["metric"] for plan in images["plans"]}
    # Ties, such as 5.25, round up.
    loss = {name: reached["no deficit"] - metric + 1e-9 for name, metric in reached.items()}
    start, later, end = (loss[f"half from {share}"] for share in ("0%", "12.5%", "50%"))
    assert f"costs more at the start ({start:.1f} points) than a little later ({later:.1f})" in text
    assert f"3 bits in the last half are ({end:.1f} points)" in text
    twice = reached["no deficit, 100% longer"] - reached["early 100%, then a full budget"]
    assert f"ends {twice:.1f} points below two full budgets" in text
    assert f"spread evenly lose {loss['static at the cost of half']:.1f} points, where windows lose 2 to 5" in text
    assert all(2 <= loss[f"half from {share}"] < 5.5 for share in ("0%", "12.5%", "25%", "50%"))
    weights, activations, gradients = (
        loss[f"half from 0%, {part} only"] for part in ("weights", "activations", "gradients")
    )
    assert f"for weights cost {weights:.1f} points, for activations {activations:.1f}" in text
    assert f"and for gradients alone {gradients:.0f}:" in text
    nodes = [1000 * plan["metric"] for plan in graph["plans"]]
    assert f"all are within {max(nodes) - min(nodes):.0f} of 1,000 test nodes" in text


def test_deficits_cost_what_their_whole_runs_cost() -> None:
    images, graph = ({plan["plan"]: plan for plan in study["plans"]} for study in studies_of("deficits"))
    rows = {row["held-out accuracy, %"]: row for row in table("held-out accuracy, %", DEFICITS)}
    assert set(rows) == {"FP32", *LENGTHS}
    for name, (plan, budgets) in LENGTHS.items():
        row = rows[name]
        assert row["ResNet-20, CIFAR-10"] == f"{100 * images[plan]['metric']:.2f}"
        assert row["GCN, Cora"] == f"{100 * graph[plan]['metric']:.1f}"
        costs = [
            budgets * study[plan]["relative_to_fp32"] / study["no deficit"]["relative_to_fp32"]
            for study in (images, graph)
        ]
        first, *others = row["cost of the whole run, x no deficit"].split("; GCN ")
        assert float(first) == pytest.approx(costs[0], abs=0.006)
        assert float(others[0] if others else first) == pytest.approx(costs[1], abs=0.006)
    gains = [
        100 * (images[f"early {share}%, then a full budget"]["metric"] - images["no deficit"]["metric"])
        for share in (25, 100)
    ]
    assert "by {:.1f} to {:.1f} points for 1.07 to 1.30 times its cost".format(*gains) in one_line(DEFICITS)


# --- Sentences about intervals


def test_sentences_about_differences(scripts: dict[str, ModuleType]) -> None:
    claims = scripts["claims"]

    def loss(file: str, plan: str) -> Any:
        (study,) = claims.stored(file)
        return study.judged("FP32")[plan].loss

    first, second = loss("assignments-squeezenet", "r = 0.7"), loss("assignments-resnet18-long", "r = 0.7")
    for found, sentence in ((first, "{} points below FP32 ({})"), (second, "mean of r = 0.7 is {} below ({})")):
        interval = f"{100 * found.low:+.2f} to {100 * found.high:+.2f}"
        assert sentence.format(f"{100 * found.mean:.2f}", interval) in one_line(TEXT)

    def words(file: str) -> list[str]:
        return [
            claims.word(study.judged()[name])
            for study in claims.stored(file)
            for names in study.record["order"]["groups"].values()
            for name in names
        ]

    large, small = words("graphs"), words("graphs-cora-cpu")
    assert len(large) == 80
    assert len(small) == 20
    assert (
        f"{large.count('keeps')} of the 80 schedules keep static 8's accuracy, {large.count('better')} are"
        in one_line(GRAPHS)
    )
    assert f"none loses, and three seeds leave {large.count('undecided')} undecided" in one_line(GRAPHS)
    assert "loses" not in (*large, *small)
    balanced = studies_of("cifar")[0]["order"]["equal_cost"][0]
    interval = "{:.2f} points ({:.2f} to {:.2f})".format(*(-100 * balanced[key] for key in ("mean", "high", "low")))
    tutorial = one_line((RESULTS.parent / "tutorials" / "study-a-schedule.md").read_text())
    assert f"were {interval} below the static plan of that cost" in tutorial
    assert small.count("keeps") + small.count("better") == 1, "one of the twenty keeps it"
    assert "three seeds leave nineteen undecided" in one_line(GRAPHS)
    assert f"except that {large.count('keeps')} of 80 schedules keep" in one_line(SUMMARY)
    for title in ("cora, sage, fp-agg", "coauthor-cs, sage, fp-agg"):
        (study,) = (study for study in claims.stored("graphs") if study.title == title)
        text = claims.changing(study, "").effect.removeprefix("points ").replace(" (", " X(")
        mean, interval = text.split(" X")
        assert f"{mean} points {interval}" in one_line(GRAPHS) or f"by {mean} {interval}" in one_line(GRAPHS)
    metrics = one_line((RESULTS / "metrics.md").read_text())
    bert, resnet = (claims.rounds(number, "", "weights int8", "").effect for number in (0, 1))
    for effect in (bert, resnet):
        mean, _, interval = effect.removeprefix("loss ").partition(" ")
        assert f"{mean}, {interval.strip('()')}" in metrics
    low, high = claims.rounds(0, "", "gradients int8", "").effect.partition(" (")[2].strip(")").split(" to ")
    assert f"per-tensor scales loses 2.5 ({-float(high):.2f} to {-float(low):.2f})" in metrics


def test_the_table_of_metrics() -> None:
    text = (RESULTS / "metrics.md").read_text()
    rows, studies = table("| rounded |", text), studies_of("metrics")
    plans = [{plan["plan"]: plan for plan in study["plans"]} for study in studies]
    assert [row["rounded"] for row in rows] == [name for name in plans[0] if name != "bf16"]
    for row in rows:
        cells = [*row.values()]
        for records, predicted, gap in zip(plans, cells[1::2], cells[2::2], strict=True):
            record = records[row["rounded"]]
            assert predicted == ("" if record["predicted"] is None else f"{record['predicted']['all']:.2f}"), row
            assert float(gap) == pytest.approx(record["gap"], abs=0.051 if abs(record["gap"]) > 10 else 0.00051), row
    bert, resnet = (study["spearman"] for study in studies)
    for correlation, name in ((bert["all"], "BERT"), (resnet["all"], "ResNet"), (bert["wgrad.dy"], "`wgrad.dy`")):
        low, high = correlation["interval"]
        assert f"{name} {correlation['value']:+.2f} ({low:+.2f} to {high:+.2f})" in one_line(text)
    shares = [100 * records["advice"]["relative_to_fp32"] for records in plans]
    assert "at {:.1f} and {:.1f} % of FP32's bit operations".format(*shares) in one_line(text)


# --- New domains

NEW = one_line((RESULTS / "new-domains.md").read_text())


def test_the_sentences_about_forecasting(scripts: dict[str, ModuleType]) -> None:
    claims = scripts["claims"]
    study = claims.stored("forecast")[0]
    words = [claims.word(study.judged()[name]) for name in TEN]
    assert set(words) == {"keeps", "better"}
    assert words.count("better") == 5, "five of the ten are better"
    for static in ("static at the cost of CR", "static 6"):
        mean, low, high = re.findall(r"\+(0\.\d+)", claims.changing(study, "", static).effect)
        assert f"by {mean} ({low} to {high})" in NEW
    trend = study.record["order"]["trend"]
    pairs = f"{trend['concordant']:g} of {trend['pairs']} pairs of schedules are in that order"
    assert f"{pairs}, p = {trend['p_value']:.2g}" in NEW
    # The cheapest schedules have the largest error, so the correlation of cost with quality is positive.
    means, correlation = study.record["order"]["means"], study.record["order"]["pearson"]
    assert means["high-saving"] > means["low-saving"]
    assert correlation["value"] > 0 > correlation["interval"][0]
    costs = {name: plan["relative_to_fp32"] for name, plan in study.plans.items()}
    cheaper = [1 - costs[f"static at the cost of {name}"] / costs[name] for name in ("ER", "RR")]
    assert "at the cost of RR and ER cost {:.0f} to {:.0f} % less".format(*(100 * share for share in cheaper)) in NEW
    assert 0.08 < 1 - costs["static 6"] / costs["CR"] < 0.12, "a tenth less"
    assert costs["static 6"] < costs["static at the cost of CR"]
    assert study.plans["static 6"]["metric"] < study.plans["static at the cost of CR"]["metric"]
    assert study.plans["FP32"]["metric"] < study.record["floor"] == 0.386


def test_the_sentences_about_electricity_demand(scripts: dict[str, ModuleType]) -> None:
    claims = scripts["claims"]
    study = claims.stored("forecast-demand")[0]
    assert study.plans["FP32"]["metric"] < study.record["floor"] == 0.14
    assert f"{study.command} --out docs/results/forecast-demand.json" in NEW
    order = study.record["order"]
    (low, high), trend = order["pearson"]["interval"], order["trend"]
    assert order["is_sure"]
    assert trend["concordant"] == trend["pairs"] == 28
    assert f"all 28 pairs of schedules of different groups are in that order, p = {trend['p_value']:.2g}" in NEW
    assert f"minus the error is {order['pearson']['value']:+.2f} ({low:+.2f} to {high:+.2f})" in NEW
    judged, eight = study.judged(), study.plans["static 8"]["metric"]
    words = {name: claims.word(judged[name]) for name in (*TEN, "static 6")}
    names = {word: {name for name in words if words[name] == word} for word in words.values()}
    assert names["loses"] == {"RR", "RTH", "RTV"}
    assert names["keeps"] == {"LR", "ER", "ETH", "static 6"}
    assert len(names["undecided"]) == 4
    more = [100 * (study.plans[name]["metric"] / eight - 1) for name in ("RR", "RTH", "RTV")]
    assert "RR, RTH and RTV have {:.1f}, {:.1f} and {:.1f} % more error than static 8".format(*more) in NEW
    assert study.cost("static 6", "static 8") == "56 %"
    low_cost, *_, high_cost = sorted(study.cost(name, "static 8") for name in claims.BALANCED)
    assert (low_cost, high_cost) == ("62 %", "64 %")
    mean, low, high = re.findall(r"-(0\.\d+)", claims.changing(study, "", "static 6").effect)
    assert f"by {mean} ({high} to {low})" in NEW
    assert f"have {claims.changing(study, '').effect.removeprefix('mse ')}." in NEW


def test_the_sentences_about_an_lstm(scripts: dict[str, ModuleType]) -> None:
    claims = scripts["claims"]
    study = claims.stored("forecast-lstm")[0]
    assert f"{study.command} --out docs/results/forecast-lstm.json" in NEW
    assert study.plans["FP32"]["metric"] < study.record["floor"] == 0.413
    judged, eight = study.judged(), study.plans["static 8"]["metric"]
    words = {name: claims.word(judged[name]) for name in TEN}
    assert [name for name in TEN if words[name] != "keeps"] == ["RR", "RTH"]
    assert {words["RR"], words["RTH"]} == {"undecided"}
    assert {f"{100 * (study.plans[name]['metric'] / eight - 1):.1f}" for name in ("RR", "RTH")} == {"0.8"}
    assert judged["static 6"].verdict == "keeps"
    assert study.cost("static 6", "static 8") == "56 %"
    costs = {name: plan["relative_to_fp32"] for name, plan in study.plans.items()}
    assert all(costs[name] > costs["static 6"] for name in TEN if words[name] == "keeps")
    order = study.record["order"]
    (low, high), trend = order["pearson"]["interval"], order["trend"]
    assert order["is_sure"]
    assert trend["concordant"] == trend["pairs"] == 28
    assert f"minus the error is {order['pearson']['value']:+.2f} ({low:+.2f} to {high:+.2f})" in NEW
    less = [1 - costs["static at the cost of CR"] / costs[name] for name in claims.BALANCED]
    assert all(0.08 < share < 0.15 for share in less), "a tenth less"
    assert f"have {claims.changing(study, '').effect.removeprefix('mse ')}." in NEW


def test_plans_of_equal_cost_have_equal_cost(scripts: dict[str, ModuleType]) -> None:
    claims = scripts["claims"]
    studies = {title: study for study, title in claims.new_domains()}
    assert not claims.has_equal_cost(studies["ETTh1, LSTM, 200 steps"], "CR", claims.BALANCED)
    told = [claim.run for claim in claims.claims() if "of equal cost" in claim.run]
    assert not any("LSTM" in run for run in told)
    assert sum("DLinear" in run for run in told) == 2


def changed_share(name: str, settings: dict[str, str]) -> float:
    """The share of updates whose bits are not those of the rollout that they learn from."""
    steps, recipe = int(settings["steps"]), PPOSettings()
    transitions = int(settings.get("environments", recipe.environments)) * int(settings.get("rollout", recipe.rollout))
    updates = recipe.epochs * transitions // int(settings["batch"])
    bits = schedule(name, low=3, high=8, cycles=8).table(steps)
    return sum(bits[step] != bits[step - step % updates] for step in range(steps)) / steps


def test_the_sentences_about_reinforcement_learning(scripts: dict[str, ModuleType]) -> None:
    claims = scripts["claims"]
    study = claims.stored("rl")[0]
    figures = [f"{study.plans[name]['metric']:.0f}" for name in ("FP32", "static 8", "static 6")]
    assert "FP32 reaches {}, static 8 {} and static 6, at 56 % of static 8's bit operations, {}".format(*figures) in NEW
    assert study.cost("static 6", "static 8") == "56 %"
    assert all(study.plans[name]["metric"] < study.plans["static 8"]["metric"] for name in TEN)
    judged = study.judged()
    losses = [judged[name] for name in ("RR", "RTH")]
    assert [name for name in TEN if judged[name].verdict != "undecided"] == ["RR"]
    assert losses[0].verdict == "loses"
    texts = [
        f"{loss.mean:.0f} ({loss.low:.0f} to {loss.high:.0f})" for loss in (judgement.loss for judgement in losses)
    ]
    assert f"by {' and '.join(texts)}; of all plans, only RR's loss is decided" in NEW
    settings = dict(setting.split("=") for setting in study.record["settings"])
    transitions = int(settings["environments"]) * int(settings["rollout"])
    rollouts = int(settings["steps"]) * int(settings["batch"]) // (PPOSettings().epochs * transitions)
    assert f"{rollouts * transitions:,} transitions, {settings['steps']} updates" in NEW
    order = study.record["order"]
    (low, high), trend = order["pearson"]["interval"], order["trend"]
    assert f"{trend['concordant']:g} of {trend['pairs']} pairs of different groups, p = {trend['p_value']:.2g}" in NEW
    assert f"is {order['pearson']['value']:+.2f} ({low:+.2f} to {high:+.2f}), so the order is undecided" in NEW
    assert low < 0
    assert trend["p_value"] < 0.05
    assert not order["is_sure"], "a trend without a correlation is no order"
    mean, low, high = (float(text) for text in re.findall(r"[-+]\d+\.\d+", claims.changing(study, "").effect))
    assert f"have {mean:+.0f} ({low:+.0f} to {high:+.0f})" in NEW
    assert f"up to {max(study.plans[name]['deviation'] for name in TEN):.0f} in standard deviation" in NEW
    shares = [changed_share(name, settings) for name in TEN]
    assert f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % of its updates" in NEW
    _, both, _, updates = claims.stored("rl")
    eight = both.judged()["static 3"]
    one = judge(updates.plans["static 3"]["values"], both.plans["static 3"]["values"], 0.0, "higher")
    assert (eight.verdict, one.is_better) == ("loses", True)
    assert f"3 bits lose {eight.loss.mean:.0f} ({eight.loss.low:.0f} to {eight.loss.high:.0f}) to 8 bits" in NEW
    assert f"by {-one.loss.mean:.0f} ({-one.loss.high:.0f} to {-one.loss.low:.0f}), which is undecided as one of" in NEW
    assert [claim.verdict for claim in claims.mismatches()] == 8 * ["undecided"], "one of eight comparisons"
    command = next(
        line for line in (RESULTS / "new-domains.md").read_text().splitlines() if "experiments/rl.py" in line
    )
    assert set(command.split()) == set(study.command.split())


def test_the_sentences_about_acrobot(scripts: dict[str, ModuleType]) -> None:
    claims = scripts["claims"]
    study = claims.stored("rl-acrobot")[0]
    means = {name: plan["metric"] for name, plan in study.plans.items()}
    assert means["FP32"] > study.record["floor"] == -95
    assert f"FP32 reaches {means['FP32']:.2f} and static 8 {means['static 8']:.2f}" in NEW
    ranked = sorted(means[name] for name in TEN)
    assert ranked[0] == means["CR"]
    assert f"Nine of the ten schedules have means from {ranked[-1]:.2f} to {ranked[1]:.2f}" in NEW
    reached = [value >= -95 for name in TEN for value in study.plans[name]["values"].values()]
    assert f"{sum(reached)} of the {len(reached)} runs of schedules reach the floor" in NEW
    worst = [study.plans[name]["values"]["1"] for name in ("CR", "static at the cost of RR")]
    assert "with seed 1 CR has {:.2f}, and the static plan at the cost of RR {:.2f}".format(*worst) in NEW
    assert max(ranked) < means["static 8"]
    assert f"so is FP32, by {means['static 8'] - means['FP32']:.2f}" in NEW
    judged = study.judged()
    assert {judgement.verdict for judgement in judged.values()} == {"undecided"}
    assert not any(judgement.is_better for judgement in judged.values())
    (margin,) = {judgement.margin for judgement in judged.values()}
    narrowest = min(judgement.loss.half_width for judgement in judged.values())
    assert f"is {margin:.2f}, and the narrowest of all intervals is ±{narrowest:.2f}" in NEW
    trend = study.record["order"]["trend"]
    assert f"({trend['concordant']:g} of {trend['pairs']} pairs, p = {trend['p_value']:.2g})" in NEW
    assert not study.record["order"]["is_sure"]
    assert f"have {claims.changing(study, '').effect.removeprefix('return ')}." in NEW
    assert {len(plan["values"]) for plan in study.plans.values()} == {5}, "five seeds"
    assert f"{study.command} --out docs/results/rl-acrobot.json" in NEW
