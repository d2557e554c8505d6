"""The texts of ``asyncpipe jobs``: tables of jobs, one job, and its events line by line.

Texts from a service may contain anything, for example the message of an exception. ``plain`` escapes control characters
in them, which a terminal would execute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from asyncpipe.cli.tables import columns
from asyncpipe.core.predict.memory import format_bytes
from asyncpipe.train.progress import devices_text

if TYPE_CHECKING:
    from asyncpipe.service.client import ServerEvent

Job: TypeAlias = Mapping[str, Any]
"""What the API says of a job, or of something that it has."""

LINE_SECONDS = 5.0
"""Between two lines about steps, if the output is not a terminal."""
LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}
LOSSES_HEAD = f"{'STEP':>9}  {'LOSS':>10}  {'RATE':>9}  {'SECONDS':>8}  {'TOKENS':>8}"


def plain(text: object) -> str:
    """``text`` in one line, with escapes in place of unprintable characters."""
    shown = str(text).replace("\n", " ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def jobs_table(jobs: Sequence[Job]) -> str:
    """A line for each job under a heading."""
    shown = {head: text for head, text in _JOBS.items() if head != "USER" or any(job.get("owner") for job in jobs)}
    return columns(shown, jobs) if jobs else "no jobs"


def history_table(history: Sequence[Job]) -> str:
    """A line for each change of a job's state under a heading."""
    return columns(_HISTORY, history)


def workers_table(workers: Sequence[Job]) -> str:
    """A line for each worker under a heading."""
    return columns(_WORKERS, workers) if workers else "no workers"


def artifacts_table(found: Sequence[Job]) -> str:
    """A line for each artifact under a heading."""
    return columns(_ARTIFACTS, found, numbers=("STEP", "BYTES"))


def _text(key: str) -> Callable[[Job], str]:
    return lambda row: plain(row.get(key) or "")


_JOBS: dict[str, Callable[[Job], str]] = {
    "ID": _text("id"),
    "NAME": lambda job: plain(job["name"])[:24],
    "USER": _text("owner"),
    "STATE": lambda job: _state(job),
    "CLASS": lambda job: plain(job["priority_class"])[:4],
    "WEIGHT": lambda job: f"{job['weight']:g}",
    "SCHEDULE": _text("schedule"),
    "STEP": lambda job: _steps(job),
    "UPDATED": lambda job: _when(job["updated"]),
    "CAUSE": lambda job: plain(job.get("waits_for") or job["cause"]),
}
_HISTORY = {"AT": lambda row: _when(row["at"]), "FROM": _text("from"), "TO": _text("to"), "CAUSE": _text("cause")}
_WORKERS: dict[str, Callable[[Job], str]] = {
    "WORKER": _text("name"),
    "HOST": _text("host"),
    "STATE": lambda worker: ("up" if worker["up"] else "down") + (", draining" if worker["draining"] else ""),
    "MACHINE": _text("machine"),
    "PID": _text("pid"),
    "HEARD": lambda worker: "" if (ago := worker["heartbeat_seconds"]) is None else f"{ago:.1f} s",
    "DEVICES": lambda worker: plain(" ".join(worker["devices"])),
    "JOBS": lambda worker: plain(" ".join(worker["jobs"])),
}
_FAILURES: dict[str, Callable[[Job], str]] = {
    "JOBS": _text("count"),
    "USERS": lambda group: plain(" ".join(group["users"])),
    "FIRST": lambda group: _when(group["first"]),
    "LAST": lambda group: _when(group["last"]),
    "NEWEST": lambda group: plain(group["jobs"][0]),
    "ROOT": _text("root"),
}
_COLOURS = {"stderr": 33, "warning": 33, "traceback": 31, "error": 31, "critical": 31, "service": 36, "debug": 2}
_ARTIFACTS: dict[str, Callable[[Job], str]] = {
    "NAME": _text("name"),
    "STEP": lambda each: "" if each.get("step") is None else str(each["step"]),
    "BYTES": lambda each: "" if each.get("size") is None else f"{each['size']:,}",
}


def job_text(job: Job) -> str:
    """Everything about a job, a line for each key."""
    rows = [
        ("job", job["id"]),
        ("name", job["name"]),
        ("state", f"{_state(job)}: {job['cause']}"),
        *([("waits for", job["waits_for"])] if job.get("waits_for") else []),
        *([("user", " ".join([job["owner"], *job["teams"]]))] if job.get("owner") else []),
        ("entry", f"{job['entry']}, code {job['code']}" if job.get("code") else job["entry"]),
        *([("last failure", job["root"])] if job.get("root") else []),
        ("class", f"{job['priority_class']}, weight {job['weight']:g}, priority {job.get('priority', 0)}"),
        ("devices", _devices(job)),
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


def change_text(job: Job) -> str:
    """One line about a job's state."""
    return f"{plain(job['name'])} ({plain(job['id'])}) is {_state(job)} at step {_steps(job)}: {plain(job['cause'])}"


def id_text(job: Job) -> str:
    """The job's id."""
    return plain(job["id"])


def deleted_text(found: Job) -> str:
    """What was deleted, or would be, in a line."""
    steps = ", ".join(map(str, found["snapshots"]))
    does, kept = "deleted" if found["deleted"] else "would delete", f"{found['files']} files"
    snapshots = f"snapshots of steps {steps}" if steps else "no snapshots"
    job = f"job {found['id']} ({found['name']}, {found['state']})"
    return f"{does} {job}: {kept}, {format_bytes(found['bytes'])}, {snapshots}"


def failures_table(found: Sequence[Job]) -> str:
    """A line for each group of failures under a heading."""
    return columns(_FAILURES, found) if found else "no failures"


def said_line(line: Job, *, colours: bool) -> str:
    """One line that a run said, on a terminal in the colour of its stream."""
    text = f"{_when(line['at'])}  {line['stream']:<9}  {plain(str(line['text']).expandtabs())}".rstrip()
    colour = _COLOURS.get(line["stream"]) if colours else None
    return text if colour is None else f"\x1b[{colour}m{text}\x1b[0m"


def loss_line(row: Job) -> str:
    """One line about a step, under ``LOSSES_HEAD``. Lines are printed one by one, since a job may have millions."""
    forms = {"loss": (10, ".6f"), "learning_rate": (9, ".3e"), "seconds": (8, ".3f")}
    shown = "  ".join(f"{_number(row, key, form):>{width}}" for key, (width, form) in forms.items())
    return f"{row['step']:>9}  {shown}  {row['tokens']:>8}"


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

    def _show_step(self, data: Job) -> None:
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


def _step_text(data: Job, steps: int | None) -> str:
    loss, rate = _number(data, "loss", ".4f"), _number(data, "learning_rate", ".2e")
    seconds, tokens = data.get("seconds"), data.get("tokens")
    speed = f"  {tokens / seconds:,.0f} tokens/s" if tokens and isinstance(seconds, int | float) and seconds > 0 else ""
    total = f"/{steps}" if steps else ""
    return f"step {data.get('step')}{total}  loss {loss}  rate {rate}{speed}"


def _number(row: Job, key: str, form: str) -> str:
    return f"{row[key]:{form}}" if isinstance(row.get(key), int | float) else "not finite"


def _state(job: Job) -> str:
    asked = job.get("asked")
    return f"{plain(job['state'])} (to be {plain(asked)})" if asked else plain(job["state"])


def _devices(job: Job) -> str:
    if (asked := plain(job.get("asks_for", ""))).startswith("any ") and (
        job["state"] == "queued" or not job["devices"]
    ):
        return asked
    return devices_text(job["devices"], job.get("replicas", 1))


def _steps(job: Job) -> str:
    return f"{job['step']}/{job['steps']}" if job.get("steps") else str(job["step"])


def _when(at: float) -> str:
    """The local time of a Unix time."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
