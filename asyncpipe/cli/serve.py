"""``asyncpipe serve``: a service that trains jobs submitted over HTTP, until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import add_command
from asyncpipe.cli.log_format import FORMATS, log_to_stderr
from asyncpipe.cli.metrics import metrics_served
from asyncpipe.errors import missing_package

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.service.settings.service_settings import ServiceSettings
    from asyncpipe.service.training_service import TrainingService


__all__ = ["add_parser", "ending_line", "give_up"]

DESCRIPTION = """\
Train jobs that are submitted over HTTP (see `asyncpipe jobs`), several at once on the same devices, for weeks. Whatever
the service has acknowledged is on disk: the process may be killed at any time, and the next start continues.

Jobs run only entries that the operator registers: --entry, or [entries] in the file. A flag overrides the environment
(ASYNCPIPE_PORT is --port, and so on for every key of the file), which overrides the file. Without a token the service
accepts only addresses of this machine.

On SIGTERM or SIGINT (Ctrl-C) the service takes no new jobs, every running job ends its step and takes a snapshot within
--grace-seconds, and the service exits with 0. A supervisor should wait ten seconds longer before it kills the process.
A second signal ends the process at once; its jobs then continue from their last snapshots at the next start.
"""

EPILOG = """\
examples:
  asyncpipe serve --entry charlm:build --entry-path examples/charlm --devices cpu:0,cpu:1,cpu:2,cpu:3
  asyncpipe serve --config service.toml
  asyncpipe serve --config service.toml --address 0.0.0.0 --token-file token --metrics-port none

a file of settings:
  folder = "runs/service"
  devices = ["cuda:0", "cuda:1"]
  entry_path = "/srv/training"
  token_file = "/etc/asyncpipe/token"    # mode 0600; `openssl rand -hex 32` makes a token
  max_running = 4
  [entries."charlm:build"]
  fixed = { max_bytes = 200_000 }        # parameters that clients cannot set
  [memory_limit]
  "cuda:0" = "70 GiB"
"""

GRACE_OVER = 1
"""Exit status if jobs or devices did not end in time."""
SLACK_SECONDS = 5.0
"""After the grace period, for the store and the devices' threads to close."""
READER_SECONDS = 1.0
"""How long a last message waits for its reader."""


def add_parser(subparsers: Subparsers) -> None:
    """Add ``serve`` to the command line."""
    parser = add_command(
        subparsers,
        "serve",
        summary="run a service that trains jobs",
        description=DESCRIPTION,
        examples=EPILOG,
        allow_abbrev=False,  # Else `--token SECRET` would mean --token-file, whose error message prints the secret.
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.toml", help="a file of settings (default: ASYNCPIPE_CONFIG)")
    add("--folder", type=Path, metavar="FOLDER", help="where jobs and snapshots are kept (default: runs/service)")
    add("--devices", metavar="LIST", help="devices for jobs, as cpu:0,cpu:1")
    add(
        "--entry",
        action="append",
        dest="entries",
        metavar="MODULE:FACTORY",
        help="an entry for jobs; may be repeated",
    )
    add("--entry-path", type=Path, metavar="FOLDER", help="search this folder first for the entries' modules")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="of stderr (default: info)")
    add("--log-format", choices=FORMATS, default="text", help="of stderr: text (default), or json, one object a line")
    _add_addresses(parser)
    _add_jobs(parser)
    _add_limits(parser)
    parser.set_defaults(run=_serve)


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where it listens").add_argument
    add("--address", metavar="IP", help="listen on this address (default: 127.0.0.1); others need a token")
    add("--port", metavar="PORT", help="listen on this port (default: 8080); 0 takes a free one")
    add("--probe-port", metavar="PORT", help="answer /livez and /readyz, and nothing else, on this port as well")
    add(
        "--host",
        action="append",
        dest="hosts",
        metavar="NAME",
        help="another host name that requests may use; may be repeated",
    )
    add("--token-file", type=Path, metavar="FILE", help="clients must send the token in FILE, of mode 0600")
    add(
        "--metrics-address",
        metavar="IP",
        help="serve metrics on this address (default: 127.0.0.1); others need --metrics-client-authority",
    )
    add(
        "--metrics-port",
        metavar="PORT",
        help='and on this port (default: 9400); 0 takes a free one, "none" disables metrics',
    )
    add("--metrics-certificate", type=Path, metavar="FILE", help="serve metrics over TLS with this certificate (PEM)")
    add("--metrics-key", type=Path, metavar="FILE", help="and this key, if the certificate's file has none")
    add(
        "--metrics-client-authority",
        type=Path,
        metavar="FILE",
        help="answer only scrapers whose certificate this authority has signed (PEM)",
    )
    add("--metrics-access", metavar="HOW", help="certificate (default), or open: for a network of scrapers alone")


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how jobs run").add_argument
    add("--max-running", metavar="N", help="most jobs that run at once (default: 4)")
    add("--max-queued", metavar="N", help="most jobs that wait; more are refused (default: 1000)")
    add(
        "--workers",
        metavar="WHERE",
        help="threads (default), processes (one for each device), ray or torchrun",
    )
    add(
        "--isolation",
        choices=("thread", "process"),
        help="run each job in a process of its own (default where jobs share no device), or on threads of the service",
    )
    add(
        "--no-share-devices",
        dest="share_devices",
        action="store_false",
        default=None,
        help="run one job at a time on a device (default: any number)",
    )
    add("--job-memory", metavar="BYTES", help='most memory of a job\'s process, as "8 GiB" (default: no limit)')
    add("--cancel-seconds", metavar="SECONDS", help="time for a cancelled job to end, before it is killed (default: 5)")
    add("--max-attempts", metavar="N", help="deaths after which a job is quarantined (default: 3)")
    add(
        "--no-resume",
        dest="resume",
        action="store_false",
        default=None,
        help="pause the jobs that the last process left, so that nothing begins by itself",
    )
    add("--memory-limit", metavar="LIST", help="memory of a device for all jobs together, as cuda:0=70GiB")
    add("--grace-seconds", metavar="SECONDS", help="time for jobs to end after a signal (default: 30)")
    add(
        "--lost-state",
        metavar="WHAT",
        help="if the store or the folders of jobs are gone: refuse (default), quarantine",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits of clients")
    add = limits.add_argument
    of_address = "requests of one address without a right token"
    add("--requests-per-second", metavar="N", help=f"{of_address}, on average (default: 50)")
    add("--burst", metavar="N", help=f"{of_address}, at once (default: 100)")
    add("--token-requests-per-second", metavar="N", help="requests with one token, on average (default: 100)")
    add("--token-burst", metavar="N", help="requests with one token, at once (default: 200)")
    add("--max-connections", metavar="N", help="connections of the API (default: 1000, or what the file limit allows)")
    add("--header-seconds", metavar="SECONDS", help="time to send a request's head (default: 10)")
    add("--body-seconds", metavar="SECONDS", help="time to send a request's body (default: 10)")
    add("--max-body", metavar="BYTES", help="size of a request's body (default: 128KiB)")
    add(
        "--trusted-proxy",
        action="append",
        dest="trusted_proxies",
        metavar="IP",
        help="address or network of a proxy that says whose requests it passes on; may be repeated",
    )
    add("--proxy-header", metavar="NAME", help="where it says so: forwarded (default) or x-forwarded-for")


NO_SETTINGS = ("log_level", "log_format", "run")
"""Arguments that are no keys of the settings."""


def _serve(args: argparse.Namespace) -> int:
    # Late imports: other commands, --help and wrong settings do not wait for torch.
    given = {key: value for key, value in vars(args).items() if key not in NO_SETTINGS and value is not None}
    settings = _settings(given)
    log_to_stderr(args.log_level, args.log_format)

    from asyncpipe.service.malloc import limit_arenas

    limit_arenas(len(settings.devices))

    from asyncpipe.runtime.portal import new_event_loop
    from asyncpipe.service.descriptors import raise_limit

    settings.check_devices()
    budget = raise_limit(settings)
    settings = settings.model_copy(update={"max_connections": budget.connections})
    _print(str(budget))
    deadline = threading.Timer(settings.grace_seconds + SLACK_SECONDS, give_up)
    deadline.daemon = True
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_run(settings, deadline))
    finally:
        deadline.cancel()
    return 0


def give_up() -> None:
    """End the process although jobs or devices have not ended.

    ``os._exit``, because a normal exit would join the devices' threads, one of which may hang for ever.
    """
    try:
        _print_last("the grace period is over; jobs go on from their last snapshots at the next start")
    finally:
        os._exit(GRACE_OVER)


def _settings(given: dict[str, Any]) -> ServiceSettings:
    try:
        from asyncpipe.service.settings.service_settings import ServiceSettings
    except ImportError as error:
        raise missing_package("a service needs pydantic-settings, FastAPI and uvicorn", "service") from error
    return ServiceSettings(**given)


async def _run(settings: ServiceSettings, deadline: threading.Timer) -> None:
    """Serve until a signal arrives; then start ``deadline`` and drain the jobs."""
    from asyncpipe.service.http import serve_api
    from asyncpipe.service.training_service import TrainingService

    with _end_signals() as first:
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(TrainingService(settings))
            url = await stack.enter_async_context(serve_api(service, settings))
            _print(f"service: {url}")
            if settings.probe_port is not None:
                _print(f"probes: port {settings.probe_port}")
            metrics = metrics_served(
                service.collector,
                settings.metrics_port,
                settings.metrics_address,
                certificate=settings.metrics_certificate,
                key=settings.metrics_key,
                client_authority=settings.metrics_client_authority,
            )
            stack.enter_context(metrics)
            where = ", in worker processes" if settings.workers != "threads" else ""
            where += "; each job in a process of its own" if settings.is_isolated else ""
            _print(f"entries: {', '.join(service.entries.names)}; devices: {', '.join(settings.devices)}{where}")
            status = service.status()
            _print(f"ready: {status.running} jobs run, {status.queued} wait")
            number = await first
            deadline.start()
            cause = f"the service was told to end by {number.name}"
            service.take_no_more(cause)  # Before the message, whose readers rely on it.
            _print_last(ending_line(service, settings, number))
            await service.drain(cause)
        _print_last("ended; jobs go on at the next start")


@contextmanager
def _end_signals() -> Iterator[asyncio.Future[signal.Signals]]:
    """Handle SIGINT and SIGTERM during the block: the first is the future's result, the second ends the process.

    The handlers are Python's (``signal.signal``), which run between two bytecodes of the main thread, and not the event
    loop's: the loop may be stuck in a callback, and the second signal must not wait for it.
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Future[signal.Signals] = loop.create_future()
    seen = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal seen
        if seen:
            os._exit(128 + number)  # Not sys.exit: the user wants no cleanup, which may be what hangs.
        seen = True
        loop.call_soon_threadsafe(first.set_result, signal.Signals(number))

    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):  # Only the main thread may set handlers.
            before[number] = signal.signal(number, on_signal)
    try:
        yield first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ending_line(service: TrainingService, settings: ServiceSettings, number: signal.Signals) -> str:
    """The line that is printed when a signal ends the service."""
    jobs = service.status().running
    does = "running job ends its step and takes" if jobs == 1 else "running jobs end their step and take"
    running = f"{jobs} {does} a snapshot, in at most {settings.grace_seconds:g} s" if jobs else "no job runs"
    return f"{number.name}: no more jobs are taken; {running} (once more: end at once)"


def _print(line: str) -> None:
    print(line, flush=True)


def _print_last(line: str) -> None:
    """Print a last message; a reader that has gone or stopped reading neither fails nor delays the exit.

    In ``serve | tee log``, for example, Ctrl-C ends tee as well. If a line is not read in time, stdout becomes
    ``/dev/null``.
    """
    out, taken = sys.stdout.fileno(), threading.Event()

    def write() -> None:
        with suppress(OSError):
            os.write(out, f"{line}\n".encode())
            taken.set()

    # Not `print`: it would keep a line that it cannot write in its buffer, and the interpreter's exit would block.
    writer = threading.Thread(target=write, name="asyncpipe last message", daemon=True)
    writer.start()
    writer.join(READER_SECONDS)
    if not taken.is_set():
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
