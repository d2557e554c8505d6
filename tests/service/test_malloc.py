"""The C library's heaps: how many a process gets, counted by the C library itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from asyncpipe.service import malloc

THREADS = 12
COUNT = f"""
import ctypes, os, tempfile, threading
from asyncpipe.service.malloc import limit_arenas

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc.restype = ctypes.c_void_p
told = limit_arenas(1)
barrier = threading.Barrier({THREADS})

def allocate():
    barrier.wait()
    libc.malloc(1000)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(told, file.read().count(b"<heap nr"))
"""


def counted(**environment: str) -> str:
    """What ``limit_arenas(1)`` says in a process of its own, and how many arenas threads have made there then."""
    kept = {key: value for key, value in os.environ.items() if key != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", COUNT]
    ended = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True, timeout=60)
    return ended.stdout.strip()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
def test_threads_share_a_few_heaps():
    assert counted() == "3 3"
    assert counted(MALLOC_ARENA_MAX="6") == "None 6"


@pytest.mark.parametrize("said", [None, "musl 1.2", ValueError("no such name"), AttributeError("no confstr")])
def test_another_c_library_is_left_alone(monkeypatch, said):
    def confstr(_: str) -> str | None:
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr(os, "confstr", confstr)
    monkeypatch.setattr(malloc.ctypes, "CDLL", None)
    assert malloc.limit_arenas(2) is None
