from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bitplan.errors import BitplanError, PlanError, RunError, TaskError
from bitplan.lab.compare import Choice, Update, compare
from bitplan.lab.compare.compare import choices_of, planned_jobs
from bitplan.lab.compare.folder import read_comparison
from bitplan.lab.report.runs import read_runs
from bitplan.lab.train import RunFolder, train
from bitplan.plans import Plan

CHOICES = [Choice("FP32", None), Choice("8 bits", "int8-all"), Choice("4 bits", "int4-all")]
ROUNDS_LINEAR = {"version": 1, "rules": [{"match": "*", "op": "linear", "weight": "e3m2"}]}


def metrics(folder: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in sorted(folder.glob("*/metrics.jsonl"))}


def test_every_plan_with_every_seed_in_a_folder_of_its_own(tiny: str, tmp_path: Path) -> None:
    summaries = compare(tiny, CHOICES, folder=tmp_path, seeds=range(2), settings=["steps=4"], command="again")
    assert [summary.folder.name for summary in summaries] == [
        *("fp32-s0", "8-bits-s0", "4-bits-s0"),  # seed by seed: an early end is a comparison still
        *("fp32-s1", "8-bits-s1", "4-bits-s1"),
    ]
    assert {summary.status for summary in summaries} == {"finished"}
    assert {summary.step for summary in summaries} == {4}
    assert len(set(metrics(tmp_path).values())) == 6
    comparison = read_comparison(tmp_path)
    assert comparison is not None
    assert (comparison.task, comparison.seeds, comparison.command, comparison.settings) == (
        tiny,
        (0, 1),
        "again",
        ("steps=4",),
    )
    assert comparison.labels["8-bits-s1"] == "8 bits"
    assert [run.label for run in read_runs([tmp_path])] == ["FP32", "FP32", "8 bits", "8 bits", "4 bits", "4 bits"]


def test_a_run_of_a_comparison_is_the_run_that_its_command_makes(tiny: str, tmp_path: Path) -> None:
    """Nothing of the runs before it in the same process reaches it, what tasks remember included."""
    from bitplan.lab.tasks.registry import find_task

    compare(tiny, CHOICES, folder=tmp_path / "all", seeds=[3])
    config = RunFolder(tmp_path / "all" / "4-bits-s3").config()
    assert config.command == f"bitplan train {tiny} --plan int4-all --seed 3"
    train(find_task(tiny, (), 3), "int4-all", folder=tmp_path / "alone", task_source=tiny)
    alone, compared = ((tmp_path / where / "metrics.jsonl").read_bytes() for where in ("alone", "all/4-bits-s3"))
    assert compared == alone


def test_what_is_over_is_not_made_again_and_what_is_half_goes_on(tiny: str, tmp_path: Path) -> None:
    compare(tiny, CHOICES, folder=tmp_path / "whole", seeds=[0])
    updates: list[Update] = []

    def stop() -> bool:  # in the middle of the second run
        return any(update.job.label == "8 bits" and update.progress for update in updates)

    stopped = compare(tiny, CHOICES, folder=tmp_path / "parts", seeds=[0], on_update=updates.append, stop=stop)
    assert [summary.status for summary in stopped] == ["finished", "stopped"]
    seen: list[tuple[str, int]] = []

    def note(update: Update) -> None:
        if update.progress is not None:
            seen.append((update.job.label, update.progress.step))

    reported = compare(tiny, CHOICES, folder=tmp_path / "parts", seeds=[0], stop=lambda: True)
    assert [summary.status for summary in reported] == ["finished"]  # read, however late
    done = compare(tiny, CHOICES, folder=tmp_path / "parts", seeds=[0], on_update=note)
    assert [summary.status for summary in done] == ["finished"] * 3
    assert "FP32" not in {label for label, _ in seen}
    assert min(step for label, step in seen if label == "8 bits") == stopped[1].step + 1
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_more_plans_and_seeds_join_a_comparison(tiny: str, tmp_path: Path) -> None:
    compare(tiny, CHOICES[:1], folder=tmp_path, seeds=[0], settings=["steps=2"])
    compare(tiny, CHOICES[1:2], folder=tmp_path, seeds=[1], settings=["steps=2"])
    comparison = read_comparison(tmp_path)
    assert comparison is not None
    assert comparison.labels == {"fp32-s0": "FP32", "8-bits-s1": "8 bits"}
    assert comparison.seeds == (0, 1)


def test_a_plan_of_this_process_only_is_written_where_commands_can_name_it(tiny: str, tmp_path: Path) -> None:
    compare(tiny, [Choice("mine", Plan.from_dict(ROUNDS_LINEAR))], folder=tmp_path, settings=["steps=2"])
    source = RunFolder(tmp_path / "mine-s0").config().plan_source
    assert source is not None
    assert Plan.load(source).all_rules == Plan.from_dict(ROUNDS_LINEAR).all_rules
    assert [run.label for run in read_runs([tmp_path])] == ["mine"]


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_trained(tiny: str, tmp_path: Path) -> None:
    misfit = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "conv2d", "weight": "e3m2"}]})
    with pytest.raises(PlanError, match="misfit does not fit"):
        compare(tiny, [*CHOICES, Choice("misfit", misfit)], folder=tmp_path)
    assert not list(tmp_path.glob("*/run.json"))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"choices": []}, RunError, "name at least one plan"),
        ({"choices": [Choice("a", None), Choice("A", "int8-all")]}, RunError, "two plans are called A"),
        ({"choices": [Choice("a", "nothing")]}, PlanError, "no preset and no file 'nothing'"),
        ({"seeds": []}, RunError, "at least one seed"),
        ({"seeds": [1, 1]}, RunError, "each only once"),
        ({"jobs": 0}, RunError, "jobs is 0"),
        ({"settings": ["stepps=3"]}, TaskError, "no setting 'stepps'"),
        ({"task": "digit"}, TaskError, "digits"),
    ],
)
def test_mistakes_are_answered_before_anything_is_written(
    tiny: str, tmp_path: Path, wrong: dict[str, Any], error: type[BitplanError], message: str
) -> None:
    requests = {"task": tiny, "choices": CHOICES} | wrong
    with pytest.raises(error, match=message):
        compare(requests.pop("task"), requests.pop("choices"), folder=tmp_path / "new", **requests)
    assert not (tmp_path / "new").exists()


def test_a_folder_of_another_comparison_is_refused(tiny: str, tmp_path: Path) -> None:
    compare(tiny, CHOICES[:1], folder=tmp_path, settings=["steps=2"])
    with pytest.raises(RunError, match="holds a comparison on"):
        compare("digits", CHOICES[:1], folder=tmp_path)
    with pytest.raises(RunError, match="steps=2, not 3"):
        compare(tiny, CHOICES[:1], folder=tmp_path, settings=["steps=3"])


def test_plan_by_plan_where_graphs_are_compiled(tiny: str, tmp_path: Path) -> None:
    jobs = planned_jobs(CHOICES[:2], (0, 1), tmp_path, plan_major=True)
    assert [(job.label, job.seed) for job in jobs] == [("FP32", 0), ("FP32", 1), ("8 bits", 0), ("8 bits", 1)]


def test_a_plan_may_have_seeds_of_its_own(tiny: str, tmp_path: Path) -> None:
    choices = [CHOICES[0], replace(CHOICES[1], seeds=(1, 7)), replace(CHOICES[2], seeds=())]
    jobs = planned_jobs(choices, (0, 1), tmp_path)
    first, second = CHOICES[0].label, CHOICES[1].label
    assert [(job.label, job.seed) for job in jobs] == [(first, 0), (first, 1), (second, 1), (second, 7)]
    with pytest.raises(RunError, match="each only once"):
        planned_jobs([replace(CHOICES[0], seeds=(2, 2))], (0, 1), tmp_path)


def test_names_of_plans_that_users_type(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plan.yaml").write_text(json.dumps(ROUNDS_LINEAR))
    (tmp_path / "named.yaml").write_text(json.dumps(ROUNDS_LINEAR | {"name": "bold"}))
    files = [str(tmp_path / name) for name in ("a/plan.yaml", "b/plan.yaml", "named.yaml")]
    assert choices_of(["FP32", "int8-all", *files]) == [
        Choice("fp32", None),
        Choice("int8-all", "int8-all"),
        Choice(files[0], files[0]),
        Choice(files[1], files[1]),
        Choice("bold", files[2]),
    ]


def test_a_task_of_ones_own_that_fails_is_told_in_a_sentence(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "train" / "tiny_task.py").read_text()
    (tmp_path / "own.py").write_text(
        text.replace("right = model", "raise ValueError('no figures')\n        right = model")
    )
    with pytest.raises(TaskError, match=r"own.py:Tiny failed under FP32, seed 0: ValueError: no figures \(line \d+\)"):
        compare(f"{tmp_path / 'own.py'}:Tiny", CHOICES[:1], folder=tmp_path / "runs", settings=["steps=2"])


def test_compiled_graphs_serve_the_next_seed_and_change_no_number(tiny: str, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    # Sizes that differed between earlier calls of nn.Sequential are dynamic shapes, whose code sums in another order.
    torch.compiler.reset()
    counters.clear()
    options: dict[str, Any] = {"settings": ["steps=3"], "compile": True}
    (tmp_path / "small.json").write_text(json.dumps(ROUNDS_LINEAR))
    choices = choices_of([str(tmp_path / "small.json")])
    compare(tiny, choices, folder=tmp_path / "both", seeds=[0, 1], **options)
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()
    compare(tiny, choices, folder=tmp_path / "alone", seeds=[1], **options)
    assert counters["stats"]["unique_graphs"] == 2
    assert metrics(tmp_path / "both")["small-s1"] == metrics(tmp_path / "alone")["small-s1"]
