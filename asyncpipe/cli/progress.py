"""Progress of commands that take long: one display that changes on a terminal, lines elsewhere.

A line is written only if it says something new, so that a log or a pipe does not fill with repetitions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TextIO

from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.errors import missing_package
from asyncpipe.train.progress import ProgressSink, RunStarted, StepProgress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "LineProgress",
    "LiveProgress",
    "choose_progress",
    "details",
    "figures",
    "headline",
    "minutes",
    "show_phases",
]

LINE_EVERY = 20
"""Steps between two lines."""
BAR_WIDTH = 30


@contextmanager
def show_phases(out: TextIO) -> Iterator[Callable[[str], None]]:
    """A function that shows what the command does now; a text begins with the phase, and details follow a comma.

    On a terminal, a status line shows the newest text until the end of the block. Elsewhere, a phase is a line.
    """
    if out.isatty() and find_spec("rich") is not None:
        with _console(out).status("") as status:
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
            from rich.progress import BarColumn, Progress, TextColumn
        except ImportError as error:
            raise missing_package("the live display needs rich, --no-progress does not", "cli") from error
        texts = ("[bold]{task.description}", "{task.completed}/{task.total}", "{task.fields[figures]}")
        phase, count, figures = map(TextColumn, texts)
        with Progress(phase, BarColumn(bar_width=BAR_WIDTH), count, figures, console=_console(out)) as bar:
            yield LiveProgress(bar)


def _console(out: TextIO) -> Console:
    from rich.console import Console

    return Console(file=out)


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
            self._print(f"step {progress.step}/{progress.steps}  {figures(progress)}  {details(progress)}")

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
    """A progress bar with the last step's figures; it is redrawn by a thread of its own."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("building", total=None, figures="")

    def started(self, run: RunStarted) -> None:
        """Print the headline above the display."""
        self._bar.console.print(headline(run), highlight=False)
        self._bar.update(self._task, description="training", total=run.steps)

    def stepped(self, progress: StepProgress) -> None:
        """Show the figures; below, by stage, the utilization (*busy*) and the memory of its device."""
        report = progress.report
        busy = " ".join(f"{share:.0%}" for share in report.stage_utilization)
        memory = " ".join(map(format_bytes, report.stage_memory))
        below = f"{details(progress)}  busy {busy}{f'  memory {memory}' * bool(memory)}"
        self._bar.update(self._task, completed=progress.step, figures=f"{figures(progress)}\n{below}")

    def entered(self, phase: str) -> None:
        """Show the phase in front of the bar."""
        self._bar.update(self._task, description=phase)

    def waiting(self, reason: str | None) -> None:
        """Show there what is waited for."""
        if reason is not None:
            self.entered(reason)


def figures(progress: StepProgress) -> str:
    """Loss, speed, bubble and the time that is left, in one line."""
    tokens, samples = progress.tokens_per_second, progress.samples / progress.seconds if progress.seconds else 0.0
    speed = f"{tokens:,.0f} tokens/s" if progress.tokens else f"{samples:,.0f} samples/s"
    return (
        f"loss {progress.loss:.3f}  {speed}  "
        f"bubble {progress.report.bubble_ratio:.0%}  {minutes(progress.remaining_seconds)} left"
    )


def details(progress: StepProgress) -> str:
    """The norm of the gradients, and the MFU where it is known."""
    mfu = progress.report.mfu
    return f"norm {progress.gradient_norm:.3g}{'' if mfu is None else f'  MFU {mfu:.1%}'}"


def headline(run: RunStarted) -> str:
    """One line about the run that begins."""
    where = f" in {len(run.workers)} worker process{'es' * (len(run.workers) > 1)}" if run.workers else ""
    return f"{run.name}: {run.parameters:,} parameters, {run.steps} steps on {run.where}{where}"


def minutes(seconds: float) -> str:
    """``75`` as ``1:15``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
