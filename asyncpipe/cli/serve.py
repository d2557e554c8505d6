"""Run a service that trains jobs.

Train jobs that are submitted over HTTP (see `asyncpipe jobs`), several at once on the same devices, for weeks. Whatever
the service has acknowledged is on disk: the process may be killed at any time, and the next start continues.

Jobs run only entries that the operator registers: --entries, or [entries] in the file. A flag overrides the environment
(ASYNCPIPE_PORT is --port, and so on for every key of the file), which overrides the file. In a flag and in the
environment a list is written as cpu:0,cpu:1 and a table as KEY=VALUE,KEY=VALUE; either may be JSON. Without a token the
service accepts only addresses of this machine.

On SIGTERM or SIGINT (Ctrl-C) the service takes no new jobs, every running job ends its step and takes a snapshot within
--grace-seconds, and the service exits with 0. A supervisor should wait ten seconds longer before it kills the process.
A second signal ends the process at once; its jobs then continue from their last snapshots at the next start.

On SIGHUP, or when told so by `asyncpipe service reload`, it reads its settings and its certificate again. Jobs that run
go on. From then on it uses what the settings say of these keys:
RELOADED

With --standby it waits while another service has the folder, and takes over within seconds when that one has ended.

examples:
  asyncpipe serve --entries charlm:build --entry-path examples/charlm --devices cpu:0,cpu:1,cpu:2,cpu:3
  asyncpipe serve --config service.toml
  asyncpipe serve --config service.toml --address 0.0.0.0 --token-file token --metrics-port none

a file of settings:
  folder = "runs/service"
  devices = ["cuda:0", "cuda:1"]
  entry_path = "/srv/training"
  token_file = "/etc/asyncpipe/token"    # mode 0600; `openssl rand -hex 32` makes a token
  share_devices = false                  # each job has its devices to itself, in a process of its own
  [entries."charlm:build"]
  fixed = { max_bytes = 200_000 }        # parameters that clients cannot set
  [memory_limit]
  "cuda:0" = "70 GiB"
"""

from __future__ import annotations

import argparse
import asyncio
import logging.config
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from textwrap import fill
from types import FrameType
from typing import TYPE_CHECKING, Any

from asyncpipe.cli.arguments import help_texts
from asyncpipe.cli.log_format import FORMATS, LEVELS, service_log
from asyncpipe.cli.metrics import metrics_served
from asyncpipe.errors import OptionError, missing_package

if TYPE_CHECKING:
    from asyncpipe.cli.arguments import Subparsers
    from asyncpipe.service.settings.service_settings import ServiceSettings
    from asyncpipe.service.training_service import TrainingService


__all__ = ["add_parser", "ending_line", "give_up", "parse_settings", "run"]

GRACE_OVER = 1
"""Exit status if jobs or devices did not end in time."""
SLACK_SECONDS = 5.0
"""After the grace period, for the store and the devices' threads to close."""
MOST_FILES = 65_536
LOOK_SECONDS = 0.5
"""Between two looks of a standby whether the folder is free."""
READER_SECONDS = 1.0
"""How long a last message waits for its reader."""

_logger = logging.getLogger(__name__)


def add_parser(subparsers: Subparsers) -> None:
    """Add ``serve`` to the command line. Its options are the settings, which only ``run`` imports."""
    parser = subparsers.add_parser("serve", help="run a service that trains jobs", add_help=False)
    parser.set_defaults(run_with=run)


def run(arguments: Sequence[str]) -> int:
    """Serve as ``arguments`` say, until a signal ends it; the exit status."""
    settings, log = parse_settings(arguments)

    # Late imports: --help and wrong settings do not wait for torch.
    from asyncpipe.service.malloc import limit_arenas

    limit_arenas(len(settings.devices))

    from asyncpipe.runtime.portal import new_event_loop
    from asyncpipe.service.jobs.isolation.job_output import JobOutput

    settings.check_devices()
    logging.config.dictConfig(service_log(log.log_level, log.log_format, settings.make_folder()))
    JobOutput()  # Of jobs on threads. Processes of jobs have their own.
    _raise_file_limit()
    deadline = threading.Timer(settings.grace_seconds + SLACK_SECONDS, give_up)
    deadline.daemon = True
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_run(arguments, settings, deadline))
    finally:
        deadline.cancel()
    return 0


def parse_settings(arguments: Sequence[str]) -> tuple[ServiceSettings, argparse.Namespace]:
    """The settings that ``arguments``, the environment and the file say, and the options of the log."""
    try:
        from pydantic_settings import CliSettingsSource

        from asyncpipe.service.settings.service_settings import RELOADED, SECRET, ServiceSettings
    except ImportError as error:
        raise missing_package("a service needs pydantic-settings, FastAPI and uvicorn", "service") from error
    texts = help_texts(__doc__.replace("RELOADED", fill(", ".join(RELOADED), 120)))
    parser = argparse.ArgumentParser("asyncpipe serve", usage="asyncpipe serve [OPTIONS]", allow_abbrev=False, **texts)
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="of stderr (default: info)")
    parser.add_argument("--log-format", choices=FORMATS, default="text", help="of stderr (default: text)")
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        ServiceSettings,
        root_parser=parser,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )
    args = parser.parse_args(arguments)
    given = source(parsed_args=args)()
    if shown := sorted(given.keys() & SECRET):
        raise OptionError(f"{shown[0]}: other users see arguments; set ASYNCPIPE_{shown[0].upper()}, or a file")
    return ServiceSettings(**given), args


def _raise_file_limit() -> None:
    """Let this process open ``MOST_FILES``, or as many as it may: each connection and each job needs some."""
    with suppress(ImportError):  # Windows has no such limit.
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def give_up() -> None:
    """End the process although jobs or devices have not ended.

    ``os._exit``, because a normal exit would join the devices' threads, one of which may hang for ever.
    """
    try:
        _print_last("the grace period is over; jobs go on from their last snapshots at the next start")
    finally:
        os._exit(GRACE_OVER)


async def _run(arguments: Sequence[str], settings: ServiceSettings, deadline: threading.Timer) -> None:
    """Serve until a signal arrives; then start ``deadline`` and drain the jobs."""
    from asyncpipe.service.http import serve_api
    from asyncpipe.service.who_serves import announced

    with _signals() as (first, hung_up):
        async with AsyncExitStack() as stack:
            service = await _opened(stack, settings, first)
            if service is None:
                _print_last(f"{first.result().name}: the standby ends")
                return
            note = stack.enter_context(announced(settings.folder))
            url = await stack.enter_async_context(serve_api(service, settings))
            _print(f"service: {url}")
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
            reloading = asyncio.create_task(_reload(service, arguments, hung_up, note), name="asyncpipe: SIGHUP")
            stack.callback(reloading.cancel)
            if settings.standby:  # It has read them long ago.
                hung_up.set()
            _print(f"ready: {status.running} jobs run, {status.queued} wait")
            number = await first
            deadline.start()
            cause = f"the service was told to end by {number.name}"
            service.take_no_more(cause)  # Before the message, whose readers rely on it.
            _print_last(ending_line(service, settings, number))
            await service.drain(cause)
        _print_last("ended; jobs go on at the next start")


async def _opened(
    stack: AsyncExitStack, settings: ServiceSettings, first: asyncio.Future[signal.Signals]
) -> TrainingService | None:
    """The service, open until ``stack`` closes; of a standby ``None`` if a signal came while it waited."""
    from asyncpipe.service.store.database import StoreError, StoreProblem
    from asyncpipe.service.submission.entries import Entries
    from asyncpipe.service.training_service import TrainingService

    entries = await asyncio.to_thread(Entries.load, settings) if settings.standby else None
    while True:
        service = TrainingService(settings, entries=entries)
        if settings.standby and not await _has_waited(service, first):
            return None
        try:
            return await stack.enter_async_context(service)
        except StoreError as error:
            if not settings.standby or error.problem is not StoreProblem.LOCKED:  # Another standby was faster.
                raise


async def _has_waited(service: TrainingService, first: asyncio.Future[signal.Signals]) -> bool:
    """Wait until no other process has the folder of ``service``; false if a signal came before.

    Meanwhile probes are answered, unless the port is one of this machine that the other service has.
    """
    from asyncpipe.service.http import serve_api
    from asyncpipe.service.store.database import STORE, is_in_use
    from asyncpipe.service.who_serves import server_of

    settings, url, refusals = service.settings, "", logging.getLogger("asyncpipe.audit.refused")
    async with AsyncExitStack() as stack:
        refusals.disabled = True  # Their file is the other one's.
        stack.callback(setattr, refusals, "disabled", False)
        while await asyncio.to_thread(is_in_use, settings.folder / STORE):
            other = server_of(settings.folder) or "another process"
            service.wait_for(f"the folder {settings.folder}, which {other} has")
            if not url:
                url = "no probes"
                with suppress(OptionError):
                    url = await stack.enter_async_context(serve_api(service, settings))
                _print(f"standby: {url}; {service.status().reason}")
            await asyncio.wait([first], timeout=LOOK_SECONDS)
            if first.done():
                return False
    return True


async def _reload(
    service: TrainingService, arguments: Sequence[str], told: asyncio.Event, note: Callable[[str, bool], None]
) -> None:
    """Read the settings again whenever ``told`` is set, and ``note`` what came of it."""
    while await told.wait():
        told.clear()
        try:
            settings, _ = await asyncio.to_thread(parse_settings, arguments)
            left = await service.reload(settings)
        except Exception as error:  # noqa: BLE001 - whatever the new settings are, the service goes on
            said, is_wrong = f"the settings are wrong, and nothing has changed: {error}", True
        else:
            said, is_wrong = f"the settings were read again; entries: {', '.join(service.entries.names)}", False
            said += f"; for a restart: {', '.join(left)}" if left else ""
        _logger.log(logging.ERROR if is_wrong else logging.INFO, "%s", said)
        note(said, is_wrong)


@contextmanager
def _signals() -> Iterator[tuple[asyncio.Future[signal.Signals], asyncio.Event]]:
    """Handle SIGINT, SIGTERM and SIGHUP during the block; the last one sets the event.

    Of the others the first is the future's result, and the second ends the process.

    The handlers are Python's (``signal.signal``), which run between two bytecodes of the main thread, and not the event
    loop's: the loop may be stuck in a callback, and the second signal must not wait for it.
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Future[signal.Signals] = loop.create_future()
    seen, hung_up = False, asyncio.Event()

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal seen
        if number == signal.SIGHUP:
            loop.call_soon_threadsafe(hung_up.set)
            return
        if seen:
            os._exit(128 + number)  # Not sys.exit: the user wants no cleanup, which may be what hangs.
        seen = True
        loop.call_soon_threadsafe(first.set_result, signal.Signals(number))

    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError):  # Only the main thread may set handlers.
            before[number] = signal.signal(number, on_signal)
    try:
        yield first, hung_up
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
