"""The log of `asyncpipe serve`: JSON on request, and no flood of lines from refused requests."""

from __future__ import annotations

import json
import logging
from typing import Any

from asyncpipe.cli.log_format import AT_ONCE, EACH, JsonLines, RefusalLimit


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:
    found = logging.LogRecord("asyncpipe.service.jobs", logging.ERROR, "x.py", 1, message, args, None)
    vars(found).update(more)
    return found


def test_a_line_of_json_has_what_the_record_says() -> None:
    line = JsonLines().format(record("job %s\nfailed", "01j", job="01j", step=3, snapshot=None, audit=object()))
    table = json.loads(line)
    assert "\n" not in line
    assert table.pop("time").endswith("Z")
    assert table == {
        "level": "error", "logger": "asyncpipe.service.jobs", "message": "job 01j\nfailed", "job": "01j", "step": 3,
        "snapshot": None,
    }  # fmt: skip


def test_a_line_of_json_has_the_traceback() -> None:
    failed = record("bad")
    try:
        raise ValueError("why")
    except ValueError as error:
        failed.exc_info = (ValueError, error, error.__traceback__)
    assert "ValueError: why" in json.loads(JsonLines().format(failed))["exception"]


def test_refusals_are_logged_a_few_a_minute_and_counted() -> None:
    now = [0.0]
    limit = RefusalLimit(lambda: now[0])
    refused = [limit.let_through(record("401", refused=True)) for _ in range(1000)]
    assert sum(each is not None for each in refused) == AT_ONCE
    assert limit.let_through(record("a job failed")) is not None
    assert limit.let_through(record("ok", refused=False)) is not None
    now[0] = EACH
    again = record("%d", 401, refused=True)
    told = limit.let_through(again)
    assert told is not None
    assert told.getMessage() == "401 (and 990 more refused before)"
    assert told.not_logged == 990
    assert again.getMessage() == "401", "other handlers have the same record"
    assert limit.let_through(again) is again
