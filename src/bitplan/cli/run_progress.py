"""A run while it goes on: one line that moves on a terminal, and lines that stay where the output is piped."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bitplan.files import byte_text
from bitplan.lab.train.summary import Progress

#: How many lines a run gets, beside those of its evaluations, where they stay.
_LINES = 10


class RunProgress:
    """Shows what ``train(on_progress=...)`` tells."""

    def __init__(self, console: Console, metric: str, label: str = "") -> None:
        self.console = console
        self.metric = metric
        self.label = label
        self._last: Progress | None = None
        self._bar: Bar | None = None
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=8),
                MofNCompleteColumn(),
                TextColumn("{task.fields[words]}"),
                TimeRemainingColumn(compact=True),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(label, total=None, words="")

    def __enter__(self) -> RunProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, now: Progress) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=now.step, total=now.steps, words=progress_words(now, self.metric))
        elif self._is_worth_a_line(now):
            start = f"{self.label}: " if self.label else ""
            self.console.print(
                f"{start}step {now.step}/{now.steps}: {progress_words(now, self.metric)}", soft_wrap=True
            )
        self._last = now

    def _is_worth_a_line(self, now: Progress) -> bool:
        before = self._last
        if now.phase != "training":
            return now.phase == "searching" and (before is None or before.phase != "searching")
        was_evaluating = before is not None and before.phase == "evaluating"
        return was_evaluating or now.step == 1 or now.step % max(1, now.steps // _LINES) == 0


def progress_words(now: Progress, metric: str) -> str:
    """Loss, metric, bits, cost (of the whole run in FP32) and the peak of memory in a few words: 80 columns are few."""
    if now.phase == "searching":
        return "the loss is not finite; looking for what broke first"
    words = [] if now.loss is None else [f"loss {now.loss:.3f}"]
    words += [] if now.metric is None else [f"{metric} {now.metric:.3f}"]
    words += [f"{now.promoted} promoted"] if now.promoted else []
    words += [f"{now.bits:.3g} bits", f"cost {now.cost:.1%}", byte_text(now.peak)]
    words += [] if now.error is None else [f"error {now.error:.1e}"]
    return ", ".join(words)
