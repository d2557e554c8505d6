"""Back up and tend a service.

Work with the folder of a service, on its machine and as its user. The folder is --folder, or ASYNCPIPE_FOLDER, or that
of the settings in --config or ASYNCPIPE_CONFIG, or runs/service, as for `asyncpipe serve`.

examples:
  asyncpipe service backup /backups/monday.tar --config service.toml
  asyncpipe service backup /backups/monday.tar --folder runs/service --snapshots newest
  asyncpipe service restore /backups/monday.tar --folder runs/restored
  asyncpipe service retention --config service.toml
  asyncpipe service reload --config service.toml
  asyncpipe service tokens create ci --role submit --config service.toml
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from asyncpipe.cli import service_tokens
from asyncpipe.cli.arguments import add_command
from asyncpipe.errors import OptionError, missing_package

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.service.settings.service_settings import FolderSettings

__all__ = ["add_parser"]

RELOAD_SECONDS = 60.0
"""For a service to import its entries and to say what came of its settings."""
INCOMPLETE = 1
"""Exit status of a backup of a folder in which something was damaged or missing."""

# Late imports below: --help does not wait for torch.


def add_parser(subparsers: Subparsers) -> None:
    """Add ``service`` and its commands to the command line."""
    commands = add_command(subparsers, "service", __doc__).add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    backup, restore, retention, reload = (
        add_command(commands, run.__name__.lstrip("_"), run.__doc__) for run in (_backup, _restore, _retention, _reload)
    )
    backup.add_argument("file", metavar="FILE", type=Path, help="the backup, a tar archive; must not be there yet")
    kinds = ("all", "newest", "none")
    text = "which snapshots of each job are part of it (default: all); the newest are enough to go on from"
    backup.add_argument("--snapshots", choices=kinds, default="all", help=text)
    restore.add_argument("file", metavar="FILE", type=Path, help="the backup")
    retention.add_argument("--dry-run", action="store_true", help="only show; this command does nothing else")
    retention.add_argument("--json", action="store_true", help="print JSON, for programs")
    tokens = service_tokens.add_parser(commands)
    for parser, run in ((backup, _backup), (restore, _restore), (retention, _retention), (reload, _reload), *tokens):
        parser.add_argument("--folder", type=Path, metavar="FOLDER", help="the folder of the service")
        text = "the settings of the service, which name it"
        parser.add_argument("--config", type=Path, metavar="FILE.toml", help=text)
        parser.set_defaults(run=lambda args, run=run: run(args, _settings(args)))


def _settings(args: argparse.Namespace) -> FolderSettings:
    """What --folder, --config, the environment and the file say. Raises ``SettingsError``."""
    try:
        from asyncpipe.service.settings.service_settings import FolderSettings
    except ImportError as error:
        raise missing_package("a service needs pydantic-settings", "service") from error
    given = {"folder": args.folder, "config": args.config}
    return FolderSettings(**{key: value for key, value in given.items() if value is not None})


def _backup(args: argparse.Namespace, settings: FolderSettings) -> int:
    """Back a service up while it runs.

    Write a backup of the service to FILE, which must not be there yet: all jobs with their histories, losses, logs and
    snapshots, the log of changes, and the hashes of tokens. The service may run meanwhile, and is not slowed down by it
    but for the disk. A job that is restored goes on from its newest snapshot in the backup, with the same bits.

    FILE is a tar archive of mode 0600. It appears when it is complete; without snapshots (--snapshots none), jobs that
    have not ended are quarantined when it is restored, and not begun anew.

    Exits with 1 if files of the service were damaged or missing, which it lists; all else is in FILE then.
    """
    from asyncpipe.core.predict.memory import format_bytes
    from asyncpipe.service.keeping.backup import SnapshotsWanted, back_up

    done = back_up(settings.folder, args.file, SnapshotsWanted(args.snapshots))
    for problem in done.problems:
        print(f"asyncpipe: warning: {problem}", file=sys.stderr)
    print(f"{done.path}: {done.jobs} jobs, {done.snapshots} snapshots, {format_bytes(done.size)}")
    return INCOMPLETE if done.problems else 0


def _restore(args: argparse.Namespace, settings: FolderSettings) -> int:
    """Make a service's folder from a backup.

    Make a new folder for a service from the backup FILE, whose store and snapshots are checked. Then start the service
    with that folder; it goes on with the jobs that ran. The service that the backup is of must have ended, or both
    train the same jobs.
    """
    from asyncpipe.service.keeping.backup import restore

    print(f"{settings.folder}: {restore(args.file, settings.folder)} jobs; start the service with this folder")
    return 0


def _retention(args: argparse.Namespace, settings: FolderSettings) -> int:
    """Show what rules of retention would delete.

    Show what the rules of retention in --config would delete now, and why. This deletes nothing: a service applies its
    rules itself, each hour, and writes a line for each deletion to its log. So rules can be tried on the folder of a
    service that runs, before it is started again with them.

    rules:
      [retention.jobs]         # whole jobs that have ended: their history, losses, logs and snapshots
      days = 90
      count = 10_000
      [retention.snapshots]    # of jobs that stay
      days = 7
    """
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


def _reload(args: argparse.Namespace, settings: FolderSettings) -> int:
    """Have the service read its settings again.

    Have the service that runs with this folder read its settings again, as SIGHUP does, and print what came of it: the
    entries that it has, and the keys that differ and are used from its next start on. It reads the file, arguments and
    environment that it was started with. Jobs that run go on.

    Exits with 1 if the settings are wrong, and says why; nothing has changed then.
    """
    from asyncpipe.service.who_serves import server_of

    before = now = server_of(settings.folder)
    if before is None:
        raise OptionError(f"no asyncpipe serve runs with the folder {settings.folder}: start one, or name another")
    if before.host != socket.gethostname():
        raise OptionError(f"{before} serves the folder {settings.folder}: use this command on {before.host}")
    os.kill(before.pid, signal.SIGHUP)
    until = time.monotonic() + RELOAD_SECONDS
    while now == before and time.monotonic() < until:
        time.sleep(0.05)
        now = server_of(settings.folder)
    if now is None or now == before or now.pid != before.pid:
        what = "has not said anything" if now == before else "has ended"
        raise OptionError(f"{before} {what} after it was told to read its settings again; its log may say why")
    print(now.said)
    return int(now.is_wrong)
