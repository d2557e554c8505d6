"""Every promise of docs/guarantees.md names the tests that hold it, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BULLETS = re.findall(r"^- (.+(?:\n  .+)*)", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("promise", BULLETS, ids=lambda promise: promise[:40])
def test_every_promise_names_tests_that_exist(promise: str) -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", promise)
    assert named, "a promise ends with its tests, as `tests/FILE.py::test_name`"
    assert promise.endswith("`"), "the tests come last"
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in found, f"{path} has no test {name}"
