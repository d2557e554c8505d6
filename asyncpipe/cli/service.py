"""``asyncpipe service``: what an operator does with the folder of a service, also while the service runs.

Commands here read the folder on this machine, as the user of the service; those of ``asyncpipe jobs`` speak to a
service over HTTP. A command with more to it has a file of its own, ``service_NAME.py`` with an ``add_parser``; all find
the folder by ``service_folder.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpipe.cli import service_retention, service_tokens
from asyncpipe.cli.arguments import add_command
from asyncpipe.cli.service_folder import add_folder_options, folder_of

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers

__all__ = ["add_parser"]

INCOMPLETE = 1
"""Exit status of a backup of a folder in which something was damaged or missing."""

DESCRIPTION = """\
Work with the folder of a service, on its machine and as its user. The folder is --folder, or ASYNCPIPE_FOLDER, or that
of the settings in --config or ASYNCPIPE_CONFIG, or runs/service, as for `asyncpipe serve`.
"""

EXAMPLES = """\
examples:
  asyncpipe service backup /backups/monday.tar --config service.toml
  asyncpipe service backup /backups/monday.tar --folder runs/service --snapshots newest
  asyncpipe service restore /backups/monday.tar --folder runs/restored
  asyncpipe service retention --config service.toml
  asyncpipe service tokens create ci --role submit --config service.toml
"""

BACKUP = """\
Write a backup of the service to FILE, which must not be there yet: all jobs with their histories, losses, logs and
snapshots, the log of changes, and the hashes of tokens. The service may run meanwhile, and is not slowed down by it but
for the disk. A job that is restored goes on from its newest snapshot in the backup, with the same bits.

FILE is a tar archive of mode 0600. It appears when it is complete; without snapshots (--snapshots none), jobs that have
not ended are quarantined when it is restored, and not begun anew.

Exits with 1 if files of the service were damaged or missing, which it lists; all else is in FILE then.
"""

RESTORE = """\
Make a new folder for a service from the backup FILE, whose store and snapshots are checked. Then start the service with
that folder; it goes on with the jobs that ran. The service that the backup is of must not run any more, or both train
the same jobs.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``service`` and its commands to the command line."""
    parser = add_command(
        subparsers, "service", summary="back up and tend a service", description=DESCRIPTION, examples=EXAMPLES
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    backup = add_command(commands, "backup", summary="back a service up while it runs", description=BACKUP)
    backup.add_argument("file", metavar="FILE", type=Path, help="the backup, a tar archive; must not be there yet")
    kinds = ("all", "newest", "none")
    text = "which snapshots of each job are part of it (default: all); the newest are enough to go on from"
    backup.add_argument("--snapshots", choices=kinds, default="all", help=text)
    add_folder_options(backup)
    backup.set_defaults(run=_backup)
    restore = add_command(commands, "restore", summary="make a service's folder from a backup", description=RESTORE)
    restore.add_argument("file", metavar="FILE", type=Path, help="the backup")
    add_folder_options(restore)
    restore.set_defaults(run=_restore)
    service_retention.add_parser(commands)
    service_tokens.add_parser(commands)


def _backup(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    # Late imports: --help does not wait for torch.
    from asyncpipe.core.predict.memory import format_bytes
    from asyncpipe.service.keeping.backup import SnapshotsWanted, back_up

    done = back_up(folder, args.file, SnapshotsWanted(args.snapshots))
    for problem in done.problems:
        print(f"asyncpipe: warning: {problem}", file=sys.stderr)
    print(f"{done.path}: {done.jobs} jobs, {done.snapshots} snapshots, {format_bytes(done.size)}")
    return INCOMPLETE if done.problems else 0


def _restore(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    from asyncpipe.service.keeping.backup import restore

    print(f"{folder}: {restore(args.file, folder)} jobs; start the service with this folder")
    return 0
