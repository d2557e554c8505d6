"""The programs that others are compared by, with one GPT-2."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.gpt2_peers import gpt2 as peers
from benchmarks.gpt2_peers.with_asyncpipe import check


def test_asyncpipe_is_right_in_every_case_that_others_are_asked():
    for name, case in peers.CASES.items():
        assert peers.verdict(check(case), peers.wanted(case)) == "right", name


def test_a_verdict_says_what_is_wrong():
    right = peers.wanted(peers.Case())
    name = next(iter(right.gradients))
    found = peers.Found(2 * right.loss, {name: 1.5 * right.gradients[name]}, calls=1)
    said = peers.verdict(found, right)
    assert said.startswith(f"wrong: loss {2 * right.loss:.4f} in place of {right.loss:.4f}; no gradient of lm_head")
    assert said.endswith(f"gradient of {name} is off by 50%; the buffer counts 1 in place of 0")
