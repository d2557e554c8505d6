"""The format of a backup: a tar archive, whose last member says what is in it.

::

    jobs.sqlite3                            the store, as it was when the backup began
    jobs/ID/snapshots/step-40/model.pt …    snapshots, each whole
    jobs/ID/events.jsonl, losses.jsonl …    logs, up to their last whole line
    audit.jsonl, refused.jsonl …
    backup.json                             the format, the time, and the SHA-256 of each file

Any ``tar`` reads it. Without its last member it is a part of a backup, and is refused.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import time
from pathlib import PurePosixPath
from typing import IO, Any

from asyncpipe.errors import AsyncpipeError

__all__ = ["CONTENTS", "FORMAT", "ArchiveWriter", "BackupError", "HashedReader", "is_safe"]

FORMAT = 1
CONTENTS = "backup.json"
"""The name of the last member."""


class BackupError(AsyncpipeError, RuntimeError):
    """A backup cannot be made or restored; the message says what is wrong and what would be right.

    Nothing is left of what was begun.
    """


class HashedReader:
    """A file that is read, and the SHA-256 of what was read of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """As ``read`` of a file."""
        content = self._file.read(size)
        self._sha256.update(content)
        return content

    @property
    def sha256(self) -> str:
        """Of all that was read."""
        return self._sha256.hexdigest()


class ArchiveWriter:
    """Writes a backup to ``file``, member by member; ``finish`` makes it a whole one. Blocks; raises ``OSError``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed by finish
        self._at = time.time()
        self._sums: dict[str, str] = {}

    def add(self, name: str, file: IO[bytes], size: int) -> str:
        """Add the next ``size`` bytes of ``file`` as ``name``; their SHA-256. Raises ``OSError`` if there are fewer."""
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = size, 0o600, int(self._at)
        source: Any = HashedReader(file)
        self._tar.addfile(info, source)
        self._sums[name] = source.sha256
        return self._sums[name]

    def finish(self, about: dict[str, Any], scratch: IO[bytes]) -> None:
        """Write the last member, with the description ``about``, through the empty file ``scratch``."""
        document = {"format": FORMAT, "at": self._at, **about, "sha256": self._sums}
        scratch.write(json.dumps(document, indent=1).encode())
        size = scratch.tell()
        scratch.seek(0)
        self.add(CONTENTS, scratch, size)
        self._tar.close()


def is_safe(name: str) -> bool:
    """Whether a member of this name is inside the folder that an archive is read into."""
    path = PurePosixPath(name)
    return (
        not path.is_absolute() and "\\" not in name and ":" not in name and ".." not in path.parts and str(path) == name
    )
