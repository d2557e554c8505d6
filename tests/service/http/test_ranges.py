"""Ranges and preconditions against RFC 9110: tables of its sections, and an oracle for every range of small files."""

from __future__ import annotations

import pytest

from asyncpipe.service.http.ranges import Selection, select_bytes

TAG = '"abc"'


@pytest.mark.parametrize(
    ("asked", "status", "first", "end"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=0-99", 206, 0, 10),
        ("bytes=3-", 206, 3, 10),
        ("bytes=-4", 206, 6, 10),
        ("bytes=-40", 206, 0, 10),
        ("BYTES=2-3", 206, 2, 4),
        ("bytes= 2-3 ", 206, 2, 4),
        ("bytes=10-", 416, 0, 0),
        ("bytes=10-20", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        # Malformed, several, or of another unit: everything.
        ("bytes=5-3", 200, 0, 10),
        ("bytes=", 200, 0, 10),
        ("bytes=-", 200, 0, 10),
        ("bytes=a-b", 200, 0, 10),
        ("bytes=0-1,4-5", 200, 0, 10),
        ("bytes=0-1,", 200, 0, 10),
        ("lines=0-1", 200, 0, 10),
        ("0-1", 200, 0, 10),
        ("bytes=٣-٤", 200, 0, 10),
        ("bytes=" + "9" * 30 + "-", 200, 0, 10),
        ("bytes=+1-2", 200, 0, 10),
        ("bytes=1 - 2", 200, 0, 10),
    ],
)
def test_a_range_of_ten_bytes(asked, status, first, end):
    assert select_bytes({"range": asked}, TAG, 10) == Selection(status, first, end)


def test_every_range_of_small_files_is_what_slices_say():
    for size in range(5):
        content = bytes(range(size))
        for first in range(7):
            for last in (None, *range(first, 7)):
                found = select_bytes({"range": f"bytes={first}-{'' if last is None else last}"}, TAG, size)
                expected = content[first : None if last is None else last + 1]
                assert (found.status == 206) == bool(expected)
                assert content[found.first : found.end] == expected
        for suffix in range(1, 7):
            found = select_bytes({"range": f"bytes=-{suffix}"}, TAG, size)
            assert content[found.first : found.end] == content[-suffix:]
            assert found.status == (206 if size else 200)


def test_content_range_has_the_last_byte_and_the_size():
    assert Selection(206, 2, 4).content_range(10) == "bytes 2-3/10"
    assert Selection(416).content_range(10) == "bytes */10"
    assert Selection(200, 0, 10).content_range(10) is None


@pytest.mark.parametrize(
    ("sent", "status"),
    [('"abc"', 206), (' "abc" ', 206), ('"old"', 200), ('W/"abc"', 200), ("Wed, 21 Oct 2026 07:28:00 GMT", 200)],
)
def test_if_range_compares_strongly(sent, status):
    assert select_bytes({"range": "bytes=1-2", "if-range": sent}, TAG, 10).status == status


@pytest.mark.parametrize(
    ("name", "sent", "status"),
    [
        ("if-none-match", '"abc"', 304),
        ("if-none-match", 'W/"abc"', 304),
        ("if-none-match", '"x", "a,b" , W/"abc"', 304),
        ("if-none-match", "*", 304),
        ("if-none-match", '"x"', 200),
        ("if-none-match", "abc", 200),
        ("if-match", '"abc"', 200),
        ("if-match", '"x","abc"', 200),
        ("if-match", "*", 200),
        ("if-match", 'W/"abc"', 412),
        ("if-match", '"x"', 412),
    ],
)
def test_preconditions_come_before_ranges(name, sent, status):
    assert select_bytes({name: sent}, TAG, 10).status == status
    ranged = select_bytes({name: sent, "range": "bytes=99-"}, TAG, 10).status
    assert ranged == (416 if status == 200 else status)


def test_head_knows_no_ranges():
    assert select_bytes({"range": "bytes=1-2"}, TAG, 10, ranges=False) == Selection(200, 0, 10)
