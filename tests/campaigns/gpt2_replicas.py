"""A GPT-2 that two replicas of two stages fine-tune, against transformers alone with the whole mini-batch, in float64.

::

    python -m tests.campaigns.gpt2_replicas [WAY …]
    PYTHONPATH=FOLDER_OF_RAY python -m tests.campaigns.gpt2_replicas ray ray-hosts

One job file is trained on threads, in worker processes, on two nodes of a Ray cluster (which it starts), with and
without names of hosts, and by torchrun with an agent for each replica; each with a whole and a sharded optimizer.
All with one kind of optimizer must have the same bits, and all the numbers of transformers, whose loop is here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Generator, Tensor

from asyncpipe.train.adamw import BETAS, learning_rate
from asyncpipe.train.job_file import TrainingTable
from asyncpipe.train.token_data import BytesAsTokens, read_data
from tests.campaigns.architectures.in_float64 import in_float64
from tests.campaigns.launchers import two_nodes

TEXT = Path(__file__).parents[2] / "ARCHITECTURE.md"
LENGTH, HELD_OUT = 32, 0.1
TOLERANCE = 1e-10
TRAINING: dict[str, Any] = {
    "steps": 20,
    "batch_size": 13,
    "learning_rate": 1e-3,
    "warmup_steps": 5,
    "weight_decay": 0.1,
    "seed": 7,
    "overlap": True,
}
JOB: dict[str, dict[str, Any]] = {
    "job": {"model": "transformers"},
    "job.parameters": {"config": "base", "data": str(TEXT), "length": LENGTH, "held_out": HELD_OUT},
    "pipeline": {"devices": [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]], "microbatches": 3},
    "training": TRAINING,
    "faults": {"step_retries": 0},
    "snapshots": {"folder": "snapshots", "every": 99},
}
PROGRAM = [sys.executable, "-m", "asyncpipe", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "asyncpipe.worker", "train"]
WAYS = {
    "threads": PROGRAM,
    "processes": PROGRAM,
    "torchrun": TORCHRUN,
    "ray": PROGRAM,
    "ray-hosts": PROGRAM,
}


def main() -> int:
    """Print a table; 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)} (default: all)")
    ways = parser.parse_args().ways or list(WAYS)
    wrong = 0
    with TemporaryDirectory() as made:
        folder = Path(made)
        _write_base(folder / "base")
        wanted = _alone(folder / "base")
        first: dict[bool, list[Tensor]] = {}
        print("| workers | optimizer | same bits | largest difference |\n|---|---|---|---|", flush=True)
        for way in ways:
            for sharded in (False, True):
                found = _trained(folder, way, sharded=sharded)
                same = all(map(torch.equal, found, first.setdefault(sharded, found)))
                difference = _difference(found, wanted)
                wrong += not same or not difference <= TOLERANCE
                optimizer = "sharded" if sharded else "whole"
                print(f"| {way} | {optimizer} | {'yes' if same else 'no'} | {difference:.1e} |", flush=True)
    return int(wrong > 0)


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


def _write_base(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    # Transformers draws other numbers for dropout than a pipeline.
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4, **ends, **none)
    GPT2LMHeadModel(config).double().save_pretrained(folder)


def _alone(folder: Path) -> list[Tensor]:
    """Losses and weights of a plain loop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, use_cache=False).train()
    training = TrainingTable(**TRAINING)
    text = read_data(TEXT, BytesAsTokens(), length=LENGTH, held_out=HELD_OUT, field="text")
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    losses = []
    batches = text.batches(training.batch_size, Generator().manual_seed(training.seed))
    for step, (x, labels) in enumerate(islice(batches, training.steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        with in_float64():  # The library casts logits to float32.
            loss = model(**x, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [torch.stack(losses), *model.state_dict().values()]


def _trained(folder: Path, way: str, *, sharded: bool) -> list[Tensor]:
    """Losses and weights of the job."""
    from transformers import AutoModelForCausalLM

    name = f"{way}-{'sharded' if sharded else 'whole'}"
    job = folder / "job.toml"
    job.write_text("\n".join(_lines()), encoding="utf-8")
    options = [f"snapshots.folder={name}", f"job.parameters.save={name}-model"]
    options += [f"pipeline.shard_optimizer={json.dumps(sharded)}"]
    with two_nodes() if way.startswith("ray") else nullcontext("") as address:
        if address:
            options.append(f'ray.address="{address}"')
        if way == "ray-hosts":
            options.append('pipeline.devices=[["a/cpu:0", "a/cpu:1"], ["b/cpu:0", "b/cpu:1"]]')
        command = [*WAYS[way], str(job), "--no-progress", "--workers", way.partition("-")[0]]
        command += [word for option in options for word in ("--set", option)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    recent = torch.load(folder / name / f"step-{TRAINING['steps']}" / "run.pt", weights_only=True)["meter"]["recent"]
    losses = torch.tensor([each["loss"] for each in recent], dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(folder / f"{name}-model", dtype=torch.float64)
    return [losses, *model.state_dict().values()]


def _lines() -> Iterator[str]:
    yield 'name = "gpt2"'
    for table, values in JOB.items():
        yield f"[{table}]"
        yield from (f"{key} = {json.dumps(value)}" for key, value in values.items())


if __name__ == "__main__":
    sys.exit(main())
