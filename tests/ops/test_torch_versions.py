"""A torch that cannot work is refused by one sentence, at the import."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asyncpipe import ops


@pytest.mark.parametrize("version", ["2.6.0+cu124", "1.13.1", "2.9.1"])
def test_too_old(version: str) -> None:
    with pytest.raises(ImportError, match=r"works with torch 2\.13 and newer .*; torch .* is too old$"):
        ops._check(SimpleNamespace(__version__=version))


def test_a_private_name_is_gone() -> None:
    with pytest.raises(ImportError, match=r"torch 2\.99\.0 has no torch\._C\.DispatchKey\.Python"):
        ops._check(SimpleNamespace(__version__="2.99.0", _C=SimpleNamespace(DispatchKey=SimpleNamespace())))
