from __future__ import annotations

from dataclasses import dataclass

import pytest

from bitplan.errors import TaskError
from bitplan.lab.tasks.registry import read_settings
from bitplan.lab.tasks.task import Settings


@dataclass(frozen=True)
class Own(Settings):
    name: str = "a"
    flag: bool = False
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == "wrong":
            raise ValueError("name may not be wrong")


def test_values_are_read_as_their_fields_types() -> None:
    read = read_settings(Own, ["steps=7", "lr=1e-2", "flag=yes", "name=b=c"], "own")
    assert read == Own(steps=7, lr=0.01, flag=True, name="b=c")
    assert type(read.steps) is int


@pytest.mark.parametrize(
    ("text", "steps"), [("64_000", 64_000), ("1e3", 1000), ("+5", 5), ("12345678901234567", 12345678901234567)]
)
def test_whole_numbers_have_many_spellings(text: str, steps: int) -> None:
    assert read_settings(Own, [f"steps={text}"], "own").steps == steps


@pytest.mark.parametrize("text", ["true", "True", "on", "1", "yes"])
def test_truth_has_many_spellings(text: str) -> None:
    assert read_settings(Own, [f"flag={text}"], "own").flag is True
    assert read_settings(Own, ["flag=off"], "own").flag is False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["step=7"], r"the task own has no setting 'step'; did you mean steps"),
        (["steps"], r"'steps' sets nothing: write key=value, such as steps=200\."),
        (["=3"], r"'=3' sets nothing"),
        (["steps=1.5"], r"steps=1\.5: steps must be a whole number\."),
        (["steps=many"], r"steps=many: steps must be a whole number\."),
        (["steps=inf"], r"steps=inf: steps must be a whole number\."),
        (["lr=fast"], r"lr=fast: lr must be a number\."),
        (["flag=maybe"], r"flag=maybe: flag must be true or false\."),
        (["steps=1", "steps=2"], r"steps is set twice: give it once\."),
        (["sizes=3"], r"sizes cannot be set on the command line"),
        (["steps=0"], r"steps is 0; it must be at least 1\."),
        (["lr=nan"], r"lr is nan; it must be above 0\."),
        (["clip=-1"], r"clip is -1\.0; it must be at least 0"),
        (["name=wrong"], r"the task own refuses these settings: name may not be wrong"),
    ],
)
def test_what_cannot_be_set_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence) as raised:
        read_settings(Own, arguments, "own")
    assert "\n" not in str(raised.value)
