"""Exceptions of a worker, raised again in the controller."""

from __future__ import annotations

import pickle
import traceback

from asyncpipe.errors import RemoteError
from asyncpipe.runtime.workers.packed import Packed, pack

__all__ = ["pack_error", "portable_error", "with_remote_text"]


def pack_error(worker: str, error: BaseException) -> Packed:
    """``error`` and its traceback's text.

    An exception travels as ``RemoteError`` if it cannot be pickled and back, or if no future can carry it.
    """
    text = "".join(traceback.format_exception(error))
    return pack(
        (RemoteError(worker, text) if isinstance(error, StopIteration) else portable_error(worker, error), text)
    )


def portable_error(worker: str, error: BaseException) -> BaseException:
    """``error``, or a ``RemoteError`` with its traceback's text if it cannot be pickled and back."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - a class's own methods run here
        return RemoteError(worker, "".join(traceback.format_exception(error)))
    return error


def with_remote_text(worker: str, error: BaseException, text: str) -> BaseException:
    """``error`` with the remote traceback as the cause of its innermost cause."""
    if not isinstance(error, RemoteError):
        innermost, seen = error, {id(error)}
        while (cause := innermost.__cause__) is not None and id(cause) not in seen:
            innermost = cause
            seen.add(id(cause))
        innermost.__cause__ = RemoteError(worker, text)
    return error
