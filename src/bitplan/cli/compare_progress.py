"""A comparison while it goes on: bars on a terminal, a line for each run where the output is piped."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from bitplan.lab.compare import Update
from bitplan.lab.report.answer import number_text
from bitplan.lab.train import Summary


class CompareProgress:
    """Shows what ``compare(on_update=...)`` tells."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self._bars: Bars | None = None
        self._lines: dict[tuple[str, int], TaskID] = {}
        self._done = 0
        self._total = total
        if console.is_terminal:
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[words]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._whole = self._bars.add_task("all runs", total=total, words="")

    def __enter__(self) -> CompareProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, update: Update) -> None:
        if update.summary is not None:
            self._done += 1
        if self._bars is not None:
            self._show(self._bars, update)
        elif update.summary is not None:
            words = _summary_words(update.summary)
            name = f"{update.job.label}, seed {update.job.seed}"
            self.console.print(f"[{self._done}/{self._total}] {name}: {words}", soft_wrap=True)

    def _show(self, bars: Bars, update: Update) -> None:
        """A bar for each run that is at work; one that is over leaves a line above them."""
        job, now = update.job, update.progress
        key = (job.label, job.seed)
        name = f"{job.label}, seed {job.seed}"
        if update.summary is not None:
            if key in self._lines:
                bars.remove_task(self._lines.pop(key))
            bars.console.print(f"{name}: {_summary_words(update.summary)}", soft_wrap=True)
            bars.update(self._whole, completed=self._done)
            return
        assert now is not None
        if key not in self._lines:
            self._lines[key] = bars.add_task(name, total=now.steps, words="")
        words = [] if now.loss is None else [f"loss {now.loss:.3f}"]
        words += [] if now.metric is None else [f"metric {now.metric:.3f}"]
        if now.phase == "searching":
            words = ["not finite; looking for what broke first"]
        bars.update(self._lines[key], completed=now.step, total=now.steps, words=", ".join(words))


def _summary_words(summary: Summary) -> str:
    """The metric comes first among the figures of a run."""
    figures = [f"{name} {number_text(value)}" for name, value in summary.metrics.items()]
    told = "" if summary.status == "finished" else f"{summary.status} at step {summary.step}; "
    return f"{told}{', '.join(figures) or 'no figures'} ({summary.seconds:.1f} s)"
