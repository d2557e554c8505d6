"""GPT-2 with asyncpipe: the whole program is ``pipeline`` and ``pipe.step(batch)``."""

from __future__ import annotations

from typing import Any

# begin
from asyncpipe import Pipeline, from_transformers
from benchmarks.gpt2_peers.gpt2 import MICROBATCHES, Case, Found


def pipeline(model: Any, batch: Any, **options: Any) -> Pipeline:
    """A pipeline of two stages."""
    return from_transformers(model, batch, devices=["cpu:0", "cpu:1"], microbatches=MICROBATCHES, **options)


def train(pipe: Any, batch: Any) -> float:
    """The loss of a step; gradients are in the model's parameters."""
    return float(pipe.step(batch, return_outputs=False).loss)


# end


def check(case: Case) -> Found:
    """What it makes of a case."""
    model, batch = case.model(), case.batch()
    with pipeline(model, batch).sync() as pipe:
        loss = train(pipe, batch)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Found(loss, gradients, int(model.transformer.ln_f.calls) if case.counted else 0)
