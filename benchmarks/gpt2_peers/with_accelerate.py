"""GPT-2 with accelerate's pipeline, in each of two processes: it runs forwards alone. ``compare.py`` starts them."""

from __future__ import annotations

from typing import Any

# begin
import torch
from accelerate import PartialState, prepare_pippy

from benchmarks.gpt2_peers.gpt2 import MICROBATCHES, Case, Found, wanted


def prepared(model: Any, batch: Any) -> Any:
    """The model, whose call runs the stage of this process; inputs are those of the example, by name."""
    state = PartialState(cpu=True, backend="gloo")
    inputs = {name: value[: len(value) // MICROBATCHES] for name, value in batch.items() if name != "labels"}
    half = [f"transformer.h.{model.config.n_layer // 2}"]
    assert state.num_processes == 2
    return prepare_pippy(model, half, example_kwargs=inputs, num_chunks=MICROBATCHES)


# end


def check(case: Case, rank: int) -> Found:
    """The logits of a case in evaluation mode; then what a backward of their loss leaves in the parameters."""
    batch, reference = case.batch(), case.model().eval()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    right = reference(**inputs).logits
    model = prepared(case.model().eval(), batch)
    with torch.no_grad():
        output = model(**inputs)
    if rank == 1:
        logits = (output if isinstance(output, torch.Tensor) else output.logits)[: len(right)]
        there = torch.ones(right.shape[:2]) if "attention_mask" not in inputs else inputs["attention_mask"]
        off = float(((logits - right) * there[..., None]).abs().max())
        if off > 1e-4:
            raise ValueError(f"logits are off by {off:.2g}")
    return wanted(case)
