"""A request's JSON, read under limits: bytes, seconds, depth, and only what every reader takes for the same.

``{"a": 1, "a": 2}``, ``NaN``, numbers that overflow, NUL and halves of surrogate pairs are refused: the next program
to read the document might see something else, or nothing at all.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from aiohttp import web

from asyncpipe.service.http.problems import Problem
from asyncpipe.service.http.redact import shorten
from asyncpipe.service.job_states import JSON

__all__ = ["MOST_DEPTH", "parse_json", "read_json"]

MOST_DEPTH = 32
"""Lists and objects within one another."""

_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string literal; one without an end is taken whole, so that a search never begins again inside it."""
_PAIR = re.compile(rb"\[\]|\{\}")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_NEITHER_IN_TEXT = re.compile("[\0\ud800-\udfff]")


async def read_json(request: web.Request, most_bytes: int, seconds: float) -> JSON:
    """The request's body as JSON.

    Raises ``Problem``: 415 unless it is said to be plain JSON, 413 above ``most_bytes``, 408 if it takes more than
    ``seconds`` to arrive, 400 for what is no JSON or not safely so.
    """
    _check_type(request)
    if (request.content_length or 0) > most_bytes:
        raise _too_large(most_bytes)
    return parse_json(await _read(request, most_bytes, seconds))


async def _read(request: web.Request, most_bytes: int, seconds: float) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most_bytes:
                    raise _too_large(most_bytes)
    except TimeoutError:
        detail = f"the body did not arrive within {seconds:g} s"
        raise Problem(408, "slow-body", detail, close=True) from None
    except (web.RequestPayloadError, ValueError):
        raise Problem(400, "malformed", "the body was not sent as HTTP demands", close=True) from None
    return bytes(body)


def _check_type(request: web.Request) -> None:
    charset = (request.charset or "utf-8").lower().replace("_", "-")
    plain = request.headers.get("Content-Encoding", "identity").lower() == "identity"
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8") or not plain:
        detail = "send application/json, in UTF-8, without a content encoding"
        raise Problem(415, "media-type", detail, headers=[("Accept-Post", "application/json")], close=True)


def _too_large(most_bytes: int) -> Problem:
    return Problem(413, "too-large", f"a body may have {most_bytes} bytes", close=True)


def parse_json(body: bytes) -> JSON:
    """``body`` as JSON. Raises ``Problem`` with status 400."""
    if _too_deep(body):
        raise _malformed(f"lists and objects may be nested {MOST_DEPTH} deep, and each must be closed")
    try:
        value: JSON = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite
        )
    except UnicodeDecodeError:
        raise _malformed("the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"the body is not JSON: {error.msg}, at line {error.lineno} column {error.colno}") from None
    except ValueError as error:  # Integers of thousands of digits, and what the functions below refuse.
        raise _malformed(f"the body cannot be read: {shorten(str(error), 200)}") from None
    _check_texts(value)
    return value


def _too_deep(body: bytes) -> bool:
    """Whether brackets outside of strings are nested too deeply, or do not match.

    Each turn takes away the innermost pairs; all of it is done in C, however the body is made.
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
        raise ValueError(f"the key {shorten(twice, 50)!r} is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _check_texts(value: JSON) -> None:
    waiting: list[JSON] = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                if _NEITHER_IN_TEXT.search(text):
                    raise _malformed("a text holds NUL or half of a surrogate pair")
            case list(items):
                waiting += items
            case dict(table):
                waiting += table
                waiting += table.values()
