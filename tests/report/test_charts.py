from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.errors import RunError
from bitplan.lab.report.charts import (
    MOST_NAMES,
    MOST_POINTS,
    bits_chart,
    loss_chart,
    memory_chart,
    metric_chart,
    price_chart,
)
from bitplan.lab.report.figures import dark_partners, log_ticks, plan_styles
from bitplan.lab.report.heatmaps import measures_of, sites_chart
from bitplan.lab.report.page import page_html
from bitplan.lab.report.summaries import Experiment, PlanSummary, Report, Verdict

WriteRun = Callable[..., Path]
Make = Callable[..., Experiment]


@pytest.fixture
def experiment(write_run: WriteRun, tmp_path: Path) -> Make:
    def make(*runs: dict[str, Any]) -> Experiment:
        for number, facts in enumerate(runs):
            write_run(tmp_path / f"{number:03}", **facts)
        (result,) = Report.of([tmp_path]).experiments
        return result

    return make


def drawn(figure: Any) -> Any:
    assert figure is not None
    return json.loads(figure.to_json())


def of_plan(figure: Any, number: int) -> list[Any]:
    return [trace for trace in drawn(figure)["data"] if trace.get("meta", {}).get("plan") == number]


def test_the_scatter_has_means_error_bars_single_seeds_and_the_front(experiment: Make) -> None:
    result = experiment(
        {"value": 0.9, "cost": 1.0},
        {"plan": "a", "value": 0.8, "cost": 0.25, "seed": 0},
        {"plan": "a", "value": 0.6, "cost": 0.25, "seed": 1},
    )
    figure = price_chart(result, "cost")
    seeds, mean = of_plan(figure, 1)
    assert (seeds["x"], seeds["y"]) == ([25.0, 25.0], [80.0, 60.0])
    assert (mean["x"], mean["y"]) == ([25.0], [pytest.approx(70.0)])
    assert mean["error_y"]["array"] == [pytest.approx(14.142, abs=1e-3)]
    assert mean["error_y"]["visible"]
    (front,) = [trace for trace in drawn(figure)["data"] if trace.get("meta", {}).get("front")]
    assert (front["x"], front["y"]) == ([25.0, 100.0], [pytest.approx(70.0), 90.0])
    (single,) = of_plan(figure, 0)
    assert not single["error_y"]["visible"]


def test_the_scatter_against_bytes(experiment: Make) -> None:
    figure = price_chart(experiment({"value": 0.9, "memory": 4 * 2**20}), "memory")
    (point,) = of_plan(figure, 0)
    assert point["x"] == [4.0]
    assert drawn(figure)["layout"]["xaxis"]["title"]["text"] == "MiB of a step's tensors"


def test_a_plan_that_fails_is_crossed_out_and_one_without_a_value_stands_at_the_foot(experiment: Make) -> None:
    result = experiment(
        {"value": 0.9},
        {"plan": "bad", "value": 0.1, "cost": 0.1},
        {"plan": "lost", "value": None, "cost": 0.01, "status": "diverged"},
    )
    figure = price_chart(result, "cost")
    (bad,) = of_plan(figure, 1)
    assert (bad["marker"]["symbol"], bad["text"]) == ("x", ["bad (fails)"])
    (lost,) = of_plan(figure, 2)
    assert (lost["yaxis"], lost["text"]) == ("y2", ["lost (diverged, no accuracy)"])
    assert drawn(figure)["layout"]["meta"]["whole"][0] < 10
    low, high = drawn(figure)["layout"]["meta"]["zoom"]
    assert drawn(figure)["layout"]["yaxis"]["range"] == [low, high]
    assert 80 < low < 90 < high < 100


def test_the_axis_is_whole_where_all_plans_work_alike(experiment: Make) -> None:
    near = experiment({"value": 0.2}, {"plan": "near", "value": 0.3})
    assert "meta" not in drawn(price_chart(near, "cost"))["layout"]


def test_no_axis_of_an_accuracy_goes_above_100(experiment: Make) -> None:
    best = price_chart(experiment({"value": 1.0}, {"plan": "bad", "value": 0.1}), "cost")
    assert drawn(best)["layout"]["meta"]["zoom"][1] < 100.5


def test_names_stand_beside_few_points_only(experiment: Make) -> None:
    many = experiment(*({"plan": f"p{number}", "cost": 1 / (number + 1)} for number in range(MOST_NAMES + 1)))
    assert all(trace.get("mode") != "markers+text" for trace in drawn(price_chart(many, "cost"))["data"])


def test_losses_of_runs_their_mean_and_where_one_diverged(experiment: Make) -> None:
    result = experiment(
        {"seed": 0, "losses": (2.0, 1.0)},
        {"seed": 1, "losses": (4.0, 3.0)},
        {"seed": 2, "losses": (8.0, float("nan")), "status": "diverged"},
    )
    first, second, third, cross, mean = of_plan(loss_chart(result), 0)
    assert (first["y"], second["y"]) == ([2.0, 1.0], [4.0, 3.0])
    assert third["y"] == [8.0, None]
    assert (cross["x"], cross["y"], cross["marker"]["symbol"]) == ([10], [8.0], "x")
    assert mean["y"] == [3.0, 2.0]  # of those that finished
    assert drawn(loss_chart(result))["layout"]["yaxis"]["type"] == "log"


def test_losses_below_zero_have_a_linear_axis(experiment: Make) -> None:
    assert "type" not in drawn(loss_chart(experiment({"losses": (1.0, -1.0)})))["layout"]["yaxis"]


def test_the_metric_over_time_is_in_per_cent(experiment: Make) -> None:
    (line,) = of_plan(metric_chart(experiment({"value": 0.5})), 0)
    assert line["y"] == [50.0]


def test_long_curves_are_thinned_and_keep_their_ends(experiment: Make) -> None:
    count = 3 * MOST_POINTS + 2
    (line,) = of_plan(loss_chart(experiment({"losses": [1.0 + number for number in range(count)]})), 0)
    assert len(line["x"]) <= MOST_POINTS + 1
    assert (line["x"][0], line["x"][-1]) == (10, 10 * count)


def test_bits_over_time(experiment: Make) -> None:
    (line,) = of_plan(bits_chart(experiment({"plan": "a", "bits": 6.0})), 0)
    assert (line["x"], line["y"], line["line"]["shape"]) == ([10, 20, 30], [6.0, 6.0, 6.0], "hv")


def test_bytes_by_class(experiment: Make) -> None:
    figure = drawn(memory_chart(experiment({"memory": 4 * 2**20}, {"plan": "a", "memory": 2**20})))
    assert [(bar["name"], bar["x"]) for bar in figure["data"]] == [
        ("weights", [1.0, 0.25]),
        ("activations", [2.0, 0.5]),
        ("gradients of activations", [1.0, 0.25]),
    ]
    assert figure["layout"]["yaxis"]["ticktext"] == ["fp32", "a"]


SITES = [
    {"site": "a/linear.0:weight", "role": "weight", "format": "int8 channel", "rule": "r0", "error": 0.01},
    {"site": "a/linear.0:activation", "role": "activation", "format": None, "rule": None},
    {"site": "b/relu.0:activation", "role": "activation", "format": "e4m3", "rule": "r1", "error": 0.1},
]


def test_sites_by_format(experiment: Make) -> None:
    (plan,) = experiment({"plan": "a", "sites": SITES}).plans
    (heat,) = drawn(sites_chart(plan, "format"))["data"]
    assert heat["z"] == [[3.0, None], [None, 3.0]]  # 8 bits each; what is left alone is empty
    assert heat["text"] == [["int8", ""], ["", "e4m3"]]
    assert "by r1" in heat["hovertext"][1][1]


def test_sites_by_error(experiment: Make) -> None:
    (plan,) = experiment({"plan": "a", "sites": SITES}).plans
    (heat,) = drawn(sites_chart(plan, "error"))["data"]
    assert heat["z"] == [[-2.0, None], [None, -1.0]]
    assert heat["text"] == [["1.0%", ""], ["", "10.0%"]]


def test_what_was_not_watched_has_no_map_of_errors(experiment: Make) -> None:
    fp32, planned = experiment({}, {"plan": "a", "sites": SITES[1:2]}).plans
    assert measures_of(fp32) == measures_of(planned) == []
    assert sites_chart(planned, "format") is None


def test_where_nothing_is_known_there_is_no_chart(experiment: Make) -> None:
    result = experiment({"status": "unfinished", "value": None, "cost": 0.0})
    assert price_chart(result, "cost") is price_chart(result, "memory") is memory_chart(result) is metric_chart(result)


def test_what_users_named_is_shown_as_it_is_written(experiment: Make) -> None:
    result = experiment({"plan": "<b>%{x}</b>"}, {})
    for figure in (price_chart(result, "cost"), loss_chart(result), bits_chart(result), memory_chart(result)):
        text = json.dumps(drawn(figure))
        assert "<b>%{x}" not in text
        assert "&lt;b&gt;%" in text


def test_plans_differ_in_colour_and_line_and_every_colour_has_a_dark_partner() -> None:
    verdicts: list[Verdict] = ["reference", *["keeps"] * 34]
    styles = plan_styles([PlanSummary("", (), verdict) for verdict in verdicts])
    assert len({(style.colour, style.line) for style in styles}) == 35
    assert {style.colour for style in styles} <= set(dark_partners())


@pytest.mark.parametrize(("values", "count"), [([1.0], 3), ([0.4, 100.0], 12), ([1e-9, 1.0], 10)])
def test_ticks_of_a_logarithmic_axis_are_few_and_cover_the_values(values: list[float], count: int) -> None:
    ticks = log_ticks(values)
    assert len(ticks) <= count
    assert min(ticks) <= min(values)
    assert max(ticks) >= max(values)


def test_without_plotly_a_sentence_says_what_to_install(experiment: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without_plotly(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "plotly":
            raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
        return real(name, *rest)

    report = Report((experiment({}),))
    monkeypatch.setattr(builtins, "__import__", without_plotly)
    with pytest.raises(RunError, match="pip install plotly"):
        page_html(report)
