"""Batches of random lengths, padded and cut at random: loss and gradients are those of the whole batch.

What is compared with is computed by transformers itself, of the whole batch in one call. A case draws a family, how
many samples, their lengths, the side of the padding, which labels are ignored, how the batch is cut (evenly, or into
micro-batches of any size that are trimmed to their own longest sample), where the labels are, and how it is run.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from asyncpipe import Microbatches, from_transformers
from tests.campaigns.architectures.architecture import ZOO
from tests.campaigns.architectures.in_float64 import in_float64
from tests.campaigns.architectures.judge import compared, told
from tests.campaigns.architectures.zoo_transformers import WORDS
from tests.campaigns.harness import Campaign, Run, Verdict

__all__ = ["CAMPAIGN", "draw", "judge_case"]

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "bert", "roberta", "t5")
LONGEST, IGNORED = 11, -100
TOGETHER, SECONDS = 25, 120.0
"""Cases of one process, which share the models, and its time."""


@dataclass(frozen=True)
class PaddingCase:
    """What a case is; the numbers in its batch follow from ``seed``."""

    seed: int
    family: str
    lengths: tuple[int, ...]
    """By sample."""
    padded_left: bool
    sizes: tuple[int, ...]
    """Of micro-batches that the caller has cut; none if the pipeline cuts."""
    microbatches: int
    ignored: float
    """The chance of a label to be ignored."""
    ignored_sample: int
    """A sample whose labels are all ignored; -1 for none."""
    labels_apart: bool
    """Whether the labels are given as the target, or in the batch."""
    called: bool
    """``pipe(**batch).loss.backward()`` in place of a step."""
    schedule: str
    checkpoint: str
    devices: int


def draw(seed: int, families: Sequence[str] = FAMILIES) -> PaddingCase:
    """The case of this seed."""
    chance = random.Random(seed)
    samples = chance.randint(2, 9)
    sizes: list[int] = []
    if chance.random() < 0.5:
        while sum(sizes) < samples:
            sizes.append(chance.randint(1, samples - sum(sizes)))
    return PaddingCase(
        seed=seed,
        family=chance.choice(families),
        lengths=tuple(chance.randint(2, LONGEST) for _ in range(samples)),
        padded_left=not sizes and chance.random() < 0.3,
        sizes=tuple(sizes),
        microbatches=chance.randint(1, 5),
        ignored=chance.choice((0.0, 0.3, 0.8)),
        ignored_sample=chance.randrange(-1, samples),
        labels_apart=chance.random() < 0.3,
        called=not sizes and chance.random() < 0.2,
        schedule=chance.choice(("gpipe", "1f1b", "zb-h1")),
        checkpoint=chance.choice(("always", "except_last", "never")),
        devices=chance.choice((2, 3)),
    )


@cache
def _model(family: str) -> nn.Module:
    return ZOO[family].made()[0]


def _batch(case: PaddingCase) -> dict[str, Tensor]:
    """The whole batch, padded to its longest sample."""
    draws = torch.Generator().manual_seed(case.seed)
    samples, longest = len(case.lengths), max(case.lengths)
    ids = torch.randint(3, WORDS, (samples, longest), generator=draws)
    counted = torch.arange(longest).expand(samples, longest)
    there = counted < torch.tensor(case.lengths).unsqueeze(1)
    there = there.flip(1) if case.padded_left else there
    ignored = torch.rand(samples, longest, generator=draws) < case.ignored
    if case.ignored_sample >= 0:
        ignored[case.ignored_sample] = True
    # One label is left, which is not the first of its sample, since a causal model has no loss of that.
    kept = 1 if case.ignored_sample == 0 else 0
    ignored[kept, -1 if case.padded_left else 1] = False
    labels = ids.where(there & ~ignored, IGNORED)
    if case.family == "roberta":
        labels = torch.randint(3, (samples,), generator=draws).where(~ignored[:, 0], IGNORED)
        labels[kept] = 1
    return {"input_ids": ids.where(there, 0), "attention_mask": there.long(), "labels": labels}


def _pieces(case: PaddingCase, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The micro-batches of the case, each without the columns that are padding in all its samples."""
    begin, pieces = 0, []
    for size in case.sizes:
        rows = slice(begin, begin + size)
        longest = max(case.lengths[rows])
        pieces.append({name: x[rows, :longest] if x.dim() > 1 else x[rows] for name, x in batch.items()})
        begin += size
    return pieces


def judge_case(case: PaddingCase) -> Verdict:
    """What became of a case."""
    model, batch = _model(case.family), _batch(case)
    with warnings.catch_warnings(), in_float64():
        warnings.simplefilter("ignore")
        model.zero_grad()
        whole = model(**batch).loss
        whole.backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        try:
            loss = _pipelined(case, model, batch)
        except Exception as error:  # noqa: BLE001 - the finding
            return told(error)
    scale = 1 / max(float(g.abs().max()) for g in expected.values() if g is not None)
    found = [compared("loss", loss.double(), whole.detach().double())[0]]
    found += [compared(f"gradient of {name}", p.grad, expected[name], scale)[0] for name, p in model.named_parameters()]
    wrong = [text for text in found if text]
    return Verdict("wrong", "; ".join(wrong[:4])) if wrong else Verdict("right")


def _pipelined(case: PaddingCase, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Train one step; returns the loss."""
    devices = [f"cpu:{k}" for k in range(case.devices)]
    options: dict[str, Any] = {"schedule": case.schedule, "checkpoint": case.checkpoint}
    pipe = from_transformers(model, batch, devices=devices, microbatches=case.microbatches, **options)
    with pipe.sync() as opened:
        if case.called:
            loss: Tensor = opened(**batch).loss
            loss.backward()
            return loss.detach()
        x: Any = Microbatches(_pieces(case, batch)) if case.sizes else dict(batch)
        target: tuple[Any, ...] = ()
        if case.labels_apart:
            pieces = x.pieces if case.sizes else [x]
            labels = [piece.pop("labels") for piece in pieces]
            if case.family == "t5":
                # What its decoder reads follows from the labels.
                for piece, mine in zip(pieces, labels, strict=True):
                    piece["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=mine)
            target = (Microbatches(labels) if case.sizes else labels[0],)
        result = opened.step(x, *target, return_outputs=False)
        assert result.loss is not None
        return result.loss


def _work(run: Run) -> None:
    families = run.options.only.split(",") if run.options.only else FAMILIES

    def judged(seeds: Sequence[int]) -> Iterator[Verdict]:
        return (judge_case(draw(seed, families)) for seed in seeds)

    run.judge(run.chunks(TOGETHER), judged, SECONDS)


CAMPAIGN = Campaign("padding", _work, {"cases": 200, "only": "", "case": -1, "processes": 1, "here": False}, draw)
