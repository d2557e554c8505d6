"""Reads the JSON body of a request within limits of bytes, seconds and depth, and refuses ambiguous JSON.

``{"a": 1, "a": 2}``, ``NaN``, numbers that overflow, NUL and unpaired surrogates are refused: another program that
reads the document could read something else, or fail.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from email.message import Message
from typing import Any, NoReturn

from starlette.requests import Request

from asyncpipe.service.http.problems import Problem
from asyncpipe.service.http.redact import shorten
from asyncpipe.service.job_states import JSON

__all__ = ["MOST_DEPTH", "parse_json", "read_json"]

MOST_DEPTH = 32
"""How deeply lists and objects may be nested."""
MOST_EXACT = 2**53
"""Up to this, each integer is a floating-point number of its own."""

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string literal. One without an end matches up to the end, so that the search takes linear time."""
_PAIR = re.compile(rb"\[\]|\{\}")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_NEITHER_IN_TEXT = re.compile("[\0\ud800-\udfff]")


async def read_json(request: Request, most_bytes: int, seconds: float) -> JSON:
    """The request's body as JSON.

    Raises ``Problem``: 415 for another content type or encoding, 413 above ``most_bytes``, 408 if the body takes more
    than ``seconds`` to arrive, 400 for malformed or ambiguous JSON.
    """
    _check_type(request)
    length = request.headers.get("Content-Length", "0")  # The server has checked it.
    if not length.isdecimal() or int(length) > most_bytes:
        raise _too_large(most_bytes)
    return parse_json(await _read(request, most_bytes, seconds))


async def _read(request: Request, most_bytes: int, seconds: float) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise _too_large(most_bytes)
    except TimeoutError:
        detail = f"the body did not arrive within {seconds:g} s"
        raise Problem(408, "slow-body", detail, close=True) from None
    return bytes(body)


def _check_type(request: Request) -> None:
    sent = Message()
    sent["Content-Type"] = ", ".join(request.headers.getlist("Content-Type"))
    charset = sent.get_content_charset("utf-8").replace("_", "-")
    plain = request.headers.get("Content-Encoding", "identity").lower() == "identity"
    if sent.get_content_type() != "application/json" or charset not in ("utf-8", "utf8") or not plain:
        detail = "send application/json, in UTF-8, without a content encoding"
        raise Problem(415, "media-type", detail, headers=[("Accept-Post", "application/json")], close=True)


def _too_large(most_bytes: int) -> Problem:
    return Problem(413, "too-large", f"a body may have at most {most_bytes} bytes", close=True)


def parse_json(body: bytes) -> JSON:
    """``body`` as JSON. Raises ``Problem`` with status 400."""
    if _too_deep(body):
        raise _malformed(f"lists and objects may be nested {MOST_DEPTH} deep, and each must be closed")
    try:
        value: JSON = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_number
        )
    except UnicodeDecodeError:
        raise _malformed("the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON: {error.msg}, at line {error.lineno} column {error.colno}") from None
    except ValueError as error:  # Integers of thousands of digits, and the errors of the functions below.
        raise _malformed(f"the body cannot be read: {shorten(str(error), 200)}") from None
    _check_texts(value)
    return value


def _too_deep(body: bytes) -> bool:
    """Whether brackets outside of strings are nested too deeply, or do not match.

    Each round removes the innermost pairs. The work is done in C, in a time that no body can make long.
    """
    brackets = _STRINGS.sub(b"", body).translate(None, _OTHERS)
    for _ in range(MOST_DEPTH):
        if not brackets:
            return False
        brackets = _PAIR.sub(b"", brackets)
    return bool(brackets)


def _malformed(detail: str) -> Problem:
    return Problem(400, "malformed", detail)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shorten(twice, 50)!r} occurs twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _number(text: str) -> float:
    """A finite number; ``2.0`` is the integer 2, as JSON schema and half of the programs that write JSON have it."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return int(value) if value.is_integer() and abs(value) <= MOST_EXACT else value


def _check_texts(value: JSON) -> None:
    waiting: list[JSON] = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                if _NEITHER_IN_TEXT.search(text):
                    raise _malformed("a text contains NUL or an unpaired surrogate")
            case list(items):
                waiting += items
            case dict(table):
                waiting += table
                waiting += table.values()
