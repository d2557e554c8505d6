"""What is different in other versions of torch: one that cannot work is refused by one sentence, at the import."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from asyncpipe import ops
from asyncpipe.ops.autograd import own_draws
from asyncpipe.ops.autograd.own_draws import OwnDraws


@pytest.mark.parametrize("version", ["2.6.0+cu124", "1.13.1", "2.8.0"])
def test_too_old(version: str) -> None:
    with pytest.raises(ImportError, match=r"works with torch 2\.9 and newer .*; torch .* is too old$"):
        ops._check(SimpleNamespace(__version__=version))


def test_a_private_name_is_gone() -> None:
    with pytest.raises(ImportError, match=r"torch 2\.99\.0 has no torch\._C\.DispatchKey\.Python"):
        ops._check(SimpleNamespace(__version__="2.99.0", _C=SimpleNamespace(DispatchKey=SimpleNamespace())))


def test_the_dispatch_key_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "DRAWS_KEY", "Gone")
    with pytest.raises(ImportError, match=r"works with torch .*; torch \S+ has no dispatch key Gone, install one"):
        ops._check(torch)


def old_put(slot: str, value: object) -> None:
    """Takes no reference, but drops one when the slot changes, as torch itself does up to 2.11."""
    own_draws._put(slot, value)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))


@pytest.mark.parametrize("torchs", [torch._C._stash_obj_in_tls, old_put], ids=["of this torch", "of an old one"])
def test_a_slot_holds_one_reference(torchs: Callable[[str, object], None]) -> None:
    put = own_draws._balanced(torchs)
    value = object()
    alone = sys.getrefcount(value)
    kept = [value] * 20  # A missing reference fails the test instead of Python.
    for _ in range(10):
        put("asyncpipe: a test", value)
        assert sys.getrefcount(value) == alone + len(kept) + 1
        put("asyncpipe: a test", kept)
        assert sys.getrefcount(value) == alone + len(kept)


class Draws(OwnDraws):
    """Any draws."""


def enter(draws: OwnDraws) -> None:
    for _ in range(1000):
        with draws, draws:
            assert own_draws.own_draws() is draws


def test_entering_keeps_the_count_of_references() -> None:
    draws = Draws()
    before, nones = sys.getrefcount(draws), sys.getrefcount(None)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(enter, [draws, draws]))
    enter(draws)
    assert sys.getrefcount(draws) == before
    assert abs(sys.getrefcount(None) - nones) < 500, "it is put where there was nothing"
    alive = weakref.ref(draws)
    del draws
    assert alive() is None
