from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bitplan.errors import RunError
from bitplan.lab.report.runs import read_run, read_runs

WriteRun = Callable[..., Path]


def write_comparison(folder: Path, labels: dict[str, str]) -> None:
    plans = [{"label": label, "plan": None, "runs": [run]} for run, label in labels.items()]
    content = {"bitplan_compare": 1, "task": "digits", "settings": [], "plans": plans, "seeds": [0], "command": "c"}
    (folder / "compare.json").write_text(json.dumps(content))


def test_a_finished_run(write_run: WriteRun, tmp_path: Path) -> None:
    sites = [
        {
            "site": "conv1/conv2d.0:weight",
            "role": "weight",
            "format": "int8 channel",
            "rule": "rules[0]",
            "error": 0.01,
        },
        {"site": "bn/batch_norm.0:weight(bias)", "role": "weight", "format": "int8", "rule": None},
        {"site": "fc/linear.0", "role": "fprop.x", "format": None, "rule": None, "overflow": "NaN"},
    ]
    run = read_run(write_run(tmp_path / "a", plan="p", seed=3, value=0.75, cost=0.25, memory=800.0, sites=sites))
    assert (run.label, run.plan, run.seed, run.status, run.value) == ("p", "p", 3, "finished", 0.75)
    assert (run.relative_cost, run.total_memory, run.step) == (0.25, 800.0, 30)
    assert run.curve("loss") == ([10, 20, 30], [2.3, 0.5, 0.1])
    assert run.curve("accuracy") == ([30], [0.75])
    assert run.points[-1].is_evaluation
    assert [(site.site, site.role) for site in run.sites] == [
        ("conv1/conv2d.0", "weight"),
        ("bn/batch_norm.0", "weight(bias)"),
        ("fc/linear.0", "fprop.x"),
    ]
    assert run.sites[0].error == 0.01
    assert math.isnan(run.sites[2].overflow or 0.0)


def test_without_a_plan_it_is_called_fp32(write_run: WriteRun, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"))
    assert (run.label, run.plan, run.plan_text) == ("fp32", None, None)


@pytest.mark.parametrize("status", ["stopped", "diverged"])
def test_runs_that_did_not_finish_say_why(write_run: WriteRun, tmp_path: Path, status: str) -> None:
    run = read_run(write_run(tmp_path / "a", status=status))
    assert run.status == status
    assert run.why == f"it {status} at step 30."


def test_a_run_without_a_summary_is_unfinished_and_tells_what_it_has(write_run: WriteRun, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", status="unfinished", value=0.5))
    assert (run.status, run.value, run.loss, run.step, run.is_under_way) == ("unfinished", 0.5, 0.1, 30, True)


def test_a_run_that_a_process_is_at_work_in_is_running(write_run: WriteRun, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", status="unfinished")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).status == "running"


def test_a_torn_last_line_is_no_line_yet(write_run: WriteRun, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    assert read_run(folder).points[-1].step == 30


def test_a_loss_that_strict_json_writes_as_a_word(write_run: WriteRun, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", status="diverged")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "loss": "NaN"}\n')
    assert math.isnan(read_run(folder).curve("loss")[1][-1])


def test_comparisons_give_their_labels_and_their_order(write_run: WriteRun, tmp_path: Path) -> None:
    for name in ("a", "b", "stray"):
        write_run(tmp_path / "runs" / "compared" / name)
    write_comparison(tmp_path / "runs" / "compared", {"b": "first", "a": "second"})
    assert [run.label for run in read_runs([tmp_path / "runs"])] == ["first", "second", "fp32"]


def test_a_run_that_is_named_twice_counts_once(write_run: WriteRun, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a")
    assert len(read_runs([tmp_path / "runs", folder])) == 1


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("run.json", "{", "run.json is damaged"),
        ("run.json", '{"bitplan_run": 7}', "version 7"),
        ("summary.json", '{"status": "well"}', "summary.json is damaged"),
        ("sites.json", "[3]", "sites.json is damaged"),
        ("../compare.json", '{"bitplan_compare": 9}', "comparison of version 9"),
        ("../compare.json", '{"bitplan_compare": 1}', "compare.json is damaged"),
        ("../compare.json", "nothing", "compare.json is damaged"),
    ],
)
def test_damaged_files_are_named_in_a_sentence(
    write_run: WriteRun, tmp_path: Path, path: str, content: str, message: str
) -> None:
    folder = write_run(tmp_path / "all" / "a")
    (folder / path).write_text(content)
    with pytest.raises(RunError, match=message):
        read_runs([tmp_path / "all"])


def test_folders_without_runs(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no folder"):
        read_runs([tmp_path / "missing"])
    with pytest.raises(RunError, match="holds no runs"):
        read_runs([tmp_path])


def test_a_run_that_goes_on_has_the_cost_of_its_steps_so_far(write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", status="unfinished", settings={"steps": 100, "hold": 20}, cost=0.01)
    assert read_run(run).relative_cost == pytest.approx(0.03 * 120 / 30)  # 3 % of the whole run after 30 of 120 steps
    assert read_run(run).planned_steps == 120
