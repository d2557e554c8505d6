"""Downloads an artifact of a job, so that it goes on where it was interrupted, and is whole or not there at all.

::

    GET …/artifacts/model.pt                    200, its SHA-256 as ETag
    GET …/artifacts/model.pt                    206, the rest of the same one, or 200, all of another one
        Range: bytes=1000-, If-Range: "…"

    model.pt.3fa9….part ───── has that SHA-256 ─────▶ model.pt

The name of the part says what it is of, so another process can go on with it, after a day as well.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import BinaryIO

import httpx

from asyncpipe.errors import OptionError
from asyncpipe.service.client.asking import Asking, BrokenExchange, Repeating, refusal
from asyncpipe.service.client.errors import ApiError, DamagedDownloadError

__all__ = ["download"]

BLOCK = 1024 * 1024
"""Bytes of a part that are read at once."""
_TAG = re.compile(r'"([0-9a-f]{64})"')
_PART = re.compile(r"\.([0-9a-f]{64})\.part")


async def download(asking: Asking, path: str, query: Sequence[tuple[str, str]], artifact: str, to: Path) -> Path:
    """The file that ``artifact`` at ``path`` has become: ``to``, or below it if it is a folder."""
    work, repeating = asking.wire.work, Repeating(asking)
    with closing(await work(partial(_PartFile, _target(to, artifact)))) as part:
        while not part.is_whole:
            headers = {"Accept": "*/*"}
            if part.size:
                headers |= {"Range": f"bytes={part.size}-", "If-Range": f'"{part.sha256}"'}
            try:
                async with asking.wire.open(asking.request("GET", path, query=query, headers=headers)) as opened:
                    response, content = opened
                    if response.status_code not in (200, 206):
                        raise await refusal(response, content)
                    tag = _TAG.fullmatch(response.headers.get("etag", ""))
                    if tag is None:
                        raise BrokenExchange("the response has no SHA-256 as its tag; is this an asyncpipe service?")
                    if response.status_code == 200:
                        await work(partial(part.begin, tag[1]))
                    async for chunk in content:
                        part.write(chunk)
                        repeating.progressed()
                break
            except (httpx.TransportError, BrokenExchange, ApiError) as error:
                await repeating.after(error)
        return await work(part.finish)


def _target(to: Path, artifact: str) -> Path:
    """Where ``artifact`` is to be. Raises ``OptionError``."""
    if to.is_dir():
        # The name is the service's, or came from somebody else: it is not to lead out of the folder.
        if Path(artifact).name != artifact or artifact == "..":
            raise OptionError(f"an artifact's name is no path, got {artifact!r:.100}")
        to /= artifact
    if not to.parent.is_dir():
        raise OptionError(f"there is no folder {to.parent}")
    return to


class _PartFile:
    """The file at ``target`` while it is downloaded, with what an earlier download has left of it.

    Every method blocks. Of two processes that download it at a time, one or both find it damaged.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self.sha256 = ""
        """Of the whole file; empty before it is known."""
        self.size = 0
        """Bytes that are there."""
        for path in target.parent.glob(f"{glob.escape(target.name)}.*.part"):
            if found := _PART.fullmatch(path.name.removeprefix(target.name)):
                self._open(found[1])
                break

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are there, and are right."""
        return self._digest.hexdigest() == self.sha256

    def begin(self, sha256: str) -> None:
        """Begin anew, with the bytes of a file that has this SHA-256."""
        self._drop()
        self._open(sha256)

    def write(self, chunk: bytes) -> None:
        """Add bytes."""
        assert self._file is not None
        self._file.write(chunk)
        self._digest.update(chunk)
        self.size += len(chunk)

    def finish(self) -> Path:
        """Give the file its name. Raises ``DamagedDownloadError`` if it is not what the service has."""
        assert self._file is not None
        if not self.is_whole:
            self._drop()
            found = self._digest.hexdigest()
            raise DamagedDownloadError(f"{self._target}: what came has the SHA-256 {found}, not {self.sha256}")
        os.fsync(self._file.fileno())
        self._part.replace(self._target)
        return self._target

    def close(self) -> None:
        """Leave what is there for the next time."""
        if self._file is not None and not self.size and not self.is_whole:
            self._drop()
        elif self._file is not None:
            self._file.close()

    @property
    def _part(self) -> Path:
        return self._target.with_name(f"{self._target.name}.{self.sha256}.part")

    def _open(self, sha256: str) -> None:
        self.sha256 = sha256
        self._file = file = self._part.open("a+b", buffering=0)  # What has come is kept, whatever ends this process.
        file.seek(0)
        self._digest = hashlib.sha256()
        while block := file.read(BLOCK):
            self._digest.update(block)
        self.size = file.tell()

    def _drop(self) -> None:
        """Remove what is there: it is of something else."""
        if self._file is not None:
            self._part.unlink(missing_ok=True)
            self._file.close()
            self._file = None
