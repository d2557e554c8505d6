"""The commands of ``asyncpipe jobs`` that show many jobs, or what happens to one. Their docstrings are their help."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import changes
from asyncpipe.cli.jobs_text import (
    LOSSES_HEAD,
    EventPrinter,
    change_text,
    jobs_table,
    loss_line,
    plain,
    said_line,
)
from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.service.client import JobClient

STATES = ("queued", "running", "paused", "finished", "failed", "cancelled", "quarantined")
NOT_FINISHED, TIMED_OUT = 1, 3
"""Exit statuses of ``follow`` and ``wait`` other than 0: the job has failed or was cancelled; it still runs."""
KEYS = {
    "name": "name",
    "steps": "training.steps",
    "devices": "pipeline.devices",
    "replicas": "pipeline.replicas",
    "background": "service.priority_class",
}
"""For which key of the job file an option of ``submit`` stands; ``--tag`` adds to ``service.tags``."""


def submit(client: JobClient, args: argparse.Namespace) -> int:
    """Submit the job of a job file.

    The file has the format of `asyncpipe train`; every key can be given by --set KEY=VALUE. Keys that the service
    decides itself do not apply and are listed on stderr: the folder of snapshots, and [observe], since the service
    observes all its jobs. The job's entry must be registered by the operator of the service, its devices must be the
    service's, its schedule must have a name.

    Where pipeline.devices is a number, or a table as {count = 2, memory = "20 GiB", hosts = 1}, the service chooses.

    The file's table [service] may have tags, deadline, priority_class, weight and priority, as in
    --set service.weight=2 or --set service.deadline=2026-12-01T08:00:00.

    Prints the job's id. With --key, submitting the same job again, even much later, returns the same job.
    """
    from asyncpipe.service.submission.from_job_file import read_submission

    submission, ignored = read_submission(args.file, changes(args, KEYS))
    if ignored:
        print(f"{args.file}: left out, as the service has its own: {', '.join(ignored)}", file=sys.stderr)
    if args.tag:
        submission["tags"] = [*submission.get("tags", ()), *args.tag]
    job = client.submit(submission, args.key)
    if args.follow:
        print(f"submitted job {job['id']}", file=sys.stderr, flush=True)
        args.job = job["id"]
        return follow(client, args)
    print(json.dumps(job) if args.json else plain(job["id"]))
    return 0


def list_jobs(client: JobClient, args: argparse.Namespace) -> int:
    """Show jobs, the newest first."""
    jobs = tuple(client.list(args.state, after=args.after, **_filters(client, args)))
    print(json.dumps(jobs) if args.json else jobs_table(jobs))
    if len(jobs) == args.limit and not args.json:
        print(f"there may be more: --after {jobs[-1]['id']}", file=sys.stderr)
    return 0


def _filters(client: JobClient, args: argparse.Namespace) -> dict[str, Any]:
    filters = {name: getattr(args, name) for name in ("entry", "text", "since", "limit", "root")}
    owner = client.me()["user"] if args.mine else args.user
    if args.mine and owner is None:
        raise OptionError("--mine: the service knows no users, so its jobs are nobody's; leave it out")
    return {**filters, "tags": args.tag, "owner": owner}


def watch(client: JobClient, args: argparse.Namespace) -> int:
    """Show again and again which jobs there are.

    Shows the jobs that have not ended until Ctrl-C; with filters as of `list`, those that meet them. Where the output
    is no terminal, a line for each change of a job's state.
    """
    turns = _turns(client, args)
    for text in _drawn(turns) if sys.stdout.isatty() else _changes(turns):
        if text:
            print(text, flush=True)
    return 0


def _turns(client: JobClient, args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], ...]]:
    filters = _filters(client, args)
    for turn in itertools.count() if args.turns is None else range(args.turns):
        if turn:
            time.sleep(args.every)
        yield tuple(client.list(args.state or STATES[:3], **filters))


def _drawn(turns: Iterator[tuple[dict[str, Any], ...]]) -> Iterator[str]:
    for jobs in turns:
        yield f"\x1b[H\x1b[2J{datetime.now():%H:%M:%S}, Ctrl-C ends\n{jobs_table(jobs)}"


def _changes(turns: Iterator[tuple[dict[str, Any], ...]]) -> Iterator[str]:
    before: dict[str, dict[str, Any]] = {}
    for jobs in turns:
        now = {job["id"]: job for job in jobs}
        lines = [change_text(job) for job in jobs[::-1] if before.get(job["id"], {}).get("state") != job["state"]]
        gone = [job for each, job in before.items() if each not in now]
        lines += [f"{plain(job['name'])} ({plain(job['id'])}) is {plain(job['state'])} no more" for job in gone]
        yield "\n".join(lines)
        before = now


def losses(client: JobClient, args: argparse.Namespace) -> int:
    """Show the loss of each step."""
    if not args.json:
        print(LOSSES_HEAD)
    for row in client.losses(args.job, args.after):
        print(json.dumps(row) if args.json else loss_line(row))
    return 0


def follow(client: JobClient, args: argparse.Namespace) -> int:
    """Show what happens to a job until it ends.

    Shows the job's past events and then new ones. Ctrl-C stops following and does not affect the job. If the connection
    breaks or the service restarts, the command waits for it. With --json, one JSON object per line.

    Exits with 0 if the job finished, with 1 if it failed or was cancelled.
    """
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


def logs(client: JobClient, args: argparse.Namespace) -> int:
    """Show what a job said: prints, log records and tracebacks of its code.

    Shows the last run of the job, or --run N. With --follow it goes on until the job has ended, with the runs that
    come; Ctrl-C stops that and does not affect the job. With --json, one JSON object per line.

    A run keeps the first 5 and the last 5 MiB of what it said, and a job its last 5 runs; a line says what is cut. Of
    jobs on threads, what C libraries and processes print that their code starts goes where the service's output goes.
    """
    colours = sys.stdout.isatty()
    for line in client.logs(args.job, run=args.attempt, stream=args.stream, tail=args.tail, follow=args.follow):
        print(json.dumps(line) if args.json else said_line(line, colours=colours), flush=args.follow)
    return 0


def wait(client: JobClient, args: argparse.Namespace) -> int:
    """Wait until a job has ended.

    Exits with 0 if it finished, with 1 if it failed or was cancelled, with 3 if it has not ended after --timeout
    seconds; the job then continues.
    """
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
