"""``asyncpipe jobs``: submit jobs to a running service, steer them and watch them, with the client of the package."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.service.client import JobClient

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
    Command = Callable[[JobClient, argparse.Namespace], int]

__all__ = ["add_parser"]

DEFAULT_URL = "http://127.0.0.1:8080"
NOT_FINISHED, TIMED_OUT = 1, 3
"""Statuses of ``follow`` and ``wait``, beside 0: the job has failed or was cancelled; it goes on."""
FEW, MANY = 1, 8
"""How often something is asked again: by who sits before it, and by what watches a job for long."""

DESCRIPTION = """\
Work with the jobs of a service that `asyncpipe serve` runs.

The service is at --url, or ASYNCPIPE_URL, or http://127.0.0.1:8080. If it has a token, that is in the file
--token-file, or ASYNCPIPE_TOKEN_FILE, or is ASYNCPIPE_TOKEN; it is never given on the command line, which others see.
"""

EPILOG = """\
examples:
  asyncpipe jobs submit examples/charlm/charlm.toml --follow
  asyncpipe jobs submit examples/charlm/charlm.toml --steps 50 --background
  asyncpipe jobs list --state running --state queued
  asyncpipe jobs show 01k8zq1m7h9x2v4n6r8t0w3y5b
  asyncpipe jobs schedule 01k8zq1m7h9x2v4n6r8t0w3y5b interleaved
  asyncpipe jobs losses 01k8zq1m7h9x2v4n6r8t0w3y5b --json > losses.jsonl
  asyncpipe jobs wait 01k8zq1m7h9x2v4n6r8t0w3y5b --timeout 3600 && echo finished

`asyncpipe jobs COMMAND --help` says more of each.
"""

SUBMIT = """\
Submit the job of a job file, as `asyncpipe train` takes it. What a service has its own say in does not apply, and is
told: where snapshots are, and [observe], since the service watches all its jobs. The job's entry must be one that the
operator of the service has registered, its devices must be the service's, its schedule must have a name.

Prints the job's id. With --key, submitting the same again, even much later, gives the same job.
"""

FOLLOW = """\
Show what happened to a job, then what happens, until it has ended. Ctrl-C ends the showing and leaves the job alone; a
connection that breaks, or a service that restarts, is waited for. With --json, one JSON object a line.

Exits with 0 if the job finished, with 1 if it failed or was cancelled.
"""

WAIT = """\
Wait until a job has ended. Exits with 0 if it finished, with 1 if it failed or was cancelled, with 3 if it had not
ended after --timeout seconds; it goes on then.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``jobs`` and its commands to the command line."""
    parser = subparsers.add_parser(
        "jobs", help="work with the jobs of a service", description=DESCRIPTION, **_look(EPILOG)
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_submit(commands)
    listing = _add(commands, "list", _list, "show all jobs, in the order of submission")
    listing.add_argument("--state", action="append", choices=_STATES, help="only those in this state; may be repeated")
    listing.add_argument("--limit", type=_count, default=100, metavar="N", help="the first N (default: 100)")
    listing.add_argument("--after", metavar="JOB", help="from the one behind this on")
    _add_job(commands, "show", _show, "show a job and what was submitted")
    _add_job(commands, "history", _history, "show every change of a job's state, and why it was")
    _add_job(commands, "pause", _pause, "end the step, take a snapshot and leave the devices to others")
    _add_job(commands, "resume", _resume, "go on with a paused job, when its devices are free")
    _add_job(commands, "cancel", _cancel, "end a job for good")
    schedule = _add_job(commands, "schedule", _schedule, "run a job's next steps by another schedule")
    schedule.add_argument("schedule", metavar="NAME", help="a registered one, as interleaved or eager-1f1b(cap=5)")
    _add_job(commands, "follow", _follow, "show what happens to a job until it ends", FOLLOW)
    losses = _add_job(commands, "losses", _losses, "show the loss of each step")
    losses.add_argument("--after", type=_natural, default=0, metavar="N", help="of the steps behind number N")
    waiting = _add_job(commands, "wait", _wait, "wait until a job has ended", WAIT)
    waiting.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="do not wait longer")


_STATES = ("queued", "running", "paused", "finished", "failed", "cancelled")


def _look(epilog: str | None = None) -> dict[str, Any]:
    return {"epilog": epilog, "formatter_class": argparse.RawDescriptionHelpFormatter}


def _add(
    commands: Subparsers, name: str, command: Command, help_: str, description: str | None = None
) -> argparse.ArgumentParser:
    # Abbreviated, --token would be --token-file, and what is given with it would be told as a path that is not there.
    parser = commands.add_parser(
        name, help=help_, description=description or f"{help_.capitalize()}.", allow_abbrev=False, **_look()
    )
    parser.add_argument("--url", metavar="URL", help=f"where the service is (default: ASYNCPIPE_URL or {DEFAULT_URL})")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="a file, of mode 0600, with the service's token"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=lambda args: _run(command, args))
    return parser


def _add_job(
    commands: Subparsers, name: str, command: Command, help_: str, description: str | None = None
) -> argparse.ArgumentParser:
    parser = _add(commands, name, command, help_, description)
    parser.add_argument("job", metavar="JOB", help="its id")
    return parser


def _add_submit(commands: Subparsers) -> None:
    parser = _add(commands, "submit", _submit, "submit the job of a job file", SUBMIT)
    add = parser.add_argument
    add("file", metavar="FILE.toml", type=Path, help="the job file")
    add("--name", metavar="NAME", help="call the job NAME")
    add("--entry", metavar="MODULE:FACTORY", help="the entry, as the operator has registered it")
    add("--steps", type=_count, metavar="N", help="train for N steps")
    add("--devices", metavar="LIST", help="train on these, as cpu:0,cpu:1")
    add("--schedule", metavar="NAME", help="run by this schedule")
    add("--weight", type=float, metavar="W", help="its share of the devices against other jobs' (default: 1)")
    add("--background", action="store_true", help="run only where other jobs leave a device idle")
    add("--key", metavar="KEY", help="idempotency key: the same key and job make one job, however often submitted")
    add("--follow", action="store_true", help="show what happens to it until it ends, as `follow` does")


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")


def _natural(text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if 0 <= seconds < float("inf"):
        return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")


# The commands


def _run(command: Command, args: argparse.Namespace) -> int:
    # Imported here and not above, so that --help and other commands do not wait for it.
    from asyncpipe.service.client import JobClient

    watches = command in (_follow, _wait) or getattr(args, "follow", False)
    url = args.url or os.environ.get("ASYNCPIPE_URL") or DEFAULT_URL
    return command(JobClient(url, _token(args.token_file), retries=MANY if watches else FEW), args)


def _token(path: Path | None) -> str | None:
    from asyncpipe.service.settings.token_file import read_token

    given = path or os.environ.get("ASYNCPIPE_TOKEN_FILE")
    if not given:
        return os.environ.get("ASYNCPIPE_TOKEN") or None
    try:
        return read_token(Path(given))
    except ValueError as error:
        raise OptionError(f"--token-file: {error}") from None


def _submit(client: JobClient, args: argparse.Namespace) -> int:
    from asyncpipe.cli.jobs_text import plain
    from asyncpipe.service.submission.from_job_file import read_submission

    submission, ignored = read_submission(args.file)
    for key in ignored:
        print(f"{args.file}: {key}: does not apply to a job of a service", file=sys.stderr)
    submission = _with_options(submission, args)
    job = client.submit(submission, args.key)
    if args.follow:
        print(f"submitted job {job['id']}", file=sys.stderr, flush=True)
        args.job = job["id"]
        return _follow(client, args)
    print(json.dumps(job) if args.json else plain(job["id"]))
    return 0


def _with_options(submission: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The submission with what the command line says in place of what the file says."""
    changes = {
        "pipeline": {
            "devices": None if args.devices is None else [device.strip() for device in args.devices.split(",")],
            "schedule": args.schedule,
        },
        "training": {"steps": args.steps},
    }
    changed = dict(submission)
    for table, values in changes.items():
        changed[table] = {**changed[table], **{key: value for key, value in values.items() if value is not None}}
    priority = "background" if args.background else None
    above = {"name": args.name, "entry": args.entry, "weight": args.weight, "priority_class": priority}
    return {**changed, **{key: value for key, value in above.items() if value is not None}}


def _list(client: JobClient, args: argparse.Namespace) -> int:
    from asyncpipe.cli.jobs_text import jobs_table

    jobs = tuple(client.list(args.state, limit=args.limit, after=args.after))
    if args.json:
        print(json.dumps(jobs))
        return 0
    print(jobs_table(jobs) if jobs else "no jobs")
    if len(jobs) == args.limit:
        print(f"there may be more: --after {jobs[-1]['id']}", file=sys.stderr)
    return 0


def _show(client: JobClient, args: argparse.Namespace) -> int:
    return _print_job(client.show(args.job), args)


def _print_job(job: dict[str, Any], args: argparse.Namespace) -> int:
    from asyncpipe.cli.jobs_text import job_text

    print(json.dumps(job) if args.json else job_text(job))
    return 0


def _history(client: JobClient, args: argparse.Namespace) -> int:
    from asyncpipe.cli.jobs_text import history_table

    history = client.history(args.job)
    print(json.dumps(history) if args.json else history_table(history))
    return 0


def _pause(client: JobClient, args: argparse.Namespace) -> int:
    return _print_change(client.pause(args.job), args)


def _resume(client: JobClient, args: argparse.Namespace) -> int:
    return _print_change(client.resume(args.job), args)


def _cancel(client: JobClient, args: argparse.Namespace) -> int:
    return _print_change(client.cancel(args.job), args)


def _schedule(client: JobClient, args: argparse.Namespace) -> int:
    return _print_change(client.change_schedule(args.job, args.schedule), args)


def _print_change(job: dict[str, Any], args: argparse.Namespace) -> int:
    from asyncpipe.cli.jobs_text import change_text

    print(json.dumps(job) if args.json else change_text(job))
    return 0


def _losses(client: JobClient, args: argparse.Namespace) -> int:
    from asyncpipe.cli.jobs_text import LOSSES_HEAD, loss_line

    if not args.json:
        print(LOSSES_HEAD)
    for row in client.losses(args.job, args.after):
        print(json.dumps(row) if args.json else loss_line(row))
    return 0


def _follow(client: JobClient, args: argparse.Namespace) -> int:
    from asyncpipe.cli.jobs_text import EventPrinter

    printer = EventPrinter(sys.stdout, as_json=args.json, steps=client.show(args.job).get("steps"))
    try:
        for event in client.events(args.job):
            printer.show(event)
        job = client.show(args.job)
    except KeyboardInterrupt:
        printer.end()
        print(f"job {args.job} goes on; asyncpipe jobs follow {args.job} shows it again", file=sys.stderr)
        raise
    printer.end()
    return _outcome(job, quiet=args.json)


def _wait(client: JobClient, args: argparse.Namespace) -> int:
    from asyncpipe.service.client import WaitTimeoutError

    try:
        job = client.wait(args.job, args.timeout)
    except WaitTimeoutError as error:
        print(error, file=sys.stderr)
        return TIMED_OUT
    if args.json:
        print(json.dumps(job))
    return _outcome(job, quiet=args.json)


def _outcome(job: dict[str, Any], *, quiet: bool) -> int:
    from asyncpipe.cli.jobs_text import change_text

    if not quiet:
        print(change_text(job))
    return 0 if job["state"] == "finished" else NOT_FINISHED
