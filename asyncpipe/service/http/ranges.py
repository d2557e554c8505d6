"""Which bytes a request wants of something that has an entity tag: ranges and preconditions of RFC 9110. Pure.

::

    If-Match ─ fails ─▶ 412      If-None-Match ─ matches ─▶ 304
        └──▶ Range ─ none, several, not bytes, malformed, or If-Range has another tag ─▶ 200, all of it
               ├─ begins behind the end ─▶ 416, with the size
               └─ one ─▶ 206, with its part

A client may be answered with everything where it asks for several ranges (section 14.2), so it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Selection", "select_bytes"]

_BYTES = re.compile(r"bytes=[ \t]*(?:([0-9]{1,19})-([0-9]{1,19})?|-([0-9]{1,19}))[ \t]*", re.ASCII | re.IGNORECASE)
_TAG = re.compile(r'[ \t]*((?:W/)?"[\x21\x23-\x7e\x80-\xff]*")[ \t]*(?:,|$)')


class Selection(NamedTuple):
    """The answer to a request: its status, and the bytes from ``first`` to before ``end``."""

    status: int
    first: int = 0
    end: int = 0

    def content_range(self, size: int) -> str | None:
        """The value of ``Content-Range``, of the statuses that have one."""
        if self.status == 416:
            return f"bytes */{size}"
        return f"bytes {self.first}-{self.end - 1}/{size}" if self.status == 206 else None


def select_bytes(headers: Mapping[str, str], tag: str, size: int, *, ranges: bool = True) -> Selection:
    """What a GET (or a HEAD, without ``ranges``) with ``headers`` gets of ``size`` bytes with the strong ``tag``.

    Names in ``headers`` are in lower case; ``tag`` has its quotes.
    """
    if (wanted := headers.get("if-match")) is not None and not _is_among(tag, wanted, weakly=False):
        return Selection(412)
    if (known := headers.get("if-none-match")) is not None and _is_among(tag, known, weakly=True):
        return Selection(304)
    asked = headers.get("range")
    # A date, or a weak tag, is never the same (section 13.1.5): there is no date of what is made when it is asked for.
    if not ranges or asked is None or headers.get("if-range", tag).strip(" \t") != tag:
        return Selection(200, 0, size)
    found = _BYTES.fullmatch(asked)
    if found is None:
        return Selection(200, 0, size)
    first, last, suffix = (None if text is None else int(text) for text in found.groups())
    if suffix is not None:
        if suffix and not size:
            return Selection(200)
        first, last = max(0, size - suffix) if suffix else size, None
    assert first is not None
    if last is not None and last < first:
        return Selection(200, 0, size)
    return Selection(206, first, size if last is None else min(last + 1, size)) if first < size else Selection(416)


def _is_among(tag: str, listed: str, *, weakly: bool) -> bool:
    if listed.strip() == "*":
        return True
    found = (match[1] for match in _TAG.finditer(listed))
    return any((each.removeprefix("W/") if weakly else each) == tag for each in found)
