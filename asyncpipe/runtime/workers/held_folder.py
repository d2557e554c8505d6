"""A folder for sockets, which does not stay when its maker is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress

__all__ = ["HeldFolder"]


class HeldFolder:
    """A new folder of temporary files that only this user can enter, until ``remove``.

    Its maker has it locked, which ends with the maker's process, however that ends. Whoever makes the next folder with
    the same ``prefix`` removes those that nobody has locked. So what is left is at most what the last ones have left.
    """

    def __init__(self, prefix: str) -> None:
        _remove_left(prefix)
        while True:
            self.path = tempfile.mkdtemp(prefix=prefix)
            with suppress(FileNotFoundError):
                self._descriptor = _open(self.path)
                # Whoever removes what is left may have seen this folder before it was locked. Then it is gone when the
                # lock is had, and there must be another one. Without locks (on some file systems) nobody removes any.
                with suppress(OSError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if _is_at(self._descriptor, self.path):
                    break
                os.close(self._descriptor)

    def remove(self) -> None:
        """Remove it with what is in it; twice is once."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _remove_left(prefix: str) -> None:
    """Remove the folders of this user with ``prefix`` that nobody has locked."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in [each for each in entries if each.name.startswith(prefix)]:
            with suppress(OSError):
                descriptor = _open(entry.path)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(descriptor).st_uid == os.getuid() and _is_at(descriptor, entry.path):
                        shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(descriptor)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
