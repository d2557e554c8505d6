"""Work with the jobs of a service.

The service is one that `asyncpipe serve` runs, at --url, or ASYNCPIPE_URL, or http://127.0.0.1:8080. Its token, if it
has one, is read from the file --token-file or ASYNCPIPE_TOKEN_FILE, or is ASYNCPIPE_TOKEN. It is never a command-line
argument, which other users of the machine could see.

examples:
  asyncpipe jobs submit examples/charlm/charlm.toml --follow
  asyncpipe jobs submit examples/charlm/charlm.toml --steps 50 --set pipeline.schedule=interleaved --background
  asyncpipe jobs list --state failed --since -1d
  asyncpipe jobs list --tag night
  asyncpipe jobs list --mine
  asyncpipe jobs watch
  asyncpipe jobs priority background charlm 01k8zq1m
  asyncpipe jobs cancel 01k8zq1m 01k8zq2r
  asyncpipe jobs show 01k8zq1m7h9x2v4n6r8t0w3y5b
  asyncpipe jobs schedule 01k8zq1m7h9x2v4n6r8t0w3y5b interleaved
  asyncpipe jobs logs charlm --follow
  asyncpipe jobs failures --since -1d
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

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.cli import jobs_asking as asking
from asyncpipe.cli import jobs_text as texts
from asyncpipe.cli import jobs_watching as watching
from asyncpipe.cli.arguments import add_command, add_set, count, moment, names, natural, seconds
from asyncpipe.cli.jobs_download import download
from asyncpipe.errors import AsyncpipeError, OptionError

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.service.client import JobClient

    Command = Callable[[JobClient, argparse.Namespace], Any]
    Declare = Callable[[argparse.ArgumentParser], object]

__all__ = ["add_parser"]

DEFAULT_URL = "http://127.0.0.1:8080"
FAILED = 1
"""Exit status if one of several jobs could not be changed."""
FEW, MANY = 1, 8
"""Retries of a request: of an interactive command, and of one that watches a job for long."""


# What commands take


def _job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the job's id, the unique beginning of it, or name")


def _jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", metavar="JOB", nargs="+", help="each job's id, the unique beginning of it, or name")


def _host(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("host", metavar="HOST", help="the host, as `workers` names it")


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


def _submit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE.toml", type=Path, help="the job file")
    add("--name", metavar="NAME", help="name of the job")
    add("--steps", type=count, metavar="N", help="train for N steps")
    text = "train on these devices, as cpu:0,cpu:1, or on so many of any, as 2"
    add("--devices", type=_names_or_count, metavar="LIST|N", help=text)
    add("--replicas", type=count, metavar="N", help="train N replicas, each on as many of the devices, in their order")
    text = "run only while other jobs leave a device idle"
    add("--background", action="store_const", const="background", help=text)
    add("--tag", action="append", default=[], metavar="TAG", help="a word by which it is found; may be repeated")
    add_set(parser)
    add("--key", metavar="KEY", help="idempotency key: the same key and job make one job, however often submitted")
    add("--follow", action="store_true", help="show what happens to it until it ends, as `follow` does")


def _names_or_count(text: str) -> int | list[str]:
    return count(text) if text.isdigit() else names(text)


def _filters(limit: int, parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--state", action="append", choices=watching.STATES, help="only jobs in this state; may be repeated")
    add("--entry", metavar="ENTRY", help="only jobs of this entry")
    add("--tag", action="append", default=[], metavar="TAG", help="only jobs with this tag; may be repeated")
    add("--text", metavar="TEXT", help="only jobs with this text in their name, entry, id, cause or tags")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--user", metavar="USER", help="only jobs of this user")
    whose.add_argument("--mine", action="store_true", help="only your own jobs")
    add("--since", type=moment, metavar="TIME", help="only jobs that changed since then: 2026-12-01T08:00, or -2d")
    add("--root", metavar="LINE", help="only jobs whose last failure has this root line, as `failures` shows it")
    add("--limit", type=count, default=limit, metavar="N", help=f"at most N jobs (default: {limit})")


def _list(parser: argparse.ArgumentParser) -> None:
    _filters(100, parser)
    parser.add_argument("--after", metavar="JOB", help="only jobs that follow this one in the list")


def _watch(parser: argparse.ArgumentParser) -> None:
    _filters(40, parser)
    parser.add_argument("--every", type=seconds, default=2.0, metavar="SECONDS", help="how often (default: 2)")
    parser.add_argument("--turns", type=count, metavar="N", help="end after N times")


def _goes_on(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    text = "from the snapshot of step N; 0: from its beginning"
    parser.add_argument("--from-step", type=natural, metavar="N", help=text)
    add_set(parser, "training.steps=200")


def _delete(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be deleted")


def _schedule(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("schedule", metavar="NAME", help="a registered schedule, as interleaved or eager-1f1b(cap=5)")


def _losses(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("--after", type=natural, default=0, metavar="N", help="only steps after number N")


def _logs(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    add = parser.add_argument
    add("-f", "--follow", action="store_true", help="go on until the job has ended")
    add("--run", dest="attempt", type=count, metavar="N", help="what its Nth run said (default: the last one)")
    add("--tail", type=count, metavar="N", help="only the last N lines")
    add("--stream", metavar="STREAM", help="only stdout, stderr, traceback, service, or a level as warning")


def _failures(parser: argparse.ArgumentParser) -> None:
    text = "only jobs that changed since then: 2026-12-01T08:00, or -2d"
    parser.add_argument("--since", type=moment, metavar="TIME", help=text)


def _wait(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="do not wait longer")


def _download(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    add = parser.add_argument
    add("what", metavar="WHAT", nargs="*", default=["model"], help="model (the default), losses, log, trace, or a name")
    add("--to", type=Path, default=Path(), metavar="PATH", help="the folder, or for one artifact the file (default: .)")
    add("--step", type=natural, metavar="N", help="the model of the snapshot after step N (default: the newest)")


def _priority(parser: argparse.ArgumentParser) -> None:
    text = (
        "from now on: foreground or background, the class; or a number from -100 to 100: queued jobs of one class and "
    )
    text += "user with higher ones begin first"
    parser.add_argument("priority", type=_class_or_number, metavar="CLASS|NUMBER", help=text)
    _jobs(parser)


def _class_or_number(text: str) -> dict[str, object]:
    if text in ("foreground", "background"):
        return {"priority_class": text}
    try:
        return {"priority": int(text)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be foreground, background or a number, got {text!r}") from None


def _weight(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weight", type=float, metavar="WEIGHT", help="the weight from now on, as 2")
    _jobs(parser)


def _tag(parser: argparse.ArgumentParser) -> None:
    for option, text in (("--add", "one more tag; may be repeated"), ("--remove", "one tag less; may be repeated")):
        parser.add_argument(option, action="append", default=[], metavar="TAG", help=text)
    _jobs(parser)


# The commands


def _shown(ask: Command, text: Callable[[Any], str], client: JobClient, args: argparse.Namespace) -> int:
    found = ask(client, args)
    print(json.dumps(found) if args.json else text(found))
    return 0


def _each(change: Callable[..., Any], client: JobClient, args: argparse.Namespace) -> int:
    """Change each of the jobs; one that cannot be changed does not keep the others."""
    status = 0
    for job in args.jobs:
        try:
            _shown(lambda client, args: change(client, args, job), texts.change_text, client, args)  # noqa: B023
        except AsyncpipeError as error:
            if len(args.jobs) == 1:
                raise
            status = FAILED
            print(f"{job}: {error}", file=sys.stderr)
    return status


SHOWN: dict[str, tuple[Command, Callable[[Any], str], Declare]] = {
    "show": (asking.show, texts.job_text, _job),
    "history": (asking.history, texts.history_table, _job),
    "retry": (asking.retry, texts.change_text, _goes_on),
    "fork": (asking.fork, texts.id_text, _goes_on),
    "delete": (asking.delete, texts.deleted_text, _delete),
    "workers": (asking.workers, texts.workers_table, _nothing),
    "drain": (asking.drain, texts.workers_table, _host),
    "undrain": (asking.undrain, texts.workers_table, _host),
    "schedule": (asking.schedule, texts.change_text, _schedule),
    "failures": (asking.failures, texts.failures_table, _failures),
    "artifacts": (asking.artifacts, texts.artifacts_table, _job),
}
"""Commands that ask the service once and show its answer: what asks, what shows, and the arguments."""
OF_EACH: dict[str, tuple[Callable[..., Any], Declare]] = {
    "pause": (asking.pause, _jobs),
    "resume": (asking.resume, _jobs),
    "cancel": (asking.cancel, _jobs),
    "priority": (asking.priority, _priority),
    "weight": (asking.weight, _weight),
    "tag": (asking.tag, _tag),
}
"""Commands that change each of several jobs."""
OTHERS: dict[str, tuple[Command, Declare]] = {
    "submit": (watching.submit, _submit),
    "list": (watching.list_jobs, _list),
    "watch": (watching.watch, _watch),
    "follow": (watching.follow, _job),
    "logs": (watching.logs, _logs),
    "losses": (watching.losses, _losses),
    "download": (download, _download),
    "wait": (watching.wait, _wait),
}
"""Commands that print for themselves and return an exit status."""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``jobs`` and its commands to the command line."""
    parser = add_command(subparsers, "jobs", __doc__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (command, declare) in OTHERS.items():
        _add(commands, name, command.__doc__, declare, command)
    for name, (ask, text, declare) in SHOWN.items():
        _add(commands, name, ask.__doc__, declare, partial(_shown, ask, text))
    for name, (change, declare) in OF_EACH.items():
        _add(commands, name, change.__doc__, declare, partial(_each, change))


def _add(commands: Subparsers, name: str, text: str | None, declare: Declare, command: Command) -> None:
    # Without allow_abbrev=False, argparse would take `--token SECRET` for `--token-file SECRET` and print the secret
    # in the message that there is no such file.
    parser = add_command(commands, name, text, allow_abbrev=False)
    parser.add_argument("--url", metavar="URL", help=f"the service's address (default: ASYNCPIPE_URL or {DEFAULT_URL})")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="a file with the service's token, of mode 0600")
    text = "who has signed the service's certificate (PEM; default: whom the system, or SSL_CERT_FILE, trusts)"
    parser.add_argument("--authority", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    declare(parser)
    parser.set_defaults(run=partial(_run, command))


def _run(command: Command, args: argparse.Namespace) -> int:
    # A late import: --help and other commands do not need it.
    from asyncpipe.service.client import JobClient

    watches = command in (watching.follow, watching.wait, download) or getattr(args, "follow", False)
    url = args.url or os.environ.get("ASYNCPIPE_URL") or DEFAULT_URL
    retries = MANY if watches else FEW
    status: int = command(JobClient(url, _token(args.token_file), retries=retries, authority=args.authority), args)
    return status


def _token(path: Path | None) -> str | None:
    from asyncpipe.service.settings.token_file import read_token

    given = path or os.environ.get("ASYNCPIPE_TOKEN_FILE")
    if not given:
        return os.environ.get("ASYNCPIPE_TOKEN") or None
    try:
        return read_token(Path(given))
    except ValueError as error:
        raise OptionError(f"--token-file: {error}") from None
