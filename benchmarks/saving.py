"""Steps while a save is written in the background, against the same steps without: what training pays for it.

A GPT-2 of 13 million parameters with AdamW on two CPU devices, in threads and in two worker processes. The steps of a
turn with a save begin when its copies are made; turns alternate.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from asyncpipe import Pipeline, from_transformers
from asyncpipe.bench import Figures, Progress
from asyncpipe.bench.harness import markdown

__all__ = ["run", "show"]


TURNS, STEPS = 3, 5


def run(progress: Progress) -> Figures:
    """A row for each place of the stages and each format."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for workers in ("threads", "processes"):
            for layout in ("safetensors", "dcp"):
                progress(f"{workers}, {layout}")
                rows.append(_measured(workers, layout, Path(folder)))
    return {"rows": rows}


def _measured(workers: str, layout: Any, folder: Path) -> dict[str, Any]:
    found: dict[bool, list[float]] = {False: [], True: []}
    copied, written = [], []
    batch = {"input_ids": torch.randint(512, (4, 32))}
    batch["labels"] = batch["input_ids"]
    with _pipeline(workers, batch).sync() as pipe:
        for turn in range(2 * TURNS + 2):
            is_saved = turn % 2 == 1
            began = time.perf_counter()
            saving = pipe.save(folder / "save", format=layout, background=True) if is_saved else None
            ready = time.perf_counter()
            times = []
            for _ in range(STEPS):
                start = time.perf_counter()
                pipe.step(batch)
                times.append(time.perf_counter() - start)
                if saving is not None and saving.done():
                    break
            if saving is not None:
                saving.result()
            if turn > 1:  # The first turns import and warm up.
                found[is_saved] += times
                if is_saved:
                    copied.append(ready - began)
                    written.append(time.perf_counter() - ready)
    size = sum(path.stat().st_size for path in (folder / "save").iterdir())
    return {
        "where": workers,
        "format": layout,
        "MB": size / 1e6,
        "copy": median(copied),
        "write": median(written),
        "step": median(found[False]),
        "step while writing": median(found[True]),
    }


def _pipeline(workers: str, batch: dict[str, torch.Tensor]) -> Pipeline:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0, n_embd=512, n_layer=4, n_head=8)
    )
    devices, optimizer = ["cpu:0", "cpu:1"], partial(torch.optim.AdamW, lr=1e-4)
    return from_transformers(model, batch, devices=devices, microbatches=4, optimizer=optimizer, workers=workers)


show = markdown(rows="Seconds, medians; MB of all files.")
