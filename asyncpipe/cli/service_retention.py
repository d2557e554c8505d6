"""``asyncpipe service retention``: what rules of retention would delete, shown before they are applied."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import add_command
from asyncpipe.cli.service_folder import add_folder_options, folder_of

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.service.keeping.retention import Removal
    from asyncpipe.service.settings.retention_settings import RetentionSettings

__all__ = ["add_parser"]

RETENTION = """\
Show what the rules of retention in --config would delete now, and why. This deletes nothing: a service applies its
rules itself, each hour, and writes a line for each deletion to its log. So rules can be tried on the folder of a
service that runs, before it is started again with them.

  [retention.jobs]         # whole jobs that have ended: their history, losses, logs and snapshots
  days = 90
  count = 10_000
  [retention.snapshots]    # of jobs that stay
  bytes = "500 GiB"
  [retention.losses]
  [retention.logs]
"""


def add_parser(commands: Subparsers) -> None:
    """Add ``retention`` to the commands of ``asyncpipe service``."""
    parser = add_command(commands, "retention", summary="show what would be deleted", description=RETENTION)
    parser.add_argument("--dry-run", action="store_true", help="only show; this command does nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_folder_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    folder = folder_of(args)
    rules = _rules(args.config or os.environ.get("ASYNCPIPE_CONFIG"))
    # Late imports: --help does not wait for torch.
    from asyncpipe.service.keeping.disk_use import DiskUse
    from asyncpipe.service.keeping.retention import removals
    from asyncpipe.service.store.database import STORE, open_beside
    from asyncpipe.service.store.keeping_queries import stored_jobs

    with open_beside(folder / STORE) as connection:
        known = stored_jobs(connection)
    use = DiskUse(folder)
    ended = use.ended(known)
    found = removals(ended, rules, time.time())
    if args.json:
        print(json.dumps({"bytes": use.total(), "removals": [_as_json(each) for each in found]}))
    else:
        print(_text(found, use.total(), len(ended)))
    return 0


def _rules(config: Path | str | None) -> RetentionSettings:
    from pydantic import ValidationError

    from asyncpipe.service.settings.retention_settings import RetentionSettings
    from asyncpipe.service.settings.service_settings import SettingsError
    from asyncpipe.train.validation import read_toml, wrong_keys

    tables = read_toml(Path(config), SettingsError).get("retention", {}) if config else {}
    try:
        return RetentionSettings.model_validate(tables)
    except ValidationError as error:
        problems = wrong_keys(error, RetentionSettings)
        raise SettingsError("\n".join(f"{config}: retention.{problem}" for problem in problems)) from None


def _as_json(removal: Removal) -> dict[str, Any]:
    return {**removal._asdict(), "kind": str(removal.kind)}


def _text(found: Sequence[Removal], total: int, ended: int) -> str:
    from asyncpipe.core.predict.memory import format_bytes

    lines = [f"{each.kind:9}  {each.job}  {format_bytes(each.bytes):>10}  {each.name}: {each.reason}" for each in found]
    freed = format_bytes(sum(each.bytes for each in found))
    jobs = len({each.job for each in found})
    lines.append(f"would delete {freed} of {format_bytes(total)}, of {jobs} of {ended} jobs that have ended")
    return "\n".join(lines)
