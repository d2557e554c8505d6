"""``asyncpipe jobs``: submit jobs to a running service, control them and watch them, by ``service.client``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncpipe.cli.arguments import add_command, count, natural, seconds
from asyncpipe.cli.jobs_download import DOWNLOAD, add_download_arguments, artifacts, download
from asyncpipe.cli.jobs_ended import DELETE, FORK, RETRY, add_goes_on, ask_fork, ask_retry, deleted_text
from asyncpipe.cli.jobs_finding import WATCH, add_every, add_filters, filters, moment, table_of_jobs, watch
from asyncpipe.cli.jobs_text import (
    LOSSES_HEAD,
    EventPrinter,
    change_text,
    history_table,
    job_text,
    loss_line,
    plain,
    workers_table,
)
from asyncpipe.errors import AsyncpipeError, OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.service.client import JobClient

    Command = Callable[[JobClient, argparse.Namespace], int]

__all__ = ["add_parser"]

_T = TypeVar("_T")

DEFAULT_URL = "http://127.0.0.1:8080"
HOST_CHANGES = {
    "drain": "have jobs leave a host after their steps, for maintenance",
    "undrain": "have jobs use a host again",
}
"""Commands about hosts, in the same way."""
CHANGES = {
    "pause": "end the job's step, take a snapshot and leave the devices to others",
    "resume": "continue a paused job when its devices are free",
    "cancel": "end a job for good",
}
"""Commands that are methods of ``JobClient``, with their summaries."""
NOT_FINISHED, TIMED_OUT = 1, 3
"""Exit statuses of ``follow`` and ``wait`` other than 0: the job has failed or was cancelled; it still runs."""
FEW, MANY = 1, 8
"""Retries of a request: of an interactive command, and of one that watches a job for long."""

DESCRIPTION = """\
Work with the jobs of a service that `asyncpipe serve` runs.

The service is at --url, or ASYNCPIPE_URL, or http://127.0.0.1:8080. Its token, if it has one, is read from the file
--token-file or ASYNCPIPE_TOKEN_FILE, or is ASYNCPIPE_TOKEN. It is never a command-line argument, which other users of
the machine could see.
"""

EPILOG = """\
examples:
  asyncpipe jobs submit examples/charlm/charlm.toml --follow
  asyncpipe jobs submit examples/charlm/charlm.toml --steps 50 --background
  asyncpipe jobs list --state failed --since -1d
  asyncpipe jobs list --tag night
  asyncpipe jobs watch
  asyncpipe jobs priority background charlm 01k8zq1m
  asyncpipe jobs cancel 01k8zq1m 01k8zq2r
  asyncpipe jobs show 01k8zq1m7h9x2v4n6r8t0w3y5b
  asyncpipe jobs schedule 01k8zq1m7h9x2v4n6r8t0w3y5b interleaved
  asyncpipe jobs losses 01k8zq1m7h9x2v4n6r8t0w3y5b --json > losses.jsonl
  asyncpipe jobs download 01k8zq1m7h9x2v4n6r8t0w3y5b model losses.csv --to runs
  asyncpipe jobs retry 01k8zq1m7h9x2v4n6r8t0w3y5b --set training.learning_rate=1e-4
  asyncpipe jobs fork 01k8zq1m7h9x2v4n6r8t0w3y5b --from-step 400 --set name=longer
  asyncpipe jobs delete 01k8zq1m7h9x2v4n6r8t0w3y5b --dry-run
  asyncpipe jobs workers
  asyncpipe jobs drain host-a
  asyncpipe jobs wait 01k8zq1m7h9x2v4n6r8t0w3y5b --timeout 3600 && echo finished

`asyncpipe jobs COMMAND --help` explains each command.
"""

SUBMIT = """\
Submit the job of a job file, in the format of `asyncpipe train`. Keys that the service decides itself do not apply and
are listed on stderr: the folder of snapshots, and [observe], since the service observes all its jobs. The job's entry
must be registered by the operator of the service, its devices must be the service's, its schedule must have a name.

The file's table [service] may have tags, deadline, priority_class and weight.

Prints the job's id. With --key, submitting the same job again, even much later, returns the same job.
"""

FOLLOW = """\
Show a job's past events and then new ones, until it has ended. Ctrl-C stops following and does not affect the job. If
the connection breaks or the service restarts, the command waits for it. With --json, one JSON object per line.

Exits with 0 if the job finished, with 1 if it failed or was cancelled.
"""

WORKERS = """\
Show the worker processes of a service that has its devices in some, also those that do not run now: workers start when
the first job needs them. HOST is what `drain` takes: the host in the names of devices, or the worker alone. HEARD is
how long ago something came from the worker, which is asked every half second.
"""

DRAIN = """\
Have jobs leave a host, for maintenance: each ends its step, takes a snapshot and goes on with other devices, to the
same losses and weights. If nothing is left for a job, it waits. This lasts until `undrain`, or until the service ends.
The host's workers run on; when `workers` shows no jobs there, it may be switched off.
"""

WAIT = """\
Wait until a job has ended. Exits with 0 if it finished, with 1 if it failed or was cancelled, with 3 if it has not
ended after --timeout seconds; the job then continues.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``jobs`` and its commands to the command line."""
    parser = add_command(
        subparsers, "jobs", summary="work with the jobs of a service", description=DESCRIPTION, examples=EPILOG
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_submit(commands)
    listing = _add(commands, "list", _list, "show jobs, the newest first", job=False)
    add_filters(listing, 100)
    listing.add_argument("--after", metavar="JOB", help="only jobs that follow this one in the list")
    watching = _add(commands, "watch", watch, "show again and again which jobs there are", WATCH, job=False)
    add_filters(watching, 40)
    add_every(watching)
    _add(commands, "show", _show, "show a job and its submission")
    _add(commands, "history", _history, "show every change of a job's state, with its cause")
    for name, summary in CHANGES.items():
        _add(commands, name, _change, summary, many=True).set_defaults(change=name)
    _add_amending(commands)
    add_goes_on(_add(commands, "retry", _retry, "queue a job again that failed or was cancelled", RETRY))
    add_goes_on(_add(commands, "fork", _fork, "submit a copy of a job that goes on from its snapshot", FORK))
    deleting = _add(commands, "delete", _delete, "delete a job that has ended, with all that it has", DELETE)
    deleting.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    _add(commands, "workers", _workers, "show the service's worker processes and their hosts", WORKERS, job=False)
    for name, summary in HOST_CHANGES.items():
        changing = _add(commands, name, _change_host, summary, DRAIN if name == "drain" else None, job=False)
        changing.add_argument("host", metavar="HOST", help="the host, as `workers` names it")
        changing.set_defaults(change=name)
    schedule = _add(commands, "schedule", _schedule, "run a job's next steps by another schedule")
    schedule.add_argument("schedule", metavar="NAME", help="a registered schedule, as interleaved or eager-1f1b(cap=5)")
    _add(commands, "follow", _follow, "show what happens to a job until it ends", FOLLOW)
    losses = _add(commands, "losses", _losses, "show the loss of each step")
    losses.add_argument("--after", type=natural, default=0, metavar="N", help="only steps after number N")
    _add(commands, "artifacts", artifacts, "show what of a job can be downloaded")
    add_download_arguments(
        _add(commands, "download", download, "download a model, losses, the log or a trace", DOWNLOAD)
    )
    waiting = _add(commands, "wait", _wait, "wait until a job has ended", WAIT)
    waiting.add_argument("--timeout", type=seconds, metavar="SECONDS", help="do not wait longer")


def _add(
    commands: Subparsers,
    name: str,
    command: Command,
    summary: str,
    description: str | None = None,
    *,
    job: bool = True,
    many: bool = False,
) -> argparse.ArgumentParser:
    # Without allow_abbrev=False, argparse would take `--token SECRET` for `--token-file SECRET` and print the secret
    # in the message that there is no such file.
    parser = add_command(commands, name, summary=summary, description=description, allow_abbrev=False)
    parser.add_argument("--url", metavar="URL", help=f"the service's address (default: ASYNCPIPE_URL or {DEFAULT_URL})")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="a file with the service's token, of mode 0600")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    means = "id, the unique beginning of it, or name"
    if many:
        parser.add_argument("jobs", metavar="JOB", nargs="+", help=f"each job's {means}")
    elif job:
        parser.add_argument("job", metavar="JOB", help=f"the job's {means}")
    parser.set_defaults(run=lambda args: _run(command, args))
    return parser


def _add_amending(commands: Subparsers) -> None:
    priority = _add(commands, "priority", _priority, "change the priority class of jobs", job=False)
    priority.add_argument("priority_class", choices=("foreground", "background"), help="the class from now on")
    weight = _add(commands, "weight", _weight, "change the weights of jobs", job=False)
    weight.add_argument("weight", type=float, metavar="WEIGHT", help="the weight from now on, as 2")
    tag = _add(commands, "tag", _tag, "change the tags of jobs", job=False)
    tag.add_argument("--add", action="append", default=[], metavar="TAG", help="one more tag; may be repeated")
    tag.add_argument("--remove", action="append", default=[], metavar="TAG", help="one tag less; may be repeated")
    for parser in (priority, weight, tag):
        parser.add_argument("jobs", metavar="JOB", nargs="+", help="each job's id, unique beginning of it, or name")


def _add_submit(commands: Subparsers) -> None:
    parser = _add(commands, "submit", _submit, "submit the job of a job file", SUBMIT, job=False)
    add = parser.add_argument
    add("file", metavar="FILE.toml", type=Path, help="the job file")
    add("--name", metavar="NAME", help="name of the job")
    add("--entry", metavar="MODULE:FACTORY", help="the entry, as the operator has registered it")
    add("--steps", type=count, metavar="N", help="train for N steps")
    add("--devices", metavar="LIST", help="train on these devices, as cpu:0,cpu:1")
    add("--schedule", metavar="NAME", help="use this schedule")
    add("--weight", type=float, metavar="W", help="weight of its share of the devices (default: 1)")
    add("--background", action="store_true", help="run only while other jobs leave a device idle")
    add("--tag", action="append", metavar="TAG", help="a word by which it is found; may be repeated")
    add("--deadline", type=moment, metavar="TIME", help="fail unless it has ended: 2026-12-01T08:00, or 6h from now")
    add("--key", metavar="KEY", help="idempotency key: the same key and job make one job, however often submitted")
    add("--follow", action="store_true", help="show what happens to it until it ends, as `follow` does")


# The commands


def _run(command: Command, args: argparse.Namespace) -> int:
    # A late import: --help and other commands do not need it.
    from asyncpipe.service.client import JobClient

    watches = command in (_follow, _wait, download) or getattr(args, "follow", False)
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
    return _print(job, lambda job: plain(job["id"]), args)


def _with_options(submission: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The submission, with options of the command line in place of the file's values."""

    def changed(table: dict[str, Any], **options: Any) -> dict[str, Any]:
        return {**table, **{key: value for key, value in options.items() if value is not None}}

    devices = None if args.devices is None else [device.strip() for device in args.devices.split(",")]
    return changed(
        submission,
        name=args.name,
        entry=args.entry,
        weight=args.weight,
        priority_class="background" if args.background else None,
        tags=[*submission.get("tags", ()), *args.tag] if args.tag else None,
        deadline=args.deadline,
        pipeline=changed(submission["pipeline"], devices=devices, schedule=args.schedule),
        training=changed(submission["training"], steps=args.steps),
    )


def _list(client: JobClient, args: argparse.Namespace) -> int:
    jobs = tuple(client.list(args.state, after=args.after, **filters(args)))
    _print(jobs, table_of_jobs, args)
    if len(jobs) == args.limit and not args.json:
        print(f"there may be more: --after {jobs[-1]['id']}", file=sys.stderr)
    return 0


def _show(client: JobClient, args: argparse.Namespace) -> int:
    return _print(client.show(args.job), job_text, args)


def _history(client: JobClient, args: argparse.Namespace) -> int:
    return _print(client.history(args.job), history_table, args)


def _change(client: JobClient, args: argparse.Namespace) -> int:
    return _each(args, getattr(client, args.change))


def _priority(client: JobClient, args: argparse.Namespace) -> int:
    return _each(args, lambda job: client.amend(job, priority_class=args.priority_class))


def _weight(client: JobClient, args: argparse.Namespace) -> int:
    return _each(args, lambda job: client.amend(job, weight=args.weight))


def _tag(client: JobClient, args: argparse.Namespace) -> int:
    def change(job: str) -> dict[str, Any]:
        tags = [tag for tag in client.show(job)["tags"] if tag not in args.remove]
        return client.amend(job, tags=dict.fromkeys([*tags, *args.add]))

    return _each(args, change)


def _each(args: argparse.Namespace, change: Callable[[str], dict[str, Any]]) -> int:
    """Change each of the jobs; one that cannot be changed does not keep the others."""
    failed: list[AsyncpipeError] = []
    for job in args.jobs:
        try:
            _print(change(job), change_text, args)
        except AsyncpipeError as error:
            if len(args.jobs) == 1:
                raise
            failed.append(error)
            print(f"{job}: {error}", file=sys.stderr)
    return NOT_FINISHED if failed else 0


def _workers(client: JobClient, args: argparse.Namespace) -> int:
    return _print(client.workers(), lambda found: workers_table(found) if found else "no workers", args)


def _change_host(client: JobClient, args: argparse.Namespace) -> int:
    return _print(getattr(client, args.change)(args.host), workers_table, args)


def _retry(client: JobClient, args: argparse.Namespace) -> int:
    return _print(ask_retry(client, args), change_text, args)


def _fork(client: JobClient, args: argparse.Namespace) -> int:
    return _print(ask_fork(client, args), lambda job: plain(job["id"]), args)


def _delete(client: JobClient, args: argparse.Namespace) -> int:
    return _print(client.delete(args.job, dry_run=args.dry_run), deleted_text, args)


def _schedule(client: JobClient, args: argparse.Namespace) -> int:
    return _print(client.change_schedule(args.job, args.schedule), change_text, args)


def _print(found: _T, text: Callable[[_T], str], args: argparse.Namespace) -> int:
    print(json.dumps(found) if args.json else text(found))
    return 0


def _losses(client: JobClient, args: argparse.Namespace) -> int:
    if not args.json:
        print(LOSSES_HEAD)
    for row in client.losses(args.job, args.after):
        print(json.dumps(row) if args.json else loss_line(row))
    return 0


def _follow(client: JobClient, args: argparse.Namespace) -> int:
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
    return _outcome(job, args)


def _wait(client: JobClient, args: argparse.Namespace) -> int:
    from asyncpipe.service.client import WaitTimeoutError

    try:
        job = client.wait(args.job, args.timeout)
    except WaitTimeoutError as error:
        print(error, file=sys.stderr)
        return TIMED_OUT
    if args.json:
        print(json.dumps(job))
    return _outcome(job, args)


def _outcome(job: dict[str, Any], args: argparse.Namespace) -> int:
    if not args.json:
        print(change_text(job))
    return 0 if job["state"] == "finished" else NOT_FINISHED
