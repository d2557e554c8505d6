"""The ledger of promises: `python -m tests.ledger` writes docs/ledger.md from the markers of the tests.

A test that holds a promise of docs/guarantees.md says so with `@pytest.mark.promise("section", "sentence")`. The
section is a heading of that page; tests with the same sentence hold it together. The markers are read and not run, so
this needs neither torch nor pytest.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PROMISES = ROOT / "docs" / "guarantees.md"
LEDGER = ROOT / "docs" / "ledger.md"

HEAD = """# Ledger of the guarantees

<!-- `python -m tests.ledger` writes this page from the tests. Change the markers there. -->

[Guarantees](guarantees.md) says in plain words what asyncpipe promises. This page lists each promise in detail, with
the tests that hold it. Run one of them with `python -m pytest NAME`; [long ones](../CONTRIBUTING.md) need `-m long`.
"""


class Promise(NamedTuple):
    """One sentence, and one test that holds it."""

    section: str
    sentence: str
    test: str


def promises(text: str, path: str) -> Iterator[Promise]:
    """What the markers of a file of tests say, from the first line to the last."""
    for test in ast.parse(text).body:
        if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for marker in test.decorator_list:
            match marker:
                case ast.Call(
                    func=ast.Attribute(attr="promise"),
                    args=[ast.Constant(value=str(section)), ast.Constant(value=str(sentence))],
                ):
                    yield Promise(section, sentence, f"{path}::{test.name}")


def marked_files() -> dict[str, str]:
    """The files of tests that have a marker: path -> text."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    return {path.relative_to(ROOT).as_posix(): text for path, text in texts.items() if "@pytest.mark.promise(" in text}


def all_promises() -> list[Promise]:
    """The promises of all tests, by file."""
    return [promise for path, text in marked_files().items() for promise in promises(text, path)]


def sections() -> list[str]:
    """The headings of docs/guarantees.md, in order."""
    return re.findall(r"^## (.+)$", PROMISES.read_text(encoding="utf-8"), re.MULTILINE)


def ledger() -> str:
    """The text of docs/ledger.md."""
    tests: dict[tuple[str, str], list[str]] = {}
    for section, sentence, test in all_promises():
        tests.setdefault((section, sentence), []).append(f"`{test}`")
    parts = [HEAD]
    for section in sections():
        rows = [f"| {said[1]} | {'<br>'.join(names)} |\n" for said, names in tests.items() if said[0] == section]
        parts.append(f"\n## {section}\n\n| promise | tests |\n|---|---|\n{''.join(rows)}")
    return "".join(parts)


if __name__ == "__main__":
    LEDGER.write_text(ledger(), encoding="utf-8")
