"""Downloads an artifact of a job, so that it goes on where it was interrupted, and is whole or not there at all.

::

    GET …/artifacts/model.pt                    200, its SHA-256 as ETag, the snapshot's step in Content-Location
    GET …/artifacts/model.pt?step=40            206, the rest of the same one, or 200, all of another one
        Range: bytes=1000-, If-Range: "…"

    model.pt.40-3fa9….part ───── all bytes are there, and have that SHA-256 ─────▶ model.pt

The name of the part says what it is of, so another process can go on with it, after a day as well. What is asked is
pure; ``PartFile`` blocks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from contextlib import suppress
from io import BufferedRandom
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from asyncpipe.errors import AsyncpipeError, OptionError
from asyncpipe.service.client.asking import Asking, read_refusal
from asyncpipe.service.client.dialogue import (
    BrokenExchange,
    Dialogue,
    Found,
    Pause,
    ResponseHead,
    hang_up,
    more_bytes,
    open_response,
)
from asyncpipe.service.client.errors import ApiError

__all__ = ["DamagedDownloadError", "Download", "PartFile", "Representation", "target_of"]

_TAG = re.compile(r'"([0-9a-f]{64})"')
_PART = re.compile(r"([0-9]*)-([0-9a-f]{64})\.part")


class DamagedDownloadError(AsyncpipeError, OSError):
    """What was downloaded does not have the SHA-256 that the service said; it was removed."""


class Representation(NamedTuple):
    """What the following bytes are of."""

    sha256: str
    step: int | None
    """Of a model's snapshot."""
    offset: int
    """Where they begin."""

    @property
    def part_name(self) -> str:
        """The end of the name of a file that has its beginning."""
        return f"{'' if self.step is None else self.step}-{self.sha256}.part"


class Download:
    """A download from ``path``, of a model that of the snapshot after ``step``; ``begun`` is what is there already."""

    def __init__(self, asking: Asking, path: str, step: int | None, begun: Representation | None) -> None:
        self._asking = asking
        self._path = path
        self._step = step
        self._begun = begun if step is None or begun is None or begun.step == step else None

    def dialogue(self) -> Dialogue[None]:
        """Finds a ``Representation``, its bytes, and, if another one has to be begun, that and its bytes."""
        failures = 0
        while True:
            before = self._begun
            error: BrokenExchange | ApiError
            try:
                if (yield from self._once()):
                    return
                error = BrokenExchange(f"the download of {self._path} ends again and again before its end")
            except (BrokenExchange, ApiError) as broken:
                error = broken
            failures = 1 if self._begun not in (before, None) else failures + 1
            yield Pause(self._asking.pause_after(failures, error))

    def _once(self) -> Dialogue[bool]:
        """Whether all bytes are there."""
        begun = self._begun
        step = self._step if begun is None else begun.step
        headers = {"Accept": "*/*"}
        if begun is not None and begun.offset:
            headers |= {"Range": f"bytes={begun.offset}-", "If-Range": f'"{begun.sha256}"'}
        path = self._path if step is None else f"{self._path}?step={step}"
        head = yield from open_response(self._asking.request("GET", path, headers))
        if head.status == 416 and begun is not None and head.headers.get("content-range") == f"bytes */{begun.offset}":
            yield from hang_up()
            yield Found(begun)
            return True
        if head.status not in (200, 206):
            error = yield from read_refusal(head)
            if begun is not None and (error.status == 416 or (error.status == 404 and step != self._step)):
                self._begun = None  # The snapshot has made room for newer ones, or the part is of nothing.
                raise BrokenExchange(f"what had been begun is not there any more: {error.detail}") from error
            raise error
        now, size = _representation(head, begun)
        self._begun = now
        yield Found(now)
        while chunk := (yield from more_bytes()):
            now = self._begun = now._replace(offset=now.offset + len(chunk))
            if now.offset > size:
                self._begun = None
                raise BrokenExchange(f"the response has more than {size} bytes")
            yield Found(chunk)
        yield from hang_up()
        return now.offset == size


def _representation(head: ResponseHead, begun: Representation | None) -> tuple[Representation, int]:
    """What the response with ``head`` has bytes of, and how many bytes that has in all."""
    tag, length = _TAG.fullmatch(head.headers.get("etag", "")), head.number("content-length")
    if tag is None or length is None:
        raise BrokenExchange("the response has no SHA-256 as its tag; is this the address of an asyncpipe service?")
    steps = parse_qs(urlsplit(head.headers.get("content-location", "")).query).get("step", [])
    step = int(steps[0]) if steps and steps[0].isascii() and steps[0].isdigit() else None
    if head.status == 200:
        return Representation(tag[1], step, 0), length
    assert begun is not None
    size = begun.offset + length
    if tag[1] != begun.sha256 or head.headers.get("content-range") != f"bytes {begun.offset}-{size - 1}/{size}":
        raise BrokenExchange("the response has other bytes than were asked for")
    return begun, size


def target_of(to: str | Path, artifact: str) -> Path:
    """The file that ``artifact`` becomes: ``to``, or below it if it is a folder. Raises ``OptionError``."""
    target = Path(to)
    if target.is_dir():
        # The name is the service's, or came from somebody else: it is not to lead out of the folder.
        if Path(artifact).name != artifact or artifact == "..":
            raise OptionError(f"an artifact's name is no path, got {artifact!r:.100}")
        target /= artifact
    if not target.parent.is_dir():
        raise OptionError(f"there is no folder {target.parent}")
    return target


class PartFile:
    """The file at ``target`` while it is downloaded, for one thread at a time. A context manager; every method blocks.

    Raises ``OptionError`` if another process downloads it, ``OSError`` if the disk fails.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path: Path | None = None
        self._file: BufferedRandom | None = None
        self.begun: Representation | None = None
        """What is there of an earlier download."""

    def __enter__(self) -> PartFile:
        self.find()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self) -> None:
        """Find what an earlier download has left."""
        prefix = f"{self._target.name}."
        parts = [
            (path, found)
            for path in self._target.parent.iterdir()
            if path.name.startswith(prefix) and (found := _PART.fullmatch(path.name.removeprefix(prefix)))
        ]
        if parts:
            path, found = max(parts, key=lambda part: part[0].stat().st_mtime_ns)
            step = int(found[1]) if found[1] else None
            size = self._open(path).seek(0, os.SEEK_END)
            self.begun = Representation(found[2], step, size)

    def close(self) -> None:
        """Leave what is there for the next time."""
        if self._file is not None and self._path is not None:
            empty = self._file.seek(0, os.SEEK_END) == 0
            self._file.close()
            if empty:
                self._path.unlink(missing_ok=True)

    def take(self, piece: Representation | bytes) -> None:
        """Add bytes, or begin with those of a representation where they belong."""
        if not isinstance(piece, Representation):
            assert self._file is not None
            self._file.write(piece)
            self._file.flush()  # What has come is kept, whatever ends this process.
            return
        path = self._target.with_name(f"{self._target.name}.{piece.part_name}")
        if path != self._path:
            self._drop()
            self._open(path)
        assert self._file is not None
        self._file.truncate(piece.offset)
        self._file.seek(piece.offset)
        self.begun = piece

    def finish(self) -> Path:
        """Check that the file is what the service has, and give it its name. Raises ``DamagedDownloadError``."""
        assert self._file is not None
        assert self._path is not None
        assert self.begun is not None
        self._file.flush()
        self._file.seek(0)
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        if sha256 != self.begun.sha256:
            self._drop()
            raise DamagedDownloadError(
                f"{self._target}: what came has the SHA-256 {sha256}, not {self.begun.sha256}; it was removed"
            )
        os.fsync(self._file.fileno())
        self._path.replace(self._target)
        self._file.close()
        self._file = None
        return self._target

    def _open(self, path: Path) -> BufferedRandom:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        file = os.fdopen(descriptor, "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise OptionError(f"{self._target} is being downloaded by another process") from None
        self._path, self._file = path, file
        return file

    def _drop(self) -> None:
        """Remove what is there: it is of something else."""
        if self._file is not None and self._path is not None:
            with suppress(OSError):
                self._path.unlink()
            self._file.close()
        self._path = self._file = None
