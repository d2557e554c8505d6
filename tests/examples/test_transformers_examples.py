"""The example that fine-tunes a model of transformers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

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
