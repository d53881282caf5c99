"""What a run folder refuses, and how it guards what lies in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bitplan
from bitplan.errors import RunError
from bitplan.lab.train import RunFolder, find_runs, fresh_folder, train
from bitplan.lab.train.folder import DiskError
from bitplan.plans import Plan

SRC = Path(bitplan.__file__).parents[1]

HOLD = """
import sys
from bitplan.lab.train import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def finished(tmp_path: Path, tiny: Any, noisy: Plan) -> Path:
    train(tiny("steps=3"), noisy, folder=tmp_path / "run")
    return tmp_path / "run"


def test_a_second_process_is_kept_out_until_the_first_has_died(tmp_path: Path, tiny: Any) -> None:
    folder = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        env={"PYTHONPATH": str(SRC)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert RunFolder(folder).is_locked()
        with pytest.raises(RunError, match=f"process {holder.pid} trains in .*: wait until it has ended, or name"):
            train(tiny("steps=3"), folder=folder)
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.close()
        holder.stdout.close()
    assert not RunFolder(folder).is_locked()
    assert train(tiny("steps=3"), folder=folder).status == "finished"


def test_a_second_run_in_one_process_is_kept_out_too(tmp_path: Path, tiny: Any) -> None:
    with RunFolder(tmp_path / "run").locked(), pytest.raises(RunError, match="trains in"):
        train(tiny(), folder=tmp_path / "run")


def test_what_never_became_a_run_leaves_nothing(tmp_path: Path, tiny: Any) -> None:
    wrong = Plan.from_dict({"version": 1, "rules": [{"match": "nothing", "weight": "e4m3"}]})
    with pytest.raises(bitplan.errors.PlanError, match="no module fits"):
        train(tiny(), wrong, folder=tmp_path / "deep" / "run")
    assert not (tmp_path / "deep" / "run").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(bitplan.errors.PlanError):
        train(tiny(), wrong, folder=mine)
    assert list(mine.iterdir()) == []


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path, tiny: Any) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match=r"holds thesis\.tex and no run: name a folder that is empty"):
        train(tiny(), folder=tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_way_is_a_sentence(tmp_path: Path, tiny: Any) -> None:
    (tmp_path / "file").write_text("precious")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match="cannot make the folder"):
            train(tiny(), folder=folder)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_folder_of_another_version_is_refused(finished: Path, tiny: Any, noisy: Plan) -> None:
    content = json.loads((finished / "run.json").read_text())
    (finished / "run.json").write_text(json.dumps({**content, "bitplan_run": 2}))
    with pytest.raises(
        RunError, match="run folder of version 2, and this bitplan reads version 1: use the bitplan that"
    ):
        train(tiny("steps=3"), noisy, folder=finished)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"bitplan_run": 1}'])
def test_a_damaged_run_file_is_a_sentence(finished: Path, tiny: Any, noisy: Plan, text: str) -> None:
    (finished / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run\.json is damaged.*: restore it, leave it out of a report, or begin anew"):
        train(tiny("steps=3"), noisy, folder=finished)


@pytest.mark.parametrize("text", ["", "{}", '{"status": "finished"}', '{"status": "odd", "step": 1}'])
def test_a_damaged_summary_is_a_sentence(finished: Path, text: str) -> None:
    (finished / "summary.json").write_text(text)
    with pytest.raises(RunError, match=r"summary\.json is damaged"):
        RunFolder(finished).summary()


@pytest.mark.parametrize(
    ("settings", "seed", "arguments", "options", "message"),
    [
        (["steps=3"], 1, "noisy", {}, "seed 0, not 1"),
        (["steps=4"], 0, "noisy", {}, "steps=3, not 4"),
        (["steps=3"], 0, "none", {}, "the plan noisy, whose content differs from that of none"),
        (["steps=3"], 0, "bf16-all", {}, "the plan noisy, whose content differs from that of bf16-all"),
        (["steps=3"], 0, "noisy", {"compile": True}, "compile False, not True"),
        (["steps=3"], 0, "noisy", {"log_every": 5}, "log_every 10, not 5"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(
    finished: Path, tiny: Any, noisy: Plan, settings: list[str], seed: int, arguments: str, options: Any, message: str
) -> None:
    plan = {"noisy": noisy, "none": None}.get(arguments, arguments)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(RunError, match=f"holds a run with {message}: name another folder, or use the same options"):
        train(tiny(*settings, seed=seed), plan, folder=finished, **options)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file() and path.name != "lock"} == before


def test_what_a_killed_process_had_half_written_is_swept(tmp_path: Path, tiny: Any) -> None:
    folder = tmp_path / "run"
    train(tiny("steps=6"), folder=folder, stop=lambda: True)
    left = [
        folder / ".summary.json.77.tmp",
        folder / "checkpoints" / ".tmpAbC12",
        folder / "checkpoints" / ".step-1.9.tmp",
    ]
    mine = [folder / ".gitignore", folder / "checkpoints" / "notes.tmp"]
    for path in (*left, *mine):
        path.write_text("half")
    assert train(tiny("steps=6"), folder=folder).status == "finished"
    assert [path.exists() for path in (*left, *mine)] == [False, False, False, True, True]


def test_the_status_tells_who_is_at_work(tmp_path: Path, tiny: Any) -> None:
    folder = RunFolder(tmp_path / "run")
    seen: list[str] = []
    train(tiny("steps=6"), folder=folder.path, on_progress=lambda now: seen.append(folder.status()), stop=lambda: True)
    assert seen == ["running"]
    assert folder.status() == "stopped"
    folder.summary_file.unlink()
    assert folder.status() == "unfinished"
    assert train(tiny("steps=6"), folder=folder.path).status == folder.status() == "finished"


def test_runs_are_found_in_folders_of_folders(tmp_path: Path, write_run: Any) -> None:
    paths = [tmp_path / name for name in ("one", "comparison/a-s0", "comparison/b-s0", "x/y/z/too-deep")]
    for path in paths:
        write_run(path)
    (tmp_path / "one" / "inner").mkdir()
    assert {run.path for run in find_runs(tmp_path)} == set(paths[:3])
    assert [run.path for run in find_runs(paths[0])] == [paths[0]]
    with pytest.raises(RunError, match="there is no folder"):
        find_runs(tmp_path / "nowhere")


def test_new_folders_have_names_that_are_free(tmp_path: Path) -> None:
    first = fresh_folder("digits", None, 3, tmp_path)
    assert first == tmp_path / "digits-fp32-s3"
    first.mkdir()
    assert fresh_folder("digits", None, 3, tmp_path) == tmp_path / "digits-fp32-s3-2"
    assert fresh_folder("a/b", "../c d", 0, tmp_path).parent == tmp_path


# --- damaged and foreign folders ---


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "task": (None, [], 3),
        "settings": (None, [], {}, {"steps": "x"}, "x"),
        "plan": ([], {}, True),
        "seed": (None, True, 1.5, "x"),
        "metric": (None, {}, {"name": "accuracy", "better": "more", "trivial": 0.1}),
        "execution": (None, [], {}, "fast"),
        "compile": (None, 1, "x"),
        "log_every": (True, 0.5, "x"),
        "machine": (None, [], "x"),
        "crossover": ([], {}, {"min_macs": {"int8": -1}, "min_channels": {}}),
    }.items(),
)
def test_entries_of_another_type_are_named(tmp_path: Path, write_run: Any, name: str, values: tuple[Any, ...]) -> None:
    file = write_run(tmp_path / "run") / "run.json"
    content = json.loads(file.read_text())
    assert RunFolder(tmp_path / "run").config().task == "digits"
    for value in values:
        file.write_text(json.dumps({**content, name: value}))
        with pytest.raises(RunError, match=rf"run\.json is damaged \({name} must be "):
            RunFolder(tmp_path / "run").config()


@pytest.mark.parametrize("name", ["run.json", "summary.json"])
def test_json_that_is_nested_too_deeply_is_damaged(finished: Path, name: str) -> None:
    (finished / name).write_text('{"bitplan_run": 1, "task": ' + "[" * 100_000)
    with pytest.raises(RunError, match=rf"{name} is damaged"):
        _ = RunFolder(finished).config(), RunFolder(finished).summary()


def test_tensors_without_their_json_are_removed_by_the_next_run(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), folder=tmp_path / "run", stop=lambda: True)
    left = tmp_path / "run" / "checkpoints" / "step-00000000.safetensors"
    left.write_bytes(b"of a checkpoint whose JSON was removed before the process was killed")
    train(tiny(), folder=tmp_path / "run")
    assert not left.exists()


def test_a_folder_that_is_renamed_while_training_is_a_sentence(tmp_path: Path, tiny: Any) -> None:
    def rename(now: Any) -> None:
        if now.step == 3:
            (tmp_path / "run").rename(tmp_path / "elsewhere")

    with pytest.raises(DiskError, match="checkpoints"):
        train(tiny(), folder=tmp_path / "run", on_progress=rename)


def test_times_without_seconds_and_odd_names_of_checkpoints_are_passed_over(tmp_path: Path, tiny: Any) -> None:
    train(tiny(), folder=tmp_path / "run", stop=lambda: True)
    (tmp_path / "run" / "times.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run" / "checkpoints" / "step-\u00b2.json").write_text("{}")
    assert train(tiny(), folder=tmp_path / "run").status == "finished"


def test_a_truth_value_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": true}\n{"step": 2}\n')
    assert RunFolder(tmp_path).metrics() == [{"step": 2}]
