"""Fixtures and hooks of all tests: skips without a GPU, and detection of leaks."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner
from hypothesis import settings

FULL = Path("/dev/full")
# Test workers and more than a hundred subprocesses import the package. Where the environment forbids bytecode files,
# each of them would compile all of it again, for most of a second.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tests run beside each other, and their tensors are small: further threads of torch would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

JOIN_SECONDS = 10.0
TURNS = 5
"""Iterations of the event loop in which a cancelled coroutine may end."""


# A busy machine is no failure: each test has a timeout, its examples have no deadline of their own.
settings.register_profile("asyncpipe", deadline=None)
settings.load_profile("asyncpipe")


def pytest_configure() -> None:
    """Restore Python's handler of SIGINT (a shell starts background processes with SIGINT ignored), and so on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Workers are forked from one process as long as the environment is the same; pytest notes the test's phase in it.
    runner._update_current_test_var = lambda *_: None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of the CUDA paths, with a reason, if there is no CUDA device; and long ones, unless asked for."""
    if "long" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("long") is not None:
                item.add_marker(pytest.mark.skip(reason="takes long: `make long` runs it"))
    on_cuda = [item for item in items if item.get_closest_marker("cuda") is not None]
    if not on_cuda:
        return
    import torch  # Not at the top: the tests of the core need no torch.

    if not torch.cuda.is_available():
        for item in on_cuda:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_collection_finish() -> None:
    """Make seeding cost what it should: without a GPU, torch notes the stack each time for one that might come."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        torch.cuda.manual_seed_all = lambda seed: None


@pytest.fixture(scope="module", autouse=True)
def _preloaded_fork_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers' fork servers have imported torch already, but where tests look at how workers begin."""
    with pytest.MonkeyPatch.context() as patch:
        if "runtime" not in request.path.parts:
            patch.setattr("asyncpipe.runtime.workers.fork_server.spawn", _spawn_preloaded)
        yield


def _spawn_preloaded(*given: Any, **options: Any) -> Any:
    from preloaded import spawn  # Not at the top: it imports what tests of the core need not have.

    return spawn(*given, **options)


@pytest.fixture
def own_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No other test's files are among the temporary ones. The path is short, as that of a Unix socket must be."""
    # Made where they stay: the first ``tmp_path``, or preloaded process, of a session may come after this.
    tmp_path_factory.getbasetemp()
    get_temp_dir()
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def new_threads() -> Callable[[], int]:
    """A function that counts the threads started since; threads of earlier tests may still be ending."""
    before = set(threading.enumerate())
    return lambda: len(set(threading.enumerate()) - before)


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves a thread, a pending coroutine or a tensor behind.

    A test requests it before any fixture that holds tensors, so that those are torn down first.
    """
    threads = set(threading.enumerate())
    # Existing objects are exempt from collection: the collector need not visit torch and thousands of tests again.
    gc.collect()
    gc.freeze()
    left_by_test: list[str] = []
    if inspect.iscoroutinefunction(test := getattr(request.node, "obj", None)):
        request.node.obj = _watched(test, left_by_test)
    yield
    assert not left_by_test, f"coroutines are left pending: {left_by_test}"
    left = [thread for thread in threading.enumerate() if thread not in threads and not _ends(thread)]
    assert not left, f"threads are left: {left}"
    gc.collect()
    pending = [value for value in gc.get_objects() if issubclass(type(value), asyncio.Task) and not value.done()]
    assert not pending, f"coroutines are left pending: {pending}"
    shapes = [tuple(tensor.shape) for tensor in _tensors()]
    assert not shapes, f"tensors of these shapes are left: {shapes}"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A file on a full disk: every write to it fails with ENOSPC.

    Where this process may replace the system's own, it is another node of the same device: a test that finds a
    mistake shall not leave a regular file in its place.
    """
    if not FULL.is_char_device():
        pytest.skip("this system has no /dev/full")
    if not os.access(FULL.parent, os.W_OK):
        return FULL
    made = tmp_path / "full"
    try:
        os.mknod(made, stat.S_IFCHR | 0o666, FULL.stat().st_rdev)
        made.open("w").close()
    except OSError as error:
        pytest.skip(f"as this user, /dev/full could be replaced, and no other node can be made: {error}")
    return made


def _watched(test: Callable[..., Coroutine[Any, Any, None]], left: list[str]) -> Callable[..., Any]:
    """``test``, extended to append the tasks left on its loop to ``left``: fixtures run after the loop is closed."""

    @functools.wraps(test)
    async def run(**arguments: Any) -> None:
        before = asyncio.all_tasks()
        await test(**arguments)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        left.extend(map(repr, asyncio.all_tasks() - before))

    return run


def _ends(thread: threading.Thread) -> bool:
    """Whether ``thread`` ends in time. Threads that Python did not start, such as the autograd engine's, may stay."""
    if isinstance(thread, threading._DummyThread):
        return True
    thread.join(JOIN_SECONDS)
    return not thread.is_alive()


def _tensors() -> list[Any]:
    """All tensors that the collector tracks, without those that existed before ``gc.freeze``."""
    torch = sys.modules.get("torch")
    return [] if torch is None else [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
