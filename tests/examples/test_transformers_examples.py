"""The examples with models of transformers: a loop of one's own, and the programs that others are compared by."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncpipe.train.job_file import load_job

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_loop_is_forty_lines_and_learns(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "finetune"))
    finetune = __import__("finetune")
    sys.modules.pop("finetune")
    assert len((EXAMPLES / "finetune" / "finetune.py").read_text().splitlines()) <= 40
    text = "\n".join("devices wait for each other"[: 8 + number % 20] for number in range(40))
    torch.manual_seed(0)
    first, last = asyncio.run(finetune.main(text, tmp_path / "tuned"))
    assert last < first
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").config.hidden_size == 64
    # The job file is one, of the same model.
    job = load_job(EXAMPLES / "finetune" / "finetune.toml")
    assert job.job.parameters["config"]["hidden_size"] == 64


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What is asked of every contestant."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "gpt2_peers"))
    yield __import__("gpt2")
    for name in ("gpt2", "with_asyncpipe"):
        sys.modules.pop(name, None)


def test_asyncpipe_is_right_in_every_case_that_others_are_asked(peers):
    check = __import__("with_asyncpipe").check
    for name, case in peers.CASES.items():
        assert peers.verdict(check(case), peers.wanted(case)) == "right", name


def test_a_verdict_says_what_is_wrong(peers):
    right = peers.wanted(peers.Case())
    name = next(iter(right.gradients))
    found = peers.Found(2 * right.loss, {name: 1.5 * right.gradients[name]}, calls=1)
    said = peers.verdict(found, right)
    assert said.startswith(f"wrong: loss {2 * right.loss:.4f} in place of {right.loss:.4f}; no gradient of lm_head")
    assert said.endswith(f"gradient of {name} is off by 50%; the buffer counts 1 in place of 0")
