"""``asyncpipe service retention``: what rules of retention would delete, shown before they are applied."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from asyncpipe.cli.arguments import add_command
from asyncpipe.cli.service_folder import add_folder_options, folder_settings

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers

__all__ = ["add_parser"]

RETENTION = """\
Show what the rules of retention in --config would delete now, and why. This deletes nothing: a service applies its
rules itself, each hour, and writes a line for each deletion to its log. So rules can be tried on the folder of a
service that runs, before it is started again with them.

  [retention.jobs]         # whole jobs that have ended: their history, losses, logs and snapshots
  days = 90
  count = 10_000
  [retention.snapshots]    # of jobs that stay
  days = 7
"""


def add_parser(commands: Subparsers) -> None:
    """Add ``retention`` to the commands of ``asyncpipe service``."""
    parser = add_command(commands, "retention", summary="show what would be deleted", description=RETENTION)
    parser.add_argument("--dry-run", action="store_true", help="only show; this command does nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_folder_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = folder_settings(args)
    # Late imports: --help does not wait for torch.
    from asyncpipe.service.keeping.retention import removals, with_snapshots
    from asyncpipe.service.store.database import STORE, open_beside
    from asyncpipe.service.store.finding import every_job

    with open_beside(settings.folder / STORE) as connection:
        found = removals(every_job(connection), settings.retention, time.time(), with_snapshots(settings.folder))
    if args.json:
        print(json.dumps({"removals": [each._asdict() for each in found]}))
        return 0
    for each in found:
        print(f"{each.what:9}  {each.job}  {each.name}: {each.reason}")
    jobs, snapshots = (sum(each.what == what for each in found) for what in ("job", "snapshots"))
    print(f"would delete {jobs} jobs, and the snapshots of {snapshots} others")
    return 0
