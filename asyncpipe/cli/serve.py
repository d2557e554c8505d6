"""``asyncpipe serve``: a service that trains the jobs that it is given over HTTP, until it is told to end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from asyncpipe.errors import OptionError

if TYPE_CHECKING:
    from asyncpipe.service.settings.service_settings import ServiceSettings
    from asyncpipe.service.training_service import TrainingService

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser"]

DESCRIPTION = """\
Train jobs that are submitted over HTTP (`asyncpipe jobs` does that), several at once on the same devices, for weeks.
What was acknowledged is on disk: the process can be killed at any instant, and the next one goes on.

Jobs run only what the operator registers: --entry, or [entries] in the file. Flags win over the environment
(ASYNCPIPE_PORT is --port, and so on for every key of the file), and that over the file. Without a token only this
machine can be served.

SIGTERM or SIGINT (Ctrl-C): no new jobs are taken, every running one ends its step and takes a snapshot, all within
--grace-seconds, and the service exits with 0. What stops the process for good should wait ten seconds longer than
that. A second one ends the process at once; jobs then go on from their last snapshots at the next start, as after any
kill.
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
"""Status where jobs or devices did not end in time."""
SLACK_SECONDS = 5.0
"""Beyond the grace period, in which jobs end: for the store and the devices' threads to close."""
READER_SECONDS = 1.0
"""For whoever reads what is said at the end."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def add_parser(subparsers: Subparsers) -> None:
    """Add ``serve`` to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="run a service that trains jobs",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --token would be --token-file, and a token that is given with it would be told.
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE.toml", help="a file of settings (default: ASYNCPIPE_CONFIG)")
    add("--folder", type=Path, metavar="FOLDER", help="jobs and snapshots are here (default: runs/service)")
    add("--devices", metavar="LIST", help="what jobs may train on, as cpu:0,cpu:1")
    add(
        "--entry", action="append", dest="entries", metavar="MODULE:FACTORY", help="jobs may name this; may be repeated"
    )
    add("--entry-path", type=Path, metavar="FOLDER", help="look for the entries' modules here first")
    add("--address", metavar="IP", help="serve on this address (default: 127.0.0.1); any other needs a token")
    add("--port", metavar="PORT", help="and this port (default: 8080); 0 takes any free one")
    add("--host", action="append", dest="hosts", metavar="NAME", help="requests may also ask for NAME; may be repeated")
    add("--token-file", type=Path, metavar="FILE", help="clients must show the token in FILE, of mode 0600")
    add("--metrics-address", metavar="IP", help="serve metrics on this address (default: 127.0.0.1)")
    add("--metrics-port", metavar="PORT", help='and this port (default: 9400); 0 as above, "none" for no metrics')
    add("--max-running", metavar="N", help="jobs that run at once (default: 4)")
    add("--max-queued", metavar="N", help="jobs that wait; more are refused (default: 1000)")
    add("--memory-limit", metavar="LIST", help="bytes of a device that jobs may take together, as cuda:0=70GiB")
    add("--grace-seconds", metavar="SECONDS", help="for jobs to end in, when the service is told to (default: 30)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="of stderr (default: info)")
    parser.set_defaults(run=_serve)


SETTINGS = (
    "config folder devices entries entry_path address port hosts token_file metrics_address metrics_port max_running "
    "max_queued memory_limit grace_seconds"
).split()
"""Flags that are keys of the settings."""


def _serve(args: argparse.Namespace) -> int:
    # Imported here and not above, so that neither the other commands, nor --help, nor wrong settings wait for torch.
    settings = _settings({key: value for key in SETTINGS if (value := getattr(args, key)) is not None})
    logging.basicConfig(level=args.log_level.upper(), format=FORMAT, stream=sys.stderr)

    from asyncpipe.service.malloc import limit_arenas

    limit_arenas(len(settings.devices))

    from asyncpipe.runtime.portal import new_event_loop

    settings.check_devices()
    deadline = threading.Timer(settings.grace_seconds + SLACK_SECONDS, _give_up)
    deadline.daemon = True
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_run(settings, deadline))
    finally:
        deadline.cancel()
    return 0


def _give_up() -> None:
    """End the process, whatever hangs: a device's thread may never come back."""
    try:
        _say("the grace period is over; jobs go on from their last snapshots at the next start")
    finally:
        os._exit(GRACE_OVER)


def _settings(given: dict[str, Any]) -> ServiceSettings:
    try:
        from asyncpipe.service.settings.service_settings import ServiceSettings
    except ImportError as error:
        needs = "a service needs pydantic-settings and aiohttp"
        raise OptionError(f"{needs}, and not all is installed: pip install 'asyncpipe[service]'") from error
    return ServiceSettings(**given)


async def _run(settings: ServiceSettings, deadline: threading.Timer) -> None:
    """Serve until a signal, which starts ``deadline``, then drain."""
    from asyncpipe.service.http import serve_api
    from asyncpipe.service.training_service import TrainingService

    stop = _Stop()
    with stop.heeded():
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(TrainingService(settings))
            url = await stack.enter_async_context(serve_api(service, settings))
            _print(f"service: {url}")
            stack.enter_context(_metrics(service, settings))
            _print(f"entries: {', '.join(service.entries.names)}; devices: {', '.join(settings.devices)}")
            _print(_found(service))
            number = await stop.asked()
            deadline.start()
            cause = f"the service was told to end by {number.name}"
            service.take_no_more(cause)  # Before it is said: who reads the line relies on it.
            _say(_farewell(service, settings, number))
            await service.drain(cause)
        _say("ended; jobs go on at the next start")


@contextmanager
def _metrics(service: TrainingService, settings: ServiceSettings) -> Iterator[None]:
    """Metrics over HTTP during the block, if the settings have a port for them; their address is printed."""
    from prometheus_client import CollectorRegistry

    from asyncpipe.observe.metrics import serve_metrics

    if settings.metrics_port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(service.collector)
    with serve_metrics(registry, settings.metrics_port, settings.metrics_address) as server:
        _print(f"metrics: http://{settings.metrics_address}:{server.port}/metrics")
        yield


class _Stop:
    """The signals that end the service: the first one asks, the second one ends the process where it stands."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[signal.Signals] = self._loop.create_future()
        self._seen = False

    async def asked(self) -> signal.Signals:
        """The first signal, when it comes."""
        return await self._first

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Signals are for this during the block.

        They are taken between two instructions of the main thread and not by the loop: that may be busy with
        something that hangs, and the second one must not wait for it.
        """
        before: dict[signal.Signals, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # Only the main thread may.
                before[number] = signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._seen:
            os._exit(128 + number)
        self._seen = True
        self._loop.call_soon_threadsafe(self._first.set_result, signal.Signals(number))


def _found(service: TrainingService) -> str:
    status = service.status()
    return f"ready: {status.running} jobs run, {status.queued} wait"


def _farewell(service: TrainingService, settings: ServiceSettings, number: signal.Signals) -> str:
    jobs = service.status().running
    running = "no job runs" if not jobs else f"{jobs} running {'job ends its' if jobs == 1 else 'jobs end their'} step"
    rest = (
        "" if not jobs else f" and take{'s' if jobs == 1 else ''} a snapshot, in at most {settings.grace_seconds:g} s"
    )
    return f"{number.name}: no more jobs are taken; {running}{rest} (once more: end at once)"


def _print(line: str) -> None:
    print(line, flush=True)


def _say(line: str) -> None:
    """Print ``line`` at the end, which no reader holds up or fails, whether it has gone or has stopped.

    In ``serve | tee log``, Ctrl-C ends tee as well. What is printed after a line that was not taken goes nowhere.
    """
    out, taken = sys.stdout.fileno(), threading.Event()

    def write() -> None:
        with suppress(OSError):
            os.write(out, f"{line}\n".encode())
            taken.set()

    # Not with `print`: what it cannot write it keeps, and the interpreter would try, and wait, once more at exit.
    writer = threading.Thread(target=write, name="asyncpipe farewell", daemon=True)
    writer.start()
    writer.join(READER_SECONDS)
    if not taken.is_set():
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
