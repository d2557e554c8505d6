"""Tests hold the promises of docs/guarantees.md, and docs/ledger.md names these tests."""

from __future__ import annotations

import ast

from tests import ledger

PROMISES = ledger.all_promises()


def test_the_ledger_is_what_the_program_writes() -> None:
    assert ledger.LEDGER.read_text(encoding="utf-8") == ledger.ledger(), "run `python -m tests.ledger`"


def test_each_section_is_promised_and_each_promise_is_held() -> None:
    assert {promise.section for promise in PROMISES} == set(ledger.sections())


def test_each_marker_is_read_and_is_on_a_test() -> None:
    nodes = (node for text in ledger.marked_files().values() for node in ast.walk(ast.parse(text)))
    markers = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "promise"]
    assert len(set(PROMISES)) == len(markers), "a marker is on a function of the module, and has two strings"
    assert [promise for promise in PROMISES if not promise.test.rpartition("::")[2].startswith("test")] == []


def test_markers_are_read_without_running_the_tests() -> None:
    text = """
@pytest.mark.promise("Memory", "One.")
@pytest.mark.parametrize("x", [1])
@pytest.mark.promise("Memory", "Two " "lines.")
async def test_a(): ...
"""
    assert [*ledger.promises(text, "tests/test_x.py")] == [
        ("Memory", "One.", "tests/test_x.py::test_a"),
        ("Memory", "Two lines.", "tests/test_x.py::test_a"),
    ]
