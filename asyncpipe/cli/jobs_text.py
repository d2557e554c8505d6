"""The texts of ``asyncpipe jobs``: tables of jobs, one job, and its events line by line.

Texts from a service may contain anything, for example the message of an exception. ``plain`` escapes control characters
in them, which a terminal would execute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from asyncpipe.cli.tables import table

if TYPE_CHECKING:
    from asyncpipe.service.client import ServerEvent

__all__ = [
    "LOSSES_HEAD",
    "EventPrinter",
    "change_text",
    "history_table",
    "job_text",
    "jobs_table",
    "loss_line",
    "plain",
    "workers_table",
]

LINE_SECONDS = 5.0
"""Between two lines about steps, if the output is not a terminal."""
LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}
LOSSES_HEAD = f"{'STEP':>9}  {'LOSS':>10}  {'RATE':>9}  {'SECONDS':>8}  {'TOKENS':>8}"


def plain(text: object) -> str:
    """``text`` in one line, with escapes in place of unprintable characters."""
    shown = str(text).replace("\n", " ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def jobs_table(jobs: Iterable[Mapping[str, Any]]) -> str:
    """A line for each job under a heading."""
    rows = [
        (
            plain(job["id"]),
            plain(job["name"])[:24],
            _state(job),
            plain(job["priority_class"])[:4],
            f"{job['weight']:g}",
            plain(job.get("schedule") or ""),
            _steps(job),
            _when(job["updated"]),
            plain(job["cause"]),
        )
        for job in jobs
    ]
    return table(("ID", "NAME", "STATE", "CLASS", "WEIGHT", "SCHEDULE", "STEP", "UPDATED", "CAUSE"), rows)


def history_table(history: Iterable[Mapping[str, Any]]) -> str:
    """A line for each change of a job's state under a heading."""
    rows = [(_when(row["at"]), *(plain(row.get(key) or "") for key in ("from", "to", "cause"))) for row in history]
    return table(("AT", "FROM", "TO", "CAUSE"), rows)


def workers_table(workers: Iterable[Mapping[str, Any]]) -> str:
    """A line for each worker under a heading."""
    rows = [
        (
            plain(worker["name"]),
            plain(worker["host"]),
            ("up" if worker["up"] else "down") + (", draining" if worker["draining"] else ""),
            plain(worker["machine"]),
            str(worker["pid"] or ""),
            "" if worker["heartbeat_seconds"] is None else f"{worker['heartbeat_seconds']:.1f} s",
            plain(" ".join(worker["devices"])),
            plain(" ".join(worker["jobs"])),
        )
        for worker in workers
    ]
    return table(("WORKER", "HOST", "STATE", "MACHINE", "PID", "HEARD", "DEVICES", "JOBS"), rows)


def job_text(job: Mapping[str, Any]) -> str:
    """Everything about a job, a line for each key."""
    rows = [
        ("job", job["id"]),
        ("name", job["name"]),
        ("state", f"{_state(job)}: {job['cause']}"),
        *([("waits for", job["waits_for"])] if job.get("waits_for") else []),
        ("entry", job["entry"]),
        ("class", f"{job['priority_class']}, weight {job['weight']:g}"),
        ("schedule", job.get("schedule") or ""),
        ("step", _steps(job)),
        ("snapshot", job.get("snapshot") or "none yet"),
        ("submitted", _when(job["submitted"])),
        ("updated", f"{_when(job['updated'])}, begun {job['attempts']} times"),
    ]
    for section, values in job.get("document", {}).items():
        shown = values.items() if isinstance(values, Mapping) else [("", values)]
        rows += [(f"{section}.{key}".rstrip("."), json.dumps(value)) for key, value in shown if value is not None]
    longest = max(len(name) for name, _ in rows)
    return "\n".join(f"{plain(name):<{longest}}  {plain(value)}".rstrip() for name, value in rows)


def change_text(job: Mapping[str, Any]) -> str:
    """One line about a job's state."""
    return f"{plain(job['name'])} ({plain(job['id'])}) is {_state(job)} at step {_steps(job)}: {plain(job['cause'])}"


def loss_line(row: Mapping[str, Any]) -> str:
    """One line about a step, under ``LOSSES_HEAD``. Lines are printed one by one, since a job may have millions."""
    loss, rate, seconds = (
        _number(row, "loss", ".6f"),
        _number(row, "learning_rate", ".3e"),
        _number(row, "seconds", ".3f"),
    )
    return f"{row['step']:>9}  {loss:>10}  {rate:>9}  {seconds:>8}  {row['tokens']:>8}"


class EventPrinter:
    """Prints a job's events. On a terminal each step overwrites the previous one; elsewhere there is a line every few
    seconds, and one for the last step. ``steps`` is the job's total number of steps."""

    def __init__(self, out: TextIO, *, as_json: bool = False, steps: int | None = None) -> None:
        self._out = out
        self._as_json = as_json
        self._steps = steps
        self._draws = out.isatty()
        self._drawn = 0
        self._next_line = 0.0
        self._unprinted: str | None = None

    def show(self, event: ServerEvent) -> None:
        """Print ``event``."""
        if self._as_json:
            table = {"id": event.id, "kind": event.kind, "at": event.at, "data": event.data}
            print(json.dumps(table), file=self._out, flush=True)
        elif event.kind == "step":
            self._show_step(event.data)
        else:
            self._print(f"{_when(event.at)}  {_event_text(event)}")

    def end(self) -> None:
        """Print a step that was held back, and end the line."""
        if self._unprinted is not None:
            self._print(self._unprinted)
        elif self._drawn:
            print(file=self._out, flush=True)
        self._drawn = 0

    def _show_step(self, data: Mapping[str, Any]) -> None:
        line = _step_text(data, self._steps)
        if self._draws:
            print(f"\r{line:<{self._drawn}}", end="", file=self._out, flush=True)
            self._drawn = len(line)
        elif (now := time.monotonic()) >= self._next_line:
            self._next_line = now + LINE_SECONDS
            self._print(line)
        else:
            self._unprinted = line

    def _print(self, line: str) -> None:
        if self._unprinted is not None and self._unprinted != line:
            # So that this line comes after the step that precedes it.
            print(self._unprinted, file=self._out)
        self._unprinted = None
        print(f"\r{line:<{self._drawn}}" if self._drawn else line, file=self._out, flush=True)
        self._drawn = 0


def _event_text(event: ServerEvent) -> str:
    data = event.data
    match event.kind:
        case "state":
            before = f" (was {plain(data['from'])})" if data.get("from") else ""
            return f"{plain(data.get('to'))}{before}: {plain(data.get('cause'))}"
        case "snapshot":
            return f"snapshot {plain(data.get('name'))}"
        case "note":
            return f"{LEVELS.get(data.get('level', 20), 'note')}: {plain(data.get('text'))}"
        case kind:
            return f"{plain(kind)}: {plain(json.dumps(data))}"


def _step_text(data: Mapping[str, Any], steps: int | None) -> str:
    loss, rate = _number(data, "loss", ".4f"), _number(data, "learning_rate", ".2e")
    seconds, tokens = data.get("seconds"), data.get("tokens")
    speed = f"  {tokens / seconds:,.0f} tokens/s" if tokens and isinstance(seconds, int | float) and seconds > 0 else ""
    total = f"/{steps}" if steps else ""
    return f"step {data.get('step')}{total}  loss {loss}  rate {rate}{speed}"


def _number(row: Mapping[str, Any], key: str, form: str) -> str:
    return f"{row[key]:{form}}" if isinstance(row.get(key), int | float) else "not finite"


def _state(job: Mapping[str, Any]) -> str:
    asked = job.get("asked")
    return f"{plain(job['state'])} (to be {plain(asked)})" if asked else plain(job["state"])


def _steps(job: Mapping[str, Any]) -> str:
    return f"{job['step']}/{job['steps']}" if job.get("steps") else str(job["step"])


def _when(at: float) -> str:
    """The local time of a Unix time."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
