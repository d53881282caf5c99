"""Looking at a run while it goes on: nothing of it changes, and what goes bad is named before the loss shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bitplan.analysis.measure.watch import AlarmMonitor
from bitplan.errors import RunError
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.task import Task
from bitplan.lab.train import Progress, RunFolder, train
from bitplan.lab.train.folder import read_lines
from bitplan.plans import Plan

PLANTED = f"{Path(__file__).parent / 'planted_task.py'}:Planted"


def planted(*settings: str) -> Task:
    return find_task(PLANTED, settings)


def stop_after(step: int) -> dict[str, Any]:
    seen: list[int] = []
    return {"on_progress": lambda now: seen.append(now.step), "stop": lambda: bool(seen) and seen[-1] >= step}


@pytest.mark.parametrize("plan", [None, "fp8-linear"])
def test_a_watched_run_is_the_same_to_the_bit(tmp_path: Path, tiny: Any, fingerprint: Any, plan: str | None) -> None:
    train(tiny(), plan, folder=tmp_path / "plain", log_every=1)
    train(tiny(), plan, folder=tmp_path / "watched", log_every=1, measure_every=3)
    assert fingerprint(tmp_path / "plain") == fingerprint(tmp_path / "watched")
    lines = read_lines(tmp_path / "watched" / "measurements.jsonl")
    assert [line["step"] for line in lines] == list(range(0, 24, 3))
    assert not (tmp_path / "plain" / "measurements.jsonl").exists()


def test_a_resumed_run_measures_what_an_undisturbed_one_does(tmp_path: Path, tiny: Any, noisy: Plan) -> None:
    train(tiny(), noisy, folder=tmp_path / "whole", measure_every=2)
    for step in (1, 6, 7, 12):
        train(tiny(), noisy, folder=tmp_path / "parts", measure_every=2, **stop_after(step))
    train(tiny(), noisy, folder=tmp_path / "parts", measure_every=2)
    whole, parts = ((tmp_path / name / "measurements.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    assert whole.count(b"\n") == 12
    with pytest.raises(RunError, match="measure_every 2, not 0"):
        train(tiny(), noisy, folder=tmp_path / "whole")


def test_the_plans_own_formats_are_measured(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), "fp8-linear", folder=tmp_path / "run", measure_every=8)
    rows = read_lines(tmp_path / "run" / "measurements.jsonl")[-1]["rows"]
    by_key = {(row["product"], row["pass"], row["candidate"]): row for row in rows}
    for product in ("0/linear.0", "4/linear.0"):
        forward, reference = (by_key[product, "fprop", name] for name in ("plan", "e4m3 tensor"))
        assert forward["median"] == reference["median"]
    plan = by_key["4/linear.0", "wgrad", "plan"]
    assert (plan["left"]["quantizer"], plan["right"]["quantizer"]) == ("e5m2 tensor", "e4m3 tensor")
    assert plan["right"]["median"] == by_key["4/linear.0", "wgrad", "e4m3 tensor"]["right"]["median"]


@pytest.mark.parametrize(
    ("what", "site"),
    [("gradient", "3/linear.0:dgrad.dy"), ("activation", "6/linear.0:fprop.x"), ("weight", "6/linear.0:fprop.w")],
)
def test_a_planted_outlier_is_named_before_the_loss_rises(tmp_path: Path, what: str, site: str) -> None:
    at = 9
    reported: list[Progress] = []
    settings = (f"what={what}", f"at={at}")
    train(planted(), folder=tmp_path / "clean", log_every=1, measure_every=1)
    train(planted(*settings), folder=tmp_path / "run", log_every=1, measure_every=1, on_progress=reported.append)
    clean, bad = (
        {line["step"]: float(line["loss"]) for line in RunFolder(tmp_path / name).metrics() if "lr" in line}
        for name in ("clean", "run")
    )
    alarms = [line["alarm"] for line in read_lines(tmp_path / "run" / "measurements.jsonl") if line["alarm"]]
    assert alarms[0]["site"] == site
    assert alarms[0]["step"] == at
    # Up to then the loss is that of a run without an outlier, to the bit; and afterwards it is not.
    assert all(bad[step] == clean[step] for step in range(1, at + 1))
    assert max(bad[step] / clean[step] for step in range(at + 1, 25)) > 1.01
    assert not [line for line in read_lines(tmp_path / "clean" / "measurements.jsonl") if line["alarm"]]
    first = next(now for now in reported if now.alarm is not None)
    assert first.step == at + 1
    assert site in str(first.alarm)
    assert first.error is not None


def test_an_ordinary_run_raises_no_alarm(tmp_path: Path, tiny: Any) -> None:
    train(tiny("steps=60"), "int8-all", folder=tmp_path / "run", measure_every=4)
    assert not [line for line in read_lines(tmp_path / "run" / "measurements.jsonl") if line["alarm"]]


def test_the_watchman_knows_what_is_usual() -> None:
    watchman = AlarmMonitor()

    def look(step: int, first: float, second: float, amax: float = 10.0) -> str | None:
        largest = 1.0 if step < 2 else amax
        alarm = watchman.look(step, [("one", first, largest), ("other", second, largest)])
        return None if alarm is None else alarm.site

    assert look(0, 0.3, 0.01) is None  # there is no past yet
    assert look(1, 0.4, 0.012) is None
    assert look(2, 0.5, 0.09) is None  # nine times, but little
    assert look(3, 0.5, 0.9, amax=1.0) is None  # nothing has grown: the rest has shrunk
    assert look(3, 0.5, 0.9) == "other"
    assert look(4, 0.5, 0.9) is None  # told already
    assert look(5, 0.5, 0.01, amax=1.0) is None
    assert look(6, 9.0, 0.9) == "one"  # the first of both
    assert look(7, float("nan"), 0.01) is None  # still bad
    assert look(8, 0.4, float("nan")) == "other"


def test_figures_go_to_tensorboard(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.lab.train.summary import Events

    reported: dict[int, dict[str, float]] = {}
    monkeypatch.setattr(Events, "scalars", lambda self, step, values: reported.setdefault(step, dict(values)))
    monkeypatch.setattr("bitplan.lab.train.loop.open_events", lambda folder, after: Events())
    train(tiny(), folder=tmp_path / "run", measure_every=12)
    assert list(reported) == [0, 12]
    row = read_lines(tmp_path / "run" / "measurements.jsonl")[1]["rows"][0]
    name = f"backward_error/{row['candidate']}/{row['product']}/{row['pass']}"
    assert reported[12][name] == row["median"]
    assert reported[12]["alarm"] == 0.0


def test_the_command_says_how_it_was_measured(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), folder=tmp_path / "run", measure_every=12)
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["measure_every"] == 12
    assert "--measure-every 12" in content["command"]
