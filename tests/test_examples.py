"""The scripts in examples/ run with the commands of docs/examples.md, and print what they promise."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bitplan.cli import main
from bitplan.plans import Plan

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "examples.md").read_text()
#: The first block of the page has one command for each script.
COMMANDS = [
    shlex.split(line, comments=True) for line in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)[0].splitlines()
]
#: These start processes themselves. The others run in this one: importing torch and bitplan takes seconds in each.
OF_SEVERAL_PROCESSES = ("fsdp2_train.py", "ray_tune_plans.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with examples/ in it, where runs may be written; the working folder, as for who types the command."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "examples")
    return tmp_path


def shown_by(script: str, folder: Path) -> str:
    """What the page's command for a script prints."""
    (text,) = (text for text in COMMANDS if any(word.startswith(f"examples/{script}") for word in text))
    if script not in OF_SEVERAL_PROCESSES:
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()) as shown:
            if text[0] == "bitplan":
                with pytest.raises(SystemExit) as ended:
                    main(text[1:])
                assert not ended.value.code
            else:
                monkeypatch.setattr(sys, "argv", text[1:])
                runpy.run_path(text[1], run_name="__main__")
        return shown.getvalue()
    process = subprocess.run(
        [sys.executable, *text[1:]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_fsdp2_learns_on_two_processes(folder: Path) -> None:
    losses = [float(text) for text in re.findall(r"loss (\S+)", shown_by("fsdp2_train.py", folder))]
    assert len(losses) == 4  # from the first process only
    assert losses[-1] < 0.2 * losses[0]


def test_the_page_has_a_command_for_every_example() -> None:
    named = re.findall(r"examples/(\w+\.py)", " ".join(word for text in COMMANDS for word in text))
    assert sorted(named) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_plain_pytorch_learns_in_8_bits_at_a_fraction_of_the_cost(folder: Path) -> None:
    shown = shown_by("plain_pytorch.py", folder)
    (accuracies,) = re.findall(r"accuracy without a plan (\S+), in 8 bits (\S+)", shown)
    plain, planned = map(float, accuracies)
    assert plain > 0.85
    assert plain != planned
    assert abs(plain - planned) < 0.03
    costs = [
        tuple(float(figure.replace(",", "")) for figure in row)
        for row in re.findall(r"GBitOPs +(\S+) +(\S+) +(\S+)", shown)
    ]
    (without, fp32, _), (with_plan, also_fp32, _) = costs
    assert without == fp32 == also_fp32
    assert with_plan < fp32 / 8


def test_a_recorded_loop_is_reported_against_its_reference(folder: Path) -> None:
    shown = shown_by("own_loop.py", folder)
    assert "the mean accuracy of int8-all is no worse than that of fp32" in shown
    assert [path.name for path in sorted((folder / "runs" / "own-loop").iterdir())] == ["fp32", "int8"]


def test_a_training_function_is_compared_under_plans(folder: Path) -> None:
    shown = shown_by("own_train.py", folder)
    assert len(re.findall(r"^\[\d/4\] .*: accuracy 0\.\d+", shown, flags=re.M)) == 4
    assert "the mean accuracy of int8-all is no worse than that of fp32" in shown


def test_a_task_of_ones_own_trains_by_name_under_a_plan(folder: Path) -> None:
    shown = shown_by("own_task.py", folder)
    (error,) = re.findall(r"waves, int8-all, seed 0: error (\S+) \(the trivial predictor: 0.5\) after 300 steps", shown)
    assert float(error) < 0.05
    assert (folder / "runs" / "waves-int8-all-s0" / "model.safetensors").is_file()


def test_a_format_of_ones_own_is_trained_packed_and_written(folder: Path) -> None:
    shown = shown_by("own_format.py", folder)
    assert "my-nf4: 4 bits, 16 values from -1.0 to 1.0" in shown
    errors = {name: float(error) for name, error in re.findall(r"^(\S+) +relative error (\S+)$", shown, flags=re.M)}
    assert min(errors, key=lambda name: errors[name]) == "my-nf4"
    assert set(errors) == {"my-nf4", "int4", "e2m1"}
    assert f"packed: {256 * 256 * 4} -> {256 * 256 // 2 + 256 * 4 * 4} bytes" in shown
    (plain, rounded) = map(float, *re.findall(r"steps: (\S+) in float32, (\S+) in my-nf4", shown))
    assert plain != rounded < 0.1
    (saved, packed) = map(int, *re.findall(r"tensors: (\d+) bytes in float32, (\d+) in my-nf4", shown))
    assert saved / 6 < packed < saved / 3
    assert Plan.load(folder / "own_format.yaml").to_dict()["formats"]["my-nf4"][0] == -1.0


def test_out_of_memory_finds_a_plan_that_fits_and_really_does(folder: Path) -> None:
    shown = shown_by("out_of_memory.py", folder)
    assert re.findall(r"activations in (\w+), packed: .*, (fits|does not fit)$", shown, flags=re.M) == [
        ("bf16", "does not fit"),
        ("e4m3", "fits"),
    ]
    (saved,) = re.findall(r"measured: saved for backward (\d+) -> (\d+) bytes", shown)
    (peak,) = re.findall(r"measured: peak (\d+) -> (\d+) bytes", shown)
    assert int(saved[1]) < int(saved[0]) / 3.5
    assert int(peak[1]) <= 13 * 2**20 < int(peak[0])
    (losses,) = re.findall(r"loss (\S+) -> (\S+) with activations in e4m3, packed", shown)
    assert float(losses[1]) < float(losses[0]) / 1.5


def test_a_llama_of_transformers_learns_in_fp8(folder: Path) -> None:
    shown = shown_by("hf_llama.py", folder)
    plain, planned = map(float, re.findall(r"loss (\S+)", shown))
    assert plain != planned
    assert max(plain, planned) < 0.3


def test_adapters_learn_on_a_base_in_4_bits(folder: Path) -> None:
    pytest.importorskip("peft")
    shown = shown_by("lora_4bit.py", folder)
    before, after = (float(size) for size in re.findall(r"^weights .*: (\S+) MB$", shown, flags=re.M))
    assert after < before / 3.5
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", shown, flags=re.M)]
    assert losses[-1] < losses[0] - 1.5
    (merged,) = re.findall(r"merged: LlamaForCausalLM, loss (\S+)", shown)
    assert abs(float(merged) - losses[-1]) < 1


def test_a_late_switch_wins_back_what_few_bits_cost(folder: Path) -> None:
    shown = shown_by("late_switch.py", folder)
    rows = re.findall(r"^(no plan|\S+)((?: +\d\.\d{4}){7})  \+-", shown, flags=re.M)
    errors = {name: [float(figure) for figure in figures.split()] for name, figures in rows}
    assert list(errors) == ["no plan", "nvfp4", "nvfp4-late", "fp8-linear", "fp8-late"]
    assert errors["nvfp4"][:2] == errors["nvfp4-late"][:2]  # up to 75 %
    last = {name: figures[-1] for name, figures in errors.items()}
    assert last["no plan"] < last["nvfp4"]
    assert last["nvfp4-late"] - last["no plan"] < 0.75 * (last["nvfp4"] - last["no plan"])
    assert last["fp8-late"] < last["fp8-linear"] < last["nvfp4"]


def lines_changed(page: str, script: Path) -> tuple[int, str]:
    """How many lines the diff of a how-to page adds to the plain script, and that script."""
    text = script.read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "how-to" / page).read_text(), flags=re.DOTALL)
    added = 0
    for block in re.findall(r"(?:^[-+].*\n)+", diff, flags=re.MULTILINE):
        lines = block.splitlines()
        new = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
        assert text.count(new) == 1, new
        text = text.replace(new, "".join(f"{line[1:]}\n" for line in lines if line.startswith("-")))
        added += sum(1 for line in new.splitlines() if line)
    return added, text


@pytest.mark.parametrize(
    ("script", "page"), [("lightning_module.py", "lightning.md"), ("accelerate_loop.py", "accelerate.md")]
)
def test_a_trainer_takes_a_plan_in_three_lines(script: str, page: str, folder: Path) -> None:
    """The script runs with its plan, and without the lines of the diff it is the plain script."""
    (planned,) = re.findall(r"held out: loss ([\d.]+)", shown_by(script, folder))
    added, plain_text = lines_changed(page, folder / "examples" / script)
    assert added <= 3
    assert "integrations" not in plain_text
    (folder / "examples" / script).write_text(plain_text)
    (plain,) = re.findall(r"held out: loss ([\d.]+)", shown_by(script, folder))
    assert planned != plain
    assert float(planned) == pytest.approx(float(plain), abs=0.05)


def test_the_trainer_of_transformers_takes_a_plan_in_three_lines(folder: Path) -> None:
    shown = shown_by("hf_trainer.py", folder)
    (loss,) = re.findall(r"evaluation loss ([\d.]+)", shown)
    assert 1 < float(loss) < 3.5  # 5.5 before training
    bits = [float(figure) for figure in re.findall(r"'bitplan/bits': '?([\d.]+)", shown)]
    assert len(bits) == 3
    assert all(8 < figure < 16 for figure in bits)  # FP8 in linear layers, FP32 in attention
    added, plain_text = lines_changed("transformers.md", folder / "examples" / "hf_trainer.py")
    assert added <= 3
    assert "bitplan.integrations" not in plain_text
    compile(plain_text, "hf_trainer.py", "exec")


def test_plans_that_learn_slower_are_ended_early(folder: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs ray[tune]")
    shown = shown_by("ray_tune_plans.py", folder)
    trials = [(float(loss), int(steps)) for loss, steps in re.findall(r"loss (\S+) after (\d+) steps", shown)]
    assert len(trials) == 5
    assert {steps for _, steps in trials} > {60}  # some were ended, and the best were not
    assert trials[0][1] == 60


def test_a_plan_is_found_for_a_budget(folder: Path) -> None:
    shown = shown_by("fit_my_model.py", folder)
    (share,) = re.findall(r"Peak .* instead of .* \((\d+)%\)", shown)
    assert 20 < int(share) <= 80
    assert "Chosen:" in shown
