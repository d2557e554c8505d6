"""The GPT-2 that all programs of this folder train, its batches, and what transformers itself computes of them."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

MICROBATCHES = 4
SMALL = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 300}
"""To see who is right."""
TIMED = {"n_layer": 8, "n_embd": 256, "n_head": 8, "vocab_size": 2000}
"""To see how long it takes."""


class CountedNorm(nn.LayerNorm):
    """A norm with a buffer: how often it was called in training."""

    calls: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
        """The norm."""
        if self.training:
            self.calls += 1
        return super().forward(input)


class Case(NamedTuple):
    """What is asked of a contestant."""

    tied: bool = False
    padded: bool = False
    samples: int = 16
    encoding: bool = False
    recomputed: bool = False
    counted: bool = False

    def model(self, shape: dict[str, int] = SMALL) -> Any:
        """The model, with the same weights each time; dropout is off, so that results can be compared."""
        torch.manual_seed(0)
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False, "tie_word_embeddings": self.tied}
        model = GPT2LMHeadModel(GPT2Config(n_positions=128, **shape, **off, **ends)).train()
        if self.recomputed:
            with warnings.catch_warnings():  # Later versions have another name for it.
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.counted:
            model.transformer.ln_f = CountedNorm(shape["n_embd"])
        return model

    def batch(self, tokens: int = 32, vocabulary: int = 300) -> Any:
        """What a data collator makes: ids and labels, with a mask and labels of -100 where it has padded."""
        draws = torch.Generator().manual_seed(1)
        ids = torch.randint(vocabulary, (self.samples, tokens), generator=draws)
        batch = {"input_ids": ids, "labels": ids}
        if self.padded:
            lengths = torch.randint(4, tokens + 1, (self.samples, 1), generator=draws)
            there = torch.arange(tokens) < lengths
            batch = {"input_ids": ids * there, "attention_mask": there.long(), "labels": ids.where(there, -100)}
        return BatchEncoding(batch) if self.encoding else batch


CASES = {
    "samples of one length": Case(),
    "embedding and head are one weight": Case(tied=True),
    "padded samples, labels of -100": Case(padded=True),
    "14 samples in 4 micro-batches": Case(samples=14),
    "the tokenizer's BatchEncoding": Case(padded=True, encoding=True),
    "the model asks for recomputation": Case(recomputed=True),
    "a buffer that forwards change": Case(counted=True),
}


class Found(NamedTuple):
    """What a step has made."""

    loss: float
    gradients: dict[str, Tensor]
    """By the unsplit model's names; a tied weight by its first one."""
    calls: int = 0
    """The buffer, if the case has it."""


def wanted(case: Case) -> Found:
    """What transformers makes of the whole batch at once; the buffer counts micro-batches."""
    model = case.model()
    output = model(**case.batch())
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Found(output.loss.item(), gradients, MICROBATCHES if case.counted else 0)


def verdict(found: Found, right: Found) -> str:
    """Whether a contestant is right, or what is wrong."""
    wrong = []
    if abs(found.loss - right.loss) > 1e-4 * abs(right.loss):
        wrong.append(f"loss {found.loss:.4f} in place of {right.loss:.4f}")
    missing = right.gradients.keys() - found.gradients.keys()
    if missing:
        wrong.append(f"no gradient of {', '.join(sorted(missing)[:2])}")
    off = {
        name: float((gradient - right.gradients[name]).abs().max() / right.gradients[name].abs().max())
        for name, gradient in found.gradients.items()
        if name in right.gradients
    }
    worst = max(off, key=lambda name: off[name], default="")
    if worst and off[worst] > 1e-3:
        wrong.append(f"gradient of {worst} is off by {off[worst]:.0%}")
    if found.calls != right.calls:
        wrong.append(f"the buffer counts {found.calls} in place of {right.calls}")
    return f"wrong: {'; '.join(wrong)}" if wrong else "right"
