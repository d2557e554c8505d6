"""``asyncpipe jobs retry``, ``fork`` and ``delete``: what is done with jobs that have ended."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import natural
from asyncpipe.core.predict.memory import format_bytes

if TYPE_CHECKING:
    from asyncpipe.service.client import JobClient

    Ask = Callable[[JobClient, argparse.Namespace], dict[str, Any]]

__all__ = ["DELETE", "FORK", "RETRY", "add_goes_on", "ask_fork", "ask_retry", "deleted_text"]

RETRY = """\
Queue a job again that failed, was cancelled or quarantined. It goes on from its newest snapshot, or from that of
--from-step N; with --from-step 0 it begins anew, which it never does by itself where snapshots were and are gone. Newer
snapshots are set aside. --set changes what was submitted, as training.learning_rate=1e-4, and may be repeated; the
value is written as in TOML, and `none` brings the default back.
"""

FORK = """\
Submit a copy of a job, in whatever state that is. The copy goes on from a snapshot of the job, and has its losses until
there; the job itself stays as it is. --from-step and --set as for `retry`; --set name=NAME gives it another name.

Prints the new job's id.
"""

DELETE = """\
Delete a job that has ended: its history, losses, logs and snapshots. What is deleted is printed; with --dry-run it is
only printed. A job that others wait for stays.
"""


def add_goes_on(parser: argparse.ArgumentParser) -> None:
    """Add the options that say from where a job goes on, and with what."""
    parser.add_argument(
        "--from-step", type=natural, metavar="N", help="from the snapshot of step N; 0: from its beginning"
    )
    text = "another value of the job, as training.steps=200; may be repeated"
    parser.add_argument(
        "--set", type=_pair, action="append", default=[], dest="changes", metavar="KEY=VALUE", help=text
    )


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, as training.steps=200; got {text!r}")
    if value.strip() == "none":
        return key.strip(), None
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()  # A text without quotes.


def ask_retry(client: JobClient, args: argparse.Namespace) -> dict[str, Any]:
    """The job."""
    return client.retry(args.job, args.from_step, dict(args.changes))


def ask_fork(client: JobClient, args: argparse.Namespace) -> dict[str, Any]:
    """The new job."""
    return client.fork(args.job, args.from_step, dict(args.changes))


def deleted_text(found: dict[str, Any]) -> str:
    """What was deleted, or would be, in a line."""
    steps = ", ".join(map(str, found["snapshots"]))
    snapshots = f"snapshots of steps {steps}" if steps else "no snapshots"
    what = (
        f"job {found['id']} ({found['name']}, {found['state']}): {found['files']} files, {format_bytes(found['bytes'])}"
    )
    return f"{'deleted' if found['deleted'] else 'would delete'} {what}, {snapshots}"
