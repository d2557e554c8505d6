"""Streams of a caller's own: what a step waits for, and who waits for it, is then this caller alone.

A step begins behind what the caller's current streams have queued, and these then wait for the step. Callers that share
a stream, as all do that never set one, therefore wait for one another's steps, and for a kernel that hangs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Lock
from types import coroutine
from typing import Any, TypeVar

import torch

from asyncpipe.ops.device.devices import ACCELERATORS, resolve_devices
from asyncpipe.ops.device.lent_streams import lend
from asyncpipe.ops.device.streams import record

__all__ = ["CallerStreams", "await_inside", "current_streams"]

_T = TypeVar("_T")


class CallerStreams:
    """A stream on each accelerator among ``devices``, for one caller of one or several pipelines.

    In a thread of its own::

        streams = CallerStreams(["cuda:0", "cuda:1"])
        with streams.current():
            pipe.step(x, target)
            optimizer.step()

    On a loop, where other coroutines run in between: ``await streams.run(train(pipe))``. Tensors from elsewhere must be
    ready, or the streams must be told to wait for them; ``join`` before what was made on them is read elsewhere.
    """

    def __init__(self, devices: Sequence[str | torch.device]) -> None:
        """Raises ``DeviceError`` as ``Pipeline`` does. The streams are made when they are first used."""
        resolved = resolve_devices(devices)
        self._devices = list(dict.fromkeys(device.physical for device in resolved if device.is_accelerator))
        self._streams: list[Any] = []
        self._lock = Lock()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make them the current streams of this thread inside. May be entered by several threads at once."""
        with self._lock:
            while len(self._streams) < len(self._devices):
                self._streams.append(lend(self._devices[len(self._streams)], self))
        with _current(self._streams):
            yield

    def join(self) -> None:
        """Let this thread's current streams read what was made on these: they wait for what is queued there now."""
        for stream in self._streams:
            module = torch.get_device_module(stream.device)
            # Hazard: what the caller made on its own streams, the weights for instance, may still be written.
            module.current_stream(stream.device).wait_event(record(stream))

    async def run(self, awaitable: Awaitable[_T]) -> _T:
        """Await ``awaitable`` with these as the current streams; other coroutines of the loop keep theirs."""
        return await (await_inside(self.current, awaitable) if self._devices else awaitable)


def current_streams() -> Callable[[], AbstractContextManager[None]]:
    """A context with the streams that are current on this thread now, for another thread. On CPUs it does nothing."""
    modules = [torch.get_device_module(kind) for kind in ACCELERATORS]
    return partial(
        _current,
        [
            stream
            for module in modules
            if module.is_initialized()
            for device in range(module.device_count())
            if (stream := module.current_stream(device)) != module.default_stream(device)
        ],
    )


@contextmanager
def _current(streams: Sequence[Any]) -> Iterator[None]:
    before: list[tuple[Any, Any]] = []
    try:
        for stream in streams:
            module = torch.get_device_module(stream.device)
            before.append((module, module.current_stream(stream.device)))
            _set_stream(module, stream)
        yield
    finally:
        for module, stream in reversed(before):
            _set_stream(module, stream)


def _set_stream(module: Any, stream: Any) -> None:
    """Make ``stream`` current on its device; the current device, which torch changes with it, stays."""
    device = module.current_device()
    module.set_stream(stream)
    module.set_device(device)


@coroutine
def await_inside(
    context: Callable[[], AbstractContextManager[Any]], awaitable: Awaitable[_T]
) -> Generator[Any, Any, _T]:
    """Await ``awaitable`` inside ``context()``, which is left while ``awaitable`` waits."""
    steps: Any = awaitable.__await__()
    resume: Callable[[], Any] = partial(next, steps)
    while True:
        try:
            with context():
                awaited = resume()
        except StopIteration as end:
            result: _T = end.value
            return result
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001 - thrown into the awaitable, which handles it
            resume = partial(steps.throw, error)
        else:
            resume = partial(steps.send, sent)
