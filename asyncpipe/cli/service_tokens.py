"""Who may use a service.

Tokens by which a service knows who asks. Each has a name, which the log of changes (audit.jsonl) tells, a user, who may
be in teams, and a role:

  read       sees jobs, losses, logs, files, workers and metrics
  submit     also submits jobs, and changes and deletes its user's
  operate    also changes everybody's jobs, and what concerns the service: drains hosts

A job belongs to the user who has submitted it. What one may do with the jobs of one's teams and of others, the settings
say (team_access, others).

Tokens are made and revoked here, in the folder of the service, and not over HTTP: who may is who may write the folder.
The service may run meanwhile, and knows at once. It keeps hashes of tokens. The token of its settings (token_file) may
do everything. Making and revoking a token leaves a line in audit.jsonl, with the user of this machine who did it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncpipe.cli.arguments import add_command, moment
from asyncpipe.cli.log_format import add_to_audit
from asyncpipe.service.token_roles import TokenRole, create_token, read_tokens, revoke_token

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.service.settings.service_settings import FolderSettings

    Run = Callable[[argparse.Namespace, FolderSettings], int]

__all__ = ["add_parser"]


def add_parser(commands: Subparsers) -> list[tuple[argparse.ArgumentParser, Run]]:
    """Add ``tokens`` and its commands to ``asyncpipe service``; their parsers, and what runs them."""
    parser = add_command(commands, "tokens", __doc__)
    of_tokens = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = add_command(of_tokens, "create", _create.__doc__)
    create.add_argument("name", metavar="NAME", help="whom it is for, as ci or ada@example.org")
    create.add_argument("--role", choices=[role.value for role in TokenRole], required=True, help="what it lets do")
    create.add_argument("--user", metavar="USER", help="whose it is; one may have several (default: a user NAME)")
    text = "a team that its user is in; may be repeated"
    create.add_argument("--team", action="append", default=[], metavar="TEAM", help=text)
    text = "until when it is valid: 2026-12-01T08:00, or 90d from now (default: until it is revoked)"
    create.add_argument("--expires", type=moment, metavar="TIME", help=text)
    listing = add_command(of_tokens, "list", _list.__doc__)
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    revoke = add_command(of_tokens, "revoke", _revoke.__doc__)
    revoke.add_argument("name", metavar="NAME", help="its name")
    return [(create, _create), (listing, _list), (revoke, _revoke)]


def _create(args: argparse.Namespace, settings: FolderSettings) -> int:
    """Make a token.

    Make a token, and print it to stdout: once, since the service keeps its hash alone. Give it to whom NAME stands for.

    From the first token on, the service refuses requests without one, also from this machine, and also when all are
    revoked.
    """
    role, user, teams = TokenRole(args.role), args.user, args.team
    secret, record = create_token(settings.folder, args.name, role, args.expires, user=user, teams=teams)
    of = f" of {record.user}" if record.user != record.name else ""
    of += f" ({', '.join(record.teams)})" if record.teams else ""
    add_to_audit(settings.folder, record.name, f"token created{of}, may {record.role}")
    print(f"token {record.name}{of} may {record.role}; it is shown this once:", file=sys.stderr)
    print(secret)
    return 0


def _list(args: argparse.Namespace, settings: FolderSettings) -> int:
    """Show all tokens, without their secrets."""
    from asyncpipe.cli.tables import table

    tokens = read_tokens(settings.folder) or ()
    if args.json:
        listed = [token._asdict() for token in tokens]
        print(json.dumps([{key: value for key, value in each.items() if key != "digest"} for each in listed]))
    elif tokens:
        rows = [
            (each.name, each.user, ",".join(each.teams), each.role, _when(each.created), _when(each.expires))
            for each in tokens
        ]
        print(table(("NAME", "USER", "TEAMS", "ROLE", "CREATED", "EXPIRES"), rows))
    else:
        print("no tokens")
    return 0


def _when(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _revoke(args: argparse.Namespace, settings: FolderSettings) -> int:
    """Revoke a token.

    The service accepts no request with it from now on, also if it runs. What the token's holder has open, such as the
    events of a job, ends within a second. Jobs that were submitted with it go on. The name may be given again.
    """
    record = revoke_token(settings.folder, args.name)
    add_to_audit(settings.folder, record.name, f"token revoked, could {record.role}")
    print(f"revoked {record.name}, which could {record.role}")
    return 0
