from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bitplan.analysis.sites import list_sites
from bitplan.analysis.targets import Target, target_errors
from bitplan.errors import TargetError
from bitplan.lab.targets import load_target

GOOD = """
import torch
from torch import nn
from helper import SIZE

def make():
    return nn.Linear(SIZE, 2), torch.randn(4, SIZE), None

def another():
    return nn.ReLU(), torch.randn(4), lambda y: y.sum()
"""


def written(folder: Path, text: str, name: str = "own.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture
def good(tmp_path: Path) -> str:
    written(tmp_path, "SIZE = 3", "helper.py")
    return written(tmp_path, GOOD)


def test_a_built_in_model_comes_with_batch_and_loss() -> None:
    target = load_target("gpt-tiny")
    inputs, following = target.batch
    assert target.model(inputs).device.type == "cpu"
    assert target.loss is not None
    assert target.loss(target.model(inputs), following).shape == ()


def test_shapes_alone_take_no_memory() -> None:
    target = load_target("gpt2-small", shapes_only=True)
    assert {parameter.device.type for parameter in target.model.parameters()} == {"meta"}


@pytest.mark.parametrize("ending", ["", ":make"])
def test_a_file_is_run_and_may_import_its_neighbours(good: str, ending: str) -> None:
    target = load_target(good + ending)
    assert isinstance(target.model, nn.Linear)
    assert target.batch.shape == (4, 3)
    assert target.loss is None


def test_another_function_can_be_named(good: str) -> None:
    assert isinstance(load_target(f"{good}:another").model, nn.ReLU)


def test_a_function_may_return_a_target(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom bitplan.analysis.targets import Target\n"
        "def make():\n    return Target(torch.nn.ReLU(), torch.ones(2))"
    )
    assert isinstance(load_target(written(tmp_path, text)).model, nn.ReLU)


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(TargetError, match=r"there is no built-in model or task 'resnet21'; did you mean .*resnet20"):
        load_target("resnet21")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def make(): return 1", r"must return three things, model, batch and loss, not int\.$"),
        ("def make(): return 1, 2", r"must return three things, model, batch and loss, not tuple of 2\.$"),
        ("def make(): return 1, 2, None", r"a target's model is a torch\.nn\.Module, not int\.$"),
        (
            "import torch\ndef make(): return torch.nn.ReLU(), 2, 3",
            r"a target's loss is a function or None, not int\.$",
        ),
        ("def mike(): return 1", r"own\.py has no function 'make'; did you mean mike\?$"),
        ("make = 3", r"own\.py has no function 'make' nor any other\.$"),
        ("def make():\n    return 1 / 0", r"own\.py:make failed: ZeroDivisionError: division by zero \(line 2\)\.$"),
        (
            "import no_such_thing",
            r"own\.py cannot be run: ModuleNotFoundError: No module named 'no_such_thing' \(line 1\)",
        ),
        ("def make(:", r"own\.py cannot be run: SyntaxError: "),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(TargetError, match=sentence) as raised:
        load_target(f"{written(tmp_path, text)}:make")
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"there is no file .*absent\.py: a target is"):
        load_target(f"{tmp_path}/absent.py:make")


def test_lines_are_found_in_a_file_named_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "x = 1\nraise KeyError('gone')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=r"own\.py cannot be run: KeyError: 'gone' \(line 2\)\."):
        load_target("own.py:make")


def test_a_file_whose_model_fails_is_told_of_in_one_sentence(tmp_path: Path) -> None:
    text = "import torch\ndef make():\n    return torch.nn.Linear(3, 2), torch.ones(4, 5), None"
    name = f"{written(tmp_path, text)}:make"
    target = load_target(name)
    sentence = r"own\.py:make does not run on its batch: RuntimeError: .*shapes"
    with pytest.raises(TargetError, match=sentence) as raised, target_errors(name):
        target.model(target.batch)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "error"), [("resnet20", KeyError("bug")), ("own.py:make", TargetError("told"))])
def test_bugs_of_built_in_models_and_sentences_pass_untouched(name: str, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, target_errors(name):
        raise error
    assert raised.value is error


def test_the_import_path_is_as_before(good: str) -> None:
    import sys

    before = list(sys.path)
    load_target(good)
    assert sys.path == before


def test_a_target_is_checked_when_it_is_made() -> None:
    with pytest.raises(TargetError, match=r"not str\."):
        Target("resnet20", torch.ones(2))  # type: ignore[arg-type]


def test_a_model_that_looks_at_values_is_listed_where_the_batch_has_any() -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x[x > 0])

    assert "/tanh.0:activation" in {site.name for site in list_sites(Looks(), torch.randn(4))}
    with pytest.raises(TargetError, match=r"the model looks into its tensors \(aten\.\S+\)"):
        list_sites(Looks(), torch.randn(4, device="meta"))
