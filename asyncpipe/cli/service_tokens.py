"""``asyncpipe service tokens``: who may use a service, by tokens with names and roles."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from asyncpipe.cli.arguments import add_command
from asyncpipe.cli.jobs_finding import moment
from asyncpipe.cli.service_folder import add_folder_options, folder_of

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers

__all__ = ["add_parser"]

ROLES = ("read", "submit", "operate")

DESCRIPTION = """\
Tokens by which a service knows who asks. Each has a name, which the log of changes (audit.jsonl) tells, and a role:

  read       sees jobs, losses, logs, files, workers and metrics
  submit     also submits jobs and changes them
  operate    also what concerns the service: drains hosts, deletes what is kept

Tokens are made and revoked here, in the folder of the service, and not over HTTP: who may is who may write the folder.
The service may run meanwhile, and knows at once. It keeps hashes of tokens. The token of its settings (token_file) may
do everything.
"""

CREATE = """\
Make a token, and print it to stdout: once, since the service keeps its hash alone. Give it to whom NAME stands for.

From the first token on, the service refuses requests without one, also from this machine; and it goes on to do so when
all are revoked.
"""

REVOKE = """\
Revoke a token: no request with it is begun any more, also if the service runs, and what its holder has open, such as
the events of a job, ends within a second. Jobs that were submitted with it go on. The name may be given again.
"""


def add_parser(commands: Subparsers) -> None:
    """Add ``tokens`` and its commands to ``asyncpipe service``."""
    parser = add_command(commands, "tokens", summary="who may use a service", description=DESCRIPTION)
    of_tokens = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = add_command(of_tokens, "create", summary="make a token", description=CREATE)
    create.add_argument("name", metavar="NAME", help="whom it is for, as ci or ada@example.org")
    create.add_argument("--role", choices=ROLES, required=True, help="what it lets do")
    text = "until when it is valid: 2026-12-01T08:00, or 90d from now (default: until it is revoked)"
    create.add_argument("--expires", type=moment, metavar="TIME", help=text)
    create.set_defaults(run=_create)
    listing = add_command(of_tokens, "list", summary="show all tokens, without their secrets")
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    listing.set_defaults(run=_list)
    revoke = add_command(of_tokens, "revoke", summary="revoke a token", description=REVOKE)
    revoke.add_argument("name", metavar="NAME", help="its name")
    revoke.set_defaults(run=_revoke)
    for each in (create, listing, revoke):
        add_folder_options(each)


# Late imports: --help does not wait for them.


def _create(args: argparse.Namespace) -> int:
    from asyncpipe.service.token_roles import TokenRole, create_token

    secret, record = create_token(folder_of(args), args.name, TokenRole(args.role), args.expires)
    print(f"token {record.name} may {record.role}; it is shown this once:", file=sys.stderr)
    print(secret)
    return 0


def _list(args: argparse.Namespace) -> int:
    from asyncpipe.cli.tables import table
    from asyncpipe.service.token_roles import read_tokens

    tokens = read_tokens(folder_of(args)) or ()
    if args.json:
        listed = [token._asdict() for token in tokens]
        print(json.dumps([{key: value for key, value in each.items() if key != "digest"} for each in listed]))
    elif tokens:
        rows = [(each.name, each.role, _when(each.created), _when(each.expires)) for each in tokens]
        print(table(("NAME", "ROLE", "CREATED", "EXPIRES"), rows))
    else:
        print("no tokens")
    return 0


def _when(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _revoke(args: argparse.Namespace) -> int:
    from asyncpipe.service.token_roles import revoke_token

    record = revoke_token(folder_of(args), args.name)
    print(f"revoked {record.name}, which could {record.role}")
    return 0
