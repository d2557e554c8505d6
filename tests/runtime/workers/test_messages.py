"""What travels between a controller and its workers: messages, answers, errors, log records, large buffers."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_entries import TwoArgumentsError
from worker_helpers import SECONDS, Recorded

from asyncpipe.errors import MessageError, RemoteError, TaskError
from asyncpipe.runtime.portal import Portal
from asyncpipe.runtime.workers.channel import FRAME_BYTES, Channel, Role
from asyncpipe.runtime.workers.packed import SMALLEST_OUT_OF_BAND, Packed, pack
from asyncpipe.secured import Secured

ROOT = Path(__file__).parents[3]
LARGE = 64 << 20


# Answers and errors


WRONG = [
    (("fail", KeyError("missing")), KeyError, "missing"),
    (("fail", TaskError("F(0,1)", "F", 0, 1, "cpu:1", ValueError("in the stage"))), TaskError, r"F\(0,1\) failed"),
    (("fail_locally",), RemoteError, "LocalError: of a class that nobody can import"),
    (("fail_unpicklably",), RemoteError, "TwoArgumentsError: 1 and 2"),
    (("fail", StopIteration()), RemoteError, "StopIteration"),
    (("unpicklable",), MessageError, "a function cannot be sent to another process"),
    (("cancelled",), RuntimeError, "cancelled in the worker"),
    (("no_such_deed",), AttributeError, "no_such_deed"),
    (("echo", lambda: None), MessageError, r"a tuple cannot be sent .* must be importable from a module"),
    (("echo", TwoArgumentsError(1, 2)), MessageError, "a message from another process cannot be unpickled"),
]


async def test_a_message_may_have_more_buffers_than_the_system_takes_at_a_time():
    sent = [numpy.full(SMALLEST_OUT_OF_BAND, number % 251, numpy.uint8) for number in range(1500)]
    async with Recorded().group as group:
        (worker,) = await group.start("worker")
        async with asyncio.timeout(SECONDS):
            answer = await worker.ask(("echo", sent))
    assert all(map(numpy.array_equal, answer, sent))


async def test_whatever_goes_wrong_with_an_answer_ends_the_question():
    """What a worker raises is raised here, with the worker's traceback behind the last of its causes."""
    recorded = Recorded()
    async with recorded.group as group:
        (worker,) = await group.start("worker")
        errors = []
        for question, raised, text in WRONG:
            with pytest.raises(raised, match=text) as caught:
                await worker.ask(question)
            errors.append(caught.value)
            assert await worker.ask(("echo", "it goes on")) == "it goes on"
        with pytest.raises(MessageError, match="must be importable"):
            worker.send(("echo", lambda: None))
    missing, failed, *_ = errors
    assert isinstance(missing.__cause__, RemoteError)
    assert "in worker 'worker'" in str(missing.__cause__)
    assert "worker_entries.py" in missing.__cause__.text
    assert isinstance(failed.__cause__, ValueError)
    assert isinstance(failed.__cause__.__cause__, RemoteError)
    assert "in the stage" in "".join(traceback.format_exception(failed))
    assert recorded.heard == []


async def test_log_records_of_a_worker_are_handled_by_the_controllers_loggers(caplog):
    caplog.set_level(logging.ERROR, "asyncpipe.quiet")
    caplog.set_level(logging.INFO, "asyncpipe")  # The level of the handler, too.
    async with Recorded().group as group:
        (worker,) = await group.start("worker 7")
        await worker.ask(("log", "asyncpipe.some", logging.INFO, "told"))
        await worker.ask(("log", "asyncpipe.some", logging.DEBUG, "not told"))
        await worker.ask(("log", "asyncpipe.quiet", logging.INFO, "not told"))
        await worker.ask(("log", "of a user", logging.WARNING, "told, too"))
    assert caplog.record_tuples == [
        ("asyncpipe.some", logging.INFO, "worker 7: told"),
        ("of a user", logging.WARNING, "worker 7: told, too"),
    ]


# Large messages


async def test_a_large_message_passes_whole_and_its_buffers_are_not_copied_into_the_pickle():
    content = bytearray(range(256)) * (LARGE // 256)
    packed = pack(("length", pickle.PickleBuffer(content)))
    assert [part.nbytes for part in packed.parts][1:] == [LARGE]
    async with Recorded(address=("127.0.0.1", 0)).group as group:
        first, second = await group.start("first", "second")
        assert await asyncio.gather(first.ask(packed), second.ask(packed)) == [LARGE, LARGE]
        assert await first.ask(("bytes", LARGE)) == content


def piped() -> tuple[Portal, list[Channel], list[list[tuple[Role, int, Packed]]], threading.Event]:
    """Two channels that are connected, what each has received, and whether one was closed."""
    received: list[list[tuple[Role, int, Packed]]] = [[], []]
    closed = threading.Event()

    class Box:
        def __init__(self, index: int) -> None:
            self.index = index

        def received(self, role: Role, number: int, packed: Packed) -> None:
            received[self.index].append((role, number, packed))

        def closed(self, error: Exception) -> None:
            closed.set()

    async def make() -> list[Channel]:
        loop = asyncio.get_running_loop()
        return [Channel(Secured(end), loop, Box(index)) for index, end in enumerate(socket.socketpair())]

    portal = Portal()
    return portal, portal.call(make()), received, closed


@pytest.fixture
def pair() -> Iterator[tuple[Portal, list[Channel], list[list[tuple[Role, int, Packed]]], threading.Event]]:
    made = portal, channels, _, _ = piped()
    yield made
    close(portal, channels)


def close(portal: Portal, channels: list[Channel]) -> None:
    async def end() -> None:
        for channel in channels:
            channel.close()

    portal.call(end())
    portal.close()
    portal.join()


def wait_for(count: int, box: list[object]) -> None:
    deadline = time.monotonic() + SECONDS
    while len(box) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_urgent_message_overtakes_a_large_one(pair):
    _, (sender, _), (_, box), _ = pair
    large = Packed((memoryview(bytes(LARGE)),))
    sender.send(Role.MESSAGE, 1, large)
    sender.send(Role.MESSAGE, 2)
    sender.send(Role.PING, 3, urgent=True)
    wait_for(3, box)
    assert [number for _, number, _ in box] == [3, 1, 2]
    assert box[1][2].parts[0].nbytes == LARGE
    assert sender.flush(SECONDS)


SIZES = st.sampled_from([0, 1, 5, 1000, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, SMALLEST_OUT_OF_BAND, 1_500_000])


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.lists(SIZES, max_size=4)), max_size=12))
def test_messages_arrive_whole_and_those_of_a_stream_in_order(messages):
    portal, channels, boxes, _ = piped()
    try:
        sent: dict[tuple[int, bool], list[int]] = {}
        for number, (end, urgent, sizes) in enumerate(messages):
            parts = [memoryview(bytes([number % 251, index]) * size)[:size] for index, size in enumerate(sizes)]
            channels[end].send(Role.MESSAGE, number, Packed(parts), urgent=urgent)
            sent.setdefault((1 - end, urgent), []).append(number)
        for box in (0, 1):
            wait_for(sum(len(numbers) for (end, _), numbers in sent.items() if end == box), boxes[box])
            for _, number, packed in boxes[box]:
                sizes = messages[number][2]
                assert [bytes(part) for part in packed.parts] == [
                    (bytes([number % 251, index]) * size)[:size] for index, size in enumerate(sizes)
                ]
            for urgent in (True, False):
                numbers = [number for _, number, _ in boxes[box] if messages[number][1] == urgent]
                assert numbers == sent.get((box, urgent), [])
    finally:
        close(portal, channels)


# Classes of the controller's script

SCRIPT = """
import asyncio, sys
from dataclasses import dataclass
sys.path[:0] = {path!r}
from worker_helpers import Recorded
from asyncpipe.errors import MessageError

print("the script runs as", __name__, flush=True)

@dataclass
class Net:
    width: int
    class Inner:
        pass

async def main():
    async with Recorded().group as group:
        worker, = await group.start("worker")
        await worker.ask(("echo", 1))
        try:
            print(await worker.ask(("echo", [Net(3), Net.Inner])))
            print(await worker.ask(("length", [Net(3)])))
        except MessageError as error:
            print(error)

{guard}asyncio.run(main())
"""


def ran(tmp_path: Path, guard: str, *command: str, main: str = "script.py") -> list[str]:
    """The lines that a script prints whose main code stands behind ``guard``."""
    script = SCRIPT.format(path=[str(ROOT), str(ROOT / "tests/support")], guard=guard)
    (tmp_path / main).parent.mkdir(exist_ok=True)
    (tmp_path / main).write_text(script, encoding="utf-8")
    arguments = [sys.executable, *(command or [str(tmp_path / main)])]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


GUARD = 'if __name__ == "__main__": '
ECHOED = [
    "the script runs as __main__",
    "the script runs as __mp_main__",
    "[Net(width=3), <class '__main__.Net.Inner'>]",
    "1",
]


def test_a_script_with_a_guard_is_imported_where_its_classes_are_needed_and_others_never(tmp_path):
    assert ran(tmp_path, GUARD) == ECHOED
    assert ran(tmp_path, GUARD, "-m", "package.module", main="package/module.py") == ECHOED
    first, refused = ran(tmp_path, "")
    assert first == "the script runs as __main__"
    assert "Net is defined in the script" in refused
    assert "put Net in a module" in refused
    script = SCRIPT.format(path=[str(ROOT), str(ROOT / "tests/support")], guard="")
    assert "Net is defined interactively" in ran(tmp_path, "", "-c", script)[1]
