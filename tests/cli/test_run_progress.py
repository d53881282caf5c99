from __future__ import annotations

import io

from rich.console import Console

from bitplan.cli.train import RunProgress, progress_text
from bitplan.lab.train.summary import Phase, Progress


def at(step: int, phase: Phase = "training", metric: float | None = None, steps: int = 100) -> Progress:
    return Progress(step, steps, phase, 0.5, metric, 8.0, step / steps / 16, 5 * 2**20, 1.0)


def shown(*reported: Progress, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, highlight=False)
    with RunProgress(console, "accuracy") as progress:
        for now in reported:
            progress(now)
    return file.getvalue()


def test_the_words_are_few() -> None:
    assert progress_text(at(50, metric=0.91234), "accuracy") == "loss 0.500, accuracy 0.912, 8 bits, cost 3.1%, 5.0 MiB"
    assert progress_text(at(50), "accuracy") == "loss 0.500, 8 bits, cost 3.1%, 5.0 MiB"


def test_piped_lines_are_plain_and_not_too_many() -> None:
    lines = shown(*(at(step) for step in range(1, 101)), terminal=False).splitlines()
    assert [line.split("/")[0] for line in lines] == ["step 1", *(f"step {step}" for step in range(10, 101, 10))]
    assert "\x1b" not in "".join(lines)


def test_an_evaluation_gets_a_line_and_a_search_one_only() -> None:
    lines = shown(at(1), at(2), at(3, "evaluating"), at(3, metric=0.5), at(4), terminal=False).splitlines()
    assert [line.split("/")[0] for line in lines] == ["step 1", "step 3"]
    lines = shown(at(1), *(at(step, "searching") for step in range(1, 9)), terminal=False).splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("looking for what broke first")


def test_on_a_terminal_one_line_moves_and_fits() -> None:
    text = shown(at(1), at(100, metric=0.9), terminal=True)
    assert "accuracy 0.900" in text
    assert "100/100" in text
    assert "\x1b[2K" in text  # and is taken away at the end
