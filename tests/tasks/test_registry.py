from __future__ import annotations

from pathlib import Path

import pytest

from bitplan.analysis.sites import list_sites
from bitplan.errors import TaskError
from bitplan.lab.targets import load_target
from bitplan.lab.tasks.images import Digits
from bitplan.lab.tasks.registry import CARDS, find_task, task_class, task_names

OWN = """
from dataclasses import dataclass
import torch
from torch import nn
from bitplan.lab.tasks import Metric, Settings, Task

@dataclass(frozen=True)
class MySettings(Settings):
    features: int = 3

class Mine(Task):
    settings_class = MySettings
    metric = Metric("error", "lower", 1.0)
    def model(self): return nn.Linear(self.settings.features, 1)
    def batch(self, step): return torch.ones(2, self.settings.features), torch.ones(2, 1)
    def loss(self, output, target): return (output - target).square().mean()
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), self.settings.lr)
    def evaluate(self, model): return {"error": 0.5}
"""


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_every_name_is_a_task_of_that_name_with_a_card() -> None:
    names = task_names()
    assert len(set(names)) == len(names)
    assert [task_class(name).name for name in names] == names
    assert [*CARDS] == names


def test_settings_and_seed_reach_the_task() -> None:
    task = find_task("digits", ["steps=7", "model=resnet20"], seed=3)
    assert isinstance(task, Digits)
    assert (task.settings.steps, task.settings.model, task.seed) == (7, "resnet20", 3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("digit", r"there is no task 'digit'; did you mean digits"),
        ("xyzzy", r"there is no task 'xyzzy'; known names are digits, .*my_task\.py:MyTask"),
        ("resnet20", r"resnet20 is a model, not a task: a task has data too, such as digits"),
        ("absent.py:Task", r"there is no file absent\.py: a task is digits, "),
    ],
)
def test_what_is_no_task_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        find_task(name)


def test_a_file_brings_a_task_with_its_own_settings(tmp_path: Path) -> None:
    path = written(tmp_path, OWN)
    task = find_task(f"{path}:Mine", ["features=5"], seed=2)
    assert task.batch(0)[0].shape == (2, 5)
    assert (task.seed, task.name) == (2, "mine")
    assert find_task(path).settings.features == 3  # its only task needs no name


def test_a_task_of_a_file_is_a_target(tmp_path: Path) -> None:
    target = load_target(f"{written(tmp_path, OWN)}:Mine")
    assert any(site.name == "/linear.0:weight" for site in list_sites(target.model, target.batch, target.loss))


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        (OWN, "Nine", r"mine\.py has no task 'Nine'; did you mean .*Mine"),
        (OWN, "MySettings", r"mine\.py:MySettings is not a task: derive it from bitplan\.lab\.tasks\.Task\."),
        (OWN + "class Other(Mine): pass\n", "", r"has 2 tasks \(Mine, Other\): name one of them as .*mine\.py:MyTask"),
        ("", "", r"has 0 tasks \(none\)"),
        (OWN.replace("def loss", "def loos"), "Mine", r"Mine lacks what every task has: write its loss\."),
        (OWN + "    def __init__(self, *a): 1 / 0\n", "Mine", r"Mine failed: ZeroDivisionError: .* \(line 19\)\."),
        (OWN + "1 +\n", "Mine", r"mine\.py cannot be run: SyntaxError"),
        (OWN, "Task", r"Task lacks what every task has"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path: Path, text: str, name: str, sentence: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TaskError, match=sentence) as raised:
        find_task(f"{path}:{name}" if name else path)
    assert "\n" not in str(raised.value)


def test_a_file_s_settings_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"has no setting 'feature'; did you mean features\?"):
        find_task(f"{written(tmp_path, OWN)}:Mine", ["feature=5"])


#: These know their shapes only from their files.
NEED_FILES = {"images", "voc"}


@pytest.mark.parametrize("name", [name for name in task_names() if name not in NEED_FILES])
def test_sites_of_every_task_can_be_asked_without_files_and_memory(name: str) -> None:
    if CARDS[name].model.startswith("BERT"):
        pytest.importorskip("transformers")
    target = load_target(name, shapes_only=True)
    assert {parameter.device.type for parameter in target.model.parameters()} == {"meta"}
    result = list_sites(target.model, target.batch, target.loss)
    assert any(site.role == "grad_weight" for site in result)
    assert any(site.module == "loss" for site in result)


def test_asking_for_shapes_leaves_the_data_usable() -> None:
    load_target("lm", shapes_only=True)
    assert find_task("lm").batch(0)[0].device.type == "cpu"


def test_a_task_is_a_target_that_runs() -> None:
    target = load_target("digits")
    images, labels = target.batch
    assert target.loss is not None
    assert target.loss(target.model(images), labels).isfinite()
