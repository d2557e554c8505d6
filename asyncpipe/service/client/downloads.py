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
from functools import partial
from pathlib import Path

import httpx

from asyncpipe.errors import OptionError
from asyncpipe.service.client.asking import Asking, BrokenExchange, Repeating, refusal
from asyncpipe.service.client.errors import ApiError, DamagedDownloadError

__all__ = ["download"]

_TAG = re.compile(r'"([0-9a-f]{64})"')
_PART = re.compile(r".*\.([0-9a-f]{64})\.part", re.DOTALL)


async def download(asking: Asking, path: str, query: Sequence[tuple[str, str]], artifact: str, to: Path) -> Path:
    """The file that ``artifact`` at ``path`` has become: ``to``, or below it if it is a folder.

    Of two processes that download it at a time, one or both find it damaged.
    """
    target, repeating = _target(to, artifact), Repeating(asking)
    part = next((each for each in target.parent.glob(f"{glob.escape(target.name)}.*.part") if _sha256(each)), None)
    try:
        while True:
            headers = {"Accept": "*/*"}
            if part is not None:
                headers |= {"Range": f"bytes={part.stat().st_size}-", "If-Range": f'"{_sha256(part)}"'}
            try:
                async with asking.wire.open(asking.request("GET", path, query=query, headers=headers)) as opened:
                    response, content = opened
                    if response.status_code == 416 and part is not None:
                        break  # All of it is there.
                    if response.status_code not in (200, 206):
                        raise await refusal(response, content)
                    tag = _TAG.fullmatch(response.headers.get("etag", ""))
                    if tag is None:
                        raise BrokenExchange("the response has no SHA-256 as its tag; is this an asyncpipe service?")
                    if response.status_code == 200:
                        if part is not None:
                            part.unlink()
                        part = target.with_name(f"{target.name}.{tag[1]}.part")
                    assert part is not None
                    # Without a buffer, so that what has come is kept, whatever ends this process.
                    with part.open("wb" if response.status_code == 200 else "ab", buffering=0) as file:
                        async for chunk in content:
                            file.write(chunk)
                            repeating.progressed()
                break
            except (httpx.TransportError, BrokenExchange, ApiError) as error:
                await repeating.after(error)
        return await asking.wire.work(partial(_finish, part, target))
    finally:
        if part is not None and part.exists() and not part.stat().st_size:
            part.unlink()


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


def _sha256(part: Path) -> str:
    """The SHA-256 of the whole file, which the name of its ``part`` says; empty if it is no part."""
    found = _PART.fullmatch(part.name)
    return found[1] if found else ""


def _finish(part: Path, target: Path) -> Path:
    """Give the file its name. Raises ``DamagedDownloadError`` if it is not what the service has. Blocks."""
    with part.open("rb+") as file:
        found, expected = hashlib.file_digest(file, "sha256").hexdigest(), _sha256(part)
        if found == expected:
            os.fsync(file.fileno())
            return part.replace(target)
    part.unlink()
    raise DamagedDownloadError(f"{target}: what came has the SHA-256 {found}, not {expected}")
