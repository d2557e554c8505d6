"""Progress of commands that take long: one display that changes on a terminal, lines elsewhere.

A line is written only if it says something new, so that a log or a pipe does not fill with repetitions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TextIO

from asyncpipe.errors import missing_package
from asyncpipe.train.progress import ProgressSink, RunStarted, StepProgress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["LineProgress", "LiveProgress", "choose_progress", "headline", "minutes", "show_phases"]

LINE_EVERY = 20
"""Steps between two lines."""
REDRAWS_PER_SECOND = 5
BAR_WIDTH = 30


@contextmanager
def show_phases(out: TextIO) -> Iterator[Callable[[str], None]]:
    """A function that shows what the command does now; a text begins with the phase, and details follow a comma.

    On a terminal, a status line shows the newest text until the end of the block. Elsewhere, a phase is a line.
    """
    if out.isatty() and find_spec("rich") is not None:
        from rich.console import Console

        with Console(file=out).status("") as status:
            yield status.update
        return
    last = ""

    def show(text: str) -> None:
        nonlocal last
        phase = text.partition(",")[0]
        if phase != last:
            print(f"… {text}", file=out, flush=True)
        last = phase

    yield show


@contextmanager
def choose_progress(*, wanted: bool, out: TextIO | None = None) -> Iterator[ProgressSink]:
    """The progress display of a training run for ``out`` (default: stdout); it is removed at the end of the block.

    Raises ``OptionError`` if ``out`` is a terminal and rich is not installed.
    """
    out = out if out is not None else sys.stdout
    if not wanted:
        yield ProgressSink()
    elif not out.isatty():
        yield LineProgress(out)
    else:
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise missing_package("the live display needs rich, --no-progress does not", "cli") from error
        console = Console(file=out)
        progress = LiveProgress(console)
        with Live(get_renderable=progress.draw, console=console, refresh_per_second=REDRAWS_PER_SECOND):
            yield progress


class LineProgress(ProgressSink):
    """A line for the first step, every 20th and the last, and for each phase; for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last = ""

    def started(self, run: RunStarted) -> None:
        """Print the headline."""
        self._print(headline(run))

    def stepped(self, progress: StepProgress) -> None:
        """Print the figures, if it is the step's turn."""
        if progress.step % LINE_EVERY == 0 or progress.step in (1, progress.steps):
            self._print(
                f"step {progress.step}/{progress.steps}  loss {progress.loss:.3f}  "
                f"{progress.tokens_per_second:,.0f} tokens/s  bubble {progress.report.bubble_ratio:.0%}  "
                f"{minutes(progress.remaining_seconds)} left"
            )

    def entered(self, phase: str) -> None:
        """Print the phase."""
        self._print(phase)

    def waiting(self, reason: str | None) -> None:
        """Print what is waited for."""
        if reason is not None:
            self._print(reason)

    def _print(self, line: str) -> None:
        if line != self._last:
            print(line, file=self._out, flush=True)
        self._last = line


class LiveProgress(ProgressSink):
    """Keeps the last step's figures and draws them on request: a progress bar, and the utilization of each stage."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = console
        self._last: StepProgress | None = None
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("building", total=None, figures="")

    def started(self, run: RunStarted) -> None:
        """Print the headline above the display."""
        self._console.print(headline(run), highlight=False)
        self._bar.update(self._task, description="training", total=run.steps)

    def stepped(self, progress: StepProgress) -> None:
        """Keep the figures for the next redraw."""
        self._last = progress

    def entered(self, phase: str) -> None:
        """Show the phase in front of the bar."""
        self._bar.update(self._task, description=phase)

    def waiting(self, reason: str | None) -> None:
        """Show there what is waited for."""
        if reason is not None:
            self.entered(reason)

    def draw(self) -> RenderableType:
        """The display as it is now. Called by the thread that redraws it, at its own rate."""
        from rich.console import Group

        last = self._last
        if last is None:
            return self._bar
        figures = (
            f"loss {last.loss:.3f}  {last.tokens_per_second:,.0f} tokens/s  {minutes(last.remaining_seconds)} left"
        )
        self._bar.update(self._task, completed=last.step, figures=figures)
        return Group(self._bar, _stage_table(last))


def _stage_table(progress: StepProgress) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table("stage", "device", "busy", "", box=None, pad_edge=False)
    report = progress.report
    devices = {time.task.stage: time.task.lane.device for time in report.tasks}
    rows = [(str(stage), devices.get(stage, ""), share) for stage, share in enumerate(report.stage_utilization)]
    for stage, device, share in (*rows, ("", "bubble", report.bubble_ratio)):
        bar = ProgressBar(total=1.0, completed=share, width=BAR_WIDTH, complete_style="green")
        table.add_row(stage, device, bar, f"{share:.0%}")
    return table


def headline(run: RunStarted) -> str:
    """One line about the run that begins."""
    where = f" in {len(run.workers)} worker process{'es' * (len(run.workers) > 1)}" if run.workers else ""
    return f"{run.name}: {run.parameters:,} parameters, {run.steps} steps on {', '.join(run.devices)}{where}"


def minutes(seconds: float) -> str:
    """``75`` as ``1:15``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
